"""What the Hopper kernels refuse, before anything is launched, and in which words."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cmm
import cmm.interpret as ci
from cmm.hopper import (
    MatmulDimension,
    TuningConfig,
    all_gather_lhs_matmul,
    default_config,
    peer_access,
    requirements,
)
from cmm.hopper.config import MAX_SMEM_BYTES

SMALL = TuningConfig(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"max_concurrent_steps": 1}, "max_concurrent_steps must be at least 2, got 1"),
        ({"tile_m": 96}, "tile_m must be a multiple of 64.* got 96"),
        ({"tile_n": 512}, "tile_n must be a multiple of 64.* at most 256.* got 512"),
        ({"tile_n": 96, "epi_tile_n": None}, "tile_n must be a multiple of 64.* got 96"),
        ({"tile_m": 128, "tile_n": 256}, r"tile_m \* tile_n must be at most 128 \* 192.* got 128 \* 256"),
        ({"tile_k": 0}, "tile_k must be a Python int of at least 1, got 0"),
        ({"tile_k": 32}, "tile_k must be a multiple of 64.* got 32"),
        ({"tile_m": 64.0}, "tile_m must be a Python int of at least 1, got 64.0"),
        ({"max_concurrent_steps": 2.5}, "max_concurrent_steps must be a Python int of at least 1, got 2.5"),
        ({"max_concurrent_steps": "4"}, "max_concurrent_steps must be a Python int of at least 1, got '4'"),
        ({"max_concurrent_steps": None}, "max_concurrent_steps must be a Python int of at least 1, got None"),
        ({"max_concurrent_steps": np.int32(4)}, r"max_concurrent_steps must be a Python int.* got np.int32\(4\)"),
        ({"chunks": True}, "chunks must be a Python int of at least 1 or None, got True"),
        ({"epi_tile_m": -64}, "epi_tile_m must be a Python int of at least 1 or None, got -64"),
        ({"epi_tile_m": 32}, "epi_tile_m must be a multiple of 64.* got 32"),
        ({"epi_tile_n": 8}, "epi_tile_n must be a multiple of 16.* got 8"),
        ({"wg_dimension": "M"}, "wg_dimension must be MatmulDimension.M or MatmulDimension.N, got 'M'"),
        ({"tile_n": 192, "epi_tile_n": 128}, "tile_n=192 must be divisible by epi_tile_n=128"),
    ],
)
def test_configurations_without_meaning(changes, message):
    with pytest.raises(ValueError, match=message):
        TuningConfig(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"tile_n": 64, "epi_tile_n": 16},
        {"tile_n": 192, "epi_tile_n": 48, "max_concurrent_steps": 2, "wg_dimension": MatmulDimension.N},
        {"tile_m": 128, "tile_n": 192, "epi_tile_m": 128, "max_concurrent_steps": 2},
        {"tile_m": 384, "tile_n": 64, "epi_tile_m": None, "max_concurrent_steps": 2, "wg_dimension": MatmulDimension.N},
    ],
)
def test_configurations_at_the_limits_lower(changes):
    config = TuningConfig(**changes)
    text = ci.lower_for_cuda(
        lambda lhs, rhs: all_gather_lhs_matmul(lhs, rhs, "x", config=config),
        jax.ShapeDtypeStruct((4 * config.cta_tile_m, 256), jnp.float16),
        jax.ShapeDtypeStruct((256, 4 * config.cta_tile_n), jnp.float16),
        mesh_axes={"x": 2},
        in_specs=(P("x", None), P(None, "x")),
        out_specs=P(None, "x"),
    )
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize("config", [{}, {"tile_m": 64}, "default"])
def test_what_is_no_configuration(make_case, config):
    case = make_case(128, 128, 64, "float16", (2,))
    for function in (all_gather_lhs_matmul, lambda lhs, rhs, axis, config: cmm.matmul(lhs, rhs, config=config)):
        with ci.simulate(), pytest.raises(ValueError, match="config must be a cmm.TuningConfig or None, got"):
            case.program(functools.partial(function, config=config))(case.lhs, case.rhs)


@pytest.mark.parametrize(
    "shape, message",
    [
        ((100, 128, 128), "m=100 must be divisible by 128.*Pad m to 128"),
        ((128, 100, 128), "n=100 must be divisible by 64.*Pad n to 128"),
        ((128, 128, 100), "k=100 must be divisible by 64.*Pad k to 128"),
    ],
)
def test_shapes_that_tiles_do_not_divide(shape, message):
    with pytest.raises(ValueError, match=message):
        SMALL.check(*shape, "float16")


def test_shared_memory():
    # Four stages of (128 + 256) x 64 float16 and four epilogue buffers of 64 x 64, barriers and alignment beside them.
    assert TuningConfig().smem_bytes("float16") == 4 * 384 * 64 * 2 + 4 * 64 * 64 * 2 + 8 * 8 + 1024
    TuningConfig().check(1024, 4096, 4096, "float16")
    with pytest.raises(ValueError, match=f"needs 279632 bytes of shared memory, a Hopper CTA has {MAX_SMEM_BYTES}.*=5"):
        TuningConfig(max_concurrent_steps=5).check(1024, 4096, 4096, "float16")


def test_default_configuration_gets_smaller_with_the_shape():
    assert default_config(1024, 4096, 4096, "float16") == TuningConfig()
    # 64 tiles of 128 x 256 would leave half of 132 multiprocessors idle, 128 of 128 x 128 keep them busy.
    assert default_config(512, 4096, 4096, "float16").cta_tile_n == 128
    assert default_config(512, 4096, 4096, "float16", num_ctas=64).cta_tile_n == 256
    assert default_config(1024, 192, 4096, "float16").cta_tile_n == 64
    assert default_config(64, 128, 64, "float16").cta_tile_m == 64
    for m, minor in ((128, "M"), (64, "N")):  # A small tile is loaded deep, where k allows it.
        deep, shallow = (default_config(m, 4096, k, "float16", steps=2) for k in (4096, 192))
        assert (deep.tile_k, deep.max_concurrent_steps, deep.wg_dimension.name) == (128, 4, minor)
        assert (shallow.tile_k, shallow.max_concurrent_steps, shallow.wg_dimension.name) == (64, 7, minor)
        assert (deep.tile_m, deep.tile_n) == (shallow.tile_m, shallow.tile_n) == (64, 64)
    assert default_config(64, 132 * 256, 4096, "float16").cta_tile_n == 256
    with pytest.raises(ValueError, match="m=100"):
        default_config(100, 128, 64, "float16")


def _trace(make_case, lhs, rhs, mesh_shape=(2,), **options):
    mesh = make_case(1, 1, 1, "float32", mesh_shape).mesh
    run = jax.shard_map(
        lambda: all_gather_lhs_matmul(lhs, rhs, "x", config=SMALL), mesh=mesh, in_specs=(), out_specs=P(), **options
    )
    jax.eval_shape(run)


GOOD = (jnp.ones((128, 128), jnp.float16), jnp.ones((128, 64), jnp.float16))


def test_no_hopper_gpu(make_case):
    with pytest.raises(NotImplementedError, match=r'needs Hopper GPUs .*found cpu.*method="ring"'):
        _trace(make_case, *GOOD, check_vma=False)


def test_no_hopper_gpu_for_the_local_product():
    with pytest.raises(NotImplementedError, match="needs Hopper GPUs .*found cpu.*jnp.matmul runs everywhere"):
        cmm.matmul(*GOOD)
    with pytest.raises(NotImplementedError, match="float16 or bfloat16, got float32. jnp.matmul runs everywhere"):
        cmm.matmul(*(operand.astype(jnp.float32) for operand in GOOD))


def test_other_gpus():
    lower = functools.partial(
        ci.lower_for_cuda,
        lambda lhs, rhs: all_gather_lhs_matmul(lhs, rhs, "x", config=SMALL),
        jax.ShapeDtypeStruct((256, 128), jnp.float16),
        jax.ShapeDtypeStruct((128, 128), jnp.float16),
        mesh_axes={"x": 2},
        in_specs=(P("x", None), P(None, "x")),
        out_specs=P(None, "x"),
    )
    with pytest.raises(NotImplementedError, match="found NVIDIA A100-SXM4-80GB"):
        lower(device_kind="NVIDIA A100-SXM4-80GB")
    lower(device_kind="NVIDIA H200")


@pytest.mark.parametrize(
    "lhs, rhs, error, message",
    [
        (jnp.ones((128, 128)), jnp.ones((128, 64)), NotImplementedError, "float16 or bfloat16, got float32"),
        (jnp.ones((128, 128), jnp.float16), jnp.ones((128, 64), jnp.bfloat16), ValueError, "float16 and bfloat16"),
        (jnp.ones((128, 64), jnp.float16), jnp.ones((128, 64), jnp.float16), ValueError, "k=64 .* k=128"),
        (jnp.ones((64, 128), jnp.float16), jnp.ones((128, 64), jnp.float16), ValueError, "m=64 must be divisible by"),
    ],
)
def test_bad_operands(make_case, lhs, rhs, error, message):
    with ci.simulate():
        with pytest.raises(error, match=message):
            _trace(make_case, lhs, rhs, check_vma=False)


def test_an_axis_that_is_left_to_the_compiler(make_case):
    with ci.simulate():
        with pytest.raises(ValueError, match="leaves the axes 'y' to the compiler"):
            _trace(make_case, *GOOD, (2, 2), axis_names={"x"}, check_vma=False)


@pytest.mark.parametrize("method", ["pallas", "pallas_fast"])
def test_precision(make_case, method):
    case = make_case(128, 128, 64, "float16", (2,))
    with pytest.raises(ValueError, match=f"method='{method}' takes no precision, got 'highest'"):
        case.program(cmm.all_gather_matmul, method=method, precision="highest")(case.lhs, case.rhs)


def test_several_processes(make_case, monkeypatch):
    monkeypatch.setattr(requirements.jax, "process_count", lambda: 4)
    with pytest.raises(NotImplementedError, match='all GPUs in one process, here are 4 processes.*method="ring"'):
        requirements.check_peers()


class _Driver:
    """Stands in for the CUDA driver: some pairs of GPUs have no peer access, and some calls fail."""

    def __init__(self, missing=(), error=0):
        self.missing, self.error = missing, error

    def cuDeviceCanAccessPeer(self, answer, ordinal, peer):  # noqa: N802
        answer._obj.value = (ordinal.value, peer.value) not in self.missing
        return self.error


def _pretend_gpus(monkeypatch, driver):
    monkeypatch.setattr(peer_access.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(peer_access.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(type(jax.devices()[0]), "local_hardware_id", property(lambda device: device.id), raising=False)
    monkeypatch.setattr(requirements, "pair_without_peer_access", peer_access.pair_without_peer_access.__wrapped__)


def test_gpus_without_peer_access(monkeypatch):
    with monkeypatch.context() as patch:
        _pretend_gpus(patch, _Driver(missing={(1, 2)}))
        with pytest.raises(NotImplementedError, match="GPU 1 has no peer access to GPU 2.*CUDA_VISIBLE_DEVICES"):
            requirements.check_peers()
        _pretend_gpus(patch, _Driver())
        requirements.check_peers()
        _pretend_gpus(patch, _Driver(error=101))
        with pytest.raises(RuntimeError, match="CUDA error 101"):
            requirements.check_peers()


def test_devices_in_another_order(make_case, monkeypatch):
    # Only compilation can find it out: while a kernel is traced nobody sees which devices a mesh holds.
    monkeypatch.setattr("cmm.hopper.calls.check_machine", lambda: requirements.Gpu("NVIDIA H200", 132))
    case = make_case(128, 128, 64, "float16", (2,), devices=jax.devices("cpu")[1::-1])
    traced = case.program(functools.partial(all_gather_lhs_matmul, config=SMALL)).trace(case.lhs, case.rhs)
    with pytest.raises(NotImplementedError, match=r"row-major device ids. Got: \[1 0\]"):
        traced.lower(lowering_platforms=("cuda",))
