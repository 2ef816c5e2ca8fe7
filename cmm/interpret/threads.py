"""A simulated thread: a warpgroup of a CTA, or one of its warps."""

from __future__ import annotations

import dataclasses

from cmm.interpret import races
from cmm.interpret.evaluate import source_line


@dataclasses.dataclass(frozen=True)
class Timing:
    """Nominal virtual seconds of operations; they order events, no more."""

    operation_s: float = 1e-7
    local_copy_s: float = 1e-6
    remote_copy_s: float = 2e-6
    tile_product_s: float = 1e-6


TIMING = Timing()


class CopyGroup:
    """A group of copies out of shared memory, complete or not."""

    def __init__(self):
        self.reads: list[int] = []  # Operations, for the clocks.
        self.writes: list[int] = []
        self.reads_left = 0
        self.writes_left = 0


class Thread:
    """State of one thread of a kernel.

    Attributes:
      machine: the kernel call it belongs to.
      device, cta, warpgroup, warp: where it runs; warp is None for a warpgroup.
      coords: index by axis name: mesh axes, grid, cluster, thread, warp.
      position: its place in the clocks.
      clock: what it knows.
      groups: committed groups of copies out of shared memory not yet waited for.
      open_group: copies not yet committed to a group.
      products: pending tensor-core products, oldest first.
    """

    def __init__(self, machine, cta, warpgroup, warp, coords, position, clock):
        self.machine = machine
        self.cta = cta  # A `machine.Cta`.
        self.device = cta.device
        self.warpgroup = warpgroup
        self.warp = warp
        self.coords = coords
        self.position = position
        self.clock = clock
        self.clock.seen[position] = max(1, clock.seen[position])
        self.groups: list[CopyGroup] = []
        self.open_group = CopyGroup()
        self.copy_waiters: list = []
        self.products: list = []
        self.product_waiters: list = []
        self.last_product_end = 0.0
        self.scopes = 0  # Collective scopes entered, in program order.
        self.warps: dict[int, Thread] = {}
        self.task = None

    @property
    def local_name(self) -> str:
        warp = "" if self.warp is None else f" warp {self.warp}"
        return f"warpgroup {self.warpgroup}{warp}"

    @property
    def identity(self) -> tuple[int, int, str]:
        """How reports of races call it: device, CTA, name within the CTA."""
        return self.device, self.cta.number, self.local_name

    @property
    def name(self) -> str:
        return f"device {self.device}, CTA {self.cta.number}, {self.local_name}"

    def busy(self, nominal_s: float = TIMING.operation_s) -> float:
        """What to yield before an operation of this nominal duration."""
        return self.machine.scheduler.duration(nominal_s)

    def access(self, view, write: bool, where, operation=None, by="thread", clock=None) -> None:
        """Checks one access for races and remembers it."""
        machine = self.machine
        if not machine.detect_races or view.buffer.space == "regs":
            return
        clock = self.clock if clock is None else clock
        new = races.Access(
            write,
            self.position,
            int(self.clock.seen[self.position]),
            operation,
            view.region,
            self.identity,
            by,
            where,
        )
        view.buffer.history.add(new, clock, machine.report)

    def record_move(self, kind, start_s, where, peer, view) -> None:
        """Records that what `view` shows was moved; it is the side in global memory."""
        self.record(
            kind, start_s, where, peer=peer, num_bytes=view.num_bytes, name=view.buffer.name, region=view.region
        )

    def record(self, kind, start_s, where, **fields) -> None:
        machine = self.machine
        machine.recorder.add(
            kind=kind,
            call=machine.call,
            device=self.device,
            cta=self.cta.number,
            thread=self.warpgroup,
            warp=self.warp,
            start_s=start_s,
            end_s=machine.scheduler.now,
            source=source_line(where),
            **fields,
        )
