"""How long does one call take? By the GPUs' own record, and by the host's clock."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from cmm.completeness import IncompleteRecording, check_complete
from cmm.recording import GpuEvent, busy_us, by_gpu, matmul_us, others_us, record, record_in_turn, split_calls
from cmm.results import Spread

RECORDINGS = 3  # A recording that lacks events is made again.
_NEARLY_ALL = 0.99  # What a program does once, at its start, may be left out of the calls.


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
      lowered: what has a `compile()` to be called before the first start, so that starts need not compile.
    """

    start: Callable
    operands: Sequence
    wait: Callable = jax.block_until_ready
    to_jax: Callable = lambda result: result
    details: str = ""
    start_chain: Callable | None = None
    lowered: Sequence = ()

    def __post_init__(self):
        if self.start_chain is None:
            object.__setattr__(self, "start_chain", lambda operands: [self.start(*pair) for pair in operands])


class RecordedCall(NamedTuple):
    """One call in a steady chain, by what the GPUs recorded. Times are the slowest GPU's medians over the chain.

    They are means where calls differ in what fills or moves a GPU's own memory, so that nobody can tell which kernel
    belongs to which call. Products and transfers are the same number in each call: else there is no time (see
    `cmm.completeness`).

    Attributes:
      time_us: time in which any kernel or copy of the call runs.
      kernel_us: time of its matmul kernels alone (see `cmm.recording.matmul_us`); 0 if none was recognised.
      events: by device, the events of the call whose busy time comes closest to `time_us`.
      others_us: by name of a kernel or copy that neither multiplies, sends nor waits, its time per call, the largest
        over GPUs.
    """

    time_us: float
    kernel_us: float
    events: dict[int, list[GpuEvent]]
    others_us: Mapping[str, float] = {}


def recorded_call(
    start: Callable, operands: Sequence, calls: int, wait: Callable = jax.block_until_ready
) -> RecordedCall:
    """Times one call in a steady chain by what the GPUs recorded that hold the operands.

    A recording that lacks events is made again, three times in all.

    Args:
      start: compiled function of one operand pair; it does not wait for its result.
      operands: operand pairs; the chain takes them in turn.
      calls: length of the chain.
      wait: waits for a list of results.

    Raises:
      RuntimeError: the profiler recorded no GPU event.
      IncompleteRecording: it lost some each time.
    """
    run = lambda: [start(*operands[i % len(operands)]) for i in range(calls)]
    arrays = [leaf for leaf in jax.tree.leaves(operands) if isinstance(leaf, jax.Array)]
    gpus = len({device for array in arrays for device in array.devices()})
    for attempt in range(RECORDINGS):
        try:
            return _summary(record(run, wait), calls, gpus)
        except IncompleteRecording:
            if attempt == RECORDINGS - 1:
                raise


def recorded_chain(program: Program, starts: int, gpus: int) -> RecordedCall:
    """Times one call of a chain of calls by what the GPUs recorded, as `recorded_call` does, in a session of its own.

    The first call of each start does not count: it follows a pause.

    Args:
      program: what is timed.
      starts: how often its chain is started.
      gpus: number of GPUs on which it runs.

    Raises:
      RuntimeError: the profiler recorded no GPU event.
      IncompleteRecording: it lost some.
    """
    return _summary_of_chain(record(_starts_of(program, starts), program.wait), program, starts, gpus)


def recorded_chains(
    programs: Sequence[Program], starts: int, mark: Callable[[], None], gpus: int
) -> list[RecordedCall | RuntimeError]:
    """Times one call of each of several programs, as `recorded_chain` does, all in one session.

    Args:
      programs: what is timed, in this order.
      starts: how often the chain of each is started.
      mark: runs between them (see `cmm.recording.make_mark`).
      gpus: number of GPUs on which they run.

    Returns:
      For each program what `recorded_chain` returns, or the error that it would raise.

    Raises:
      IncompleteRecording: nobody can tell which events belong to which program.
    """
    of_programs = record_in_turn([(_starts_of(program, starts), program.wait) for program in programs], mark, gpus)
    found: list[RecordedCall | RuntimeError] = []
    for program, events in zip(programs, of_programs, strict=True):
        try:
            found.append(_summary_of_chain(events, program, starts, gpus))
        except RuntimeError as error:
            found.append(error)
    return found


def _starts_of(program, starts):
    return lambda: [program.start_chain(program.operands) for _ in range(starts)]


def _summary_of_chain(events, program, starts, gpus) -> RecordedCall:
    length = len(program.operands)
    steady = [call for call in range(starts * length) if call % length or length == 1]
    return _summary(events, starts * length, gpus, steady)


def _summary(events, calls, gpus, steady=None) -> RecordedCall:
    by_device = by_gpu(events)
    if not by_device:
        raise RuntimeError("The profiler recorded no GPU events. CUPTI allows one profiler at a time: is one attached?")
    check_complete(by_device, calls, gpus)
    steady = list(range(calls)) if steady is None else steady
    split = {device: split_calls(of_device, calls) for device, of_device in by_device.items()}
    busy = np.array([_times_us(by_device[gpu], split[gpu], busy_us) for gpu in split])[:, steady]  # [devices, calls]
    kernel = np.array([_times_us(by_device[gpu], split[gpu], matmul_us) for gpu in split])[:, steady]
    time_us = float(np.median(busy, axis=1).max())
    typical = steady[int(np.argmin(abs(busy.max(axis=0) - time_us)))]
    typical_events = {device: _on_its_own(device_calls, typical) for device, device_calls in split.items()}
    others: dict[str, float] = {}
    for of_device in by_device.values():
        for name, total_us in others_us(of_device).items():
            others[name] = max(others.get(name, 0.0), total_us / calls)
    return RecordedCall(time_us, float(np.median(kernel, axis=1).max()), typical_events, others)


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


def starts_us(program: Program, starts: int) -> float:
    """Returns how long so many starts of a program of many calls take, one after the other, by the host's clock."""
    return _chain_us(lambda pairs: program.start_chain(pairs)[-1], [(program.operands,)], starts, program.wait)


def wall_time_in_program_us(program: Program, short_starts: int, long_starts: int) -> float:
    """Returns the time of one call within a program of many, by the host's clock: the difference of two chains."""
    difference_us = starts_us(program, long_starts) - starts_us(program, short_starts)
    return difference_us / (long_starts - short_starts) / len(program.operands)


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
