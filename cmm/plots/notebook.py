"""Figures in a notebook, small enough to be committed with it."""

import io

from IPython.display import Image, display
from PIL import Image as Picture

_DPI = 100  # The files in figures/ have twice as many.
_COLORS = 64


def show(fig) -> None:
    """Displays a figure as a PNG of few colours; its label becomes the text for those who cannot see it.

    Args:
      fig: a `matplotlib.figure.Figure`.
    """
    drawn, small = io.BytesIO(), io.BytesIO()
    fig.savefig(drawn, format="png", dpi=_DPI)
    Picture.open(drawn).convert("RGB").quantize(_COLORS, Picture.Quantize.MAXCOVERAGE).save(small, "png", optimize=True)
    display(Image(small.getvalue(), alt=fig.get_label()))
