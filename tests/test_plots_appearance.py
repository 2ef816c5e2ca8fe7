"""Every figure can be read, is drawn alike each time, and says which values it cannot draw."""

import dataclasses
import itertools

import matplotlib
import numpy as np
import pytest
from figure_parts import AXIS_SIZES, by_gid, run
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from cmm import plots, roofline
from cmm.plots import palette
from cmm.plots.palette import DEVICE_COLORS, text_color


def every_figure(axis_size):
    problem = roofline.published_problem(axis_size)
    yield plots.draw_layout(axis_size, axis_size - 1)
    yield plots.draw_ring(axis_size, axis_size // 2)
    for direction in ("down", "both"):
        yield plots.draw_ring_steps(axis_size, direction)
    yield plots.draw_predicted_timeline(axis_size)
    yield plots.draw_roofline_bounds(problem)
    yield plots.draw_utilization([run(axis_size)])


@pytest.mark.parametrize("axis_size", AXIS_SIZES)
def test_no_text_is_cut_off_or_lies_on_other_text(axis_size, monkeypatch):
    for fig in every_figure(axis_size):
        renderer = FigureCanvasAgg(fig).get_renderer()
        shown = drawn_texts(fig, monkeypatch)
        names = [text.get_text() for text in shown]
        # Boxes of text have room for strokes that few letters have: a pixel or two of overlap shows nothing.
        boxes = [text.get_window_extent(renderer).padded(-2) for text in shown]
        low, high = (np.array([getattr(box, corner) for box in boxes]) for corner in ("min", "max"))
        clipped = (low < 0).any(axis=1) | (high > fig.bbox.max).any(axis=1)
        assert not clipped.any(), np.array(names)[clipped]
        overlap = ((low[:, None] < high[None]) & (high[:, None] > low[None])).all(axis=-1) & ~np.eye(
            len(low), dtype=bool
        )
        assert not overlap.any(), (fig.get_label(), [(names[a], names[b]) for a, b in np.argwhere(overlap)])


def drawn_texts(fig, monkeypatch):
    """Returns the texts that are drawn. A figure holds others, such as the labels of ticks out of view."""
    drawn = []
    with monkeypatch.context() as patched:
        patched.setattr(Text, "draw", lambda text, renderer: drawn.append(text))
        fig.draw_without_rendering()
    return [text for text in drawn if text.get_visible() and text.get_text()]


def test_long_names_get_smaller_letters():
    long_name = "a kernel whose name says everything that it does at once"
    one = run()
    methods = [dataclasses.replace(result, title=long_name) for result in one.methods]
    fig = plots.draw_utilization([dataclasses.replace(one, methods=tuple(methods))], published=())
    renderer = FigureCanvasAgg(fig).get_renderer()
    for name, text in by_gid(fig, "name-").items():
        bar = by_gid(fig, name)[""]
        assert text.get_window_extent(renderer).x1 < bar.get_window_extent(renderer).x0
    (title,) = [text for text in fig.texts if text.get_gid() == "title"]
    assert title.get_text().startswith(long_name[0].upper() + long_name[1:])
    assert title.get_window_extent(renderer).x1 < fig.bbox.width


def test_redrawing_gives_the_same_bytes(monkeypatch):
    monkeypatch.setattr(palette, "PNG_DPI", 40)
    # Every second figure: between them they have all kinds of marks.
    for first, second in itertools.islice(zip(every_figure(2), every_figure(2), strict=True), 0, None, 2):
        assert plots.render(first, "svg") == plots.render(second, "svg")
    first, second = plots.draw_ring(2), plots.draw_ring(2)
    assert plots.render(first, "png") == plots.render(second, "png") == plots.render(first, "png")


def test_settings_of_the_reader_neither_change_nor_are_changed():
    expected = plots.render(plots.draw_predicted_timeline(2))
    theirs = {"font.size": 30, "axes.facecolor": "black", "svg.hashsalt": None, "font.weight": "bold"}
    with matplotlib.rc_context(theirs):
        before = dict(matplotlib.rcParams)
        assert plots.render(plots.draw_predicted_timeline(2)) == expected
        assert dict(matplotlib.rcParams) == before


def test_text_on_every_colour_can_be_read():
    def luminance(color):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in matplotlib.colors.to_rgb(color)]
        return np.dot((0.2126, 0.7152, 0.0722), linear)

    for color in DEVICE_COLORS:
        dark, light = sorted((luminance(color), luminance(text_color(color))))
        assert (light + 0.05) / (dark + 0.05) > 4


@pytest.mark.parametrize(
    "draw, message",
    [
        (lambda: plots.draw_ring(4, 4), "step must be between 0 and axis_size - 1 = 3, got 4"),
        (lambda: plots.draw_ring(4, 0, "left"), "direction must be"),
        (lambda: plots.draw_ring_steps(0), "axis_size must be at least 1, got 0"),
        (lambda: plots.draw_layout(4, 4), "device must be between 0 and axis_size - 1 = 3, got 4"),
        (lambda: plots.draw_timeline({}), "at least one schedule"),
        (lambda: plots.render(plots.draw_layout(2), "pdf"), 'kind must be "svg" or "png"'),
    ],
)
def test_errors_name_the_values(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
