"""What can go wrong in a simulated kernel, and where.

An error never travels through XLA, where it would lose its type and fail later
calls too: the kernel that failed returns NaN, kernels after it do not run, and
the error is raised by `Simulation.run` or at the end of the `simulate` block.
"""

from __future__ import annotations

import dataclasses


class SimulationError(RuntimeError):
    """A simulated kernel did something that a GPU would not survive."""


class RaceError(SimulationError):
    """Two accesses to the same memory, one of them a write, are not ordered.

    Attributes:
      races: the `Race` reports of the kernel call that failed.
    """

    def __init__(self, races):
        self.races = tuple(races)
        shown = "\n\n".join(str(r) for r in self.races[:8])
        more = len(self.races) - 8
        tail = f"\n\n... and {more} more" if more > 0 else ""
        super().__init__(f"{len(self.races)} race(s) found.\n{shown}{tail}")


class DeadlockError(SimulationError):
    """No thread can move, or threads spin and nothing changes.

    Attributes:
      reason: what kind of standstill it is.
      waiting: one `Waiting` per thread that has not finished, and per CTA that
        has not started.
    """

    def __init__(self, reason: str, waiting):
        self.reason = reason
        self.waiting = tuple(waiting)
        lines = "\n".join(f"  {w}" for w in self.waiting)
        super().__init__(f"{reason}\n{lines}")


class BarrierError(SimulationError):
    """A barrier went on while one of its waiters was a phase behind."""


class LaunchError(SimulationError):
    """The devices of a kernel call did not come together."""


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A thread that had not finished when the simulation stopped.

    Attributes:
      thread: name of the thread: device, CTA, warpgroup and perhaps warp.
      what: the semaphore or barrier it waits for, or "running".
      value: the present value (None where there is none).
      awaited: the value it needs (None where there is none).
      source: source line of the wait.
    """

    thread: str
    what: str
    value: int | None
    awaited: int | None
    source: str

    def __str__(self) -> str:
        need = "" if self.awaited is None else (f": value {self.value}, awaits {self.awaited}")
        return f"{self.thread}: {self.what}{need} at {self.source}"
