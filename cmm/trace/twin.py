"""The twin of a ring kernel: the same products in the same order by the same roles, with nothing sent or awaited.

It multiplies activations that are already gathered, as *GEMM only* does, but with the tiles, the pipeline and the steps
of the ring kernel. What the ring kernel takes longer than its twin is what its communication costs.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cmm.hopper import roles
from cmm.hopper.clocks import WARP, WARPGROUP
from cmm.hopper.marks import LOADER, MULTIPLIERS, NO_RECORDER
from cmm.hopper.matmul import launch_roles, persistent_kernel
from cmm.hopper.rounds import Rounds


def launch(axis_name, plan, dtype, lhs, rhs, recorder=NO_RECORDER, *, fast: bool):
    """Starts the kernel on one device; as the `_launch` of a ring kernel, with gathered activations.

    Args:
      axis_name: not used: no device needs to know which one it is.
      plan: the tiles of one step; the rows of `lhs` are those of one step or more.
      dtype: of the result.
      lhs: `[steps * plan.m, plan.k]`.
      rhs: `[plan.k, plan.n]`.
      recorder: as for a ring kernel.
      fast: whether tiles are dealt out as in the fast kernel, and a single warp loads; else a warpgroup does.

    Returns:
      `[steps * plan.m, plan.n]`, and the record if there is a recorder.
    """
    del axis_name
    body = functools.partial(_body, plan, lhs.shape[0] // plan.m, recorder, fast)
    out_type = (jax.ShapeDtypeStruct((lhs.shape[0], plan.n), dtype), *recorder.out_type())
    out, *marks = persistent_kernel(plan, body, out_type=out_type)(lhs, rhs)
    return (out, *marks) if marks else out


def _body(plan, steps, recorder, fast, lhs_gmem, rhs_gmem, out_gmem, *marks_gmem):
    recorder = recorder.into(*marks_gmem)
    rounds = Rounds(plan, steps).in_kernel()

    def for_each_step(function, memory):
        if fast:
            rounds.for_each_step(function, memory)
        else:  # The readable kernel has its steps one after the other in the program, too.
            for step in range(steps):
                function(step, plan, step * plan.my_tiles() * plan.k_steps, memory)

    @recorder.role(LOADER, threads=WARP if fast else WARPGROUP)
    def load(marks, memory):
        def load_step(step, tiles, first_use, memory):
            rows = lhs_gmem.at[pl.ds(step * plan.m, plan.m)]
            roles.load_tiles(tiles, first_use, rows, rhs_gmem, marks=marks, **memory)

        for_each_step(load_step, memory)

    @recorder.role(MULTIPLIERS)
    def multiply(marks, memory):
        def multiply_step(step, tiles, first_use, memory):
            rows = out_gmem.at[pl.ds(step * plan.m, plan.m)]
            roles.multiply_tiles(tiles, first_use, rows, marks=marks, **memory)

        for_each_step(multiply_step, memory)

    def load_in_a_warp(memory):
        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 0)(lambda: load(memory))

    launch_roles(plan, lhs_gmem.dtype, out_gmem.dtype, load_in_a_warp if fast else load, multiply)
