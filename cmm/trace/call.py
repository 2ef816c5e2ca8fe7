"""A recorded call of a ring kernel in a steady chain, with the times of all devices on one axis."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from cmm import devices, interpret
from cmm.hopper.config import TuningConfig
from cmm.hopper.marks import LOADER, MULTIPLIERS, NUMBERS, SENDER, Delay, Layout
from cmm.hopper.sends import plan_sends
from cmm.roofline import Problem
from cmm.trace.cells import Cells, cells_of, expected_marks, meaningful
from cmm.trace.events import KernelEvent, events_of
from cmm.trace.offsets import Offsets, between, clock_program, offsets_from
from cmm.trace.record import recorded_program
from cmm.trace.times import Clock, Times, call_times

_SIMULATED_ROUNDS = 5  # Of the comparison of timers.


@dataclasses.dataclass(frozen=True)
class Trace:
    """One call of a kernel.

    Attributes:
      kernel: its name in `cmm.METHODS`.
      layout: what was noted where.
      times: when, in ns from the begin of the first CTA.
      clocks: how good the times of each device are.
      offsets: how the timers of devices were brought together.
      simulated: times order events, and predict nothing.
    """

    kernel: str
    layout: Layout
    times: Times
    clocks: list[Clock]
    offsets: Offsets
    simulated: bool

    @property
    def cells(self) -> Cells:
        """What the cells of `times.marks` stand for."""
        return cells_of(self.layout)

    @property
    def bounds_ns(self) -> list[float]:
        """How far the times of each device may be off against those of device 0."""
        bounds = zip(self.offsets.from_first()[1], self.clocks)
        return [bound + clock.error_ns for bound, clock in bounds]

    def events(self, ctas=None, kinds=None) -> list[KernelEvent]:
        """Returns the events of these kinds in these CTAs; by default all."""
        return events_of(self.times, self.layout, ctas, kinds)

    def spans(self, name: str, role: int) -> np.ndarray:
        """Returns begin and end of a span of `cmm.hopper.marks.SPANS`: `[2, device, CTA, cell]` in ns, or NaN."""
        first = NUMBERS[name]
        return np.moveaxis(self.times.marks[:, :, role, :, first : first + 2], -1, 0)

    def moments(self, name: str, role: int) -> np.ndarray:
        """Returns the times of a moment of `cmm.hopper.marks.MOMENTS`: `[device, CTA, cell]` in ns, or NaN."""
        return self.times.marks[:, :, role, :, NUMBERS[name]]

    def missing(self) -> int:
        """Returns how many marks should have been made and were not: 0, unless the trace was read from a file."""
        return int((expected_marks(self.layout, self.cells) & np.isnan(self.times.marks)).sum())

    def causes(self, before: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Returns for each wait for signals the last of the signals that it has waited for.

        Args:
          before: where a span holds the signal, as in the readable kernel, take its begin in place of its end.

        Returns:
          When that was sent, `[device, CTA, cell]` in ns, NaN where nobody waits; and by which CTA of the device above.
        """
        cells, plan = self.cells, self.layout.plan
        ends = self.spans("ready", LOADER)[1]
        if self.layout.num_roles > SENDER:
            sends = plan_sends(plan)
            signals = self.moments("signal", SENDER)
            chunk = cells.m_tile * sends.chunks + cells.k_step // sends.chunk_steps
            per_step = plan.m_tiles * sends.chunks
        else:
            signals = self.spans("complete", MULTIPLIERS)[0 if before else 1]
            chunk, per_step = np.zeros_like(cells.step), 1
        sent_at, sent_by = np.full(ends.shape, np.nan), np.full(ends.shape, -1)
        for device in range(len(ends)):
            above = signals[(device + 1) % len(ends)]
            cta, cell = np.nonzero(~np.isnan(above))
            order = np.argsort(above[cta, cell], kind="stable")
            cta, cell = cta[order], cell[order]
            numbers = (cells.step * per_step + chunk)[cta, cell]
            latest, by = (
                np.full(self.layout.axis_size * per_step, np.nan),
                np.full(self.layout.axis_size * per_step, -1),
            )
            latest[numbers], by[numbers] = above[cta, cell], cta  # The last one stays.
            awaited = ~np.isnan(ends[device]) & (cells.step > 0)
            needed = ((cells.step - 1) * per_step + chunk)[awaited]
            sent_at[device][awaited], sent_by[device][awaited] = latest[needed], by[needed]
        return sent_at, sent_by

    def causality(self) -> tuple[int, float]:
        """Checks that no wait for signals has ended before all of them were on their way.

        Returns:
          How many waits were checked, and by how much the earliest of them ended too early, in ns, after what clocks
          may be off: positive if an effect was seen before its cause, `-inf` if there were no waits.
        """
        begun = self.causes(before=True)[0]
        bounds = np.array(self.bounds_ns)
        early = begun - self.spans("ready", LOADER)[1] - (bounds + np.roll(bounds, -1))[:, None, None]
        early = early[~np.isnan(early)]
        return early.size, float(early.max(initial=-np.inf))


def trace_call(
    problem: Problem,
    mesh,
    kernel: str = "pallas",
    config: TuningConfig | None = None,
    *,
    every: int | None = None,
    delay: Delay | None = None,
    calls: int = 20,
    seed: int = 0,
    run=None,
) -> Trace:
    """Records the last call of a steady chain.

    Before and after the chain the devices compare their timers. Nobody waits for anything within the chain.

    Args:
      problem: shapes and dtype.
      mesh: a mesh of one axis.
      kernel, config, every, delay: as for `cmm.trace.record.record_events`.
      calls: length of the chain; all calls note what they do.
      seed: of the operands.
      run: how a program is called: `Simulation.run` on simulated devices.

    Raises:
      ValueError, NotImplementedError: as `record_events` does.
    """
    run = run or (lambda program, *operands: program(*operands))
    (axis,) = mesh.axis_names
    program, layout = recorded_program(problem, mesh, kernel, config, every, delay)
    operands = devices.random_operands(problem, mesh, seed, axis)
    if not interpret.is_active():  # Compiles it, and warms the GPUs up.
        jax.block_until_ready(run(program, *operands))
    with OffsetsAround(mesh, run) as around:
        for _ in range(calls):
            _, raw = run(program, *operands)
    return read_trace(kernel, layout, raw, around.offsets)


class OffsetsAround:
    """A context before and after which the devices of a mesh compare their timers; then it has `offsets`."""

    def __init__(self, mesh, run=lambda program, *operands: program(*operands)):
        (axis,) = mesh.axis_names
        self.size, self.offsets = mesh.size, Offsets.none(mesh.size)
        if mesh.size > 1:
            zeros = jax.device_put(jnp.zeros(mesh.size, jnp.int32), NamedSharding(mesh, P(axis)))
            # Simulated timers tick alike, and simulated rounds take long.
            program = clock_program(mesh, _SIMULATED_ROUNDS) if interpret.is_active() else clock_program(mesh)
            # Waits: what is recorded in between must not hold this program.
            self.compare = lambda: np.asarray(run(program, zeros))
            if not interpret.is_active():
                self.compare()  # Compiles it.

    def __enter__(self):
        self.before = self.compare() if self.size > 1 else None
        return self

    def __exit__(self, *error):
        if self.size > 1 and error[0] is None:
            self.offsets = between(offsets_from(self.before), offsets_from(self.compare()))


def read_trace(kernel: str, layout: Layout, raw, offsets: Offsets) -> Trace:
    """Returns the trace of one call.

    Args:
      kernel: its name in `cmm.METHODS`.
      layout: what was noted where (`cmm.trace.record`).
      raw: `i32[devices, CTAs, roles, slots, 2]`, the record.
      offsets: of the timers.

    Raises:
      ValueError: the record is none.
    """
    times, clocks = call_times(raw, offsets.from_first()[0])
    return Trace(kernel, layout, meaningful(times, layout), clocks, offsets, interpret.is_active())
