"""What a figure shows, by the names of its artists, and a run to draw."""

import dataclasses
import itertools

import numpy as np
from matplotlib.text import Text

from cmm import results, roofline

AXIS_SIZES = (1, 2, 3, 4, 8)


def by_gid(fig, prefix):
    """Returns the artists whose name begins with `prefix`, by the rest of their name."""
    artists = itertools.chain(*(ax.get_children() for ax in fig.axes))
    named = [artist for artist in artists if (artist.get_gid() or "").startswith(prefix)]
    assert len({artist.get_gid() for artist in named}) == len(named)
    return {artist.get_gid().removeprefix(prefix): artist for artist in named}


def texts(fig):
    """Returns all texts that the figure holds."""
    return [text.get_text() for text in fig.findobj(Text) if text.get_text()]


def labels(blocks):
    """Returns the text in the middle of each rectangle, by the same keys."""
    (ax,) = {block.axes for block in blocks.values()} or {None}
    at = {}
    for text in ax.texts if ax else ():
        place = tuple(np.round(text.get_position(), 6))
        assert place not in at
        at[place] = text.get_text()
    return {key: at[tuple(np.round(block.get_center(), 6))] for key, block in blocks.items()}


def run(axis_size=4, times=(182.0, 290.0, 184.0), status="measured", simulated=False, kind="NVIDIA H200", **sizes):
    """Returns a run of three methods, and a fourth that was skipped."""
    problem = dataclasses.replace(roofline.published_problem(axis_size), **sizes)
    names = (("gemm_only", "GEMM only"), ("naive", "all-gather, then matmul"), ("kernel", "a kernel"))
    methods = [
        results.MethodResult(*name, status, call_time_us=results.Spread(time, 0.98 * time, 1.05 * time))
        for name, time in zip(names, times, strict=True)
    ]
    methods.append(results.MethodResult("late", "a later kernel", "skipped", "needs 8 devices"))
    about = ("normal(0, 1)", "chains", "2026-01-31", "python -m cmm bench")
    return results.Run(problem, {"device_kind": kind}, {"jax": "0.11.2"}, simulated, *about, tuple(methods))
