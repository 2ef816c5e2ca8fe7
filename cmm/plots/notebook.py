"""Figures in a notebook, small enough to be committed with it."""

import io

from IPython.display import Image, display
from PIL import Image as Picture

_DPI = 100  # The files in figures/ have twice as many.
_COLORS = 128


def show(fig) -> None:
    """Displays a figure as a PNG of few colours; its label becomes the text for those who cannot see it.

    Args:
      fig: a `matplotlib.figure.Figure`.
    """
    drawn, small = io.BytesIO(), io.BytesIO()
    fig.savefig(drawn, format="png", dpi=_DPI)
    picture = Picture.open(drawn).convert("RGB")
    # Without `kmeans` the plain colour of a large area can come out as another one.
    picture.quantize(_COLORS, Picture.Quantize.MAXCOVERAGE, kmeans=1).save(small, "png", optimize=True)
    display(Image(small.getvalue(), alt=fig.get_label()))
