"""Semaphores and barriers: who waits, what a satisfied wait has learned."""

from __future__ import annotations

import bisect

from cmm.interpret import clocks, errors, races


class Semaphore:
    """A counter in one device's global memory that any device can increment.

    A wait learns what the senders knew whose increments it needed, in order of
    arrival, and no more. So a wait for one signal too few is caught even when the
    missing signal happened to arrive in time. A signal of another device that no
    wait has learned of is in nobody's way while the kernel runs, but once its owner
    has left the counter may be the next kernel's.
    """

    def __init__(self, name: str):
        self.name = name
        self.waiters: list = []
        self._total = 0  # Sum of all increments.
        self._taken = 0  # Sum of all decrements.
        self._sums: list[int] = []  # Running sum after each increment.
        self._known: list[clocks.Clock] = []  # What the increments so far publish.
        self._remote: list[races.Signal] = []  # The increments by other devices.

    @property
    def value(self) -> int:
        return self._total - self._taken

    def signal(self, amount: int, clock: clocks.Clock, remote: races.Signal | None = None) -> None:
        """Adds `amount` and publishes `clock`; `remote` describes a signal of another device."""
        if remote is not None:
            self._remote.append(remote)
        known = clock
        if self._known:
            known = self._known[-1].copy()
            known.join(clock)
        self._total += amount
        self._sums.append(self._total)
        self._known.append(known)

    def reached(self, value: int) -> bool:
        return self.value >= value

    def acquire(self, value: int, decrement: bool) -> clocks.Clock | None:
        """What a wait for `value` learns; None if it needed no signal."""
        needed = self._taken + value
        if decrement:
            self._taken = needed
        if not self._sums or needed <= 0:
            return None
        return self._known[min(bisect.bisect_left(self._sums, needed), len(self._sums) - 1)]

    def unheard(self, clock: clocks.Clock) -> list[races.Signal]:
        """Signals of other devices that somebody with this clock does not know of."""
        return [s for s in self._remote if not s.happened_before(clock, False)]


class Barrier:
    """An mbarrier in shared memory: completes a phase per `num_arrivals`.

    Every waiter goes through all phases in order. The hardware keeps one bit for
    the phase, so a waiter that falls two phases behind would go on or hang by
    chance; here it is an error.
    """

    def __init__(self, name: str, num_arrivals: int):
        self.name = name
        self.num_arrivals = num_arrivals
        self.waiters: list = []
        self.arrived = 0
        self._gathering: clocks.Clock | None = None
        self._known: list[clocks.Clock] = []  # Per completed phase.
        self._observed: dict = {}

    @property
    def phase(self) -> int:
        """The number of completed phases."""
        return len(self._known)

    def arrive(self, clock: clocks.Clock) -> bool:
        """Counts one arrival; tells whether it completed a phase."""
        if self._gathering is None:
            self._gathering = clock.copy()
        else:
            self._gathering.join(clock)
        self.arrived += 1
        if self.arrived < self.num_arrivals:
            return False
        self.arrived = 0
        known, self._gathering = self._gathering, None
        if self._known:
            known.join(self._known[-1])
        self._known.append(known)
        return True

    def next_phase(self, group, warp) -> int:
        """The phase that this waiter has to see next.

        A warp that has not waited on its own goes on from where its warpgroup is.
        """
        seen = self._observed
        if warp is None:
            return max([seen.get((group, None), 0)] + [seen.get((group, w), 0) for w in range(4)])
        return seen.get((group, warp), seen.get((group, None), 0))

    def observe(self, group, warp, phase: int) -> clocks.Clock:
        """The waiter has seen `phase` complete; returns what it learned.

        Raises:
          BarrierError: the barrier is already two phases further.
        """
        if self.phase > phase + 1:
            raise errors.BarrierError(
                f"{self.name} completed phase {self.phase - 1} before {group} (warp"
                f" {warp}) saw phase {phase}; on a GPU this waiter would hang or go"
                " on too early"
            )
        self._observed[group, warp] = phase + 1
        if warp is None:
            for w in range(4):
                self._observed[group, w] = phase + 1
        return self._known[phase]


class Rendezvous:
    """All threads of a CTA meet (`bar.sync`); used where a scope is entered."""

    def __init__(self, num_threads: int):
        self._num_threads = num_threads
        self._gathering: clocks.Clock | None = None
        self._arrived = 0
        self.waiters: list = []
        self.known: list[clocks.Clock] = []

    def arrive(self, clock: clocks.Clock) -> tuple[int, bool]:
        """Returns the round to wait for, and whether this arrival completed it."""
        if self._gathering is None:
            self._gathering = clock.copy()
        else:
            self._gathering.join(clock)
        self._arrived += 1
        current = len(self.known)
        if self._arrived < self._num_threads:
            return current, False
        self._arrived = 0
        self.known.append(self._gathering)
        self._gathering = None
        return current, True
