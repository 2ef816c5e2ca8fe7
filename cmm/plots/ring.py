"""What happens in a step of the ring: who multiplies which shard, who sends it where, and what is finished."""

import dataclasses
import math
from typing import Literal

from cmm.plots.cards import draw_key, draw_step
from cmm.plots.geometry import Ring
from cmm.plots.palette import LABEL_SIZE, WIDTH, styled
from cmm.plots.shapes import MARGIN, heading, inch_axes, page
from cmm.schedule import ring_schedule

Flow = Literal["down", "up", "both"]

# The directions of a flow, and which rows of a shard travel that way.
_PARTS = {"down": {"down": "all"}, "up": {"up": "all"}, "both": {"down": "upper", "up": "lower"}}
_SOURCE = "cmm.schedule.ring_schedule"


def ring_data(axis_size: int, direction: Flow = "down") -> dict:
    """Returns what the figures of the ring draw: every action of every device in every step.

    Args:
      axis_size: number of devices on the ring, at least 1.
      direction: "down", "up", or "both" for halves of each shard that travel either way.

    Returns:
      A dictionary with `actions`: the fields of `cmm.schedule.RingStep`, the direction, the part of the shard ("all",
      "upper" or "lower" half of its rows), and `finished`: the shards whose products were done before this step.

    Raises:
      ValueError: `axis_size` is below 1, or the direction is unknown.
    """
    if direction not in _PARTS:
        raise ValueError(f'direction must be "down", "up" or "both", got {direction!r}.')
    actions = []
    for one_way, part in _PARTS[direction].items():
        finished = {device: [] for device in range(axis_size)}
        for row in ring_schedule(axis_size, one_way):
            for at in row:
                more = {"direction": one_way, "part": part, "axis_size": axis_size}
                actions.append(dataclasses.asdict(at) | more | {"finished": list(finished[at.device])})
                finished[at.device].append(at.computes)
    return {"axis_size": axis_size, "direction": direction, "actions": actions, "source": _SOURCE}


@styled
def draw_ring(axis_size: int = 4, step: int = 0, direction: Flow = "down"):
    """Draws one step of the ring.

    Args:
      axis_size: number of devices on the ring.
      step: which step, 0 to `axis_size - 1`.
      direction: "down", "up", or "both" for halves of each shard that travel either way.

    Returns:
      A `matplotlib.figure.Figure`.

    Raises:
      ValueError: `axis_size` is below 1, the direction is unknown, or there is no such step.

    Source: `cmm.schedule.ring_schedule`.
    """
    data = ring_data(axis_size, direction)
    if not 0 <= step < axis_size:
        raise ValueError(f"step must be between 0 and axis_size - 1 = {axis_size - 1}, got {step}.")
    height = 3.4 if axis_size <= 2 else 4.75
    fig, bottom = page(height, _step_title(axis_size, step), _caption(axis_size, direction))
    ax = inch_axes(fig)
    draw_key(ax, MARGIN + 0.05, bottom + 0.12)
    draw_step(ax, data, step, single_ring(axis_size, direction, bottom + 0.48 + (height - 0.55) / 2))
    return fig


@styled
def draw_ring_steps(axis_size: int = 4, direction: Flow = "down"):
    """Draws all steps of the ring side by side, with the part of C that each device has finished so far.

    Args, Returns, Raises, Source: as `draw_ring`, without `step`.
    """
    data = ring_data(axis_size, direction)
    columns = min(axis_size, 2)
    rows = math.ceil(axis_size / columns)
    width, height = (WIDTH - 2 * MARGIN) / columns, _panel_height(axis_size, direction)
    fig, bottom = page(rows * height + 0.45, _steps_title(axis_size), _caption(axis_size, direction))
    ax = inch_axes(fig)
    draw_key(ax, MARGIN + 0.05, bottom + 0.12)
    for step in range(axis_size):
        left = MARGIN + step % columns * width
        low = bottom + 0.45 + (rows - 1 - step // columns) * height
        heading(ax, left + 0.05, low + height - 0.25, f"Step {step}", size=LABEL_SIZE)
        draw_step(ax, data, step, _small_ring(axis_size, direction, left + width / 2, low + (height - 0.3) / 2))
    return fig


def single_ring(axis_size: int, direction: Flow, middle: float) -> Ring:
    """Returns the ring of a figure that shows a single step, its middle at the height `middle`."""
    card, reach = ((2.0, 1.25), (2.45, 1.25)) if axis_size <= 4 else ((1.3, 0.82), (2.9, 1.55))
    return Ring(axis_size, (WIDTH / 2, middle), reach, card, direction == "both")


def _small_ring(axis_size: int, direction: Flow, x: float, y: float) -> Ring:
    card, reach = ((1.3, 0.84), (1.1, 0.84)) if axis_size <= 4 else ((0.78, 0.66), (1.33, 1.65))
    if (axis_size, direction) == (3, "both"):
        # Inside a triangle the ways run close together. Small cards leave room for the names of shards.
        card, reach = (0.78, 0.68), (1.3, 1.0)
    return Ring(axis_size, (x, y), reach, card, direction == "both")


def _panel_height(axis_size: int, direction: Flow) -> float:
    if axis_size <= 2 and direction != "both":
        return 2.2
    return 3.2 if axis_size <= 4 else 4.5


def _step_title(axis_size: int, step: int) -> str:
    if axis_size == 1:
        return "One device: it multiplies its own shard and sends nothing"
    if step == axis_size - 1:
        return f"Step {step}, the last: multiply the shard at hand, send nothing"
    return f"Step {step} of the ring: multiply the shard at hand and send it on"


def _steps_title(axis_size: int) -> str:
    if axis_size == 1:
        return _step_title(1, 0)
    return f"In {axis_size} steps every device multiplies every shard of A"


def _caption(axis_size: int, direction: Flow) -> str:
    """Says which way shards travel. The rule is that of the schedule; the pictures show its consequences."""
    if axis_size == 1:
        return "With one device there is no ring: the product is a local one."
    rules = {
        "down": "In step i device d multiplies shard (d + i) mod D, and meanwhile sends it to device d - 1.",
        "up": "In step i device d multiplies shard (d - i) mod D, and meanwhile sends it to device d + 1.",
        "both": "The upper half of each shard's rows travels down, to device d - 1, the lower half up, to d + 1.",
    }
    return rules[direction] + f" Device numbers count modulo D = {axis_size}. The last step sends nothing."
