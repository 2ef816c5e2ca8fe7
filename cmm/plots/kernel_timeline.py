"""Inside a ring kernel, at the change from one step to the next: what each role of a CTA does when, on each device."""

from collections.abc import Sequence

from cmm.plots.events import begin_of, end_of, moments
from cmm.plots.palette import (
    ACCENT,
    CAPTION_SIZE,
    INK,
    MUTED,
    RULE,
    SMALL_SIZE,
    TRACK,
    WIDTH,
    device_color,
    styled,
    tint,
)
from cmm.plots.shapes import MARGIN, axes_at, block, hatched, inches_from, lhs_name, page
from cmm.trace.events import KernelEvent

_LANES = ("multiplier", "loader", "sends")
_LANE, _GAP, _DEVICE_GAP, _AXIS = 0.19, 0.08, 0.16, 0.5  # inches
_NAME_LINE = 0.15
_LEFT, _RIGHT = MARGIN + 2.3, 0.2
KEY = (
    "Full colour: products of one shard. Pale: the epilogue of a tile (multiplier), "
    "or stores to the neighbour under way (sends). Crosswise hatched, blue: the loader waits for signals from the "
    "neighbour. Hatched, grey: waits inside the CTA, or until stores are complete. Dot: a signal. Column: that of the "
    "result in which all tiles of the CTA lie."
)
MEASURED = "Times of all devices are on one axis."
CAUSAL = "Left to right is the order of events; lengths mean nothing."


def step_change(events: Sequence[KernelEvent], step: int = 1) -> tuple[float, float]:
    """Returns a window around the begin of a step: from the last cell of the step before to the end of its first.

    Args:
      events: of the CTAs that are drawn.
      step: the step that begins, from 1 on.

    Returns:
      Begin and end in seconds.

    Raises:
      ValueError: there is no such step.
    """
    products = [e for e in events if e.kind == "tile_product"]
    before, after = ([e for e in products if e.step == number] for number in (step - 1, step))
    if not before or not after:
        raise ValueError(f"There are no products on both sides of the begin of {step=}.")
    cells = lambda found, choose: [choose(_of_cta(found, key), key=lambda e: e.start_s) for key in _ctas(found)]
    return min(e.start_s for e in cells(before, max)), max(e.end_s for e in cells(after, min))


@styled
def draw_kernel_timeline(
    events: Sequence[KernelEvent],
    title: str,
    caption: str = "",
    *,
    ctas: Sequence[int] | None = None,
    window_s: tuple[float, float] | None = None,
    causal: bool = False,
):
    """Draws some CTAs of every device, with a lane for a multiplier, for the loader and for what is sent.

    Args:
      events: of a recorded call (`cmm.trace.call.Trace.events`).
      title: the message of the figure.
      caption: what else a reader must know; the key to the signs is added.
      ctas: which CTAs; by default the first, which computes a tile of column 0, and the last.
      window_s: begin and end of what is shown, in seconds; by default around the begin of step 1.
      causal: draw the order of events in place of their times, for simulated devices.

    Returns:
      A `matplotlib.figure.Figure`. The colour of a block is that of the device that owned the shard.

    Raises:
      ValueError: there are no such events.
    """
    ctas = ctas or _first_and_last(events)
    events = [e for e in events if e.cta in ctas]
    devices = sorted({e.device for e in events})
    low_s, high_s = window_s or step_change(events)
    shown = [e for e in events if e.end_s > low_s and e.start_s < high_s and _lane(e)]
    if not shown:
        raise ValueError(f"Nothing happens in CTAs {list(ctas)} from {low_s} s to {high_s} s.")
    if causal:
        numbers = moments(shown)
        place = lambda e: (numbers[begin_of(e)], numbers[end_of(e)])
        limits = (-0.5, max(numbers.values()) + 0.5)
    else:
        place = lambda e: (e.start_s * 1e6, e.end_s * 1e6)
        limits = (low_s * 1e6, high_s * 1e6)
    per_cta = len(_LANES) * _LANE + _GAP
    height = len(devices) * (len(ctas) * per_cta + _DEVICE_GAP)
    notes = "\n".join(filter(None, (caption, KEY, CAUSAL if causal else MEASURED)))
    fig, bottom = page(height + (0 if causal else _AXIS), title, notes)
    low = bottom + (0.05 if causal else _AXIS)
    ax = axes_at(fig, _LEFT, low, WIDTH - _LEFT - _RIGHT, height, xlim=limits, ylim=(0, height))
    _dress(ax, causal)
    sending = {e.cta for e in events if e.kind == "send"}
    # Where all send, or none, it need not be said.
    names = {cta: f"CTA {cta}, sends" if cta in sending < set(ctas) else f"CTA {cta}" for cta in ctas}
    lanes = _name_lanes(ax, devices, names, {cta: _column(events, cta) for cta in ctas}, height, per_cta)
    for lane in lanes.values():
        block(ax, limits[0], lane, limits[1] - limits[0], _LANE - 0.02, TRACK, linewidth=0, zorder=1)
    for event in shown:
        _draw(ax, event, place(event), limits, lanes[event.device, event.cta, _lane(event)], len(devices))
    return fig


def _first_and_last(events) -> list[int]:
    found = sorted({e.cta for e in events if e.kind == "tile_product"})
    if not found:
        raise ValueError("No event is a product of tiles.")
    return sorted({found[0], found[-1]})


def _ctas(events) -> set[tuple]:
    return {(e.device, e.cta, e.role) for e in events}


def _of_cta(events, key) -> list:
    return [e for e in events if (e.device, e.cta, e.role) == key]


def _lane(e: KernelEvent) -> str:
    """Returns the lane of an event, or nothing if it is not drawn: multipliers do the same, so one of them is."""
    if e.kind in ("send", "signal"):
        return "sends"
    # Other waits for stores lie under products, or are those of the sender.
    if e.name == "store read" or e.name == "store complete" and e.role != "multiplier 0":
        return ""
    if e.role == "multiplier 0":
        return "multiplier"
    return "loader" if e.role == "loader" and e.kind != "load" else ""


def _column(events, cta) -> str:
    """Returns in which column of the result a CTA works; nothing if in several."""
    columns = {e.tile[1] for e in events if e.cta == cta and e.kind == "tile_product"}
    return f"column {columns.pop()}" if len(columns) == 1 else ""


def _name_lanes(ax, devices, names, columns, height, per_cta) -> dict:
    """Writes the names of devices, CTAs and lanes; returns the lower edge of each lane.

    Args:
      names, columns: of CTAs, by their numbers.
    """
    lanes, top = {}, height
    text = {"transform": inches_from(ax), "va": "center_baseline"}
    for device in devices:
        top -= _DEVICE_GAP / 2
        ax.text(MARGIN - _LEFT, top - _LANE / 2, f"device {device}", size=SMALL_SIZE, **text)
        for cta, cta_name in names.items():
            middle = top - len(_LANES) * _LANE / 2
            first = middle + _NAME_LINE / 2 * bool(columns[cta])
            ax.text(MARGIN - _LEFT + 0.8, first, cta_name, size=CAPTION_SIZE - 1, color=INK, **text)
            ax.text(MARGIN - _LEFT + 0.8, first - _NAME_LINE, columns[cta], size=CAPTION_SIZE - 1, color=MUTED, **text)
            for number, name in enumerate(_LANES):
                lanes[device, cta, name] = top - (number + 1) * _LANE
                place = (-0.08, lanes[device, cta, name] + _LANE / 2)
                ax.text(*place, name, size=CAPTION_SIZE - 1.5, color=MUTED, ha="right", **text)
            top -= per_cta
        top -= _DEVICE_GAP / 2
    return lanes


def _draw(ax, e: KernelEvent, place, limits, low: float, num_devices: int) -> None:
    start, end = max(place[0], limits[0]), min(place[1], limits[1])
    shard = (e.device + e.step) % num_devices if e.step is not None else e.device
    color = device_color(shard)
    if e.kind == "signal":
        middle = low + (_LANE - 0.02) / 2
        ax.plot(end, middle, "o", color=color, markersize=4, markeredgecolor=INK, markeredgewidth=0.6, zorder=7)
        return
    if end <= start:
        return
    look = {"facecolor": color, "zorder": 3}
    text = lhs_name(shard) if e.kind == "tile_product" else ""
    if e.kind == "wait":
        look = hatched(ACCENT) | {"hatch": "xxxx", "zorder": 4}
    elif e.kind == "barrier_wait":
        look = hatched(MUTED) | {"zorder": 4}
    elif e.kind == "delay":
        look, text = {"facecolor": INK, "zorder": 5}, "delay"
    elif e.kind in ("send", "store"):
        look = {"facecolor": tint(color, 0.35), "zorder": 2}
        text = "epilogue" if e.kind == "store" else ""
    inches = (end - start) * (WIDTH - _LEFT - _RIGHT) / (limits[1] - limits[0])
    fits = (2 if text.startswith("$") else len(text)) * 0.075 < inches
    block(ax, start, low, end - start, _LANE - 0.02, label=text if fits else "", size=7.5, linewidth=0.5, **look)


def _dress(ax, causal: bool) -> None:
    ax.set_yticks([])
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.set_axisbelow(True)
    if causal:
        ax.set_xticks([])
        return
    ax.grid(axis="x", color=RULE, linewidth=0.8, zorder=0)
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel("time since the first CTA began, µs")
