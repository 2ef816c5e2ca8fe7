"""The ring in motion: shards travel from device to device while the products fill each device's columns of C."""

import pathlib

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from cmm.plots.cards import arrow, card_places, draw_card, half_of
from cmm.plots.gif import write_gif
from cmm.plots.palette import LABEL_SIZE, MUTED, SMALL_SIZE, device_color, styled, text_color
from cmm.plots.ring import Flow, ring_data, single_ring
from cmm.plots.shapes import block, inch_axes, lhs_name, page

_DPI = 100
_FRAME_MS = 50
_LAST_FRAME_MS = 2500
_PARCEL = np.array((0.4, 0.3))
# Shares of a step at which a parcel departs, arrives, and is taken in. Its arrival before the product is finished, at
# the third of them, is the point of the method; the lengths themselves are not to scale.
_DEPART, _ARRIVE, _HAND_OVER = 0.04, 0.62, 0.84


@styled
def ring_animation(path, axis_size: int = 4, direction: Flow = "down", frames_per_step: int = 36) -> pathlib.Path:
    """Writes an animated GIF of the whole ring, 800 pixels wide, that repeats for ever.

    Args:
      path: file to write; its folder is made if needed.
      axis_size: number of devices on the ring.
      direction: "down", "up", or "both" for halves of each shard that travel either way.
      frames_per_step: frames of one step, 50 ms each.

    Returns:
      The path.

    Raises:
      ValueError: `axis_size` is below 1, or the direction is unknown.

    Source: `cmm.schedule.ring_schedule`.
    """
    data = ring_data(axis_size, direction)
    frames = []
    for step in range(axis_size):
        scene = _Scene(data, step, "multiply and send" if step < axis_size - 1 else "multiply")
        frames += [scene.frame((index + 1) / frames_per_step) for index in range(frames_per_step)]
    frames.append(_Scene(data, axis_size - 1, "C is complete").frame(1.0))
    path = pathlib.Path(path)
    write_gif(path, frames, [_FRAME_MS] * (len(frames) - 1) + [_LAST_FRAME_MS])
    return path


class _Scene:
    """One step: what stands still is drawn once, what moves is drawn anew over a copy of it."""

    def __init__(self, data: dict, step: int, message: str):
        self.actions = [action for action in data["actions"] if action["step"] == step]
        height = 3.2 if data["axis_size"] <= 2 else 4.6
        fig, bottom = page(height, "Shards travel while products are computed", _caption(data))
        self.ax = inch_axes(fig)
        self.ring = single_ring(data["axis_size"], data["direction"], bottom + height / 2)
        self._draw_still(data["axis_size"], step, message)
        self.moving = [self._parcel(action) for action in self.actions if action["sends"] is not None]
        self.growing = [self._product(action) for action in self.actions]
        self.canvas = FigureCanvasAgg(fig)
        fig.set_dpi(_DPI)
        self.canvas.draw()
        self.still = self.canvas.copy_from_bbox(fig.bbox)

    def frame(self, time: float) -> Image.Image:
        """Returns the picture at `time`, the share of the step that has passed."""
        self.canvas.restore_region(self.still)
        for rectangle, full_width in self.growing:
            rectangle.set_width(full_width * _ease(time / _HAND_OVER, smooth=False))
            self.ax.draw_artist(rectangle)
        for parcel in self.moving:
            parcel.move(time)
            for artist in (parcel.rectangle, parcel.text):
                self.ax.draw_artist(artist)
        return Image.fromarray(np.asarray(self.canvas.buffer_rgba())[..., :3].copy())

    def _draw_still(self, axis_size: int, step: int, message: str):
        for device in range(axis_size):
            draw_card(self.ax, self.ring, [action for action in self.actions if action["device"] == device])
        for action in self.actions:
            if action["sends"] is not None:
                way = self.ring.way(action["device"], action["send_to"], action["direction"])
                self.ax.add_artist(arrow(way, color=MUTED, linewidth=1.3))
        x, y = self.ring.center
        # With one or two devices the middle is taken: the words stand above the ring then.
        y += 0.1 if axis_size > 2 else 1.3
        self.ax.text(x, y, f"step {step}", size=20, weight="bold", ha="center", va="center_baseline", color=MUTED)
        self.ax.text(x, y - 0.32, message, size=LABEL_SIZE, ha="center", va="center_baseline", color=MUTED)

    def _product(self, action: dict):
        """Returns the row block of C that grows while its product is computed, and its full width."""
        place = card_places(self.ring, action["device"])["out"]
        strip = half_of(place, action["computes"], action["axis_size"])
        x, y, width, height = half_of(strip, *_half(action))
        color = device_color(action["computes"])
        return block(self.ax, x, y, width, height, color, linewidth=0.6, animated=True), width

    def _parcel(self, action: dict) -> "_Parcel":
        way = self.ring.way(action["device"], action["send_to"], action["direction"], gap=0.24)
        leaves = half_of(card_places(self.ring, action["device"])["lhs"], *_half(action))
        enters = half_of(card_places(self.ring, action["send_to"])["lhs"], *_half(action))
        return _Parcel(self.ax, way, leaves, enters, action["sends"])


class _Parcel:
    """A shard on its way: out of one card, along the arrow, a rest beside the next card, and into it."""

    def __init__(self, ax, way, leaves, enters, shard: int):
        self.leaves, self.enters = _middle(leaves), _middle(enters)
        self.at_home = np.array(leaves[2:])
        # A half shard stays as flat as it is in its card.
        self.on_the_way = np.minimum(_PARCEL, self.at_home)
        self.road = np.array([self.leaves] + [way.point(share) for share in np.linspace(0, 1, 60)])
        self.miles = np.concatenate([[0], np.cumsum(np.linalg.norm(np.diff(self.road, axis=0), axis=1))])
        self.rectangle = block(ax, *leaves, device_color(shard), animated=True, zorder=8)
        ink = text_color(device_color(shard))
        self.text = ax.text(
            *self.leaves, lhs_name(shard), size=SMALL_SIZE, color=ink, ha="center", va="center_baseline", animated=True
        )

    def move(self, time: float):
        """Puts the parcel where it is at `time`, the share of the step that has passed."""
        travelled = _ease((time - _DEPART) / (_ARRIVE - _DEPART)) * self.miles[-1]
        handed_over = _ease((time - _HAND_OVER) / (1 - _HAND_OVER))
        beside = np.array([np.interp(travelled, self.miles, self.road[:, axis]) for axis in range(2)])
        place = (1 - handed_over) * beside + handed_over * self.enters
        shrunk = min(1.0, travelled / self.miles[1]) * (1 - handed_over)
        size = (1 - shrunk) * self.at_home + shrunk * self.on_the_way
        self.rectangle.set(xy=place - size / 2, width=size[0], height=size[1])
        self.text.set_position(place)


def _half(action: dict) -> tuple[int, int]:
    """Returns which strip of a block an action concerns, and how many there are."""
    return {"all": (0, 1), "upper": (0, 2), "lower": (1, 2)}[action["part"]]


def _middle(place) -> np.ndarray:
    x, y, width, height = place
    return np.array((x + width / 2, y + height / 2))


def _ease(share: float, smooth: bool = True) -> float:
    """Returns `share` kept between 0 and 1; smooth, it also starts and stops gently."""
    share = min(1.0, max(0.0, share))
    return share * share * (3 - 2 * share) if smooth else share


def _caption(data: dict) -> str:
    ways = {
        "down": "Each device multiplies the shard at hand and sends it on to the device before it",
        "up": "Each device multiplies the shard at hand and sends it on to the device after it",
        "both": "Each device multiplies two half shards; the upper one travels down the ring, the lower one up",
    }
    return ways[data["direction"]] + ". Arrival before the product ends means no waiting. Lengths are not to scale."
