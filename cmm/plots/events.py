"""What happened in a kernel, in which order, on which device: the events that `cmm.interpret` records, as a picture."""

from collections.abc import Iterable, Sequence

from matplotlib.patches import FancyArrowPatch
from matplotlib.patheffects import withStroke

from cmm.interpret import Event
from cmm.plots.palette import (
    CAPTION_SIZE,
    INK,
    MUTED,
    SMALL_SIZE,
    TRACK,
    WIDTH,
    device_color,
    styled,
    text_color,
    tint,
)
from cmm.plots.shapes import MARGIN, axes_at, block, hatched, page

_COPIES = ("load", "store", "send", "fetch")
_DRAWN = (*_COPIES, "tile_product", "signal", "wait")
_LANE, _GAP = 0.27, 0.24  # inches
_LEFT, _RIGHT = MARGIN + 1.35, 0.25
_SHORTEST = 0.6  # Width of a store that takes no time.
_TICK = 0.06  # Width of a wait that takes none, in inches.
_FLIGHT = 0.5  # How far an arrow leads to the right: it arrives before the next moment.
_TIP = 0.04  # How deep it enters the lane that it leads to, in inches: less than would touch a name there.
_NAME_HEIGHT, _CLEAR = 0.14, 0.08  # Of the name in a box, and the space between it and an arrow, in inches.
_AFTER = {"signal": 1, "wait": 2, "kernel": 2}  # Among ends at one time, causes come first.
KEY = (
    "Solid arrow: data has reached another device's memory. Dotted arrow: a signal, it adds 1. Hatched: a wait, with "
    "its value; a thin bar is a wait that found its value there. Grey ground: the kernel runs. Left to right is the "
    "order of events; lengths mean nothing."
)

Moment = tuple[float, int]
Line = tuple[tuple[float, float], tuple[float, float]]  # from and to: moments to the right, inches up


def begin_of(e: Event) -> Moment:
    """Returns the moment at which an event begins: its time, and its place among what happens at that time."""
    return e.start_s, 0


def end_of(e: Event) -> Moment:
    """Returns the moment at which an event ends. A wait ends at the time of the signal it needed, but after it."""
    return e.end_s, _AFTER.get(e.kind, 0)


def moments(events: Sequence[Event]) -> dict[Moment, int]:
    """Returns a number for each moment at which something begins or ends: 0, 1, 2, in order of time and of causes.

    Simulated times order events and predict nothing, so pictures use these numbers in their place.
    """
    return {moment: n for n, moment in enumerate(sorted({m for e in events for m in (begin_of(e), end_of(e))}))}


@styled
def draw_events(events: Sequence[Event], title: str, caption: str = "", call: int = 0):
    """Draws one kernel call, two lanes per device: what its threads do, and the copies meanwhile.

    Args:
      events: what `Simulation.events` holds. One CTA per device, or lanes get crowded.
      title: the message of the figure.
      caption: what else a reader must know; the key to the signs is added.
      call: number of the kernel call within the events.

    Returns:
      A `matplotlib.figure.Figure`. The colour of a block or an arrow is that of the device that acts.

    Raises:
      ValueError: this call has no events.
    """
    events = [e for e in events if e.call == call]
    if not events:
        raise ValueError(f"There are no events of {call=}.")
    devices = sorted({e.device for e in events})
    at = moments([e for e in events if e.kind in (*_DRAWN, "kernel")])
    height = len(devices) * (2 * _LANE + _GAP)
    fig, bottom = page(height, title, "\n".join(filter(None, (caption, KEY))))
    ax = axes_at(fig, _LEFT, bottom + 0.05, WIDTH - _LEFT - _RIGHT, height, frame_on=False, xticks=[], yticks=[])
    ax.set(xlim=(-0.1, max(at.values()) + 0.6), ylim=(0, height))
    # low[device]: lower edge of its copy lane; the lane of its threads lies above.
    low = {device: height - (i + 1) * (2 * _LANE + _GAP) + _GAP / 2 for i, device in enumerate(devices)}
    rows = {e.index: _row(e, events) for e in events if e.kind in _DRAWN}
    lines = {e.index: _line(e, at, low, rows[e.index]) for e in events if e.kind in ("signal", "send")}
    for e in events:
        if e.kind == "kernel":
            for lane in (0, _LANE):
                left, right = at[begin_of(e)], at[end_of(e)]
                block(ax, left, low[e.device] + lane, right - left, _LANE - 0.02, TRACK, linewidth=0, zorder=1)
        elif e.kind in _DRAWN and e.kind != "signal":
            _draw_box(ax, e, at, low[e.device], rows[e.index], lines.values())
        if e.index in lines:
            _arrow(ax, lines[e.index], device_color(e.device), "dotted" if e.kind == "signal" else "solid")
    for device in devices:
        for text, x, y, style in (
            (f"device {device}", MARGIN - _LEFT, _LANE, {"size": SMALL_SIZE, "color": INK}),
            ("threads", -0.08, 1.5 * _LANE, {"size": CAPTION_SIZE - 1, "color": MUTED, "ha": "right"}),
            ("copies", -0.08, 0.5 * _LANE, {"size": CAPTION_SIZE - 1, "color": MUTED, "ha": "right"}),
        ):
            place = ((x + _LEFT) / WIDTH, (bottom + 0.05 + low[device] + y) / fig.get_figheight())
            fig.text(*place, text, va="center_baseline", **style)
    return fig


def _row(e: Event, events: Sequence[Event]) -> tuple[float, float]:
    """Returns lower edge and height of an event within its lane: copies that overlap share the lane."""
    others = [o for o in events if o.kind in _COPIES and o.device == e.device and o.index != e.index]
    overlapping = [o for o in others if o.start_s < e.end_s and e.start_s < o.end_s]
    if e.kind not in _COPIES or not overlapping:
        return 0, _LANE - 0.02
    first = all((e.start_s, e.index) < (o.start_s, o.index) for o in overlapping)
    return (_LANE / 2 if first else 0), _LANE / 2 - 0.01


def _on_copies(e: Event) -> bool:
    # What takes no time is no copy by TMA: the threads have stored it themselves.
    return e.kind in _COPIES and e.start_s < e.end_s


def _line(e: Event, at: dict, low: dict, row: tuple[float, float]) -> Line:
    """Returns the arrow of a send or a signal: from its end to the same lane of the peer, or of this device."""
    lane = 0 if _on_copies(e) else _LANE
    device = e.device if e.peer is None else e.peer
    begin = at[end_of(e)], low[e.device] + lane + row[0] + row[1] / 2
    from_below, from_above = low[device] + lane + _TIP, low[device] + lane + _LANE - 0.02 - _TIP
    height = begin[1] if device == e.device else from_below if low[device] > low[e.device] else from_above
    # It leans, since arrows of several devices that act at one moment would lie on top of each other.
    return begin, (begin[0] + _FLIGHT, height)


def _draw_box(ax, e: Event, at: dict, low: float, row: tuple[float, float], lines: Iterable[Line]) -> None:
    color, begin, end = device_color(e.device), at[begin_of(e)], at[end_of(e)]
    inches_per_moment = ax.get_position().width * WIDTH / (ax.get_xlim()[1] - ax.get_xlim()[0])
    takes_time = e.start_s < e.end_s
    lane, thickness = low + (0 if _on_copies(e) else _LANE) + row[0], row[1]
    if e.kind == "wait" and not takes_time:
        width = _TICK / inches_per_moment
        block(ax, end - width, lane, width, thickness, MUTED, linewidth=0.6, gid="found")
        return
    left = begin if takes_time else end - _SHORTEST
    look = hatched(MUTED) if e.kind == "wait" else {"facecolor": tint(color, 0.5)}
    block(ax, left, lane, end - left, thickness, linewidth=0.6, **look)
    text = f"wait {e.awaited}" if e.kind == "wait" else e.kind.replace("tile_", "")
    if 0.085 * len(text) > (end - left) * inches_per_moment:
        return
    size = CAPTION_SIZE if thickness > _LANE / 2 else CAPTION_SIZE - 1.5
    width = 0.07 * len(text) * size / CAPTION_SIZE / inches_per_moment
    middle = lane + thickness / 2
    x = _free_place(left, end, middle, width, _CLEAR / inches_per_moment, lines)
    # On hatching, a halo keeps the strokes off the letters.
    halo = [withStroke(linewidth=3, foreground=look["facecolor"])] if e.kind == "wait" else []
    ink = text_color(look["facecolor"])
    ax.text(x, middle, text, size=size, color=ink, ha="center", va="center_baseline", path_effects=halo, zorder=8)


def _free_place(left, right, height, width, clear, lines: Iterable[Line]) -> float:
    """Returns where the middle of a name stands in its box: as near to that of the box as arrows leave room."""
    taken = []
    for (x0, y0), (x1, y1) in lines:
        low, high = max(min(y0, y1), height - _NAME_HEIGHT / 2), min(max(y0, y1), height + _NAME_HEIGHT / 2)
        if low <= high:
            xs = [x0 + (x1 - x0) * (y - y0) / (y1 - y0) for y in (low, high)] if y0 != y1 else [x0, x1]
            taken.append((min(xs) - clear, max(xs) + clear))
    free, begin = [], left
    for start, stop in [*sorted(t for t in taken if t[0] < right and t[1] > left), (right, right)]:
        free.append((begin, max(begin, min(start, right))))
        begin = max(begin, stop)
    middle = (left + right) / 2
    fitting = [(a + width / 2, b - width / 2) for a, b in free if b - a >= width]
    if not fitting:
        a, b = max(free, key=lambda gap: gap[1] - gap[0])
        return min(max((a + b) / 2, left + width / 2), right - width / 2)
    return min((min(max(middle, a), b) for a, b in fitting), key=lambda x: abs(x - middle))


def _arrow(ax, line: Line, color: str, style: str) -> None:
    look = {"linestyle": style, "color": color, "linewidth": 1.8, "mutation_scale": 11, "shrinkA": 0, "shrinkB": 0}
    look["path_effects"] = [withStroke(linewidth=2.8, foreground=INK)]  # Some colours are weak on a grey ground.
    ax.add_artist(FancyArrowPatch(*line, arrowstyle="-|>", zorder=6, **look))
    ax.plot(*line[0], "o", color=color, markersize=5, markeredgecolor=INK, markeredgewidth=0.6, zorder=7)
