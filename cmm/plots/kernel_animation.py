"""One kernel, step by step: tiles of A go through shared memory into the product, and from there to the neighbour."""

from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from PIL import Image

from cmm.interpret import Event
from cmm.plots.gif import write_gif
from cmm.plots.kernel_frames import DeviceState, Frame, frames
from cmm.plots.kernel_uses import K_STEPS, M_TILES, N_TILES, PROBLEM, record_kernel
from cmm.plots.palette import (
    ACCENT,
    CAPTION_SIZE,
    EMPTY,
    INK,
    LABEL_SIZE,
    MUTED,
    RULE,
    WIDTH,
    device_color,
    styled,
    tint,
)
from cmm.plots.shapes import MARGIN, block, hatched, inch_axes, lhs_name, out_name, page
from cmm.schedule import neighbour, shard_at

_DPI = 100
# In inches. Cards stand on the ring as in the other figures: device 0 upper left, numbers run clockwise.
_CARD = np.array((3.5, 2.17))
_EDGE, _WORDS, _BELOW = 0.25, 0.62, 0.06
_GAPS = np.array((WIDTH - 2 * _EDGE - 2 * _CARD[0], 0.4))
_PLACES = ((0, 1), (1, 1), (1, 0), (0, 0))
_CELL, _SLOT_PITCH, _STAGE, _STAGE_PITCH = (0.25, 0.19), 0.64, (0.8, 0.32), 0.86
_RESULT_LEFT, _RESULT_CELL = 2.94, (0.23, 0.18)
_TITLE = "Shared memory feeds the product and the neighbour"
_CAPTION = (
    "Colour: the device that owned the shard. Hatched: a tile on its way into a slot, or a tile of the result at work. "
    "(m, k): place of a tile in its shard. Below a slot: its semaphore, which counts rows of tiles that are complete. "
    "A stage also holds a tile of B; the two multipliers of a CTA share a stage, and need not be at the same one.\n"
    "From a run on simulated devices, one CTA each. Pictures are in the order of events; no times are claimed. Devices "
    "move alike here; on GPUs they need not."
)


def kernel_animation_data(pictures: Sequence[Frame]) -> dict:
    """Returns what the animation shows. Cells of slots and tiles of the result: `.` empty, `~` at work, `#` done."""
    marks = {"empty": ".", "at work": "~", "done": "#"}
    cells = lambda states: "".join(marks[state] for state in states)
    words_of = lambda words: words.replace("\n", " and ")
    stage = lambda s, words: f"A{s.use.shard} ({s.use.m}, {s.use.k}) {words_of(words)}" if s else "empty"
    device = lambda d: {
        "stages": "; ".join(map(stage, d.stages, d.words)),
        "slots": " ".join(map(cells, d.slots)),
        "received": " ".join(map(str, d.received)),
        "result": cells(d.tiles),
    }
    rows = [{"text": p.text, "duration_ms": p.duration_ms, "devices": list(map(device, p.devices))} for p in pictures]
    return {"source": "cmm.plots.kernel_uses.record_kernel: a run on simulated devices", "frames": rows}


def kernel_animation(path, events: Sequence[Event] | None = None, frame_numbers: slice = slice(None)) -> dict:
    """Writes an animated GIF of the readable ring kernel on four devices, 800 pixels wide, that repeats for ever.

    Args:
      path: file to write; its folder is made if needed.
      events: what `cmm.plots.kernel_uses.record_kernel` returns; by default it is called.
      frame_numbers: which frames, all by default.

    Returns:
      What the animation shows, as plain Python values.

    Source: `cmm.hopper.ring_kernel`, run by `cmm.interpret`.
    """
    pictures = frames(record_kernel() if events is None else events)[frame_numbers]
    write_gif(path, draw_frames(pictures), [picture.duration_ms for picture in pictures])
    return kernel_animation_data(pictures)


@styled
def draw_frames(pictures: Sequence[Frame]) -> list[Image.Image]:
    """Returns the pictures of the animation, in RGB."""
    fig, bottom = page(_WORDS + 2 * _CARD[1] + _GAPS[1] + _BELOW, _TITLE, _CAPTION)
    fig.set_dpi(_DPI)
    # One canvas for all: it remembers how letters look.
    canvas, images = FigureCanvasAgg(fig), []
    for picture in pictures:
        ax = inch_axes(fig)
        _draw_frame(ax, bottom + _BELOW, picture)
        canvas.draw()
        images.append(Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy()))
        ax.remove()
    return images


def _draw_frame(ax, bottom: float, frame: Frame) -> None:
    top = bottom + 2 * _CARD[1] + _GAPS[1] + _WORDS
    heading, sentence = frame.text.split("\n")
    ax.text(MARGIN, top - 0.08, heading, size=LABEL_SIZE, weight="bold", color=ACCENT, va="center_baseline")
    ax.text(MARGIN, top - 0.31, sentence, size=LABEL_SIZE, va="center_baseline")
    for device, state in enumerate(frame.devices):
        x, y = (_EDGE, bottom) + np.array(_PLACES[device]) * (_CARD + _GAPS)
        _draw_card(ax, x, y + _CARD[1], device, state, frame.focus)
        target = frame.devices[neighbour(device, PROBLEM.axis_size)]
        _draw_hop(ax, (x, y) + _CARD / 2, device, target)


def _draw_card(ax, left: float, top: float, device: int, state: DeviceState, focus) -> None:
    frame = FancyBboxPatch((left, top - _CARD[1]), *_CARD, boxstyle="round,pad=0,rounding_size=0.08", zorder=2)
    frame.set(facecolor=EMPTY, edgecolor=device_color(device), linewidth=2)
    ax.add_artist(frame)
    left += 0.12
    shard = shard_at(device, state.step, PROBLEM.axis_size)
    _text(ax, left, top - 0.16, f"device {device}", size=LABEL_SIZE, weight="bold", color=INK)
    _text(ax, left + 0.95, top - 0.16, f"step {state.step}: multiplies {lhs_name(shard)}", color=INK)
    _text(ax, left, top - 0.38, "A in global memory")
    _draw_shard(ax, left, top - 0.48, device, ["done"] * M_TILES * K_STEPS, "own")
    for slot, cells in enumerate(state.slots):
        x = left + (slot + 1) * _SLOT_PITCH
        _draw_shard(ax, x, top - 0.48, shard_at(device, slot + 1, PROBLEM.axis_size), cells, f"slot {slot}")
        _draw_count(ax, x, top - 1.18, state.received[slot], focus == ("slot", slot))
    _text(ax, left, top - 1.38, "stages in shared memory")
    for number, (stage, words) in enumerate(zip(state.stages, state.words, strict=True)):
        x, border = left + number * _STAGE_PITCH, {"linewidth": 2.4} if focus == ("stage", number) else {}
        color = device_color(stage.use.shard) if stage else EMPTY
        color = tint(color, 0.25) if words in ("load", "done") else color
        label = f"{lhs_name(stage.use.shard)} ({stage.use.m}, {stage.use.k})" if stage else ""
        block(ax, x, top - 1.8, *_STAGE, color, label, LABEL_SIZE, **border)
        for line, word in enumerate(words.split("\n")):
            _text(ax, x + _STAGE[0] / 2, top - 1.89 - 0.13 * line, word, ha="center", color=INK)
    _draw_result(ax, left - 0.12 + _RESULT_LEFT, top - 0.48, device, state.tiles)


def _draw_shard(ax, left: float, top: float, shard: int, cells: Sequence[str], name: str) -> None:
    """Draws the tiles of a shard in global memory, row by row, and the name of the place below them."""
    for number, state in enumerate(cells):
        m, k = divmod(number, K_STEPS)
        _cell(ax, left + k * _CELL[0], top - (m + 1) * _CELL[1], _CELL, device_color(shard), state)
    middle = left + K_STEPS * _CELL[0] / 2
    _text(ax, middle, top - M_TILES * _CELL[1] - 0.12, name, ha="center")
    if "empty" not in cells:
        color = EMPTY if "at work" in cells else device_color(shard)
        # On a ground of its own: the borders of the tiles would run through the letters.
        ground = (middle - 0.12, top - M_TILES * _CELL[1] / 2 - 0.085, 0.24, 0.17)
        block(ax, *ground, color, lhs_name(shard), LABEL_SIZE, linewidth=0, zorder=4)


def _draw_count(ax, left: float, y: float, count: int, in_focus: bool) -> None:
    width = K_STEPS * _CELL[0]
    if in_focus:
        block(ax, left - 0.02, y - 0.085, width + 0.04, 0.17, tint(ACCENT, 0.2), linewidth=1, edgecolor=ACCENT)
    look = {"color": INK, "weight": "bold"} if count else {}
    _text(ax, left + width / 2, y, f"{count} of {M_TILES}", ha="center", **look)


def _draw_result(ax, left: float, top: float, device: int, tiles: Sequence[str]) -> None:
    """Draws a device's columns of the result, the rows of each shard in its colour."""
    _text(
        ax, left + N_TILES * _RESULT_CELL[0] / 2, top + 0.1, out_name(device), ha="center", size=LABEL_SIZE, color=INK
    )
    for number, state in enumerate(tiles):
        row, n = divmod(number, N_TILES)
        place = left + n * _RESULT_CELL[0], top - (row + 1) * _RESULT_CELL[1]
        _cell(ax, *place, _RESULT_CELL, device_color(row // M_TILES), state)
    for shard in range(PROBLEM.axis_size):
        _text(ax, left - 0.06, top - (shard + 0.5) * M_TILES * _RESULT_CELL[1], lhs_name(shard), ha="right")


def _cell(ax, x, y, size, color, state) -> None:
    look = {"empty": {}, "at work": hatched(color), "done": {"facecolor": color}}[state]
    block(ax, x, y, *size, linewidth=0.6, **look)


def _draw_hop(ax, middle, device: int, target: DeviceState) -> None:
    """Draws the way to the neighbour, and on it the tiles that are under way."""
    shards = [
        shard_at(neighbour(device, PROBLEM.axis_size), slot + 1, PROBLEM.axis_size)
        for slot, cells in enumerate(target.slots)
        for state in cells
        if state == "at work"
    ]
    to = np.array(_PLACES[neighbour(device, PROBLEM.axis_size)]) - np.array(_PLACES[device])
    start = middle + to * (_CARD / 2 + 0.05)
    stop = start + to * (_GAPS - 0.1)
    look = {"color": INK, "linewidth": 2.0} if shards else {"color": RULE, "linewidth": 1.6}
    ax.add_artist(FancyArrowPatch(start, stop, arrowstyle="-|>", mutation_scale=12, shrinkA=0, shrinkB=0, **look))
    aside = np.array((0.0, 0.2)) if to[0] else np.array((0.32, 0.0))
    for number, shard in enumerate(shards):
        step = np.array((0.0, 0.27)) if to[0] else np.array((0.36, 0.0))
        x, y = (start + stop) / 2 + aside + number * step - (0.16, 0.11)
        block(ax, x, y, 0.32, 0.22, device_color(shard), lhs_name(shard), CAPTION_SIZE)


def _text(ax, x, y, text: str, **settings) -> None:
    look = {"size": CAPTION_SIZE, "color": MUTED, "va": "center_baseline", "zorder": 6}
    ax.text(x, y, text, **(look | settings))
