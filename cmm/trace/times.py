"""From what a kernel wrote down to nanoseconds: cycles of each multiprocessor, put on the timer of its GPU.

The timer of a GPU may tick only once in a microsecond, but every CTA has noted its cycles just before and just after a
tick. Counted from there, cycles give the time of every mark. How long a cycle is follows from all CTAs together: each
role has read both clocks at its begin and at its end, and what the timer rounds off averages out.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from cmm.hopper.marks import BEGIN, DELAY, END, HEADER, LOADER, PER_CELL, TICK


class Clock(NamedTuple):
    """How good the times of one device are.

    Attributes:
      cycles_per_ns: speed of the multiprocessors during the call.
      tick_ns: resolution of the device's timer: every reading is a multiple of it.
      tick_error_ns: how far a tick may be from where it was seen; the largest of all CTAs.
      disagreement_ns: by how much readings of the timer at begin and end of roles lie outside of the tick in which the
        computed times put them; the largest of all. Cycles that change their length during a call show here.
    """

    cycles_per_ns: float
    tick_ns: int
    tick_error_ns: float
    disagreement_ns: float


@dataclasses.dataclass(frozen=True)
class Times:
    """All times of one call on all devices, in nanoseconds; NaN where a role has nothing to note.

    Attributes:
      marks: `[device, CTA, role, cell, mark]`, see `cmm.hopper.marks.NUMBERS`.
      begin, end: `[device, CTA, role]`.
      delay: `[device, CTA, role, 2]`, begin and end of a planted pause.
    """

    marks: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    delay: np.ndarray


def to_int64(raw) -> np.ndarray:
    """Joins the halves in the last axis of an `i32` array."""
    halves = np.ascontiguousarray(raw, dtype=np.int32)
    return (halves[..., 1].astype(np.int64) << 32) | halves[..., 0].view(np.uint32).astype(np.int64)


def device_times(raw) -> tuple[np.ndarray, int, Clock]:
    """Converts the record of one device.

    Args:
      raw: `i32[CTAs, roles, slots, 2]`, one device's share of what `record_events` returns.

    Returns:
      `f64[CTAs, roles, slots]` in ns after `origin`, NaN where nothing was noted; `origin`, a reading of the device's
      timer; and how good these times are.

    Raises:
      ValueError: the record is none, or not of a call that has ended.
    """
    values = to_int64(raw)
    timer = values[:, :, [BEGIN + 1, END + 1]]
    cycles = values[:, :, [BEGIN, END]]
    before, after, tick = (values[:, LOADER, TICK + number] for number in range(3))
    origin = int(timer[..., 0].min())
    timer, tick = timer - origin, tick - origin
    elapsed_ns = np.diff(timer)
    if origin <= 0 or (elapsed_ns < 0).any() or (np.diff(cycles) < 0).any() or not elapsed_ns.sum():
        raise ValueError("This is no record of a call: its clocks run backwards, or stand still.")
    rate = float(np.diff(cycles).sum() / elapsed_ns.sum())
    tick_ns = int(np.gcd.reduce(np.concatenate([timer.ravel(), tick])))
    half = (after - before) / 2
    # Differences first: cycles and nanoseconds are too large for the 53 bits of a float.
    times = tick[:, None, None] + (values - before[:, None, None] - half[:, None, None]) / rate
    clock = Clock(rate, tick_ns, float(half.max() / rate), _disagreement_ns(times[:, :, [BEGIN, END]], timer, tick_ns))
    # What a slot holds that nobody wrote to in this call is older, or no time at all.
    noted = (values >= cycles[..., :1]) & (values <= cycles[..., 1:])
    return np.where(noted, times, np.nan), origin, clock


def _disagreement_ns(times, timer, tick_ns) -> float:
    """Returns how far times lie outside of `[reading, reading + tick_ns]`."""
    return float(np.maximum(np.maximum(timer - times, times - timer - tick_ns), 0).max())


def call_times(raw, offsets_ns) -> tuple[Times, list[Clock]]:
    """Converts the record of one call, and puts all devices on one axis that starts when the first CTA does.

    Args:
      raw: `i32[devices, CTAs, roles, slots, 2]`, the whole record.
      offsets_ns: how far the timer of each device is ahead of that of device 0.

    Returns:
      The times, and how good they are on each device.
    """
    converted = [device_times(device) for device in np.asarray(raw)]
    first = converted[0][1]
    shifted = [times + (origin - first - offset) for (times, origin, _), offset in zip(converted, offsets_ns)]
    times = np.stack(shifted)
    times -= times[..., BEGIN].min()
    marks = times[..., HEADER:].reshape(*times.shape[:3], -1, PER_CELL)
    return (
        Times(marks, times[..., BEGIN], times[..., END], times[..., DELAY : DELAY + 2]),
        [clock for _, _, clock in converted],
    )
