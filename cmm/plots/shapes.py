"""The pieces that figures are made of: a page with title and caption, named blocks, and names of shards."""

import textwrap

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.transforms import ScaledTranslation

from cmm.plots.palette import (
    BACKGROUND,
    CAPTION_SIZE,
    EMPTY,
    HEADING_SIZE,
    INK,
    LABEL_SIZE,
    MUTED,
    SMALL_SIZE,
    TITLE_SIZE,
    WIDTH,
    text_color,
)

MARGIN = 0.3
_CAPTION_CHARACTERS = 108
_TITLE_CHARACTERS = 62
_CAPTION_LINE = 0.175
HEADER = 0.68


def lhs_name(shard: int) -> str:
    """Returns the name of a shard of the activations as figures print it."""
    return f"$A_{{{shard}}}$"


def rhs_name(device: int) -> str:
    """Returns the name of a device's columns of the weights."""
    return f"$B_{{{device}}}$"


def out_name(device: int) -> str:
    """Returns the name of a device's columns of the result."""
    return f"$C_{{{device}}}$"


def page(body_height: float, title: str, caption: str = "") -> tuple[Figure, float]:
    """Makes a figure of the usual width with a title above its body and a caption below it.

    Args:
      body_height: height of the part between title and caption, in inches.
      title: the message of the figure, one line.
      caption: what a reader must know to judge it (source, what is left out); each of its lines is wrapped.

    Returns:
      The figure, and the height in inches at which the body begins.
    """
    lines = [line for part in caption.splitlines() for line in textwrap.wrap(part, _CAPTION_CHARACTERS)]
    bottom = MARGIN + len(lines) * _CAPTION_LINE
    height = HEADER + body_height + bottom
    fig = Figure(figsize=(WIDTH, height), facecolor=BACKGROUND)
    fig.set_label(title)
    left = MARGIN / WIDTH
    size = TITLE_SIZE * min(1, _TITLE_CHARACTERS / len(title))
    fig.text(left, 1 - 0.42 / height, title, size=size, weight="bold", va="baseline", gid="title")
    if lines:
        fig.text(
            left, (bottom - 0.08) / height, "\n".join(lines), size=CAPTION_SIZE, color=MUTED, va="top", linespacing=1.25
        )
    return fig, bottom


def inch_axes(fig: Figure):
    """Returns axes over the whole figure whose units are inches from its lower left corner, with nothing drawn."""
    width, height = fig.get_size_inches()
    ax = fig.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height), frame_on=False, xticks=[], yticks=[])
    ax.set_facecolor("none")
    return ax


def axes_at(fig: Figure, left: float, bottom: float, width: float, height: float, **settings):
    """Returns axes whose place in the figure is given in inches."""
    fig_width, fig_height = fig.get_size_inches()
    rect = (left / fig_width, bottom / fig_height, width / fig_width, height / fig_height)
    return fig.add_axes(rect, **settings)


def inches_from(ax):
    """Returns the transform whose units are inches right of and above the lower left corner of `ax`."""
    return ax.figure.dpi_scale_trans + ScaledTranslation(0, 0, ax.transAxes)


def key_at(fig: Figure, left: float, top: float, columns: int, handles, **settings):
    """Draws a key without a frame.

    Args:
      fig: the figure.
      left, top: its upper left corner, in inches.
      columns: how many entries stand side by side.
      handles: what it shows; `settings` go to `Figure.legend`.
    """
    place = {"loc": "upper left", "bbox_to_anchor": (left / WIDTH, top / fig.get_figheight())}
    look = {"frameon": False, "fontsize": SMALL_SIZE, "borderaxespad": 0, "borderpad": 0}
    return fig.legend(handles=handles, ncols=columns, **place, **look, **settings)


def block(ax, x, y, width, height, color=EMPTY, label="", size=LABEL_SIZE, **patch) -> Rectangle:
    """Draws a rectangle with its lower left corner at `(x, y)` and `label` in its middle.

    Args:
      ax: axes to draw in.
      x, y, width, height: place and size in the units of the axes.
      color: fill; the text takes the colour that reads best on it.
      label: text, none if empty.
      size: size of the text in points.
      **patch: further settings of the rectangle, such as `hatch`, `zorder` and `gid`.
    """
    settings = {"facecolor": color, "edgecolor": INK, "linewidth": 0.8, "zorder": 3} | patch
    rectangle = Rectangle((x, y), width, height, **settings)
    # All axes here have fixed limits, so nothing needs to be measured, which `add_patch` would do.
    ax.add_artist(rectangle)
    if label:
        middle = (x + width / 2, y + height / 2)
        # On hatching, a halo keeps the strokes off the letters.
        halo = [withStroke(linewidth=3, foreground=settings["facecolor"])] if settings.get("hatch") else []
        ink = text_color(settings["facecolor"])
        text = ax.text(*middle, label, size=size, color=ink, ha="center", va="center_baseline", path_effects=halo)
        text.set_zorder(settings["zorder"] + 1)
    return rectangle


def heading(ax, x, y, text: str, **settings):
    """Writes the heading of one part of a figure."""
    ax.text(x, y, text, **({"size": HEADING_SIZE, "weight": "bold", "va": "baseline"} | settings))


def hatched(color: str, background: str = EMPTY) -> dict:
    """Returns the settings of a block that is hatched in `color`: something that is missing, or still at work."""
    return {"facecolor": background, "hatchcolor": color, "hatch": "////", "hatch_linewidth": 1.2}
