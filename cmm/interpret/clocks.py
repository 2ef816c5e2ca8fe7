"""What a thread knows to have happened: vector clocks with two proxies.

Four parts make up a clock.

- `seen[t]`: the accesses of thread t up to this epoch have happened.
- `fenced[t]`: the same, but only those that a fence (`commit_smem`) has made
  visible to the asynchronous proxy, which is what TMA and wgmma read through.
- `done`: a bit set of asynchronous operations that are known to be complete.
  Each operation is its own bit, so no two of them ever share a position.
- `fenced_global`: `seen` and `done` as they were when a fence for global memory
  (`fence.proxy.async.global`) made them visible to the asynchronous proxy, or None.
  `commit_smem` is a fence for shared memory and does nothing for global memory.
"""

from __future__ import annotations

import numpy as np


class Clock:
    """A mutable clock over a fixed number of threads."""

    __slots__ = ("seen", "fenced", "done", "fenced_global")

    def __init__(self, num_threads: int):
        self.seen = np.zeros(num_threads, np.int32)
        self.fenced = np.zeros(num_threads, np.int32)
        self.done = 0
        self.fenced_global: tuple[np.ndarray, int] | None = None  # Never changed in place, so copies share it.

    def copy(self) -> Clock:
        new = Clock.__new__(Clock)
        new.seen = self.seen.copy()
        new.fenced = self.fenced.copy()
        new.done = self.done
        new.fenced_global = self.fenced_global
        return new

    def join(self, other: Clock) -> None:
        np.maximum(self.seen, other.seen, out=self.seen)
        np.maximum(self.fenced, other.fenced, out=self.fenced)
        self.done |= other.done
        mine, theirs = self.fenced_global, other.fenced_global
        if mine is None:
            self.fenced_global = theirs
        elif theirs is not None and theirs is not mine:
            self.fenced_global = np.maximum(mine[0], theirs[0]), mine[1] | theirs[1]

    def publish(self, position: int) -> Clock:
        """A snapshot for others; what the thread does later is not part of it."""
        snapshot = self.copy()
        self.seen[position] += 1
        return snapshot

    def fence(self, position: int) -> None:
        """Makes everything seen so far visible to the asynchronous proxy."""
        np.maximum(self.fenced, self.seen, out=self.fenced)
        self.seen[position] += 1

    def fence_global(self, position: int) -> None:
        """Makes everything seen so far in global memory visible to the asynchronous proxy."""
        self.fenced_global = self.seen.copy(), self.done
        self.seen[position] += 1

    def complete(self, operation: int) -> None:
        self.done |= 1 << operation

    def knows_done(self, operation: int) -> bool:
        return bool((self.done >> operation) & 1)
