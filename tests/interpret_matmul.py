"""A product in warpgroups of their own that also sends its tiles on; `fault` names one thing that is broken."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def specialized_matmul(a, b, axis_name=None, num_devices=1, fault=None):
    """a: f16[64, k], b: f16[k, 64] -> f32 a @ b, and a sent to the left.

    Thread 0 computes. In thread 1, warp 0 loads and warp 1 sends each tile of `a`
    to the left neighbour straight from shared memory, as one more consumer.
    """
    k = a.shape[1]
    steps, stages = k // 64, 2

    def body(a_ref, b_ref, out_ref, a_left_ref, a_smem, b_smem, o_smem, full, empty):
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR)
        wg = lax.axis_index("wg")
        me = lax.axis_index(axis_name)
        left = {axis_name: lax.rem(me + num_devices - 1, jnp.int32(num_devices))}
        peer = plgpu.remote_ref(a_left_ref, left)

        @pl.when(wg == 1)
        def _memory():
            @plgpu.warp_map
            def _warps(warp):
                @pl.when(warp == 0)
                def _load():
                    @pl.loop(0, steps)
                    def _step(i):
                        slot = lax.rem(i, stages)
                        if fault != "missing_empty_wait":

                            @pl.when(i >= stages)
                            def _wait():
                                plgpu.barrier_wait(empty.at[slot])

                        where = pl.ds(i * 64, 64)
                        plgpu.copy_gmem_to_smem(a_ref.at[:, where], a_smem.at[slot], full.at[slot])
                        plgpu.copy_gmem_to_smem(b_ref.at[where], b_smem.at[slot], full.at[slot])

                @pl.when(warp == 1)
                def _send():
                    @pl.loop(0, steps)
                    def _step(i):
                        slot = lax.rem(i, stages)
                        plgpu.barrier_wait(full.at[slot])
                        plgpu.copy_smem_to_gmem(a_smem.at[slot], peer.at[:, pl.ds(i * 64, 64)])
                        if fault != "missing_read_wait":
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        plgpu.barrier_arrive(empty.at[slot])

                    plgpu.wait_smem_to_gmem(0)
                    pl.semaphore_signal(arrived, device_id=left)

        @pl.when(wg == 0)
        def _compute():
            def product(acc):
                @pl.loop(0, steps)
                def _step(i):
                    slot = lax.rem(i, stages)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, a_smem.at[slot], b_smem.at[slot])
                    if fault != "missing_wgmma_wait":
                        plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[slot])

                return acc[...]

            o_smem[...] = pl.run_scoped(product, plgpu.ACC((64, 64), jnp.float32))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, out_ref)
            plgpu.wait_smem_to_gmem(0)
            pl.semaphore_wait(arrived)

    tile = plgpu.SMEM((stages, 64, 64), a.dtype, transforms=_TRANSFORMS)
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((64, k), a.dtype)],
        scratch_types=[
            tile,
            tile,
            plgpu.SMEM((64, 64), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ],
        num_threads=2,
        thread_name="wg",
    )(a, b)
