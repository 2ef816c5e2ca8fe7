"""What a thread knows to have happened: vector clocks with two proxies.

Three parts make up a clock.

- `seen[t]`: the accesses of thread t up to this epoch have happened.
- `fenced[t]`: the same, but only those that a fence (`commit_smem`) has made
  visible to the asynchronous proxy, which is what TMA and wgmma read through.
- `done`: a bit set of asynchronous operations that are known to be complete.
  Each operation is its own bit, so no two of them ever share a position.
"""

from __future__ import annotations

import numpy as np


class Clock:
    """A mutable clock over a fixed number of threads."""

    __slots__ = ("seen", "fenced", "done")

    def __init__(self, num_threads: int):
        self.seen = np.zeros(num_threads, np.int32)
        self.fenced = np.zeros(num_threads, np.int32)
        self.done = 0

    def copy(self) -> Clock:
        new = Clock.__new__(Clock)
        new.seen = self.seen.copy()
        new.fenced = self.fenced.copy()
        new.done = self.done
        return new

    def join(self, other: Clock) -> None:
        np.maximum(self.seen, other.seen, out=self.seen)
        np.maximum(self.fenced, other.fenced, out=self.fenced)
        self.done |= other.done

    def publish(self, position: int) -> Clock:
        """A snapshot for others; what the thread does later is not part of it."""
        snapshot = self.copy()
        self.seen[position] += 1
        return snapshot

    def fence(self, position: int) -> None:
        """Makes everything seen so far visible to the asynchronous proxy."""
        np.maximum(self.fenced, self.seen, out=self.fenced)
        self.seen[position] += 1

    def complete(self, operation: int) -> None:
        self.done |= 1 << operation

    def knows_done(self, operation: int) -> bool:
        return bool((self.done >> operation) & 1)
