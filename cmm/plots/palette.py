"""What every figure shares: colours, font sizes, settings of matplotlib, and files that do not change without reason.

Colours follow Okabe and Ito, whose set readers with any common colour blindness can tell apart. No figure relies on
colour alone: blocks carry names, and idle time is hatched. The background is opaque, so that figures read the same on
light and on dark pages.
"""

import contextlib
import functools
import io
import json
import pathlib

import matplotlib
from matplotlib.colors import to_hex, to_rgb

BACKGROUND = "#fbfbf8"
INK = "#222222"
MUTED = "#5a5f66"
RULE = "#d9d9d4"
TRACK = "#efefea"
EMPTY = "#ffffff"
NEUTRAL = "#8b929a"
ACCENT = "#0072B2"

# Blue, orange, green, pink, sky, vermillion, yellow, grey. Pink is lighter than the original: the first four then also
# differ for readers who do not tell red from green, and in grey print.
DEVICE_COLORS = ("#0072B2", "#E69F00", "#009E73", "#E5AFD1", "#56B4E9", "#D55E00", "#F0E442", "#B5B5B5")

# In points. Figures are 8 inches wide, 768 pixels on a page, so the smallest text is 12 pixels high.
WIDTH = 8.0
TITLE_SIZE = 14.0
HEADING_SIZE = 12.0
LABEL_SIZE = 11.0
SMALL_SIZE = 10.0
CAPTION_SIZE = 9.0

PNG_DPI = 200

_RC = {
    "axes.edgecolor": MUTED,
    "axes.facecolor": BACKGROUND,
    "axes.labelcolor": INK,
    "axes.labelsize": LABEL_SIZE,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": BACKGROUND,
    "font.family": "DejaVu Sans",
    "font.size": LABEL_SIZE,
    "mathtext.fontset": "dejavusans",
    "savefig.facecolor": BACKGROUND,
    # Without a fixed salt, every drawing would give its clip paths new names.
    "svg.hashsalt": "cmm",
    # Text as outlines: a viewer without this font would move labels onto each other.
    "svg.fonttype": "path",
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "xtick.labelsize": SMALL_SIZE,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "ytick.labelsize": SMALL_SIZE,
}


@contextlib.contextmanager
def style():
    """Applies the settings of these figures inside a `with` block, and restores the reader's own afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


def styled(draw):
    """Decorates a drawing function so that it runs inside `style()`."""

    @functools.wraps(draw)
    def draw_in_style(*args, **kwargs):
        with style():
            return draw(*args, **kwargs)

    return draw_in_style


def device_color(device: int) -> str:
    """Returns the colour of a device and of the blocks that it owned first. Colours repeat from the ninth device on."""
    return DEVICE_COLORS[device % len(DEVICE_COLORS)]


def tint(color: str, share: float) -> str:
    """Returns `color` mixed with white: `share` 1 is the colour itself, 0 is white."""
    return to_hex([1 - share * (1 - channel) for channel in to_rgb(color)])


def text_color(fill: str) -> str:
    """Returns the colour of text that is easier to read on `fill`: white or ink, by their contrast ratios."""
    white_contrast = 1.05 / (_luminance(fill) + 0.05)
    ink_contrast = (_luminance(fill) + 0.05) / (_luminance(INK) + 0.05)
    return "#ffffff" if white_contrast > ink_contrast else INK


def _luminance(color: str) -> float:
    """Returns the relative luminance of a colour, 0 to 1. Source: Web Content Accessibility Guidelines 2.1."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def render(fig, kind: str = "svg") -> bytes:
    """Returns `fig` as the bytes of an "svg" or "png" file. The same figure always gives the same bytes."""
    # Dates and versions would change a file whose picture has not changed.
    metadata = {"svg": {"Date": None, "Creator": None, "Title": fig.get_label()}, "png": {"Software": None}}
    if kind not in metadata:
        raise ValueError(f'kind must be "svg" or "png", got {kind!r}.')
    buffer = io.BytesIO()
    with style():
        fig.savefig(buffer, format=kind, dpi=PNG_DPI, metadata=metadata[kind])
    return buffer.getvalue()


def save(fig, folder, name: str, data=None) -> list[pathlib.Path]:
    """Writes `fig` as SVG and PNG, and what it shows as JSON in the folder `data` beside them.

    Args:
      fig: a figure of this package, or any other.
      folder: where to write; made if it does not exist.
      name: file name without its ending.
      data: what was drawn, as plain Python values; `None` writes no data file.

    Returns:
      The paths written.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in ("svg", "png")]
    for path in paths:
        path.write_bytes(render(fig, path.suffix[1:]))
    if data is not None:
        paths.append(save_data(data, folder, name))
    return paths


def save_data(data, folder, name: str) -> pathlib.Path:
    """Writes the data of a figure to `folder/data/name.json` and returns the path."""
    path = pathlib.Path(folder) / "data" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
