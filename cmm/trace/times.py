"""From what a kernel wrote down to nanoseconds: by the timer of each GPU where it ticks often, else by cycles.

Where the timer ticks at least every 100 ns, its readings are the times. Elsewhere cycles of each multiprocessor are put
on it: every CTA has noted its cycles just before and just after a tick, and counted from there, cycles give the time of
every mark. How long a cycle is follows from all CTAs together, since each role has noted both clocks at its begin and
at its end. That is coarser: power changes the length of a cycle during a call, on an H200 so much that times in its
middle are wrong by 2 microseconds.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from cmm.hopper.marks import BEGIN, DELAY, END, HEADER, LOADER, PER_CELL, TICK

_FINE_TICK_NS = 100


def is_fine(tick_ns: int) -> bool:
    """Says whether a timer that ticks so often is better than counting cycles."""
    return tick_ns <= _FINE_TICK_NS


class Clock(NamedTuple):
    """How good the times of one device are.

    Attributes:
      source: "timer" or "cycles", of which the times are made.
      error_ns: how far a time of this device may be off against another one of the same device.
      cycles_per_ns: mean speed of the multiprocessors during the call.
      tick_ns: resolution of the device's timer: every reading is a multiple of it.
      tick_error_ns: how far a tick may be from where it was seen; the largest of all CTAs.
      disagreement_ns: by how much times that are made of cycles lie outside of the tick that the timer showed with
        them; the largest of all marks. Cycles that change their length during a call show here.
    """

    source: str
    error_ns: float
    cycles_per_ns: float
    tick_ns: int
    tick_error_ns: float
    disagreement_ns: float


@dataclasses.dataclass(frozen=True)
class Ticks:
    """Where a tick of the timer was seen: one for each row of marks.

    Attributes:
      values: `i64[rows, 3]`: cycles shortly before a tick and shortly after it, and the nanoseconds at the tick.
    """

    values: np.ndarray

    @property
    def after(self) -> np.ndarray:
        return self.values[:, 1]

    @property
    def ns(self) -> np.ndarray:
        return self.values[:, 2]

    @property
    def half(self) -> np.ndarray:
        """How far a tick may be from the middle of both readings, in cycles."""
        return (self.after - self.values[:, 0]) / 2

    @property
    def origin(self) -> int:
        """A reading of the timer, from which times count: 53 bits of a float are too few for whole ones."""
        return int(self.ns[0])

    def by_timer(self, marks) -> np.ndarray:
        """Returns the times of `marks`, `i32[rows, ..., 2]` as `cmm.hopper.clocks.write_mark` writes them."""
        return (self._near(self.ns, marks[..., 1]) - self.origin).astype(float)

    def by_cycles(self, marks, cycles_per_ns: float) -> np.ndarray:
        """Returns them counted in cycles from the tick of their row."""
        cycles = self._near(self.values[:, 0], marks[..., 0])
        return self.from_cycles(cycles, cycles_per_ns)

    def from_cycles(self, cycles, cycles_per_ns: float) -> np.ndarray:
        """Returns the times of whole cycles, `i64[rows, ...]`."""
        rows = lambda values: values.reshape(-1, *[1] * (cycles.ndim - 1))
        since_tick = cycles - rows(self.values[:, 0]) - rows(self.half)
        return rows(self.ns - self.origin) + since_tick / cycles_per_ns

    @staticmethod
    def _near(whole, low) -> np.ndarray:
        """Returns the values whose low halves are `low` and that are nearest to those of the rows."""
        whole = whole.reshape(-1, *[1] * (low.ndim - 1))
        ahead = (low.astype(np.int64) - whole) & 0xFFFFFFFF
        return whole + ahead - ((ahead >> 31) << 32)


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
      `f64[CTAs, roles, slots]` in ns after `origin`, NaN where nothing was noted; of the header only `BEGIN`, `END` and
      `DELAY` are times. `origin`, a reading of the device's timer. And how good these times are.

    Raises:
      ValueError: the record is none, or not of a call that has ended.
    """
    raw = np.asarray(raw)
    header = to_int64(raw[:, :, :HEADER])
    cycles, timer = header[:, :, [BEGIN, END]], header[:, :, [BEGIN + 1, END + 1]]
    ticks = Ticks(header[:, LOADER, TICK : TICK + 3])
    _check_clocks(ticks, timer, cycles)
    rate = float(np.diff(cycles).sum() / np.diff(timer).sum())
    tick_ns = int(np.gcd.reduce(np.concatenate([(timer - ticks.origin).ravel(), ticks.ns - ticks.origin])))
    by_timer, by_cycles = ticks.by_timer(raw), ticks.by_cycles(raw, rate)
    by_timer[:, :, [BEGIN, END]] = timer - ticks.origin
    by_cycles[:, :, [BEGIN, END]] = ticks.from_cycles(cycles, rate)
    # What a slot holds that nobody wrote to in this call is older, or no time at all. Low halves come again after 4 s,
    # so such nanoseconds may be of this call by chance, but cycles then do not fit to them.
    noted = (by_timer >= by_timer[:, :, [BEGIN]]) & (by_timer <= by_timer[:, :, [END]])
    noted[:, :, [TICK, TICK + 1, TICK + 2, BEGIN + 1, END + 1]] = False
    apart = np.maximum(by_timer - by_cycles, by_cycles - by_timer - tick_ns)
    noted &= apart <= by_timer[:, :, [END]] - by_timer[:, :, [BEGIN]]
    disagreement_ns = float(np.max(apart, where=noted, initial=0))
    tick_error_ns = float(ticks.half.max() / rate)
    if is_fine(tick_ns):
        source, times, error_ns = "timer", by_timer + tick_ns / 2, tick_ns
    else:
        source, times, error_ns = "cycles", by_cycles, tick_error_ns + disagreement_ns
    clock = Clock(source, float(error_ns), rate, tick_ns, tick_error_ns, disagreement_ns)
    return np.where(noted, times, np.nan), ticks.origin, clock


def _check_clocks(ticks, timer, cycles) -> None:
    """Raises a `ValueError` if a clock was not read, runs backwards or stands still; both are `[CTA, role, 2]`."""
    if ticks.ns.min() <= 0:
        cta = int(ticks.ns.argmin())
        raise ValueError(f"This is no record of a call: CTA {cta} has seen the timer tick at {ticks.ns[cta]} ns.")
    for name, unit, clock in (("timer", "ns", timer), ("cycles", "cycles", cycles)):
        if clock.min() <= 0:
            cta, role, end = np.unravel_index(clock.argmin(), clock.shape)
            what = f"role {role} of CTA {cta} {'ends' if end else 'begins'} at {clock.min()} {unit}"
            raise ValueError(f"This is no record of a call: by the {name}, {what}.")
        lasted = np.diff(clock)[..., 0]
        if (lasted < 0).any():
            cta, role = np.unravel_index(lasted.argmin(), lasted.shape)
            begin, end = clock[cta, role]
            raise ValueError(
                f"This is no record of a call: by the {name}, {(lasted < 0).sum()} of {lasted.size} roles end before "
                f"they begin, such as role {role} of CTA {cta}, from {begin} to {end} {unit}."
            )
        if not lasted.any():
            raise ValueError(f"This is no record of a call: by the {name}, all of it takes no time.")


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
