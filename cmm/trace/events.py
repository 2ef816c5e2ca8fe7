"""What the marks of a recorded call mean: events, in the form that `cmm.interpret` records them."""

import dataclasses

import numpy as np

from cmm.hopper.marks import LOADER, MULTIPLIERS, NUMBERS, ROLES, SENDER, Layout
from cmm.hopper.sends import plan_sends
from cmm.interpret import Event
from cmm.trace.cells import cells_of, meaningful, sends_of
from cmm.trace.times import Times, call_times

_ITEMSIZE_BYTES = 2  # float16 and bfloat16, all that the kernels take.


@dataclasses.dataclass(frozen=True)
class KernelEvent(Event):
    """An event that a kernel has noted itself.

    `start_s` and `end_s` count from the begin of the first CTA of all devices. What the fields of `Event` mean here:

    - "kernel": one CTA, from the begin of its first role to the end of its last.
    - "load": from the copy of a tile of A, the first of a cell, to when multiplier 0 has seen it and the tile of B in
      shared memory. So the end is an upper bound.
    - "tile_product": the products of a cell: from when a multiplier has the tiles for the first to when it waits for
      those of the next cell, or all products of the tile of the result are finished.
    - "send": from the start of a store to the neighbour to when its completion has been awaited. In the readable kernel
      it stands for all stores of a cell, in the fast kernel for the last of a cell.
    - "signal": at the moment before it; in the readable kernel after it.
    - "wait": the loader waits for signals. `awaited` is their number.
    - "barrier_wait": any other wait inside a CTA. `name` says for what: "empty" or "full" stage, "store read" by those
      who send, "store complete".
    - "store": the epilogue of a tile.
    - "delay": a planted pause.

    Attributes:
      role: see `cmm.hopper.marks.ROLES`; empty for "kernel".
      step: of the ring.
      tile: row and column of the result's tile within a step.
      half: 0 for a whole tile; 1 for the upper half of one that two CTAs share, 2 for the lower half.
      k_step: number of the product at which it begins, within its tile.
    """

    role: str = ""
    step: int | None = None
    tile: tuple[int, int] | None = None
    half: int | None = None
    k_step: int | None = None


def events_from(raw, layout: Layout, offsets_ns) -> list[KernelEvent]:
    """Returns the events of a recorded call, ordered by their ends.

    Args:
      raw: `i32[devices, CTAs, roles, slots, 2]`, what `record_events` returns for all devices.
      layout: of the kernel that was recorded (`cmm.trace.record.recorded_program`).
      offsets_ns: how far the timer of each device is ahead of that of device 0 (`cmm.trace.offsets`).

    Raises:
      ValueError: the record is none.
    """
    return events_of(meaningful(call_times(raw, offsets_ns)[0], layout), layout)


def events_of(times: Times, layout: Layout, ctas=None, kinds=None) -> list[KernelEvent]:
    """Returns the events in `times`, which holds nothing else; with `ctas` or `kinds` only those of these."""
    cells = cells_of(layout)
    sends = sends_of(layout, cells).sum(-1)
    rows = []
    for device, cta in np.ndindex(times.begin.shape[:2]):
        if (ctas is None or cta in ctas) and not np.isnan(times.begin[device, cta]).any():
            found = _Reader(times, layout, cells, sends, device, cta).read()
            rows += [row for row in found if kinds is None or row["kind"] in kinds]
    rows.sort(key=lambda row: (row["end_s"], row["start_s"]))
    return [KernelEvent(index=index, call=0, **row) for index, row in enumerate(rows)]


class _Reader:
    """Reads the events of one CTA."""

    def __init__(self, times, layout, cells, sends, device, cta):
        self.times, self.layout, self.cells, self.device, self.cta = times, layout, cells, device, cta
        self.send_plan = plan_sends(layout.plan) if layout.num_roles > SENDER else None
        self.marks = times.marks[device, cta]
        self.sends = sends[cta]
        self.is_fast = layout.num_roles > SENDER
        self.rows = []

    def read(self) -> list[dict]:
        begin, end = self.times.begin[self.device, self.cta], self.times.end[self.device, self.cta]
        self._add("kernel", begin.min(), end.max(), None, thread=None)
        for cell in np.flatnonzero(self.cells.exists[self.cta]):
            for role in (0, 1):
                self._multiplier(role, cell)
            self._loader(cell)
            if self.is_fast:
                self._sender(cell)
        for role, (start, stop) in enumerate(self.times.delay[self.device, self.cta]):
            self._add("delay", start, stop, role)
        return self.rows

    def _multiplier(self, role, cell):
        config, every = self.layout.plan.config, self.layout.every
        self._wait("full", role, cell, "full")
        tile = cell - self.cells.k_step[self.cta, cell] // every  # The cell that opens this tile.
        last = (cell + 1 - tile) * every == self.layout.plan.k_steps
        end = self._at("done", role, tile) if last else self._at("full", role, cell + 1)
        parts = self._parts(cell)
        flops = 2 * config.tile_m * config.tile_n * config.tile_k * every // parts
        self._add("tile_product", self._end("full", role, cell), end, role, cell, flops=flops)
        if cell == tile:
            num_bytes = config.tile_m * config.tile_n * _ITEMSIZE_BYTES // parts
            self._span("store", "store", role, cell, name="epilogue", num_bytes=num_bytes)
        if role == MULTIPLIERS and not self.is_fast:
            for span, name in (("send", "store read"), ("read", "store read"), ("complete", "store complete")):
                self._wait(span, role, cell, name)
            self._send(self._at("send", role, cell), self._end("complete", role, tile), role, cell)
            self._signal(self._end("complete", role, cell), role, cell)

    def _loader(self, cell):
        config = self.layout.plan.config
        self._wait("empty", LOADER, cell, "empty")
        issued, ready = self._end("empty", LOADER, cell), self._end("ready", LOADER, cell)
        if not np.isnan(ready):
            signals = self.send_plan.signals if self.is_fast else self.layout.plan.m_tiles
            name = self._semaphore(self.cells.step[self.cta, cell] - 1, cell)
            self._span("wait", "ready", LOADER, cell, name=name, awaited=signals, value=signals)
            issued = max(issued, ready)
        rows = config.cta_tile_m // self._parts(cell)
        num_bytes = (rows + config.cta_tile_n) * config.tile_k * _ITEMSIZE_BYTES
        self._add("load", issued, self._end("full", MULTIPLIERS, cell), LOADER, cell, num_bytes=num_bytes)

    def _sender(self, cell):
        self._wait("full", SENDER, cell, "full")
        self._wait("read", SENDER, cell, "store read")
        self._wait("complete", SENDER, cell, "store complete")
        issue = self._at("issue", SENDER, cell)
        if not np.isnan(issue):
            ends = self.marks[SENDER, :, NUMBERS["complete"] + 1]
            self._send(issue, np.min(ends, where=ends >= issue, initial=np.inf), SENDER, cell)
        signal = self._at("signal", SENDER, cell)
        self._signal(signal, SENDER, cell)

    def _send(self, start, end, role, cell):
        config = self.layout.plan.config
        tiles = 1 if self.is_fast else int(self.sends[cell])
        num_bytes = tiles * config.cta_tile_m * config.tile_k * _ITEMSIZE_BYTES
        self._add("send", start, end, role, cell, peer=self._below(), num_bytes=num_bytes)

    def _signal(self, at, role, cell):
        name = self._semaphore(self.cells.step[self.cta, cell], cell)
        self._add("signal", at, at, role, cell, peer=self._below(), value=1, name=name)

    def _parts(self, cell) -> int:
        """Returns how many CTAs share the tile."""
        return 2 if self.cells.half[self.cta, cell] else 1

    def _semaphore(self, step, cell) -> str:
        if not self.is_fast:
            return f"received[{step}]"
        sends = self.send_plan
        m_tile, k_step = self.cells.m_tile[self.cta, cell], self.cells.k_step[self.cta, cell]
        return f"received[{(step * self.layout.plan.m_tiles + m_tile) * sends.chunks + k_step // sends.chunk_steps}]"

    def _below(self) -> int:
        return (self.device - 1) % self.layout.axis_size

    def _at(self, name, role, cell) -> float:
        return self.marks[role, cell, NUMBERS[name]]

    def _end(self, name, role, cell) -> float:
        return self.marks[role, cell, NUMBERS[name] + 1]

    def _wait(self, span, role, cell, name):
        self._span("barrier_wait", span, role, cell, name=name)

    def _span(self, kind, span, role, cell, **fields):
        self._add(kind, self._at(span, role, cell), self._end(span, role, cell), role, cell, **fields)

    def _add(self, kind, start_ns, end_ns, role, cell=None, **fields):
        """Adds an event, unless one of its times was not noted."""
        if not np.isfinite(start_ns + end_ns):
            return
        row = {"kind": kind, "device": self.device, "cta": self.cta}
        row |= {"start_s": float(start_ns) * 1e-9, "end_s": float(end_ns) * 1e-9}
        if role is not None:
            in_warp = self.is_fast and role >= LOADER
            row |= {"role": ROLES[role], "thread": min(role, LOADER), "warp": role - LOADER if in_warp else None}
        if cell is not None:
            tile = int(self.cells.m_tile[self.cta, cell]), int(self.cells.n_tile[self.cta, cell])
            row |= {"step": int(self.cells.step[self.cta, cell]), "tile": tile}
            row |= {name: int(getattr(self.cells, name)[self.cta, cell]) for name in ("half", "k_step")}
        self.rows.append(row | fields)
