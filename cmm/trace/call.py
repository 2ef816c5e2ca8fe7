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
        return self.offsets.from_first()[1]

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

    def causality(self) -> tuple[int, float]:
        """Checks that no wait for signals has ended before all of them were on their way.

        Returns:
          How many waits were checked, and by how much the earliest of them ended too early, in ns, after what clocks
          may be off: positive if an effect was seen before its cause, `-inf` if there were no waits.
        """
        cells, size = self.cells, self.layout.axis_size
        ends = self.spans("ready", LOADER)[1]
        if self.layout.num_roles > SENDER:
            sends = plan_sends(self.layout.plan)
            signals = self.moments("signal", SENDER)
            first_chunk = cells.m_tile * sends.chunks + cells.k_step // sends.chunk_steps
            chunks_per_step = self.layout.plan.m_tiles * sends.chunks
        else:
            # The signal is sent between begin and end of this span.
            signals = self.spans("complete", MULTIPLIERS)[0]
            first_chunk, chunks_per_step = np.zeros_like(cells.step), 1
        checked, worst = 0, -np.inf
        for device in range(size):
            above = (device + 1) % size
            latest = np.full(size * chunks_per_step, -np.inf)
            sent = ~np.isnan(signals[above])
            np.maximum.at(latest, (cells.step * chunks_per_step + first_chunk)[sent], signals[above][sent])
            awaited = ~np.isnan(ends[device])
            causes = latest[((cells.step - 1) * chunks_per_step + first_chunk)[awaited]]
            early = causes - ends[device][awaited] - (self.bounds_ns[device] + self.bounds_ns[above])
            checked, worst = checked + early.size, max(worst, early.max(initial=-np.inf))
        return checked, float(worst)


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

    Before and after the chain the devices compare their timers. Nobody waits for anything in between.

    Args:
      problem: shapes and dtype.
      mesh: a mesh of one axis, two devices or more.
      kernel, config, every, delay: as for `cmm.trace.record.record_events`.
      calls: length of the chain; all calls note what they do. They follow one that is waited for.
      seed: of the operands.
      run: how a program is called: `Simulation.run` on simulated devices.

    Raises:
      ValueError, NotImplementedError: as `record_events` does.
    """
    run = run or (lambda program, *operands: program(*operands))
    (axis,) = mesh.axis_names
    program, layout = recorded_program(problem, mesh, kernel, config, every, delay)
    operands = devices.random_operands(problem, mesh, seed, axis)
    clock = clock_program(mesh)
    zeros = jax.device_put(jnp.zeros(mesh.size, jnp.int32), NamedSharding(mesh, P(axis)))
    jax.block_until_ready([run(clock, zeros), run(program, *operands)])
    before = run(clock, zeros)
    for _ in range(calls):
        _, raw = run(program, *operands)
    after = run(clock, zeros)
    offsets = between(offsets_from(before), offsets_from(after))
    times, clocks = call_times(raw, offsets.from_first()[0])
    return Trace(kernel, layout, meaningful(times, layout), clocks, offsets, interpret.is_active())
