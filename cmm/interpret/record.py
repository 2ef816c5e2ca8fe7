"""What happened in a kernel call, as data that notebooks draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

KINDS = ("kernel", "load", "store", "send", "fetch", "tile_product", "signal", "wait", "barrier_wait", "delay")


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that one thread did, or had done for it by TMA or tensor cores.

    A timeline recorded on real GPUs can use the same form: what it does not know
    stays None.

    Attributes:
      index: place in an order that respects causes: an event never comes before
        one that it depends on. Events are ordered by when they end.
      kind: one of `KINDS`. "load": global to shared memory; "store": shared to
        this device's global memory; "send": anything written to a peer's memory;
        "fetch": anything read from a peer's memory; "tile_product": one matrix
        product of tiles; "kernel": one CTA from start to end.
      call: number of the kernel call within the recording, from 0.
      device: logical device number (row-major place in the mesh).
      cta: number of the CTA on its device.
      thread: number of the warpgroup in its CTA; None for "kernel".
      warp: number of the warp, where warps act on their own.
      start_s, end_s: seconds since the start of the call. Simulated ones order
        events and predict nothing.
      peer: the other device, for "send", "fetch" and remote "signal".
      num_bytes: bytes moved, for "load", "store", "send" and "fetch".
      flops: floating-point operations of a "tile_product".
      name: the semaphore, barrier or buffer.
      region: part of the buffer, one (start, stop) pair per axis.
      value: amount of a "signal"; value of the semaphore after a "wait".
      awaited: value that a "wait" was for.
      source: source line, `file:line (function)`.
    """

    index: int
    kind: str
    call: int
    device: int
    cta: int
    thread: int | None
    start_s: float
    end_s: float
    warp: int | None = None
    peer: int | None = None
    num_bytes: int = 0
    flops: int = 0
    name: str | None = None
    region: tuple[tuple[int, int], ...] | None = None
    value: int | None = None
    awaited: int | None = None
    source: str = ""


class Recorder:
    """Collects the events of all kernel calls of one simulation."""

    def __init__(self):
        self.events: list[Event] = []
        self.calls = 0

    def new_call(self) -> int:
        self.calls += 1
        return self.calls - 1

    def add(self, **fields) -> None:
        self.events.append(Event(index=len(self.events), **fields))


def bytes_sent(events: Iterable[Event], *, device: int | None = None, peer: int | None = None) -> int:
    """Bytes that kernels wrote to memory of other devices.

    Args:
      events: what `Simulation.events` holds.
      device: only what this device sent.
      peer: only what was sent to this device.

    Returns:
      Bytes.
    """
    return sum(
        e.num_bytes for e in events if e.kind == "send" and device in (None, e.device) and peer in (None, e.peer)
    )


def to_rows(events: Iterable[Event]) -> list[dict]:
    """Events as plain dictionaries, for `json.dump`."""
    return [dataclasses.asdict(e) for e in events]


def from_rows(rows: Iterable[dict]) -> list[Event]:
    """The inverse of `to_rows`, also after a round trip through JSON."""
    events = []
    for row in rows:
        region = row.get("region")
        if region is not None:
            region = tuple((int(a), int(b)) for a, b in region)
        events.append(Event(**{**row, "region": region}))
    return events
