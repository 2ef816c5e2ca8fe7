"""How is every method timed once, in a round?"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from cmm.completeness import IncompleteRecording
from cmm.measure import (
    RECORDINGS,
    Program,
    RecordedCall,
    blocked_time_us,
    recorded_chain,
    recorded_chains,
    wall_time_in_program_us,
    wall_time_us,
)
from cmm.protocol import Protocol, order_in_round
from cmm.recording import GpuEvent, make_mark
from cmm.results import Rounds


@dataclasses.dataclass
class Times:
    """What was seen of a program so far: one time per round, and what the last recording says.

    Attributes:
      call_us, kernel_us, wall_us, wall_in_program_us: as in `cmm.results.Rounds`.
      events: the events of one recorded call by device.
      others_us: see `cmm.measure.RecordedCall`.
      alone: why it had to be recorded in a session of its own in some round, else empty.
      incomplete: why there are no times by the GPUs' record, else empty (see `give_up_recording`).
    """

    call_us: list[float] = dataclasses.field(default_factory=list)
    kernel_us: list[float] = dataclasses.field(default_factory=list)
    wall_us: list[float] = dataclasses.field(default_factory=list)
    wall_in_program_us: list[float] = dataclasses.field(default_factory=list)
    events: dict[int, list[GpuEvent]] = dataclasses.field(default_factory=dict)
    others_us: Mapping[str, float] = dataclasses.field(default_factory=dict)
    alone: str = ""
    incomplete: str = ""

    def raw(self) -> Rounds:
        """Returns the times as a record holds them."""
        return Rounds(self.call_us, self.kernel_us, self.wall_us, self.wall_in_program_us)

    def give_up_recording(self, reason: str) -> None:
        """Drops all times by the GPUs' record: with events lost in one round, nobody can tell what others lack."""
        self.call_us, self.kernel_us, self.events, self.incomplete = [], [], {}, reason


def check_recording(programs: Mapping[str, Program], mesh: Mesh) -> dict[str, RuntimeError]:
    """Returns why a program cannot be recorded, by names: an `IncompleteRecording` if the profiler sees parts of it."""
    found = dict(zip(programs, record_all(list(programs.values()), 1, mesh)[0], strict=True))
    return {name: error for name, error in found.items() if isinstance(error, RuntimeError)}


def time_on_gpus(timed: Sequence[tuple[Program, Times]], round_index: int, protocol: Protocol, mesh: Mesh) -> None:
    """Times every program once and adds it to its `Times`: first by the host's clock, then by the GPUs' record.

    Args:
      timed: the programs and their times. A program of which no recording is complete loses those of all rounds, and is
        timed by the host's clock alone from then on.
      round_index: number of the round, over all processes.
      protocol: how often and in what chains.
      mesh: the GPUs.

    Raises:
      RuntimeError: the profiler does not see a program.
    """
    in_order = [timed[place] for place in order_in_round(len(timed), round_index)]
    chains = protocol.short_chain, protocol.long_chain
    for program, times in in_order:
        times.wall_us.append(wall_time_us(program.start, program.operands, *chains, program.wait))
        times.wall_in_program_us.append(wall_time_in_program_us(program, protocol.short_starts, protocol.long_starts))
    recorded = [(program, times) for program, times in in_order if not times.incomplete]
    calls, alone = record_all([program for program, _ in recorded], protocol.recorded_starts, mesh)
    for (_, times), call in zip(recorded, calls, strict=True):
        if isinstance(call, IncompleteRecording):
            times.give_up_recording(str(call))
            continue
        if isinstance(call, RuntimeError):
            raise call
        times.call_us.append(call.time_us)
        times.kernel_us.append(call.kernel_us)
        times.events, times.others_us = call.events, call.others_us
        times.alone = times.alone or alone


def time_on_host(timed: Sequence[tuple[Program, Times]], round_index: int) -> None:
    """Times every program once by the host's clock alone, as simulated devices can."""
    for place in order_in_round(len(timed), round_index):
        program, times = timed[place]
        times.wall_us.append(blocked_time_us(program.start, program.operands))


def record_all(programs, starts, mesh) -> tuple[list[RecordedCall | RuntimeError], str]:
    """Records the programs, and again those of which events are lost; says why, if some had a session of their own.

    Args:
      programs, starts: as for `cmm.measure.recorded_chains`.
      mesh: the GPUs.
    """
    found: dict[int, RecordedCall | RuntimeError] = {}
    alone = ""
    for _ in range(RECORDINGS):
        todo = [place for place in range(len(programs)) if not isinstance(found.get(place), RecordedCall)]
        if todo:
            calls, why = _record_once([programs[place] for place in todo], starts, mesh)
            found |= zip(todo, calls, strict=True)
            alone = alone or why
    return [found[place] for place in range(len(programs))], alone


def _record_once(programs, starts, mesh) -> tuple[list[RecordedCall | RuntimeError], str]:
    """Records the programs in one session, or each in its own, and says why, if marks are lost."""
    try:
        return recorded_chains(programs, starts, _mark(mesh), mesh.size), ""
    except RuntimeError as error:
        reason = str(error)
    return [_recorded_alone(program, starts, mesh.size) for program in programs], reason


def _recorded_alone(program, starts, gpus):
    try:
        return recorded_chain(program, starts, gpus)
    except RuntimeError as error:
        return error


_mark = functools.cache(make_mark)
