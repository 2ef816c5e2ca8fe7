"""What do the warpgroups of a CTA do? One loads tiles, two multiply them; the local and the ring kernel share this.

All three walk through the same tiles in the same order. A tile of the result takes `k_steps` products, and each product
takes one *use* of a pipeline stage: the loader fills it, both multipliers read it. Uses count up over tiles and steps
of the ring without a gap, so the pipeline never drains. Stage `use % stages` serves use number `use`. Two barriers
guard it:

- `full`: completes when both tiles have arrived in shared memory. The multipliers wait for it.
- `empty`: completes when both multipliers have let go of the stage. The loader waits for it before it fills the stage
  again, from the second round on.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cmm.hopper import slots
from cmm.hopper.config import MatmulDimension
from cmm.hopper.marks import LOADER as LOADER, NO_MARKS
from cmm.hopper.plan import Plan
from cmm.hopper.wgmma import fence_registers

NUM_WARPGROUPS = 3


def memory(plan: Plan, dtype, out_dtype, readers: int = 2) -> dict:
    """Returns the shared memory and barriers of one CTA, as arguments for `pl.run_scoped`.

    Args:
      plan: the tiles.
      dtype: of the operands.
      out_dtype: of the result.
      readers: how many threads must let go of a stage before it is filled again: both multipliers, perhaps a sender.
    """
    config = plan.config
    stages = config.max_concurrent_steps
    return {
        "a_smem": slots.with_images(_swizzled((stages, config.cta_tile_m, config.tile_k), dtype), plan, dtype),
        "b_smem": _swizzled((stages, config.tile_k, config.cta_tile_n), dtype),
        "out_smem": _swizzled((2, config.epi_slots, config.epi_m, config.epi_n), out_dtype),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=readers, num_barriers=stages),
    }


def _swizzled(shape, dtype):
    swizzle = plgpu.find_swizzle(shape[-1] * jnp.dtype(dtype).itemsize * 8)
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def next_stage(stage, stages: int):
    """Returns the stage of the use after that of `stage`.

    Loops over uses count stages so. A remainder would be a division for each product, and it was seen to make the
    compiler compute the addresses of products in registers where they cost time (`R2UR`).
    """
    return lax.select(stage == stages - 1, jnp.int32(0), stage + 1)


def stage_before(stage, stages: int):
    """Returns the stage of the use before that of `stage`."""
    return lax.select(stage == 0, jnp.int32(stages - 1), stage - 1)


def load_tiles(
    plan: Plan,
    first_use,
    a_gmem,
    b_gmem,
    ready=None,
    is_slot: bool = False,
    marks=NO_MARKS,
    *,
    a_smem,
    a_images,
    b_smem,
    full,
    empty,
    **_,
):
    """The loader's part of one step: fills a stage for every use of this CTA, as soon as the stage is empty.

    Args:
      plan: the tiles.
      first_use: number of the first use of this step.
      a_gmem: `[m, k]`, the shard of this step, or the slot in which it lies (`cmm.hopper.slots`).
      b_gmem: `[k, n]`.
      ready: called with row (in tiles of this plan) and k-step of a tile of A before it is loaded; returns when it is
        there.
      is_slot: whether `a_gmem` is a slot.
      marks: what notes the times, if anything does (`cmm.hopper.marks`).
    """
    stages, k_steps = plan.config.max_concurrent_steps, plan.k_steps

    @pl.loop(0, plan.my_tiles())
    def _tile(index):
        m_tile, n_tile = plan.tile_at(index)

        first = first_use + index * k_steps

        @pl.loop(0, k_steps, init_carry=lax.rem(first, stages))
        def _product(k_step, stage):
            use = first + k_step

            with marks.span("empty", use):

                @pl.when(use >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[stage])

            plgpu.copy_gmem_to_smem(b_gmem.at[*plan.b_slice(k_step, n_tile)], b_smem.at[stage], full.at[stage])
            if ready is not None:
                with marks.span("ready", use):
                    ready(m_tile, k_step)
            part = slots.place(plan, m_tile, k_step) if is_slot else plan.a_slice(m_tile, k_step)
            plgpu.copy_gmem_to_smem(a_gmem.at[*part], (a_images if is_slot else a_smem).at[stage], full.at[stage])
            return next_stage(stage, stages)


def multiply_tiles(
    plan: Plan, first_use, out_gmem, send=None, marks=NO_MARKS, *, a_smem, a_images, b_smem, out_smem, full, empty
):
    """A multiplier's part of one step: multiplies every use of this CTA, and stores each finished tile.

    A stage is let go one use late: only then is its product known to be finished while the next one already runs.

    Args:
      plan: the tiles.
      first_use: number of the first use of this step.
      out_gmem: `[m, n]`, the rows of the result that belong to the shard of this step.
      send: `None`, or what is done with tiles of A beside multiplying them (see `cmm.hopper.ring_kernel.Send`):
        `send.use` is called at each use, and by its return every earlier stage must be free of readers; `send.finish`
        after the last use of a tile, by whose return this stage must be, too; `send.announce` once the tile is stored.
      marks: as for `load_tiles`.
    """
    config, k_steps = plan.config, plan.k_steps
    stages = config.max_concurrent_steps
    wg = lax.axis_index("wg")
    if config.wg_dimension == MatmulDimension.M:
        rows, columns = pl.ds(wg * config.tile_m, config.tile_m), slice(None)
    else:
        rows, columns = slice(None), pl.ds(wg * config.tile_n, config.tile_n)

    @pl.loop(0, plan.my_tiles())
    def _tile(index):
        m_tile, n_tile = plan.tile_at(index)
        first = first_use + index * k_steps

        def products(acc_ref):
            @pl.loop(0, k_steps, init_carry=lax.rem(first, stages))
            def _product(k_step, stage):
                use = first + k_step
                with marks.span("full", use):
                    plgpu.barrier_wait(full.at[stage])
                fence_registers()
                plgpu.wgmma(acc_ref, a_smem.at[stage, rows], b_smem.at[stage, :, columns])
                if send is not None:
                    with marks.span("send", use):
                        send.use(a_images.at[stage], m_tile, n_tile, k_step)
                plgpu.wgmma_wait(1)  # All products but this one are finished ...

                @pl.when(k_step > 0)
                def _():
                    plgpu.barrier_arrive(empty.at[stage_before(stage, stages)])  # ... so nobody reads this.

                return next_stage(stage, stages)

            return acc_ref[...]  # Waits for the last product.

        acc = pl.run_scoped(products, plgpu.ACC((config.tile_m, config.tile_n), jnp.float32))
        marks.mark("done", first)
        if send is not None:
            with marks.span("read", first):
                send.finish(n_tile)
        plgpu.barrier_arrive(empty.at[lax.rem(first + k_steps - 1, stages)])
        with marks.span("store", first):
            _store_tile(plan, acc, out_gmem.at[*plan.out_slice(m_tile, n_tile)].at[rows, columns], out_smem.at[wg])
        if send is not None:
            with marks.span("complete", first):
                send.announce(n_tile)


def _store_tile(plan, acc, out_gmem, out_smem):
    """Rounds one warpgroup's tile and stores it part by part, alternating between two buffers in shared memory."""
    config = plan.config
    acc = acc.astype(out_gmem.dtype)
    parts = [(i, j) for i in range(0, config.tile_m, config.epi_m) for j in range(0, config.tile_n, config.epi_n)]
    for number, (i, j) in enumerate(parts):
        slot = number % config.epi_slots
        # All stores but the latest have read their buffers, so this one is free again. With an odd number of parts the
        # latest one of the tile before has used the first buffer, too.
        plgpu.wait_smem_to_gmem(config.epi_slots - 1 if number else 0, wait_read_only=True)
        out_smem[slot] = acc[i : i + config.epi_m, j : j + config.epi_n]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[slot], out_gmem.at[pl.ds(i, config.epi_m), pl.ds(j, config.epi_n)])
