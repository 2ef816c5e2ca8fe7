"""Which terms make up the time of a call, and do they add up?"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from cmm.recording import GpuEvent, busy_us
from cmm.results import Spread

_ROLES = {"kernel": "matmul", "barrier": "barrier", "fill": "memory"}
GPU_PARTS = (*_ROLES, "gaps")


@dataclasses.dataclass(frozen=True)
class Term:
    """One term of the time of a call, in microseconds, and how it is known."""

    name: str
    time_us: float
    evidence: str


def gpu_parts_us(events: Sequence[GpuEvent], starts: int, calls: int) -> dict[str, float]:
    """Splits what one GPU recorded of equal programs.

    Args:
      events: everything that the GPU did, in order.
      starts: number of programs, started one after the other.
      calls: number of calls in each.

    Returns:
      Per call, medians over programs: "kernel", "barrier", "fill" of semaphores, and "gaps" between these; per program:
      "addresses", copies from the host before its first kernel, and "idle" between the last kernel of the program
      before and the first one, less these copies.

    Raises:
      ValueError: the events do not divide by `starts`, or a program has no kernel.
    """
    events = sorted(events, key=lambda event: event.start_us)
    if not events or len(events) % starts:
        raise ValueError(f"{len(events)} events on a GPU do not divide into {starts} programs.")
    each = len(events) // starts
    split = [events[index * each : (index + 1) * each] for index in range(starts)]
    rows, last_end_us = [], None
    for program in split:
        copies = [event for event in program if "H2D" in event.name]
        kernels = [event for event in program if "H2D" not in event.name]
        if not any(event.role == "matmul" for event in kernels):
            raise ValueError(f"A program has no matmul kernel: {sorted({event.name for event in program})}.")
        span_us = kernels[-1].end_us - kernels[0].start_us
        row = {part: _took_us(kernels, role) / calls for part, role in _ROLES.items()}
        row |= {"gaps": (span_us - busy_us(kernels)) / calls, "addresses": busy_us(copies)}
        if last_end_us is not None:
            rows.append(row | {"idle": kernels[0].start_us - last_end_us - row["addresses"]})
        last_end_us = kernels[-1].end_us
    return {name: float(np.median([row[name] for row in rows])) for name in rows[0]}


def terms(gpu_parts: Mapping[str, float], wall_us: Spread, start_us: float, calls: int) -> list[Term]:
    """Returns the terms of a call's wall time. They add up to its median, with what is left as the last one.

    Args:
      gpu_parts: what `gpu_parts_us` returned for programs of so many calls.
      wall_us: wall time per call in a chain of such programs.
      start_us: time per program in a chain of programs that start as many kernels, and leave the GPUs idle.
      calls: number of calls in a program.
    """
    gpu_us = sum(gpu_parts[name] for name in GPU_PARTS)
    waits_us = max(0.0, start_us / calls - gpu_us)
    evidence = {
        "kernel": "recorded",
        "barrier": "recorded; holds what one GPU waits for the other",
        "fill": "recorded",
        "gaps": "recorded",
    }
    found = [Term(name, gpu_parts[name], evidence[name]) for name in GPU_PARTS]
    found.append(
        Term(
            "start of a program",
            waits_us,
            f"host's clock: {start_us / calls:.0f} per call to start as many empty kernels, less the {len(GPU_PARTS)} "
            f"terms above, at least 0; recorded gap between programs {gpu_parts['idle'] / calls:.1f} per call",
        )
    )
    rest_us = wall_us.median - gpu_us - waits_us
    half_us = (wall_us.p90 - wall_us.p10) / 2
    found.append(Term("rest", rest_us, f"wall time less all others; uncertain by ± {half_us:.1f}"))
    return found


def _took_us(events, role) -> float:
    return sum(event.end_us - event.start_us for event in events if event.role == role)
