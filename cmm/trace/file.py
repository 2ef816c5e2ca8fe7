"""Recorded calls as files: small JSON from which figures are drawn, and Chrome's format, which Perfetto opens."""

import dataclasses
import json
import pathlib

import numpy as np

from cmm.hopper.config import MatmulDimension, TuningConfig
from cmm.hopper.marks import PER_CELL, Layout
from cmm.hopper.plan import Plan
from cmm.results import short_kind
from cmm.trace.call import Trace
from cmm.trace.cells import cells_of
from cmm.trace.offsets import Offsets
from cmm.trace.times import Clock, Times
from cmm.winners import config_fields

_EACH = 8
_LAYOUT = ("num_roles", "every", "communicates", "shared_rounds")
RULE = f"marks of CTAs whose number is a multiple of {_EACH} or that compute a tile of column 0; begin and end of all"


def kept_ctas(layout: Layout) -> list[int]:
    """Returns the CTAs whose marks a file keeps, by `RULE`, as far as they have tiles."""
    cells = cells_of(layout)
    in_column_0 = (cells.exists & (cells.n_tile == 0)).any(axis=1)
    busy = np.flatnonzero(cells.exists.any(axis=1))
    return [int(cta) for cta in busy if cta % _EACH == 0 or in_column_0[cta]]


def to_record(trace: Trace, problem, summary: dict, **more) -> dict:
    """Returns a recorded call as plain data.

    Times are whole nanoseconds. A row of marks is the number of its mask, the first time, and differences from one mark
    to the next; a mask says in hexadecimal digits which marks there are.

    Args:
      trace: the call.
      problem: shapes and dtype.
      summary: what `cmm.trace.summary.summarize` says.
      **more: further entries, such as machine and command.
    """
    layout, times = trace.layout, trace.times
    config = config_fields(layout.plan.config)
    masks: dict[str, int] = {}
    ctas = kept_ctas(layout)
    rows = [
        [[_encode(times.marks[device, cta, role], masks) for role in range(layout.num_roles)] for cta in ctas]
        for device in range(layout.axis_size)
    ]
    return more | {
        "kernel": trace.kernel,
        "problem": dataclasses.asdict(problem),
        "simulated": trace.simulated,
        "config": config,
        "num_ctas": layout.plan.num_ctas,
        **{name: getattr(layout, name) for name in _LAYOUT},
        "summary": summary,
        "clocks": [list(clock) for clock in trace.clocks],
        "offsets": [list(trace.offsets.pair_ns), list(trace.offsets.bound_ns)],
        "rule": RULE,
        "ctas": ctas,
        "masks": list(masks),
        "begin_ns": _whole(times.begin).tolist(),
        "end_ns": _whole(times.end).tolist(),
        "marks": rows,
    }


def from_record(record: dict) -> Trace:
    """Returns the call that `to_record` has written; marks of CTAs that were not kept are NaN."""
    fields = dict(record["config"])
    for name in ("grid_minor_dim", "wg_dimension"):
        fields[name] = MatmulDimension[fields[name]]
    problem = record["problem"]
    plan = Plan(problem["m_shard"], problem["n_shard"], problem["k"], TuningConfig(**fields), record["num_ctas"])
    layout = Layout(plan, problem["axis_size"], *(record[name] for name in _LAYOUT))
    begin, end = np.array(record["begin_ns"], float), np.array(record["end_ns"], float)
    marks = np.full((*begin.shape, layout.cells, PER_CELL), np.nan)
    for device, ctas in enumerate(record["marks"]):
        for cta, roles in zip(record["ctas"], ctas):
            for role, row in enumerate(roles):
                _decode(row, record["masks"], marks[device, cta, role])
    times = Times(marks, begin, end, np.full((*begin.shape, 2), np.nan))
    clocks = [Clock(*values) for values in record["clocks"]]
    offsets = Offsets(*(tuple(values) for values in record["offsets"]))
    return Trace(record["kernel"], layout, times, clocks, offsets, record["simulated"])


def file_name(record: dict) -> str:
    """Returns the name of the file of a record: kernel, device kind, number of devices, shapes and dtype."""
    p, kind = record["problem"], short_kind(record["device_kind"])
    kind = "simulated" if record["simulated"] else kind
    shape = f"d{p['axis_size']}_m{p['m_shard']}_k{p['k']}_n{p['n_shard']}_{p['dtype']}"
    return f"trace_{record['kernel']}_{kind}_{shape}.json"


def write(record: dict, path) -> pathlib.Path:
    """Writes what `to_record` returns, the marks without blanks, and returns the path."""
    path = pathlib.Path(path)
    bulky = ("marks", "begin_ns", "end_ns", "masks")
    head = json.dumps({name: value for name, value in record.items() if name not in bulky}, indent=1)
    tail = ",\n".join(f' "{name}": {json.dumps(record[name], separators=(",", ":"))}' for name in bulky)
    path.write_text(f"{head.removesuffix('}').rstrip()},\n{tail}\n}}\n", encoding="utf-8")
    return path


def read(path) -> dict:
    """Reads what `write` has written."""
    return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))


def write_perfetto(trace: Trace, path, ctas=None) -> pathlib.Path:
    """Writes a call in Chrome's trace format: a process for each device, a thread for each role of each CTA.

    Args:
      trace: the call.
      path: of the file.
      ctas: which CTAs; by default those of `RULE`.

    Source: "Trace Event Format" (Chromium documentation), which Perfetto reads.
    """
    events = trace.events(kept_ctas(trace.layout) if ctas is None else ctas)
    rows, names = [], {}
    for event in events:
        thread = event.cta * 8 + (0 if event.kind == "kernel" else 1 + (event.thread or 0) + (event.warp or 0))
        # Slices of one thread must not overlap in this format; loads and sends do, so they are asynchronous.
        names[event.device, thread] = f"CTA {event.cta:03} {event.role}".strip()
        where = {
            name: getattr(event, name) for name in ("step", "tile", "half", "k_step", "awaited", "peer", "num_bytes")
        }
        common = {"name": event.name or event.kind, "cat": event.kind, "pid": event.device, "tid": thread}
        start_us, end_us = event.start_s * 1e6, event.end_s * 1e6
        args = {"args": {name: value for name, value in where.items() if value is not None}}
        if event.kind in ("load", "send"):
            both = common | {"id": event.index}
            rows += [both | {"ph": "b", "ts": start_us} | args, both | {"ph": "e", "ts": end_us}]
        elif event.kind == "signal":
            rows.append(common | {"ph": "i", "s": "t", "ts": start_us} | args)
        else:
            rows.append(common | {"ph": "X", "ts": start_us, "dur": end_us - start_us} | args)
    devices = sorted({device for device, _ in names})
    meta = [{"ph": "M", "name": "process_name", "pid": d, "tid": 0, "args": {"name": f"device {d}"}} for d in devices]
    for (device, thread), name in sorted(names.items()):
        meta.append({"ph": "M", "name": "thread_name", "pid": device, "tid": thread, "args": {"name": name}})
    path = pathlib.Path(path)
    path.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": meta + rows}), encoding="utf-8")
    return path


def _encode(marks, masks) -> list[int]:
    flat = marks.ravel()
    noted = ~np.isnan(flat)
    mask = np.packbits(noted).tobytes().hex()
    values = _whole(flat[noted])
    return [masks.setdefault(mask, len(masks)), *values[:1].tolist(), *np.diff(values).tolist()]


def _decode(row, masks, marks) -> None:
    noted = np.unpackbits(np.frombuffer(bytes.fromhex(masks[row[0]]), np.uint8), count=marks.size).astype(bool)
    marks.reshape(-1)[noted] = np.cumsum(row[1:])


def _whole(values) -> np.ndarray:
    return np.rint(values).astype(np.int64)
