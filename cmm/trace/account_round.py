"""One round of an account: every program of every method runs under a profiler, and is read."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np

from cmm.completeness import check_complete
from cmm.measure import Program, starts_us
from cmm.recording import GpuEvent, by_gpu, record_in_turn
from cmm.trace.account_terms import Round
from cmm.trace.call import Trace, read_trace
from cmm.trace.critical import call_us, critical_parts_us
from cmm.trace.offsets import between, offsets_from
from cmm.trace.periods import kernel_us, period_parts_us

CALLS = 8  # In one program, on as many operand pairs, as in the ladder.
STARTS = 4  # Of each program, for the times of kernels; the first one does not count.
SHORT_STARTS, LONG_STARTS = 4, 32  # Of the chains that the host's clock times.
NOTING = ("recorded", "twin_recorded")


@dataclasses.dataclass
class Method:
    """A method that runs: its program, and for a ring kernel those that it is compared with.

    Attributes:
      name, title: of its rung.
      program: its calls.
      twin: the same kernel where nothing is sent.
      recorded, twin_recorded: both while they note what they do.
      rounds: what was measured, by number of the round.
      traces: of the calls that were recorded from inside.
      unreadable: by program that notes what it does, why calls of it could not be read.
    """

    name: str
    title: str
    program: Program
    twin: Program | None = None
    recorded: "Recorded | None" = None
    twin_recorded: "Recorded | None" = None
    rounds: dict[int, Round] = dataclasses.field(default_factory=dict)
    traces: list[Trace] = dataclasses.field(default_factory=list)
    unreadable: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def programs(self) -> dict[str, Program]:
        """Returns what runs in a round, by name of the field."""
        found = {"program": self.program}
        if self.twin:
            found |= {"twin": self.twin} | {kind: getattr(self, kind).program for kind in NOTING}
        return found


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A program of several calls that note what they do, and how their records are read."""

    program: Program
    layout: object


@dataclasses.dataclass
class Piece:
    """One piece of a recorded round: what ran, on how many GPUs, what it noted, and the events of each."""

    start: Callable
    gpus: int
    noted: list = dataclasses.field(default_factory=list)
    events: dict[int, list[GpuEvent]] = dataclasses.field(default_factory=dict)

    def kernels_us(self) -> dict[int, float]:
        """Returns the kernel time of each GPU; raises `IncompleteRecording` if events are missing."""
        check_complete(self.events, STARTS * CALLS, self.gpus)
        return {device: kernel_us(events, STARTS, CALLS) for device, events in self.events.items()}


@dataclasses.dataclass(frozen=True)
class Wall:
    """How long a program's two chains of starts took by the host's clock, and what GPUs did in the longer one."""

    long_us: float
    short_us: float
    gpus: int
    events: dict[int, list[GpuEvent]]

    @property
    def call_us(self) -> float:
        """The time of one call: the difference of both chains."""
        return (self.long_us - self.short_us) / (LONG_STARTS - SHORT_STARTS) / CALLS

    def period_us(self, device: int) -> dict[str, float]:
        """Returns `period_parts_us` of a GPU; raises `IncompleteRecording` if events are missing."""
        check_complete(self.events, LONG_STARTS * CALLS, self.gpus)
        return period_parts_us(self.events[device], LONG_STARTS, CALLS)


def record_walls(methods, mark, gpus) -> list[Wall]:
    """Times the program of each method by the host's clock while one profiler records the GPUs.

    So host and GPUs tell of the same calls: what keeps the GPUs waiting for a start is a gap in their record.
    """
    times_us = []
    runs = [
        (lambda program=method.program, starts=starts: times_us.append(starts_us(program, starts)), lambda _: None)
        for method in methods
        for starts in (LONG_STARTS, SHORT_STARTS)
    ]
    recorded = record_in_turn(runs, mark, gpus)
    chains = zip(times_us[::2], times_us[1::2], recorded[::2], strict=True)
    return [Wall(long_us, short_us, gpus, by_gpu(events)) for long_us, short_us, events in chains]


def record_round(methods, around, mark, gpus) -> dict[tuple, Piece]:
    """Runs all programs of all methods under one profiler; before and after what notes times, timers are compared."""
    pieces = {}
    for method in methods:
        for kind, program in method.programs().items():
            if kind in NOTING:
                pieces[method.name, kind, "before"] = Piece(lambda: [around.compare()], gpus)
            pieces[method.name, kind] = Piece(functools.partial(_start, program), gpus)
            if kind in NOTING:
                pieces[method.name, kind, "after"] = Piece(lambda: [around.compare()], gpus)

    def run(piece, kind):
        results = piece.start()
        if len(kind) == 3:
            piece.noted = results
        elif kind[1] in NOTING:
            piece.noted = [raw for _, raw in results[-1][1:]]  # The first call of a start follows a pause.
        return results

    runs = [(functools.partial(run, piece, kind), jax.block_until_ready) for kind, piece in pieces.items()]
    for piece, events in zip(pieces.values(), record_in_turn(runs, mark, gpus), strict=True):
        piece.events = by_gpu(events)
    return pieces


def _start(program):
    return [program.start_chain(program.operands) for _ in range(STARTS)]


def read_round(method, wall_us, wall, pieces) -> Round:
    """Returns what a round says of a method.

    Args:
      method: whose.
      wall_us: time of a call by the host's clock while nobody records.
      wall: the same while GPUs are recorded.
      pieces: what `record_round` has recorded.

    Raises:
      ValueError, RuntimeError: its recording is not complete.
    """
    of = lambda kind: pieces[method.name, kind]
    kernels_us = of("program").kernels_us()
    slowest = max(kernels_us, key=kernels_us.get)
    period = wall.period_us(slowest)
    if method.twin is None:
        return Round(wall_us, wall.call_us, kernels_us[slowest], period)
    parts, traces = _look_inside(method, "recorded", pieces)
    twin_parts, _ = _look_inside(method, "twin_recorded", pieces)
    twin_us, recorded_us, twin_recorded_us = (
        max(of(kind).kernels_us().values()) for kind in ("twin", "recorded", "twin_recorded")
    )
    method.traces += traces
    inside = twin_us, parts, twin_parts, recorded_us, twin_recorded_us
    return Round(wall_us, wall.call_us, kernels_us[slowest], period, *inside)


def _look_inside(method, kind, pieces) -> tuple[dict[str, float], list[Trace]]:
    """Returns the parts of the critical chain of a program that notes what it does, and what it noted."""
    before, after = (offsets_from(pieces[method.name, kind, when].noted[0]) for when in ("before", "after"))
    offsets, layout = between(before, after), getattr(method, kind).layout
    traces = []
    for raw in pieces[method.name, kind].noted:
        try:
            traces.append(read_trace(method.name, layout, np.asarray(raw), offsets))
        except ValueError as error:  # Other calls of this round may be right.
            method.unreadable.setdefault(kind, []).append(str(error))
    noted = len(pieces[method.name, kind].noted)
    if 2 * len(traces) <= noted:  # What few calls say may be as odd as those that cannot be read.
        raise RuntimeError(f"{len(traces)} of {noted} calls ({kind}) can be read. {method.unreadable[kind][-1]}")
    missing = sum(trace.missing() for trace in traces)
    if missing:
        raise RuntimeError(f"{missing} marks are missing in {len(traces)} recorded calls.")
    lengths_us = np.array([call_us(trace) for trace in traces])
    device = int(np.median(lengths_us, axis=0).argmax())  # The slowest GPU, as everywhere.
    parts = [critical_parts_us(trace, device) for trace in traces]
    middle = np.argsort(lengths_us[:, device])[len(parts) // 4 : len(parts) - len(parts) // 4]
    typical = [parts[number] for number in middle]
    return {name: float(np.mean([of_call[name] for of_call in typical])) for name in typical[0]}, traces
