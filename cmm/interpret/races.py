"""Are two accesses to the same memory ordered? Happens-before race detection.

Each buffer keeps the accesses that a later one could still race with. An access
is ordered before another if the other's thread knew it to have happened: by a
barrier, by a semaphore, or, for an asynchronous copy, by waiting for it.

The end of a kernel counts as an access to all global memory of its device, and to
its semaphores, which may belong to the next kernel then.

Source: Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System";
Flanagan and Freund, "FastTrack: Efficient and Precise Dynamic Race Detection".
"""

from __future__ import annotations

import dataclasses

from cmm.interpret import clocks

# A region is one (start, stop) pair per axis of the buffer.
Region = tuple[tuple[int, int], ...]

_UNFENCED = "the write was acquired in the generic proxy; a TMA load needs fence.proxy.async.global in between"


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two accesses of a race.

    Attributes:
      action: "read", "write" or "signal".
      by: what did it: "thread", "TMA" or "wgmma".
      device, cta, thread: who issued it; thread is the warpgroup's name.
      region: the part of the buffer, one (start, stop) per axis; empty for a "signal".
      source: `file:line (function)`.
    """

    action: str
    by: str
    device: int
    cta: int
    thread: str
    region: Region
    source: str

    def __str__(self) -> str:
        where = ", ".join(f"{a}:{b}" for a, b in self.region)
        by = "" if self.by == "thread" else f" by {self.by}"
        part = "" if self.action == "signal" else f" of [{where}]"
        return f"{self.action}{by}{part} from device {self.device}, CTA {self.cta}, {self.thread} at {self.source}"


@dataclasses.dataclass(frozen=True)
class Race:
    """Two accesses to one buffer or semaphore that nothing orders.

    Attributes:
      buffer: name of the buffer or semaphore, with the device that owns it.
      reason: why the pair is a race.
      first, second: the two accesses in the order in which they ran here; second
        is None where the race is with the end of the owner's kernel.
    """

    buffer: str
    reason: str
    first: Side
    second: Side | None

    def __str__(self) -> str:
        second = self.second or "end of the owner's kernel"
        return f"RACE on {self.buffer}: {self.reason}\n  {self.first}\n  {second}"


class Access:
    """An access that later ones are compared with."""

    action = property(lambda self: "write" if self.write else "read")

    __slots__ = ("write", "position", "epoch", "operation", "region", "who", "by", "where")

    def __init__(self, write, position, epoch, operation, region, who, by, where):
        self.write = write
        self.position = position  # Place of the thread in the clocks.
        self.epoch = epoch
        self.operation = operation  # Bit of an asynchronous operation, or None.
        self.region = region
        self.who = who  # (device, cta, thread name)
        self.by = by
        self.where = where

    def happened_before(self, clock: clocks.Clock, fenced: bool) -> bool:
        """Whether `clock` knows it; `fenced`: as seen by the async proxy."""
        if self.operation is not None:
            return clock.knows_done(self.operation)
        known = clock.fenced if fenced and self.write else clock.seen
        return bool(known[self.position] >= self.epoch)

    def reaches(self, load: Access, clock: clocks.Clock) -> bool:
        """Whether this write to global memory, ordered before a TMA load by `clock`, is visible to it.

        It is if both use the same proxy in the same CTA, or if a proxy fence stands in between.
        """
        if self.operation is not None and self.who[:2] == load.who[:2]:
            return True
        if clock.fenced_global is None:
            return False
        seen, done = clock.fenced_global
        if self.operation is not None:
            return bool((done >> self.operation) & 1)
        return bool(seen[self.position] >= self.epoch)

    def side(self, source_line) -> Side:
        device, cta, thread = self.who
        return Side(self.action, self.by, device, cta, thread, self.region, source_line(self.where))


class Start(Access):
    """What a buffer holds when its owner's kernel starts, which makes it visible to all proxies."""

    __slots__ = ()

    def reaches(self, load: Access, clock: clocks.Clock) -> bool:
        return True


class Signal(Access):
    """An increment of another device's semaphore, which its owner must learn of before its kernel ends.

    Args:
      clock: what the sender publishes with it.
      position: the sender's place in the clocks.
      who: the sender: device, CTA, thread name.
      where: its place in the kernel.
    """

    __slots__ = ()
    action = "signal"

    def __init__(self, clock: clocks.Clock, position: int, who, where):
        super().__init__(True, position, int(clock.seen[position]), None, (), who, "thread", where)


def overlap(a: Region, b: Region) -> bool:
    for (s, e), (t, f) in zip(a, b):  # Asked for every pair of accesses, and faster than `all`.
        if s >= f or t >= e:
            return False
    return True


def covers(outer: Region, inner: Region) -> bool:
    return all(s <= t and f <= e for (s, e), (t, f) in zip(outer, inner))


class History:
    """The accesses of one buffer that can still race.

    Args:
      name: how messages call the buffer.
      proxies: whether the buffer lies where the asynchronous proxy needs a fence
        to see what threads wrote (shared memory).
      check_loads: whether a TMA load needs a proxy fence to see what was written before
        it (global memory, if the simulation checks it).
    """

    def __init__(self, name: str, proxies: bool, check_loads: bool = False):
        self.name = name
        self._proxies = proxies
        self._check_loads = check_loads
        self.accesses: list[Access] = []
        # Operations on earlier owners of the same shared memory that are not known
        # to be complete: they overlap this buffer whatever their region says.
        self.inherited: list[Access] = []

    def add(self, new: Access, clock: clocks.Clock, report) -> None:
        """Checks `new`, done by someone who knew `clock`, and remembers it."""
        fenced = self._proxies and new.operation is not None
        for old in self.inherited:
            if (old.write or new.write) and not old.happened_before(clock, fenced):
                report(
                    self.name,
                    "the shared memory was freed and given out again while an asynchronous operation still used it",
                    old,
                    new,
                )
                break
        is_checked_load = self._check_loads and new.operation is not None and not new.write
        kept = []
        found = unfenced = None
        for old in self.accesses:
            if not overlap(old.region, new.region):  # Most; what is below costs more.
                kept.append(old)
                continue
            ordered = old.happened_before(clock, fenced)
            if not ordered and (old.write or new.write):
                # One report per access and buffer is enough; prefer the latest.
                found = old
            elif is_checked_load and old.write and not old.reaches(new, clock):
                unfenced = old
            # Whoever is ordered after `new` is ordered after `old`, so `new` can
            # stand for it. A read cannot stand for a write.
            if not (ordered and (new.write or not old.write) and covers(new.region, old.region)):
                kept.append(old)
        if found is not None:
            report(self.name, self._reason(found, clock, fenced), found, new)
        elif unfenced is not None:
            report(self.name, _UNFENCED, unfenced, new)
        kept.append(new)
        self.accesses = kept

    def _reason(self, old: Access, clock: clocks.Clock, fenced: bool) -> str:
        if old.operation is not None:
            return "nothing waited for the first access to complete"
        if fenced and old.happened_before(clock, False):
            return "no commit_smem between the thread's write and TMA or wgmma"
        return "nothing orders the two accesses"

    def unfinished(self, clock: clocks.Clock) -> list[Access]:
        """Accesses that somebody with this clock does not know to be complete."""
        return [a for a in self.accesses if not a.happened_before(clock, False)]
