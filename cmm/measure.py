"""How long does one call take? By the GPUs' own record, and by the host's clock."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from cmm.recording import GpuEvent, busy_us, matmul_us, record, split_calls
from cmm.results import Spread

_NEARLY_ALL = 0.99  # What a program does once, at its start, may be left out of the calls.


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How often and in what chains calls are timed.

    Attributes:
      rounds: every method is timed once per round, so that drift hits all of them alike.
      operand_sets: number of distinct operand pairs, and of calls that are chained in one program (see `cmm.chain`).
      recorded_starts: so often the chain is started while the GPUs are recorded.
      short_chain: calls, one program each, in the shorter chain on the host's clock.
      long_chain: calls in the longer one. The time per call is the difference over the difference in calls.
      short_starts: starts of the chained program in the shorter chain of starts.
      long_starts: starts in the longer one.
    """

    rounds: int
    operand_sets: int
    recorded_starts: int
    short_chain: int
    long_chain: int
    short_starts: int
    long_starts: int

    def in_words(self) -> str:
        """Returns a sentence for result files."""
        return (
            f"{self.rounds} rounds, methods interleaved; {self.operand_sets} calls on distinct operand pairs chained "
            f"in a program; call time: busy time of the slowest GPU, median over the calls of {self.recorded_starts} "
            "recorded starts; kernel time: its matmul kernels alone, likewise; wall time in a program: "
            f"{self.short_starts} and {self.long_starts} starts, difference per call; wall time alone: one call per "
            f"program, {self.short_chain} and {self.long_chain} calls, difference per call; medians over rounds, "
            "one process"
        )


ON_GPUS = Protocol(
    rounds=20, operand_sets=8, recorded_starts=2, short_chain=20, long_chain=120, short_starts=3, long_starts=15
)
# Simulated devices share the host's cores: chains would measure the scheduler, and their times mean nothing anyway.
ON_SIMULATED = Protocol(
    rounds=5, operand_sets=2, recorded_starts=0, short_chain=1, long_chain=2, short_starts=1, long_starts=2
)


@dataclasses.dataclass(frozen=True)
class Program:
    """What is timed: one way to compute, ready to run, with the operands that it takes.

    Attributes:
      start: `start(*pair)` starts one call and returns its result without waiting for it.
      operands: operand pairs in the form that `start` takes.
      start_chain: `start_chain(operands)` starts one call after the other on all pairs, and returns the list of results
        without waiting for it; by default with `start`.
      wait: waits for one result, or for a list of them.
      to_jax: turns a result into a `jax.Array`, for the check of its values.
      details: what else identifies the program, such as the configuration of a kernel or the version of a library.
    """

    start: Callable
    operands: Sequence
    wait: Callable = jax.block_until_ready
    to_jax: Callable = lambda result: result
    details: str = ""
    start_chain: Callable | None = None

    def __post_init__(self):
        if self.start_chain is None:
            object.__setattr__(self, "start_chain", lambda operands: [self.start(*pair) for pair in operands])


class RecordedCall(NamedTuple):
    """One call in a steady chain, by what the GPUs recorded. Times are the slowest GPU's medians over the chain.

    They are means where calls differ in their kernels, so that nobody can tell which kernel belongs to which call: a
    compiler may choose other kernels for the same product later in a program.

    Attributes:
      time_us: time in which any kernel or copy of the call runs.
      kernel_us: time of its matmul kernels alone (see `cmm.recording.matmul_us`); 0 if none was recognised.
      events: by device, the events of the call whose busy time comes closest to `time_us`.
    """

    time_us: float
    kernel_us: float
    events: dict[int, list[GpuEvent]]


def recorded_call(
    start: Callable, operands: Sequence, calls: int, wait: Callable = jax.block_until_ready
) -> RecordedCall:
    """Times one call in a steady chain by what the GPUs recorded.

    Args:
      start: compiled function of one operand pair; it does not wait for its result.
      operands: operand pairs; the chain takes them in turn.
      calls: length of the chain.
      wait: waits for a list of results.

    Raises:
      RuntimeError: the profiler recorded no GPU event.
    """
    return _recorded(lambda: [start(*operands[i % len(operands)]) for i in range(calls)], calls, wait)


def recorded_chain(program: Program, starts: int) -> RecordedCall:
    """Times one call of a chain of calls by what the GPUs recorded, as `recorded_call` does.

    Args:
      program: what is timed.
      starts: how often its chain is started.
    """
    run = lambda: [program.start_chain(program.operands) for _ in range(starts)]
    return _recorded(run, starts * len(program.operands), program.wait)


def _recorded(run, calls, wait) -> RecordedCall:
    events = record(run, wait)
    by_device: dict[int, list[GpuEvent]] = {}
    for event in events:
        by_device.setdefault(event.device, []).append(event)
    if not by_device:
        raise RuntimeError("The profiler recorded no GPU events. CUPTI allows one profiler at a time: is one attached?")
    split = {device: split_calls(of_device, calls) for device, of_device in by_device.items()}
    busy = np.array([_times_us(by_device[gpu], split[gpu], busy_us) for gpu in split])  # [devices, calls]
    kernel = np.array([_times_us(by_device[gpu], split[gpu], matmul_us) for gpu in split])
    time_us = float(np.median(busy, axis=1).max())
    typical = int(np.argmin(abs(busy.max(axis=0) - time_us)))
    typical_events = {device: _on_its_own(device_calls, typical) for device, device_calls in split.items()}
    return RecordedCall(time_us, float(np.median(kernel, axis=1).max()), typical_events)


def _on_its_own(calls, index) -> list[GpuEvent]:
    """Returns the events of a call without what its program did for it before the call before it multiplied."""
    before = [event.start_us for event in calls[index - 1] if event.role == "matmul"] if index else []
    return [event for event in calls[index] if event.end_us > min(before, default=float("-inf"))]


def _times_us(events, calls, time_us) -> list[float]:
    """Returns the time of each call on one GPU, or of all calls the mean, if they do not hold nearly all events."""
    total_us = time_us(events)
    of_calls = [time_us(call) for call in calls]
    return of_calls if sum(of_calls) >= _NEARLY_ALL * total_us else [total_us / len(calls)] * len(calls)


def wall_time_us(
    start: Callable, operands: Sequence, short_chain: int, long_chain: int, wait: Callable = jax.block_until_ready
) -> float:
    """Returns the time of one call by the host's clock: the difference of two chains per additional call."""
    difference_us = _chain_us(start, operands, long_chain, wait) - _chain_us(start, operands, short_chain, wait)
    return difference_us / (long_chain - short_chain)


def wall_time_in_program_us(program: Program, short_starts: int, long_starts: int) -> float:
    """Returns the time of one call within a program of many, by the host's clock: the difference of two chains."""
    arguments = (lambda operands: program.start_chain(operands)[-1], [(program.operands,)])
    difference_us = wall_time_us(*arguments, short_starts, long_starts, program.wait)
    return difference_us / len(program.operands)


def blocked_time_us(start: Callable, operands: Sequence) -> float:
    """Returns the time of one call that is waited for: all that simulated devices can offer."""
    return _chain_us(start, operands, 1, jax.block_until_ready)


def spread(values) -> Spread:
    """Returns median, 10th and 90th percentile of `values`."""
    p10, median, p90 = np.percentile(values, [10, 50, 90])
    return Spread(float(median), float(p10), float(p90))


def _chain_us(start, operands, calls, wait) -> float:
    began = time.perf_counter()
    for i in range(calls):
        result = start(*operands[i % len(operands)])
    wait(result)
    return (time.perf_counter() - began) * 1e6
