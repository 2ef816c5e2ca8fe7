"""PyTorch's matmul of the already gathered activations: a second opinion on how fast the product alone can be.

PyTorch is imported when a program is built, and never needed by anything else.
"""

import importlib
from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from cmm.measure import Program
from cmm.roofline import Problem


def build(problem: Problem, mesh: Mesh, operands: Sequence) -> Program:
    """Returns `torch.matmul` on every GPU of the mesh, started one after the other by this process without waiting.

    PyTorch computes on the memory of the JAX arrays, handed over by DLPack, and on streams of its own. The program's
    `to_jax` hands results back in the same way. JAX reserves most of each GPU's memory when it starts: results and
    workspaces of PyTorch must fit in the rest.

    Args:
      problem: shapes and dtype.
      mesh: GPUs along one axis, all of this process.
      operands: pairs of `lhs [axis_size * m_shard, k]`, whole on every device, and `rhs [k, axis_size * n_shard]`,
        sharded over columns.

    Raises:
      ImportError: PyTorch is not installed, or cannot be loaded beside JAX.
      NotImplementedError: PyTorch has no CUDA here.
    """
    torch = _load_torch()
    devices = list(mesh.devices.flat)
    # JAX fills these arrays on streams that PyTorch knows nothing of.
    jax.block_until_ready(operands)
    shards = [tuple(_to_torch(torch, array, devices) for array in pair) for pair in operands]
    gpus = [shard.device for shard in shards[0][0]]

    def start(lhs, rhs):
        return [torch.matmul(lhs_shard, rhs_shard) for lhs_shard, rhs_shard in zip(lhs, rhs, strict=True)]

    def wait(results):
        del results  # All of them: a GPU runs its calls in order.
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    def to_jax(result):
        wait(result)
        columns = [_to_jax(torch, shard, device) for shard, device in zip(result, devices, strict=True)]
        shape = (problem.axis_size * problem.m_shard, problem.axis_size * problem.n_shard)
        sharding = NamedSharding(mesh, P(None, mesh.axis_names[0]))
        return jax.make_array_from_single_device_arrays(shape, sharding, columns)

    return Program(start, shards, wait, to_jax, f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}")


def _load_torch():
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries.
        raise ImportError(f"PyTorch cannot be imported: {error}", name="torch") from error
    if not torch.cuda.is_available():
        raise NotImplementedError(f"PyTorch {torch.__version__} finds no CUDA device. It must be a build with CUDA.")
    return torch


def _to_torch(torch, array, devices):
    """Returns the array's shard on each device as a tensor on the same memory."""
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    return [torch.from_dlpack(by_device[device]) for device in devices]


def _to_jax(torch, tensor, device):
    # DLPack orders the streams of the current device, which must be that of the tensor.
    with torch.cuda.device(tensor.device):
        return jax.dlpack.from_dlpack(tensor, device=device)
