"""Which chain of causes made a call of a ring kernel as long as it was, and what happened along it?

The chain is followed backwards from the multiplier that ends last on a device. Within a CTA everything follows from
what the same multiplier did before, up to a wait for signals that held it up: the loader waited when the last of these
signals was sent, and the multiplier waited when the loader went on. There the chain goes over to the CTA of the device
above that has sent this signal. It ends at the begin of a CTA.

So the parts of a chain add up to the time of the call on its device, whatever they are: that their sum is right does
not show that the parts are. `wait` and `refill` are what is left where no cause was noted. How timers of devices were
brought together moves time between three parts only: `device_start`, `flight`, and what is left of a wait.
"""

import numpy as np

from cmm.hopper.marks import LOADER, MULTIPLIERS
from cmm.trace.call import Trace

PARTS = {
    "device_start": "the sending device starts later than this one",
    "cta_start": "its CTA starts later than the first",
    "fill": "begin of the CTA to its first product",
    "products_sending": "products of steps that send",
    "products_last": "products of the last step",
    "drain": "last stores have not yet read their stage",
    "epilogue": "a tile of the result is rounded and stored",
    "announce": "stores complete, signal is sent",
    "flight": "signal is under way, and seen",
    "wait": "rest of waits for signals",
    "refill": "rest between products: tiles are loaded again",
    "end": "last product to the end of the kernel",
}
_INSIDE_A_GAP = {"read": "drain", "store": "epilogue", "complete": "announce"}


def critical_parts_us(trace: Trace, device: int) -> dict[str, float]:
    """Returns how long each of `PARTS` takes along the chain that made the call on one device as long as it was.

    Args:
      trace: a complete call of a ring kernel, or of its twin.
      device: whose call.

    Returns:
      Time in µs by name. They add up to the time from the begin of the first CTA of this device to the end of its last.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    begin, end = trace.times.begin, trace.times.end
    cta, role = _last(trace, device)
    until = end[device].max()
    sent_at, sent_by = trace.causes()
    place = device
    while True:
        wait = _latest_wait(trace, sent_at, place, cta, role, until)
        start = begin[place, cta].min() if wait is None else trace.spans("ready", LOADER)[1][place, cta, wait]
        for name, low, high in _timeline(trace, place, cta, role, until):
            parts[name] += max(0.0, min(high, until) - max(low, start))
        if wait is None:
            break
        until, next_cta = sent_at[place, cta, wait], sent_by[place, cta, wait]
        parts["flight"] += start - until
        place, cta, role = (place + 1) % len(begin), int(next_cta), MULTIPLIERS
    first_of_place = begin[place].min()
    parts["cta_start"] += start - first_of_place
    parts["device_start"] += first_of_place - begin[device].min()
    return {name: float(value) / 1e3 for name, value in parts.items()}


def call_us(trace: Trace) -> np.ndarray:
    """Returns for each device the time from the begin of its first CTA to the end of its last."""
    return (trace.times.end.max(axis=(1, 2)) - trace.times.begin.min(axis=(1, 2))) / 1e3


def _last(trace, device) -> tuple[int, int]:
    """Returns CTA and multiplier that end last, of those that multiply anything."""
    ends = np.where(trace.cells.exists.any(axis=1)[:, None], trace.times.end[device, :, :2], -np.inf)
    cta, role = np.unravel_index(int(ends.argmax()), ends.shape)
    return int(cta), int(role)


def _latest_wait(trace, sent_at, device, cta, role, until) -> int | None:
    """Returns the cell of the latest wait for signals before `until` that held this multiplier up."""
    waits, goes_on = trace.spans("ready", LOADER)[:, device, cta]
    asks, gets = trace.spans("full", role)[:, device, cta]
    sent = sent_at[device, cta]
    # Comparisons with NaN, where nobody waits, are false.
    held_up = (sent > waits) & (sent < goes_on) & (asks < goes_on) & (goes_on < gets) & (goes_on <= until)
    cells = np.flatnonzero(held_up)
    return int(cells[np.argmax(goes_on[cells])]) if len(cells) else None


def _timeline(trace, device, cta, role, until) -> list[tuple[str, float, float]]:
    """Returns name, begin and end of what one multiplier does, one after the other, from its begin to `until`."""
    cells = trace.cells
    done, starts = trace.moments("done", role)[device, cta], trace.spans("full", role)[1][device, cta]
    opening = np.flatnonzero(cells.opens_tile[cta])
    rows = [("fill", trace.times.begin[device, cta].min(), starts[opening[0]])]
    for tile, following in zip(opening, [*opening[1:], None]):
        sends = cells.step[cta, tile] < trace.layout.axis_size - 1
        rows.append(("products_sending" if sends else "products_last", starts[tile], done[tile]))
        if following is not None:
            rows += _gap(trace, device, cta, role, tile, done[tile], following, starts[following])
    return [*rows, ("end", done[opening[-1]], max(until, done[opening[-1]]))]


def _gap(trace, device, cta, role, tile, low, following, high):
    """Returns what lies between the products of two tiles: first what the multiplier does, then what it waits for."""
    rows = []
    for span, name in _INSIDE_A_GAP.items():
        stop = trace.spans(span, role)[1, device, cta, tile]
        if stop > low:
            rows.append((name, low, min(stop, high)))  # With the moment before it.
            low = min(stop, high)
    waits, goes_on = np.clip(np.nan_to_num(trace.spans("ready", LOADER)[:, device, cta, following], nan=low), low, high)
    return [*rows, ("refill", low, waits), ("wait", waits, goes_on), ("refill", goes_on, high)]
