"""What does a GPU do during one call in a long chain of calls, by the GPUs' own record?"""

from collections.abc import Sequence

import numpy as np

from cmm.recording import GpuEvent

# Every moment of a call counts for the first of these that is under way; otherwise the GPU does nothing.
ROLES = ("matmul", "transfer", "memory", "barrier")
GAP = "gap"


def period_parts_us(events: Sequence[GpuEvent], starts: int, calls: int) -> dict[str, float]:
    """Returns how long one call on one GPU spends with what, on the average over a chain.

    Args:
      events: kernels and copies of this GPU.
      starts: how often a program was started, one after the other without waiting; at least 2.
      calls: how many equal calls the program holds.

    Returns:
      Times in µs by `ROLES` and `GAP`. They add up to the time from the first matmul of a call to that of the next. The
      first start and the last call do not count.

    Raises:
      ValueError: there are no matmuls, or their number is not the same in all calls.
    """
    low, high = _steady_part(events, starts, calls)
    parts = dict.fromkeys((*ROLES, GAP), 0.0)
    inside = [e for e in events if e.end_us > low and e.start_us < high]
    edges = sorted({low, high, *(t for e in inside for t in (e.start_us, e.end_us) if low < t < high)})
    changes: dict[float, list] = {}
    for event in inside:
        changes.setdefault(max(event.start_us, low), []).append((event.role, 1))
        changes.setdefault(min(event.end_us, high), []).append((event.role, -1))
    active = dict.fromkeys(ROLES, 0)
    for start, end in zip(edges, edges[1:]):
        for role, change in changes.get(start, ()):
            active[role] += change
        parts[next((role for role in ROLES if active[role]), GAP)] += end - start
    return {name: value / ((starts - 1) * calls - 1) for name, value in parts.items()}


def kernel_us(events: Sequence[GpuEvent], starts: int, calls: int) -> float:
    """Returns the time of the matmul kernels of one call on one GPU: the median over calls.

    The first start does not count, nor does the first call of each start, which follows a pause. Arguments and errors
    are those of `period_parts_us`.
    """
    per_call, matmuls = _matmuls(events, starts, calls)
    lengths = np.array([e.end_us - e.start_us for e in matmuls]).reshape(-1, per_call).sum(axis=1)
    steady = lengths.reshape(starts, calls)[1:, min(1, calls - 1) :]
    return float(np.median(steady))


def _steady_part(events, starts, calls) -> tuple[float, float]:
    per_call, matmuls = _matmuls(events, starts, calls)
    return matmuls[calls * per_call].start_us, matmuls[-per_call].start_us


def _matmuls(events, starts, calls):
    matmuls = sorted((e for e in events if e.role == "matmul"), key=lambda e: e.start_us)
    per_call, rest = divmod(len(matmuls), starts * calls)
    if starts < 2 or not per_call or rest:
        raise ValueError(f"{len(matmuls)} matmuls were recorded, which {starts} starts of {calls} calls cannot share.")
    return per_call, matmuls
