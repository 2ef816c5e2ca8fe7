"""What happened in a kernel, in which order, on which device: the events that `cmm.interpret` records, as a picture."""

from collections.abc import Sequence

from matplotlib.patches import FancyArrowPatch

from cmm.interpret import Event
from cmm.plots.palette import CAPTION_SIZE, INK, MUTED, SMALL_SIZE, TRACK, WIDTH, device_color, styled, tint
from cmm.plots.shapes import MARGIN, axes_at, block, hatched, page

_COPIES = ("load", "store", "send", "fetch")
_DRAWN = (*_COPIES, "tile_product", "signal", "wait")
_LANE, _GAP = 0.27, 0.24  # inches
_LEFT, _RIGHT = MARGIN + 1.35, 0.25
_SHORTEST = 0.6  # Width of a store that takes no time.
_TICK = 0.06  # Width of a wait that takes none, in inches.
_FLIGHT = 0.5  # How far an arrow leads to the right: it arrives before the next moment.
_AFTER = {"signal": 1, "wait": 2, "kernel": 2}  # Among ends at one time, causes come first.
KEY = (
    "Solid arrow: data has reached another device's memory. Dotted arrow: a signal, it adds 1. Hatched: a wait, with "
    "its value; a thin bar is a wait that found its value there. Grey ground: the kernel runs. Left to right is the "
    "order of events; lengths mean nothing."
)

Moment = tuple[float, int]


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
    for e in events:
        if e.kind == "kernel":
            for lane in (0, _LANE):
                left, right = at[begin_of(e)], at[end_of(e)]
                block(ax, left, low[e.device] + lane, right - left, _LANE - 0.02, TRACK, linewidth=0, zorder=1)
        elif e.kind in _DRAWN:
            _draw_event(ax, e, at, low, _row(e, events))
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


def _draw_event(ax, e: Event, at: dict, low: dict, row: tuple[float, float]) -> None:
    color, y = device_color(e.device), low[e.device]
    begin, end = at[begin_of(e)], at[end_of(e)]
    if e.kind == "signal":
        _arrow(ax, (end, y + 1.5 * _LANE), e, low, color, "dotted")
        return
    inches_per_moment = ax.get_position().width * WIDTH / (ax.get_xlim()[1] - ax.get_xlim()[0])
    takes_time = e.start_s < e.end_s
    # What takes no time is no copy by TMA: the threads have stored it themselves.
    on_copies = e.kind in _COPIES and takes_time
    lane, thickness = (y if on_copies else y + _LANE) + row[0], row[1]
    if e.kind == "wait" and not takes_time:
        width = _TICK / inches_per_moment
        block(ax, end - width, lane, width, thickness, MUTED, linewidth=0.6, gid="found")
        return
    left = begin if takes_time else end - _SHORTEST
    look = hatched(MUTED) if e.kind == "wait" else {"facecolor": tint(color, 0.5)}
    text = f"wait {e.awaited}" if e.kind == "wait" else e.kind.replace("tile_", "")
    size = CAPTION_SIZE if thickness > _LANE / 2 else CAPTION_SIZE - 1.5
    fits = 0.085 * len(text) < (end - left) * inches_per_moment
    block(ax, left, lane, end - left, thickness, label=text if fits else "", size=size, linewidth=0.6, **look)
    if e.kind == "send":
        _arrow(ax, (end, lane + 0.5 * thickness), e, low, color, "solid")


def _arrow(ax, start, e: Event, low: dict, color: str, line: str) -> None:
    """Draws an arrow to the same lane of the peer, or of this device where there is none."""
    device = e.device if e.peer is None else e.peer
    # It leans, since arrows of several devices that act at one moment would lie on top of each other.
    stop = (start[0] + _FLIGHT, start[1] - low[e.device] + low[device])
    look = {"linestyle": line, "color": color, "linewidth": 1.8, "mutation_scale": 11, "shrinkA": 0, "shrinkB": 0}
    ax.add_artist(FancyArrowPatch(start, stop, arrowstyle="-|>", zorder=6, **look))
    ax.plot(*start, "o", color=color, markersize=5, markeredgecolor=INK, markeredgewidth=0.6, zorder=7)
