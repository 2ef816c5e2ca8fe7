"""What does a ring kernel note down about itself, and where?

A kernel calls `marks.span(name, use)` around a wait and `marks.mark(name, use)` at a moment. Without a recorder, which
is the default, both do nothing while the kernel is traced, and the compiled kernel holds no trace of them. With one,
each mark is one store of both clocks (`cmm.hopper.clocks`) to a slot of its own in an additional result, so a mark
needs neither a counter nor shared memory, and its slot says what it is.

Uses of a stage count over all steps and tiles (see `cmm.hopper.roles`). Several uses in a row make a *cell*; every role
of every CTA has a row of slots: the header, then the marks of cell 0, of cell 1, ... What can happen several times in a
cell is noted for its first use; `each=True` notes all, and the last one stays.
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cmm.hopper import clocks
from cmm.hopper.plan import Plan

MULTIPLIERS, LOADER, SENDER = 0, 2, 3  # The roles 0 and 1 multiply.
ROLES = ("multiplier 0", "multiplier 1", "loader", "sender")

# Waits and other stretches; each has a slot for its begin and one for its end.
SPANS = (
    "empty",  # The loader waits for an empty stage.
    "full",  # A multiplier or the sender waits for a full one.
    "ready",  # The loader waits for signals: the tiles of A have arrived from the neighbour.
    "read",  # Whoever sends waits until stores have read their stage.
    "complete",  # ... until they are complete; in the readable kernel this includes the signal.
    "send",  # A multiplier of the readable kernel sends, and waits until earlier stores have read their stage.
    "store",  # A multiplier rounds a tile and stores it: the epilogue.
)
MOMENTS = (
    "issue",  # The sender has started a store to the neighbour.
    "signal",  # It is about to signal.
    "done",  # All products of a tile are finished.
)
NUMBERS = {name: 2 * number for number, name in enumerate(SPANS)}
NUMBERS |= {name: 2 * len(SPANS) + number for number, name in enumerate(MOMENTS)}
PER_CELL = 2 * len(SPANS) + len(MOMENTS)

# Slots of the header: whole cycles and nanoseconds at begin and end, what `clocks.write_tick` notes, and two marks.
BEGIN, END, TICK, DELAY, HEADER = 0, 2, 4, 7, 9


@dataclasses.dataclass(frozen=True)
class Delay:
    """A pause that is planted into a kernel to see whether the record shows it. For tests.

    Attributes:
      device: place on the ring.
      cta: the CTA.
      role: number of the role, see `ROLES`.
      use: the role pauses when it is about to wait for the stage of this use; the first of a cell.
      duration_ns: how long.
    """

    device: int
    cta: int
    role: int
    use: int
    duration_ns: int = 20_000


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each mark of a kernel is.

    Attributes:
      plan: the tiles of a step.
      axis_size: number of devices on the ring, and of steps.
      num_roles: 3, or 4 where a warp of its own sends.
      every: so many uses make a cell; a divisor of `plan.k_steps`.
      communicates: whether anything is sent and awaited; not so in the twin of a kernel (`cmm.trace.twin`).
      shared_rounds: whether rounds of tiles go on into the next step (`cmm.hopper.rounds`).
    """

    plan: Plan
    axis_size: int
    num_roles: int
    every: int
    communicates: bool = True
    shared_rounds: bool = False

    @property
    def sending_steps(self) -> int:
        """In how many steps, from the first on, the shard is sent on."""
        return self.axis_size - 1 if self.communicates else 0

    @property
    def cells(self) -> int:
        """Number of cells of the CTA that has most tiles."""
        tiles = -(-self.plan.tiles // self.plan.num_ctas)
        return self.axis_size * tiles * self.plan.k_steps // self.every

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the additional result: CTA, role, slot, and low and high half of a value."""
        return self.plan.num_ctas, self.num_roles, HEADER + self.cells * PER_CELL, 2


@dataclasses.dataclass(frozen=True)
class Recorder:
    """Records one call of a kernel on one device.

    Attributes:
      layout: where marks go.
      axis_name: the ring's axis.
      delay: a planted pause.
      gmem: the additional result; `None` before the kernel has begun.
    """

    layout: Layout
    axis_name: str
    delay: Delay | None = None
    gmem: object = None

    def out_type(self) -> tuple:
        """Returns the types of the results that the kernel has in addition."""
        return (jax.ShapeDtypeStruct(self.layout.shape, jnp.int32),)

    def into(self, gmem) -> "Recorder":
        """Returns this recorder, told inside the kernel where that result is."""
        return dataclasses.replace(self, gmem=gmem)

    def role(self, number: int, threads: int = clocks.WARPGROUP):
        """Makes of `function(marks, memory)` the function of `memory` that plays a role and notes begin and end.

        Args:
          number: `LOADER`, `SENDER`, or `MULTIPLIERS` for both.
          threads: how many threads play it: a warpgroup, or a single warp.
        """

        def decorate(function):
            def play(memory):
                role = lax.axis_index("wg") if number == MULTIPLIERS else number
                marks = Marks(self, self.gmem.at[lax.axis_index("cta"), role], number, threads)
                clocks.write_both(marks.slots, BEGIN, threads)
                function(marks, memory)
                if number == MULTIPLIERS:
                    plgpu.wait_smem_to_gmem(0)  # The kernel does it afterwards; the end of the role includes it.
                clocks.write_both(marks.slots, END, threads)
                if number == LOADER:  # It is through before the multipliers are, so the tick costs no time.
                    clocks.write_tick(marks.slots, TICK, threads)

            return play

        return decorate


@dataclasses.dataclass(frozen=True)
class Marks:
    """Notes what one role of one CTA does.

    Attributes:
      recorder: whose.
      slots: `i32[slots, 2]`, the row of this role.
      role: its number; `MULTIPLIERS` for both.
      threads: how many threads play it.
    """

    recorder: Recorder
    slots: object
    role: int
    threads: int

    def mark(self, name: str, use, *, each: bool = False) -> None:
        """Notes the time of a moment in the cell of `use`."""
        self._write(NUMBERS[name], use, each)

    @contextlib.contextmanager
    def span(self, name: str, use, *, each: bool = False):
        """Notes the time before and after what stands in this block."""
        self._write(NUMBERS[name], use, each)
        if name in ("empty", "full"):
            self._pause(use)
        yield
        self._write(NUMBERS[name] + 1, use, each)

    def _write(self, number, use, each):
        every = self.recorder.layout.every
        slot = HEADER + lax.div(use, every) * PER_CELL + number
        if not each and every > 1:
            slot = lax.select(lax.rem(use, every) == 0, slot, -1)
        clocks.write_mark(self.slots, slot, self.threads)

    def _pause(self, use):
        delay = self.recorder.delay
        if delay is None or max(delay.role - 1, 0) != max(self.role - 1, 0):
            return
        here = (lax.axis_index(self.recorder.axis_name) == delay.device) & (lax.axis_index("cta") == delay.cta)
        if self.role == MULTIPLIERS:
            here &= lax.axis_index("wg") == delay.role

        @pl.when(here & (use == delay.use))
        def _():
            clocks.write_mark(self.slots, DELAY, self.threads)
            clocks.spin(delay.duration_ns)
            clocks.write_mark(self.slots, DELAY + 1, self.threads)


class _NoMarks:
    def mark(self, name, use, *, each=False) -> None:
        pass

    def span(self, name, use, *, each=False):
        return contextlib.nullcontext()


class _NoRecorder:
    def out_type(self) -> tuple:
        return ()

    def into(self) -> "_NoRecorder":
        return self

    def role(self, number, threads=clocks.WARPGROUP):
        return lambda function: lambda memory: function(NO_MARKS, memory)


NO_MARKS = _NoMarks()
NO_RECORDER = _NoRecorder()
