"""The fast ring kernel: `AllGather(A) @ B` in nearly the time of the product alone.

It computes and sends what the kernel in `cmm.hopper.ring_kernel` does: step `i` on device `d` multiplies shard
`A_{(d+i) % D}` by `B_d`, and sends that shard to slot `i` of device `d - 1`, out of the shared memory into which it was
loaded for the product. Read that one first. Three things are different:

- *All CTAs send.* There the CTAs of column 0 send everything, and are late. Here the columns of a row share the sends.
- *A warp of its own sends.* The loader's warpgroup has four warps; one loads, one sends. A stage of the pipeline has
  three readers: two multipliers and the sender. Multipliers know nothing of the ring.
- *Nobody waits for a whole step.* A row of tiles is announced in chunks of k. When a CTA begins step `i + 1`, the first
  chunks of its row have long been there, for they were sent at the beginning of step `i`.

And where that saves a round, *rounds span steps* (`cmm.hopper.rounds`): some CTAs begin with a tile of a later step
while others are at the earlier ones. In a short step they follow these at the distance of a chunk or two. Chunks are
short then. Few tiles of a last round are halved, for two CTAs each. That is in the last step, which sends nothing.

`cmm.hopper.sends` says who sends what. There is one semaphore for each chunk of each row of each step, `received`. Each
CTA that has sent a part of a chunk signals the neighbour's once, when its part is complete in the neighbour's memory.
The neighbour's loaders wait for all these signals before they load the first tile of the chunk, and fence, so that TMA
sees what they have been told of (`cmm.hopper.fences`).

Why it is sound, for any number of devices, of tiles per CTA and of stages, and however late a CTA is:

1. *A chunk is complete before it is read.* Each of the signals that a loader waits for stands for one column's part of
   this chunk of this row in this step, and no other signal counts there: nobody can stand in for a late CTA.
2. *A slot is never overwritten while it is read.* Each step has a slot of its own, and each tile of it is written once.
3. *Shared memory is not reused while it is sent.* The sender lets go of a stage that it has sent only when the store
   has read it; it waits for that when it comes to the next stage.
4. *No device leaves early.* Every chunk of every slot is awaited by the CTAs that multiply it, so nothing is sent or
   signalled to a device whose kernel has ended. A sender signals what it has sent after its completion: before it ends,
   because the last step sends nothing, or where rounds span steps, because it signals before its tile ends. So nothing
   is in flight when it ends either.
5. *No cycle of waits.* A sender signals `lag` products after its last send of a chunk. So a signal for step `i` needs
   its CTA to have loaded `lag` tiles more, which may be the first tiles of step `i + 1`. With two chunks or more, and a
   lag of at most one chunk, these lie in the first chunk of the CTA's first tile of the result. That one is complete as
   soon as other CTAs are through with the first chunk of their last tile, at most, and `lag` tiles more: still
   step `i`. So every wait leads to an earlier one. With a single chunk the lag is 0.

   Where rounds span steps, a CTA's next tile of the result may lie several steps ahead, and there may be none. So a
   sender signals all that it has sent before a tile of the result ends. Then a signal for step `i` needs nothing but
   uses of its CTA up to the end of a tile of step `i`; those before are of step `i` or earlier, for every CTA goes
   through the steps in order. A use of step `i` waits for signals for step `i - 1`, and for stages to be let go, which
   needs uses before it. So every wait leads to an earlier step, or to an earlier use of the same CTA. That a loader
   waits at the next tile holds up nobody at this one, whose stages it has filled.

   As in the readable kernel, all CTAs are assumed to be resident at once.

Semaphores are zero when the kernel starts, and waits leave their value (`decrement=False`): many CTAs wait for one.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cmm.hopper import roles, slots
from cmm.hopper.calls import call_kernel, plan_ring
from cmm.hopper.clocks import WARP
from cmm.hopper.config import TuningConfig
from cmm.hopper.fences import acquire_for_tma
from cmm.hopper.marks import LOADER, MULTIPLIERS, NO_MARKS, NO_RECORDER, SENDER
from cmm.hopper.matmul import launch_roles, persistent_kernel
from cmm.hopper.plan import Plan
from cmm.hopper.rounds import Rounds
from cmm.hopper.sends import SendPlan, plan_sends, with_short_chunks
from cmm.schedule import neighbour, shard_at

_LOADER_WARP, _SENDER_WARP = 0, 1
_READERS = 3  # Of a stage: two multipliers and the sender.


def all_gather_lhs_matmul_fast(lhs, rhs, axis_name, *, config: TuningConfig | None = None, dtype=None):
    """Computes `AllGather(lhs) @ rhs` in one kernel per device, faster than `cmm.all_gather_lhs_matmul`.

    Arguments, result, derivatives and errors are those of `cmm.all_gather_lhs_matmul`, and so are what it costs and
    where it runs. In addition it uses `chunks` and `signal_lag` of the configuration.

    Raises:
      ValueError: also if these two do not fit the shape.
    """
    plan, dtype = plan_fast(lhs, rhs, axis_name, config=config, dtype=dtype)
    return call_kernel(_launch, lhs, rhs, axis_name, plan, dtype)


def plan_fast(lhs, rhs, axis_name, *, config: TuningConfig | None = None, dtype=None) -> tuple[Plan, jnp.dtype]:
    """Checks a call of `all_gather_lhs_matmul_fast`; returns the tiles of a step, and the dtype of the result.

    Raises:
      ValueError, NotImplementedError: as `all_gather_lhs_matmul_fast` does.
    """
    plan, dtype = plan_ring("pallas_fast", lhs, rhs, axis_name, config=config, dtype=dtype)
    return with_sends(plan, lax.axis_size(axis_name)), dtype


def with_sends(plan: Plan, axis_size: int) -> Plan:
    """Returns a plan with the chunks that suit a ring of so many devices.

    Raises:
      ValueError: chunks or lag of its configuration do not fit.
    """
    if Rounds(plan, axis_size).steps_overlap:
        plan = with_short_chunks(plan)
    plan_sends(plan)
    return plan


def _launch(axis_name, plan, dtype, lhs, rhs, recorder=NO_RECORDER, loops_back=None):
    """Starts the kernel. With `loops_back` steps in place of an axis, a device is its own neighbour."""
    axis_size = loops_back or lax.axis_size(axis_name)
    body = functools.partial(_body, plan_sends(plan), axis_name, axis_size, recorder)
    return persistent_kernel(
        plan,
        body,
        out_type=(
            jax.ShapeDtypeStruct((axis_size * plan.m, plan.n), dtype),
            slots.type_of(plan, axis_size - 1, lhs.dtype),  # One for each shard that arrives.
            *recorder.out_type(),
        ),
    )(lhs, rhs)


def _body(sends: SendPlan, axis_name, axis_size, recorder, lhs_gmem, rhs_gmem, out_gmem, scratch_gmem, *marks_gmem):
    plan, recorder = sends.plan, recorder.into(*marks_gmem)
    chunks = (axis_size - 1) * plan.m_tiles * sends.chunks
    received = pl.get_global(plgpu.SemaphoreType.REGULAR((chunks,)))
    if axis_name is None:
        device, send_dev_id, peer_scratch = 0, None, scratch_gmem
    else:
        device = lax.axis_index(axis_name)
        send_dev_id = {axis_name: neighbour(device, axis_size)}
        peer_scratch = plgpu.remote_ref(scratch_gmem, send_dev_id)
    rounds = Rounds(plan, axis_size).in_kernel()

    @recorder.role(LOADER, threads=WARP)
    def load(marks, memory):
        roles.load_tiles(rounds.of_step(0), 0, lhs_gmem, rhs_gmem, marks=marks, **memory)

        def load_received(step, tiles, first_use, memory):
            def await_chunk(m_tile, k_step):
                @pl.when(sends.is_first_of_chunk(k_step))
                def _():
                    chunk = received.at[sends.chunk(step - 1, tiles.row(m_tile), k_step)]
                    pl.semaphore_wait(chunk, value=sends.signals, decrement=False)
                    acquire_for_tma()

            shard = scratch_gmem.at[step - 1]
            roles.load_tiles(tiles, first_use, shard, rhs_gmem, await_chunk, is_slot=True, marks=marks, **memory)

        rounds.for_each_step(load_received, memory, first=1)

    @recorder.role(MULTIPLIERS)
    def multiply(marks, memory):
        def multiply_step(step, tiles, first_use, memory):
            rows = pl.ds(shard_at(device, step, axis_size) * plan.m, plan.m)
            roles.multiply_tiles(tiles, first_use, out_gmem.at[rows], marks=marks, **memory)

        rounds.for_each_step(multiply_step, memory)

    @recorder.role(SENDER, threads=WARP)
    def send(marks, memory):
        @pl.loop(0, rounds.my_tiles(), init_carry=False)
        def _tile(number, holds_previous):
            ring = (peer_scratch, received, send_dev_id)
            return _send_tile(sends, rounds, *ring, number, holds_previous, marks=marks, **memory)

    def load_and_send(memory):
        @plgpu.warp_map
        def _(warp):
            pl.when(warp == _LOADER_WARP)(lambda: load(memory))
            pl.when(warp == _SENDER_WARP)(lambda: send(memory))

    launch_roles(plan, lhs_gmem.dtype, out_gmem.dtype, load_and_send, multiply, _READERS)


def _send_tile(sends, rounds, peer_scratch, received, send_dev_id, number, holds_previous, *, marks, **memory):
    """The sender's part of tile `number` of this CTA: goes through the uses of stages, and sends what is its to send.

    A stage that is sent is held until the next use: `holds_previous` says whether the last one of the tile before is.
    Returns whether the last one of this tile is.

    Between two products there is little time, and a warp computes slowly: whatever does not change within a tile is
    computed once.
    """
    k_steps, lag = sends.plan.k_steps, sends.lag
    tile = _Tile.of(sends, rounds, number)
    announces_within_tile = _announces_within_tile(rounds)
    before = None if lag == 0 or announces_within_tile else _Tile.of(sends, rounds, jnp.maximum(number - 1, 0))

    def announce(tile, k_step, condition=True):
        """Announces a chunk if this tile of A was sent from here and is the last part of it that goes out from here."""

        @pl.when(condition & tile.is_mine(k_step) & sends.is_last_of_chunk(k_step))
        def _announce():
            with marks.span("complete", tile.first_use + k_step, each=True):
                plgpu.wait_smem_to_gmem(0)
            marks.mark("signal", tile.first_use + k_step, each=True)
            pl.semaphore_signal(received.at[tile.chunk(k_step)], device_id=send_dev_id)

    def announce_late(k_step):
        """Announces what was sent `lag` products ago, perhaps in the tile before."""
        announce(tile, k_step - lag, k_step >= lag)
        if before is not None:
            announce(before, k_step - lag + k_steps, (k_step < lag) & (number > 0))

    stages = sends.plan.config.max_concurrent_steps

    @pl.loop(0, k_steps, init_carry=(lax.rem(tile.first_use, stages), holds_previous))
    def after_last(k_step, carry):
        stage, holds_previous = carry
        is_mine = _send_use(tile, k_step, stage, holds_previous, peer_scratch, marks=marks, **memory)
        announce_late(k_step)
        return roles.next_stage(stage, stages), is_mine

    if lag and announces_within_tile:
        pl.loop(k_steps - lag, k_steps)(lambda k_step: announce(tile, k_step))
    return after_last[1]


def _send_use(tile, k_step, stage, holds_previous, peer_scratch, *, marks=NO_MARKS, a_images, full, empty, **_):
    """Sends one stage, or lets go of it, and lets go of the previous one. Returns whether this one is sent."""
    plan, use = tile.sends.plan, tile.first_use + k_step
    with marks.span("full", use):
        plgpu.barrier_wait(full.at[stage])

    @pl.when(holds_previous)
    def _let_go_of_the_previous_stage():
        with marks.span("read", use, each=True):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(empty.at[roles.stage_before(stage, plan.config.max_concurrent_steps)])

    is_mine = tile.is_mine(k_step)

    def start_store():
        slot = peer_scratch.at[tile.step]
        plgpu.copy_smem_to_gmem(a_images.at[stage], slot.at[*slots.place(plan, tile.m_tile, k_step)])
        marks.mark("issue", use, each=True)

    lax.cond(is_mine, start_store, lambda: plgpu.barrier_arrive(empty.at[stage]))
    return is_mine


def _announces_within_tile(rounds) -> bool:
    """Whether all that was sent in a tile of the result is announced before it ends: see point 5 above."""
    return rounds.span_steps


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A tile of the result, as the sender sees it.

    Attributes:
      sends: who sends what.
      first_use: number of its first use of a stage.
      step: of the ring.
      m_tile: its row.
      is_sent: whether this step's shard is sent on.
      position: of its column, which says when that column's turn to send is.
    """

    sends: SendPlan
    first_use: object
    step: object
    m_tile: object
    is_sent: object
    position: object

    @classmethod
    def of(cls, sends, rounds, number) -> "_Tile":
        """Returns tile `number` of this CTA, counted over all steps."""
        step, m_tile, n_tile = rounds.tile_at(number)
        first_use, is_sent = number * sends.plan.k_steps, step < rounds.axis_size - 1
        return cls(sends, first_use, step, m_tile, is_sent, sends.position(m_tile, n_tile))

    def is_mine(self, k_step):
        """Whether this tile of A is sent from here."""
        return self.is_sent & self.sends.is_turn(self.position, k_step)

    def chunk(self, k_step):
        """Returns the number of its chunk."""
        return self.sends.chunk(self.step, self.m_tile, k_step)
