"""Recorded calls of ring kernels as figures: a whole call, and the change from one step to the next."""

import functools
import pathlib
from collections.abc import Callable, Iterator

from cmm.dispatch import METHODS
from cmm.plots.kernel_timeline import draw_kernel_timeline, step_change
from cmm.trace import file as trace_file
from cmm.trace.events import KernelEvent

_MOST_DEVICES = 2  # More of them do not fit on a page.


def trace_figures(folder) -> Iterator[tuple[str, Callable, Callable]]:
    """Yields name, drawing function and data function of two figures for each call recorded on GPUs in `folder`.

    Args:
      folder: of the files that `python -m cmm.trace` writes, `trace_*.json`; of two devices.
    """
    for path in sorted(pathlib.Path(folder).glob("trace_*.json")):
        record = trace_file.read(path)
        if record["simulated"] or not 1 < record["problem"]["axis_size"] <= _MOST_DEVICES:
            continue
        stem = "kernel_" + path.stem.partition("_m")[0].replace("trace_", "timeline_")
        if record["problem"]["dtype"] != "float16":
            stem += f"_{record['problem']['dtype']}"
        read = functools.cache(functools.partial(_read, record))
        for part in ("call", "step_change"):
            draw = lambda part=part, read=read, record=record: _draw(record, part, *read())
            data = lambda part=part, read=read, record=record, path=path: _data(record, path, part, *read())
            yield f"{stem}_{part}", draw, data


def _read(record) -> tuple[list[KernelEvent], int, int | None]:
    """Returns the events of a recorded call, a CTA that sends, and one that sends least, of another column if any."""
    trace = trace_file.from_record(record)
    events = trace.events(record["ctas"])
    sends = {cta: sum(e.kind == "send" and e.cta == cta for e in events) for cta in record["ctas"]}
    columns = lambda cta: set(trace.cells.n_tile[cta][trace.cells.exists[cta]].tolist())
    first = max(sends, key=lambda cta: (sends[cta], -cta))
    order = lambda cta: (sends[cta], bool(columns(cta) & columns(first)), -cta)
    return events, first, min((cta for cta in sends if cta != first), key=order, default=None)


def _draw(record, part, events, first, other):
    ctas, window_s = _shown(part, events, first, other)
    return draw_kernel_timeline(events, _title(record, part), _caption(record), ctas=ctas, window_s=window_s)


def _data(record, path, part, events, first, other) -> dict:
    ctas, window_s = _shown(part, events, first, other)
    window_us = [round(time * 1e6, 3) for time in window_s]
    title, caption = _title(record, part), _caption(record)
    return {"title": title, "caption": caption, "source": path.name, "ctas": ctas, "window_us": window_us}


def _shown(part, events, first, other):
    if part == "call":
        return [first], (0.0, max(e.end_s for e in events))
    ctas = [cta for cta in (first, other) if cta is not None]
    return ctas, step_change([e for e in events if e.cta in ctas])


def _title(record, part) -> str:
    title = METHODS[record["kernel"]].title
    title = title[0].upper() + title[1:]
    if part == "call":
        # By the recording with a mark at every product, which is the better one; it may be of another call.
        hidden = 100 * record["summary"]["hidden_send_share"]
        return f"{title}: {hidden:.0f} % of the time of sends lies under products"
    change = record["summary"]["step_change_us"]["median"]
    return f"{title}: {change:.1f} µs from the last product of a step to the next, median of all CTAs"


def _caption(record) -> str:
    p, trace = record["problem"], trace_file.from_record(record)
    error_us, bound_us = (max(values) / 1e3 for values in ([c.error_ns for c in trace.clocks], trace.bounds_ns))
    every = record["every"]
    boxes = f" A box of products holds {every}; waits between them were not noted." if every > 1 else ""
    return (
        f"One call in a steady chain, recorded by the kernel itself on {p['axis_size']} x {record['device_kind']}, JAX "
        f"{record['versions']['jax']}, {p['dtype']}, per shard M={p['m_shard']} K={p['k']} N={p['n_shard']}"
        f"{', ' + record['date'] if 'date' in record else ''}. Off by at most {_two_digits(error_us)} µs within a "
        f"device, {_two_digits(bound_us)} µs between devices.{boxes}"
    )


def _two_digits(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"
