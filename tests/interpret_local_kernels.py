"""Small kernels for tests of the simulator that stay on their device; `fault` names one thing that is broken."""

import jax
import jax.numpy as jnp
from interpret_kernels import K, M, kernel_like, smem_of
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def scale_local(x, fault=None):
    """x: f16[M, K] -> 2 x, through shared memory, with a store by TMA."""

    def body(x_ref, out_ref, smem, barrier):
        plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
        if fault != "missing_barrier_wait":
            plgpu.barrier_wait(barrier)
        smem[...] = smem[...] * 2
        if fault != "missing_commit":
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out_ref)
        plgpu.wait_smem_to_gmem(0)

    return kernel_like(x, body, scratch_types=[smem_of(dtype=x.dtype), plgpu.Barrier()])


_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def product_of_written_tile(x, fault=None):
    """x: f16[64, 64] -> f32 x @ x, the tile written to shared memory by a thread."""

    def body(x_ref, out_ref, smem):
        smem[...] = x_ref[...]
        if fault != "missing_commit_before_wgmma":
            plgpu.commit_smem()

        def product(acc):
            plgpu.wgmma(acc, smem, smem)
            return acc[...]

        out_ref[...] = pl.run_scoped(product, plgpu.ACC((64, 64), jnp.float32))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[plgpu.SMEM((64, 64), x.dtype, transforms=_TRANSFORMS)],
    )(x)


def write_after_commit(x, fault=None):
    """x: f16[M, K] -> 3 x; the tile is written twice before TMA stores it."""

    def body(x_ref, out_ref, smem):
        smem[...] = x_ref[...] * 2
        plgpu.commit_smem()
        smem[...] = x_ref[...] * 3
        if fault != "missing_second_commit":
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out_ref)
        plgpu.wait_smem_to_gmem(0)

    return kernel_like(x, body, scratch_types=[smem_of(dtype=x.dtype)])


def reuse_of_shared_memory(x, fault=None):
    """Two scopes in turn at the same bytes of shared memory; x: f16[M, K] -> x."""

    def body(x_ref, out_ref, other_ref, barrier):
        def first(smem):
            plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
            plgpu.barrier_wait(barrier)
            plgpu.copy_smem_to_gmem(smem, out_ref)
            if fault != "scope_left_too_early":
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def second(smem):
            smem[...] = jnp.zeros((K, M), x.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, other_ref)
            plgpu.wait_smem_to_gmem(0)

        for function, shape in ((first, (M, K)), (second, (K, M))):
            pl.run_scoped(function, smem_of(shape, x.dtype), collective_axes="wg")

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(body, out_type=[like, like], num_threads=1, thread_name="wg", scratch_types=[plgpu.Barrier()])(
        x
    )[0]


def hand_over_by_scope(x):
    """x: f16[M, K] -> 2 x; thread 0 writes, thread 1 reads, entering a scope syncs."""

    def body(x_ref, out_ref, smem):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _write():
            smem[...] = x_ref[...] * 2

        def scope(_):
            @pl.when(wg == 1)
            def _read():
                out_ref[...] = smem[...]

        pl.run_scoped(scope, smem_of((8, K), x.dtype), collective_axes="wg")

    return kernel_like(x, body, num_threads=2, thread_name="wg", scratch_types=[smem_of(dtype=x.dtype)])


def warps_load(x, fault=None):
    """x: f16[M, K] -> x; one warp loads and waits, its warpgroup reads."""

    def body(x_ref, out_ref, smem, barrier):
        @plgpu.warp_map
        def _warps(warp):
            @pl.when(warp == 0)
            def _load():
                plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
                if fault != "warp_does_not_wait":
                    plgpu.barrier_wait(barrier)

        out_ref[...] = smem[...]

    return kernel_like(x, body, scratch_types=[smem_of(dtype=x.dtype), plgpu.Barrier()])
