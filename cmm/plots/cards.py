"""One step of the ring as a picture: a card for each device, an arrow for each shard that is sent."""

import numpy as np
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path

from cmm.plots.geometry import Ring, Way
from cmm.plots.palette import CAPTION_SIZE, EMPTY, INK, LABEL_SIZE, MUTED, SMALL_SIZE, device_color
from cmm.plots.shapes import block, hatched, lhs_name, rhs_name

_PAD = 0.09
_HEADER = 0.24
# Where the parts of a card begin and how wide they are, as shares of its inner width.
_WIDE = {"lhs": (0.0, 0.28), "@": (0.35, 0), "rhs": (0.42, 0.2), "=": (0.69, 0), "out": (0.76, 0.24)}
_NARROW = {"lhs": (0.0, 0.52), "out": (0.64, 0.36)}


def draw_step(ax, data: dict, step: int, ring: Ring):
    """Draws what all devices do in one step.

    Args:
      ax: axes in inches.
      data: as `cmm.plots.ring.ring_data` returns it.
      step: which step.
      ring: where the cards stand.
    """
    actions = [action for action in data["actions"] if action["step"] == step]
    for device in range(data["axis_size"]):
        draw_card(ax, ring, [action for action in actions if action["device"] == device])
    for action in actions:
        if action["sends"] is not None:
            draw_hop(ax, ring, action)


def draw_card(ax, ring: Ring, actions):
    """Draws a device with the shard that it multiplies, its weights, and its part of the result.

    Args:
      ax: axes in inches.
      ring: where the card stands.
      actions: what the device does in this step, one entry for each direction.
    """
    device = actions[0]["device"]
    width, height = ring.card
    left, bottom = ring.position(device) - np.array(ring.card) / 2
    frame = FancyBboxPatch((left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.08", zorder=2)
    frame.set(facecolor=EMPTY, edgecolor=device_color(device), linewidth=2, gid=f"card-{actions[0]['step']}-{device}")
    ax.add_artist(frame)
    size = LABEL_SIZE if width > 1.5 else SMALL_SIZE if width > 1 else CAPTION_SIZE
    ax.text(left + _PAD, bottom + height - 0.12, f"device {device}", size=size, va="center_baseline", zorder=4)
    _draw_product(ax, actions, card_places(ring, device), size)


def card_places(ring: Ring, device: int) -> dict[str, tuple[float, float, float, float]]:
    """Returns left, bottom, width and height of what a card shows: "lhs", "out", and in wide cards "rhs" and signs."""
    width, height = ring.card
    left, bottom = ring.position(device) - np.array(ring.card) / 2
    inner, body = width - 2 * _PAD, height - _HEADER - _PAD
    # Two half shards need more room for their names than one shard.
    lhs_height = (0.9 if ring.both_ways else 0.56) * body
    places = {}
    for part, (start, share) in (_WIDE if width > 1 else _NARROW).items():
        tall = body if part in ("rhs", "out") else lhs_height
        low = bottom + _PAD + (body - tall) / 2
        places[part] = (left + _PAD + start * inner, low, share * inner, tall)
    return places


def _draw_product(ax, actions, places, size):
    device = actions[0]["device"]
    for index, action in enumerate(actions):
        x, y, width, height = half_of(places["lhs"], index, len(actions))
        gid = f"compute-{action['step']}-{device}-{action['computes']}-{action['part']}"
        look = (device_color(action["computes"]), lhs_name(action["computes"]))
        block(ax, x, y, width, height, *look, size if height > 0.2 else CAPTION_SIZE - 1, gid=gid)
        draw_out(ax, places["out"], action, index, len(actions))
    if "rhs" in places:
        block(ax, *places["rhs"], device_color(device), rhs_name(device), size)
        for sign in ("@", "="):
            x, y, _, height = places[sign]
            ax.text(x, y + height / 2, sign, size=0.9 * size, ha="center", va="center_baseline", zorder=4)


def half_of(place, index: int, count: int) -> tuple[float, float, float, float]:
    """Returns the `index`-th of `count` equal strips of a place, the first on top."""
    x, y, width, height = place
    return x, y + height - (index + 1) * height / count, width, height / count


def draw_out(ax, place, action: dict, index: int, count: int):
    """Draws a device's columns of C: finished row blocks solid, the one at work hatched, the others empty."""
    axis_size = action["axis_size"]
    for shard in range(axis_size):
        strip = half_of(half_of(place, shard, axis_size), index, count)
        state = "finished" if shard in action["finished"] else "now" if shard == action["computes"] else "empty"
        color = device_color(shard)
        gid = f"out-{action['step']}-{action['device']}-{shard}-{action['part']}-{state}"
        look = {"finished": {"facecolor": color}, "now": hatched(color), "empty": {}}[state]
        # Thin strips would be all outline.
        linewidth = 0.6 if strip[3] > 0.06 else 0.3
        block(ax, *strip, **({"linewidth": linewidth, "gid": gid} | look))


def draw_hop(ax, ring: Ring, action: dict):
    """Draws the arrow of one shard that is sent, and its name beside it."""
    way = ring.way(action["device"], action["send_to"], action["direction"])
    gid = f"send-{action['step']}-{action['device']}-{action['send_to']}-{action['sends']}-{action['part']}"
    ax.add_artist(arrow(way, gid=gid))
    roomy = ring.card[0] > 1
    box = np.array((0.36, 0.26) if roomy else (0.28, 0.21)) * (1, 0.8 if action["part"] != "all" else 1)
    x, y = way.beside(box) - box / 2
    look = (device_color(action["sends"]), lhs_name(action["sends"]), SMALL_SIZE if roomy else CAPTION_SIZE)
    block(ax, x, y, *box, *look, gid=f"label-{gid}")


def arrow(way: Way, **settings) -> FancyArrowPatch:
    """Returns an arrow along a way."""
    path = Path([way.start, way.control, way.end], [Path.MOVETO, Path.CURVE3, Path.CURVE3])
    look = {"arrowstyle": "-|>,head_length=6,head_width=3.5", "color": INK, "linewidth": 1.6, "zorder": 1}
    return FancyArrowPatch(path=path, shrinkA=0, shrinkB=0, **(look | settings))


def draw_key(ax, x: float, y: float):
    """Draws the key of the three states of a row block of C, in one line from `(x, y)`."""
    color = device_color(0)
    states = (({"facecolor": color}, "finished"), (hatched(color), "being multiplied now"), ({}, "still to come"))
    ax.text(x, y, "Row blocks of $C_d$:", size=SMALL_SIZE, color=MUTED, va="center_baseline")
    x += 1.62
    for look, name in states:
        block(ax, x, y - 0.075, 0.26, 0.15, **({"linewidth": 0.6} | look))
        ax.text(x + 0.34, y, name, size=SMALL_SIZE, color=MUTED, va="center_baseline")
        x += 0.66 + 0.074 * len(name)
