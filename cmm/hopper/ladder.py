"""Which changes lead from the readable ring kernel to the fast one? Each can be switched on and off.

Both kernels compute and send the same. Four switches lead from `cmm.hopper.ring_kernel` to `cmm.hopper.fast_kernel`:

1. `spread_sends`: all columns of tiles share the sends of a row, not column 0 alone.
2. `sender_warp`: a warp of its own sends, not a multiplier. It signals as soon as its sends are complete, without
   waiting for the result, and each row of tiles has signals of its own: a loader waits for its row, not for the shard.
3. `chunks`: a row is announced in so many parts of k.
4. `late_signals`: the sender waits for the completion of a chunk some products later, when it is complete anyway.

With the first two and `chunks=1` it is the fast kernel of `TuningConfig(chunks=1, signal_lag=0)`.

Why `spread_sends` alone is sound (`SpreadSend`), by the points in the docstring of `cmm.hopper.ring_kernel`:

1. *A shard is complete before it is read.* Of the columns that send, column `n` sends tiles `n`, `n + senders`, ... of
   its row, so each tile of A is sent once in a step. The CTA that has finished tile `(m, n)` signals once, after its
   stores have completed, so each of the `m_tiles * senders` signals that are awaited stands for one column's part of
   one row in this step.
2. *A slot is never overwritten while it is read.* As there.
3. *Shared memory is not reused while it is sent.* There the next send waits for the store before it. Here the use after
   a send sends nothing as a rule: so it waits itself, before its multiplier lets go of the stage. After the last use of
   a tile `finish` waits, as there.
4. *No device leaves early.* As there: every signal is awaited by the loaders of the next step.
5. *No cycle of waits.* As there: step `i` needs nothing but step `i - 1` of the device above, all of it.

`sender_warp` without `spread_sends` is the fast kernel in which one column sends all. That kernel is sound for any
number of columns.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cmm.hopper import fast_kernel, ring_kernel, slots
from cmm.hopper.calls import call_kernel, plan_ring
from cmm.hopper.config import TuningConfig
from cmm.hopper.matmul import persistent_kernel
from cmm.hopper.plan import Plan
from cmm.hopper.ring_kernel import Send
from cmm.hopper.sends import plan_sends


def ladder_kernel(
    *,
    spread_sends: bool = False,
    sender_warp: bool = False,
    chunks: int = 1,
    late_signals: bool = False,
    config: TuningConfig | None = None,
) -> Callable:
    """Returns the ring kernel with these changes, as a function `f(lhs, rhs, axis_name)`.

    Args:
      spread_sends, sender_warp, chunks, late_signals: see the docstring of this module. Without any it is
        `cmm.all_gather_lhs_matmul`.
      config: tiles and pipeline, by default those that the kernel takes by itself; its `chunks` and `signal_lag` do not
        count.

    Returns:
      A function with arguments, result, derivatives, cost and errors of `cmm.all_gather_lhs_matmul`. It raises a
      `ValueError` also if `chunks` does not divide the products of a tile.

    Raises:
      ValueError: the changes make no sense together.
    """
    if not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"chunks must be a whole number of at least 1, got {chunks!r}.")
    if chunks > 1 and not sender_warp:
        raise ValueError(
            f"chunks={chunks} needs sender_warp=True: a multiplier that sends announces a row once, when its tile of "
            "the result is stored."
        )
    if late_signals and chunks == 1:
        raise ValueError(
            "late_signals=True needs sender_warp=True and chunks of 2 or more: with one chunk the last send of a step "
            "has no later product in the step, and devices could wait for each other in a circle."
        )
    if not sender_warp:
        kernel = all_gather_lhs_matmul_sending if spread_sends else ring_kernel.all_gather_lhs_matmul
        return functools.partial(kernel, config=config)
    kernel = fast_kernel.all_gather_lhs_matmul_fast if spread_sends else _column_0_by_a_warp
    # The kernel chooses the lag itself where none is given.
    change = {"chunks": chunks, "signal_lag": None if late_signals else 0}

    def function(lhs, rhs, axis_name):
        tiles = config or plan_ring("pallas_fast", lhs, rhs, axis_name)[0].config
        return kernel(lhs, rhs, axis_name, config=dataclasses.replace(tiles, **change))

    return function


def senders(plan: Plan) -> int:
    """Returns how many columns of tiles share the sends of a row: all of them, unless there are fewer tiles of A."""
    return min(plan.n_tiles, plan.k_steps)


class SpreadSend(Send):
    """Sends the tiles of A whose turn it is in this column: every `senders`-th, beginning with the column's number."""

    @staticmethod
    def signals(plan: Plan) -> int:
        """Returns how many signals say that a shard is complete: one from each tile whose column sends."""
        return plan.m_tiles * senders(plan)

    def use(self, image, m_tile, n_tile, k_step) -> None:
        """Sends a stage of A if it is this column's turn; at the next use waits until it has been read."""
        is_turn = self.is_turn(n_tile, k_step)
        was_turn = (k_step > 0) & self.is_turn(n_tile, k_step - 1)
        pl.when(is_turn)(lambda: Send.use(self, image, m_tile, n_tile, k_step))

        @pl.when(self._is_mine(n_tile) & was_turn & ~is_turn)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def is_turn(self, n_tile, k_step):
        """Whether this column sends this tile of A."""
        return n_tile == lax.rem(k_step, senders(self.plan))

    def _is_mine(self, n_tile):
        return (lax.axis_index("wg") == ring_kernel._SENDER) & (n_tile < senders(self.plan))


def all_gather_lhs_matmul_sending(lhs, rhs, axis_name, *, send_type: type[Send] = SpreadSend, config=None):
    """Computes `AllGather(lhs) @ rhs` as `cmm.all_gather_lhs_matmul` does, with another rule of who sends what.

    Args:
      lhs, rhs, axis_name, config: as there; so are result, derivatives and errors.
      send_type: the rule; each multiplier makes one such object for each step that sends.
    """
    plan, dtype = plan_ring("pallas", lhs, rhs, axis_name, config=config)
    launch = functools.partial(ring_kernel._launch, send_type=send_type)
    return call_kernel(launch, lhs, rhs, axis_name, plan, dtype)


def _column_0_by_a_warp(lhs, rhs, axis_name, *, config):
    plan, dtype = fast_kernel.plan_fast(lhs, rhs, axis_name, config=config)
    return call_kernel(_launch_column_0_by_a_warp, lhs, rhs, axis_name, plan, dtype)


def _launch_column_0_by_a_warp(axis_name, plan, dtype, lhs, rhs):
    axis_size = lax.axis_size(axis_name)
    sends = dataclasses.replace(plan_sends(plan), columns=1)
    return persistent_kernel(
        plan,
        functools.partial(fast_kernel._body, sends, axis_name, axis_size, fast_kernel.NO_RECORDER),
        out_type=(
            jax.ShapeDtypeStruct((axis_size * plan.m, plan.n), dtype),
            slots.type_of(plan, axis_size - 1, lhs.dtype),
        ),
    )(lhs, rhs)
