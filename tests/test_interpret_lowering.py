"""Kernels still lower for CUDA, and what does not lower is found."""

import functools

import interpret_kernels as kernels
import jax
import jax.numpy as jnp
import pytest
from interpret_matmul import specialized_matmul
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu
from jax.sharding import PartitionSpec as P

import cmm.interpret as ci

F16 = jnp.float16


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, F16)


@pytest.mark.parametrize("num_devices", [2, 3, 4, 8])
def test_ring_lowers(num_devices):
    f = lambda x: kernels.ring_all_gather(x, "x", num_devices)
    text = ci.lower_for_cuda(
        f, shape(num_devices * 64, 64), mesh_axes={"x": num_devices}, in_specs=P("x"), out_specs=P("x")
    )
    assert text.count("mosaic_gpu_v2") >= 1


def test_one_axis_of_two_lowers():
    f = lambda x: kernels.ring_all_gather(x, "y", 4)
    text = ci.lower_for_cuda(
        f, shape(8 * 64, 64), mesh_axes={"x": 2, "y": 4}, in_specs=P(("x", "y")), out_specs=P(("x", "y"))
    )
    assert "mosaic_gpu_v2" in text


def test_specialized_kernel_lowers():
    f = lambda a, b: tuple(specialized_matmul(a, b, "x", 2))
    text = ci.lower_for_cuda(
        f,
        shape(128, 256),
        shape(256, 128),
        mesh_axes={"x": 2},
        in_specs=(P("x"), P(None, "x")),
        out_specs=(P("x"), P("x")),
    )
    assert "mosaic_gpu_v2" in text


def test_jax_example_lowers():
    config = collective_matmul_mgpu.TuningConfig(tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4)
    f = functools.partial(collective_matmul_mgpu.all_gather_lhs_matmul, axis_name="x", config=config)
    num_devices = jax.device_count()  # The example insists on all there are.
    with ci.pretend_core_count(collective_matmul_mgpu, 132):
        text = ci.lower_for_cuda(
            f,
            shape(num_devices * 1024, 4096),
            shape(4096, num_devices * 4096),
            mesh_axes={"x": num_devices},
            in_specs=(P("x"), P(None, "x")),
            out_specs=P(None, "x"),
        )
    assert "mosaic_gpu_v2" in text


def test_too_much_shared_memory_is_found():
    def body(x_ref, out_ref, smem):
        smem[0] = x_ref[...]
        out_ref[...] = smem[0]

    f = lambda x: plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), scratch_types=[plgpu.SMEM((64, 64, 64), F16)]
    )(x)
    with pytest.raises(ValueError, match="shared memory"):
        ci.lower_for_cuda(f, shape(128, 64), mesh_axes={"x": 2}, in_specs=P("x"), out_specs=P("x"))


def test_unsupported_primitive_is_found():
    def body(x_ref, out_ref):
        out_ref[...] = jnp.sort(x_ref[...], axis=0)

    f = lambda x: plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    with pytest.raises(NotImplementedError, match="sort"):
        ci.lower_for_cuda(f, shape(128, 64), mesh_axes={"x": 2}, in_specs=P("x"), out_specs=P("x"))


def test_no_kernel_is_an_error():
    with pytest.raises(ValueError, match="no Mosaic GPU kernel"):
        ci.lower_for_cuda(lambda x: x + 1, shape(128, 64), mesh_axes={"x": 2}, in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(ValueError, match="1 operands but 2 in_specs"):
        ci.lower_for_cuda(lambda x: x, shape(128, 64), mesh_axes={"x": 2}, in_specs=(P("x"), P("x")), out_specs=P("x"))
