"""PyTorch's matmul, with a stand-in for PyTorch that keeps its tensors in the host's memory."""

import contextlib
import sys
import types

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cmm import devices, rungs
from cmm.peers import torch_matmul
from cmm.reference import accuracy
from cmm.roofline import Problem

PROBLEM = Problem(2, 4, 8, 6)


class _Tensor:
    """As much of a tensor as is handed over: values that speak DLPack, and a device."""

    def __init__(self, values, device):
        self.values, self.device = values, device

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


class _Torch(types.ModuleType):
    __version__ = "2.99"
    version = types.SimpleNamespace(cuda="13.0")

    def __init__(self, has_cuda=True):
        super().__init__("torch")
        self.waited_for, self.current = [], []
        self.cuda = types.SimpleNamespace(
            is_available=lambda: has_cuda, synchronize=self.waited_for.append, device=self._device
        )

    @contextlib.contextmanager
    def _device(self, device):
        self.current.append(device)
        yield

    def from_dlpack(self, array):
        (device,) = array.devices()
        return _Tensor(np.from_dlpack(array), f"gpu {device.id}")

    def matmul(self, lhs, rhs):
        assert lhs.device == rhs.device
        return _Tensor(lhs.values @ rhs.values, lhs.device)


def _mesh_and_operands():
    mesh = devices.ring_mesh(jax.devices("cpu")[:2])
    operands = [devices.random_operands(PROBLEM, mesh, seed) for seed in range(2)]
    whole = jax.NamedSharding(mesh, P(None, None))
    return mesh, operands, [(jax.device_put(lhs, whole), rhs) for lhs, rhs in operands]


def test_results_go_back_without_a_copy_of_the_operands(monkeypatch):
    torch = _Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    mesh, operands, gathered = _mesh_and_operands()
    program = torch_matmul.build(PROBLEM, mesh, gathered)
    for own, given in zip(program.operands, gathered, strict=True):
        for tensors, array in zip(own, given, strict=True):
            by_device = {f"gpu {shard.device.id}": shard.data for shard in array.addressable_shards}
            for tensor in tensors:
                assert tensor.values.ctypes.data == by_device[tensor.device].unsafe_buffer_pointer()
    results = [program.start(*own) for own in program.operands]
    assert not torch.waited_for, "a chain must not wait between its calls"
    for result, pair in zip(results, operands, strict=True):
        torch.waited_for.clear()
        out = program.to_jax(result)
        assert torch.waited_for == ["gpu 0", "gpu 1"]
        assert out.sharding == jax.NamedSharding(mesh, P(None, "x"))
        assert accuracy(out, *pair, mesh, "x").right
    assert torch.current == ["gpu 0", "gpu 1"] * 2
    assert program.details == "PyTorch 2.99, CUDA 13.0"


@pytest.mark.parametrize(
    "module, error, message",
    [
        (None, ImportError, "PyTorch cannot be imported"),
        (_Torch(has_cuda=False), NotImplementedError, "PyTorch 2.99 finds no CUDA device"),
    ],
)
def test_without_pytorch_it_says_so(monkeypatch, module, error, message):
    monkeypatch.setitem(sys.modules, "torch", module)
    mesh, _, gathered = _mesh_and_operands()
    (rung,) = [rung for rung in rungs.RUNGS if rung.name == "gemm_only_torch"]
    with pytest.raises(error, match=message):
        rung.build(PROBLEM, mesh, gathered)
