"""How long does one call take? By the GPUs' own record, and by the host's clock."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from cmm.recording import GpuEvent, busy_us, record, split_calls
from cmm.results import Spread


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How often and in what chains calls are timed.

    Attributes:
      rounds: every method is timed once per round, so that drift hits all of them alike.
      recorded_calls: length of the chain whose kernels are recorded.
      short_chain: calls in the shorter chain on the host's clock.
      long_chain: calls in the longer one. The time per call is the difference over the difference in calls.
      operand_sets: number of distinct operand pairs that the calls of a chain take in turn.
    """

    rounds: int
    recorded_calls: int
    short_chain: int
    long_chain: int
    operand_sets: int

    def in_words(self) -> str:
        """Returns a sentence for result files."""
        return (
            f"{self.rounds} rounds, methods interleaved; call time: busy time of the slowest GPU, median over a chain "
            f"of {self.recorded_calls} recorded calls; wall time: chains of {self.short_chain} and {self.long_chain} "
            f"calls, difference per call; {self.operand_sets} distinct operand pairs; medians over rounds, one process"
        )


ON_GPUS = Protocol(rounds=20, recorded_calls=16, short_chain=20, long_chain=120, operand_sets=8)
# Simulated devices share the host's cores: chains would measure the scheduler, and their times mean nothing anyway.
ON_SIMULATED = Protocol(rounds=5, recorded_calls=0, short_chain=1, long_chain=2, operand_sets=2)


def recorded_call(program: Callable, operands: Sequence, calls: int) -> tuple[float, dict[int, list[GpuEvent]]]:
    """Times one call in a steady chain by what the GPUs recorded.

    Args:
      program: compiled function of one operand pair.
      operands: operand pairs; the chain takes them in turn.
      calls: length of the chain.

    Returns:
      The call time in microseconds: per GPU the median over calls of the time in which any kernel or copy of the call
      runs, then the slowest GPU's. And, by device, the events of the call that comes closest to it.
    """
    events = record(lambda: [program(*operands[i % len(operands)]) for i in range(calls)])
    by_device: dict[int, list[GpuEvent]] = {}
    for event in events:
        by_device.setdefault(event.device, []).append(event)
    if not by_device:
        raise RuntimeError("The profiler recorded no GPU events. CUPTI allows one profiler at a time: is one attached?")
    split = {device: split_calls(of_device, calls) for device, of_device in by_device.items()}
    busy = np.array([[busy_us(call) for call in device_calls] for device_calls in split.values()])  # [devices, calls]
    time_us = float(np.median(busy, axis=1).max())
    typical = int(np.argmin(abs(busy.max(axis=0) - time_us)))
    return time_us, {device: device_calls[typical] for device, device_calls in split.items()}


def wall_time_us(program: Callable, operands: Sequence, short_chain: int, long_chain: int) -> float:
    """Returns the time of one call by the host's clock: the difference of two chains per additional call."""
    difference_us = _chain_us(program, operands, long_chain) - _chain_us(program, operands, short_chain)
    return difference_us / (long_chain - short_chain)


def blocked_time_us(program: Callable, operands: Sequence) -> float:
    """Returns the time of one call that is waited for: all that simulated devices can offer."""
    return _chain_us(program, operands, 1)


def spread(values) -> Spread:
    """Returns median, 10th and 90th percentile of `values`."""
    p10, median, p90 = np.percentile(values, [10, 50, 90])
    return Spread(float(median), float(p10), float(p90))


def _chain_us(program, operands, calls) -> float:
    start = time.perf_counter()
    for i in range(calls):
        result = program(*operands[i % len(operands)])
    jax.block_until_ready(result)
    return (time.perf_counter() - start) * 1e6
