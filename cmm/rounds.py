"""How is every method timed once, in a round?"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from cmm.measure import (
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


@dataclasses.dataclass
class Times:
    """What was seen of a program so far: one time per round, and what the last recording says.

    Attributes:
      call_us, kernel_us, wall_us, wall_in_program_us: as in `cmm.results.Rounds`.
      events: the events of one recorded call by device.
      others_us: see `cmm.measure.RecordedCall`.
      alone: why it had to be recorded in a session of its own in some round, else empty.
    """

    call_us: list[float] = dataclasses.field(default_factory=list)
    kernel_us: list[float] = dataclasses.field(default_factory=list)
    wall_us: list[float] = dataclasses.field(default_factory=list)
    wall_in_program_us: list[float] = dataclasses.field(default_factory=list)
    events: dict[int, list[GpuEvent]] = dataclasses.field(default_factory=dict)
    others_us: Mapping[str, float] = dataclasses.field(default_factory=dict)
    alone: str = ""


def check_recording(programs: Mapping[str, Program], mesh: Mesh) -> dict[str, RuntimeError]:
    """Returns why the profiler does not see a program, by the names of those that it does not see."""
    found = dict(zip(programs, _record_all(list(programs.values()), 1, mesh)[0], strict=True))
    return {name: error for name, error in found.items() if isinstance(error, RuntimeError)}


def time_on_gpus(timed: Sequence[tuple[Program, Times]], round_index: int, protocol: Protocol, mesh: Mesh) -> None:
    """Times every program once and adds it to its `Times`: first by the host's clock, then by the GPUs' record.

    Args:
      timed: the programs and their times.
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
    calls, alone = _record_all([program for program, _ in in_order], protocol.recorded_starts, mesh)
    for (_, times), call in zip(in_order, calls, strict=True):
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


def _record_all(programs, starts, mesh) -> tuple[list[RecordedCall | RuntimeError], str]:
    """Records the programs in one session, or each in its own, and says why, if marks are lost."""
    try:
        return recorded_chains(programs, starts, _mark(mesh)), ""
    except RuntimeError as error:
        reason = str(error)
    return [_recorded_alone(program, starts) for program in programs], reason


def _recorded_alone(program, starts):
    try:
        return recorded_chain(program, starts)
    except RuntimeError as error:
        return error


_mark = functools.cache(make_mark)
