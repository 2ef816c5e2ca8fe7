"""What did a search over configurations find? One dot for each that was tried, grouped by tiles and pipeline depth."""

import functools
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence

from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from cmm.plots.landscape_records import is_drawn, is_same_work, landscape_data
from cmm.plots.palette import (
    ACCENT,
    BACKGROUND,
    CAPTION_SIZE,
    DEVICE_COLORS,
    INK,
    MUTED,
    NEUTRAL,
    RULE,
    WIDTH,
    styled,
)
from cmm.plots.shapes import MARGIN, axes_at, inches_from, key_at, page
from cmm.results import Run
from cmm.roofline import Problem, published_problem

_PREFIX = "tune_"  # As `cmm.tune.tuning_record.file_name` begins.
_ROW, _GROUP_GAP, _HEADER, _AXIS, _KEY_LINE, _KEY_COLUMNS, _RIGHT = 0.155, 0.09, 0.45, 0.58, 0.22, 3, 0.35
# Markers and colours both differ, so that nothing depends on colours.
_ORDERS = {"M": (ACCENT, "o"), "N": (DEVICE_COLORS[1], "s")}
_WRONG = {"marker": "x", "color": DEVICE_COLORS[5], "markersize": 8, "markeredgewidth": 2.0, "linestyle": "none"}
# The axis ends at the first of these, times the fastest, that at most a fifth of the dots exceed, or at the last.
_CUTS, _MOST_BEYOND = (1.2, 1.5, 2.0), 0.2
_TEXT_LEFT_FROM = 0.55  # Names of dots further right than this share of the axis stand on their left.
_GEMM_IN_SIGHT = 0.8  # If it takes less than this share of the fastest, showing its place would leave dots no room.


def landscape_figures(folder, runs: Sequence[Run]) -> Iterator[tuple[str, Callable, Callable]]:
    """Yields name, drawing function and data function of a figure for each search on GPUs recorded in `folder`.

    Args:
      folder: of files that `python -m cmm.tune` writes, `tune_*.json`.
      runs: recorded runs. Where one has the same problem and kind of GPU, its GEMM only is shown.
    """
    for path in sorted(pathlib.Path(folder).glob(f"{_PREFIX}*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if not is_drawn(record):
            continue
        problem = Problem(**record["problem"])
        # Its data lies in the same folder as the searches, so it must not look like one.
        stem = path.stem.replace(_PREFIX, "tuning_landscape_", 1)
        name = stem.partition("_m")[0] if problem == published_problem(problem.axis_size) else stem
        run = next((run for run in runs if is_same_work(run, record)), None)
        yield name, functools.partial(draw_landscape, record, run), functools.partial(landscape_data, record, run)


@styled
def draw_landscape(record: dict, run: Run | None = None):
    """Draws one dot for each configuration that a search has tried, at its kernel time.

    Args, Raises: as `cmm.plots.landscape_records.landscape_data`.

    Returns:
      A `matplotlib.figure.Figure`, the taller the more trials there are: each has a row. Dots beyond the end of the
      axis become arrows with their times.
    """
    data = landscape_data(record, run)
    rows, (columns, left) = data["rows"], _columns(data["rows"])
    height = _ROW * len(rows) + _GROUP_GAP * (rows[-1]["group"] + 1)
    low, end = _limits(data)
    handles = _key(rows, end)
    key = _KEY_LINE * math.ceil(len(handles) / _KEY_COLUMNS)
    fig, bottom = page(_HEADER + height + _AXIS + key + 0.1, data["headline"], data["caption"])
    width, pad = WIDTH - left - _RIGHT, 0.03 * (end - low)
    ax = axes_at(fig, left, bottom + key + 0.1 + _AXIS, width, height, xlim=(low - pad, end + pad), ylim=(0, height))
    _dress(ax)
    at_margin = {"transform": inches_from(ax), "size": CAPTION_SIZE}
    for heading, x, _, _ in columns:
        ax.text(x - left, height + 0.08, heading, color=MUTED, va="baseline", linespacing=1.15, **at_margin)
    group, top = None, height
    for number, row in enumerate(rows):
        is_first, group = row["group"] != group, row["group"]
        if is_first:
            line = {"color": MUTED, "linewidth": 0.6, "clip_on": False, "transform": inches_from(ax)}
            ax.plot([MARGIN - left, width], [top - _GROUP_GAP / 2] * 2, **line)
            top -= _GROUP_GAP
        for _, x, of_group, text in columns:
            if is_first or not of_group:
                ax.text(x - left, top - _ROW / 2, text(row["config"]), va="center_baseline", **at_margin)
        _draw_trial(ax, row, number, end, top - _ROW / 2)
        top -= _ROW
    if data["gemm_only"]:
        _draw_gemm_only(ax, data["gemm_only"], height)
    key_at(fig, MARGIN, bottom + key + 0.05, _KEY_COLUMNS, handles, handlelength=1.5)
    return fig


def _columns(rows) -> tuple[list[tuple], float]:
    """Returns the columns of text, and where they end in inches.

    Each has a heading, its place, whether it is the same in a group, and what it says of a configuration. Kernels that
    cannot choose their announcements have no column for them, and equal epilogues need none.
    """
    configs = [row["config"] for row in rows]
    columns = [
        ("tile\nm × n × k", 1.18, True, lambda c: f"{c['tile_m']} × {c['tile_n']} × {c['tile_k']}"),
        ("stages", 0.56, True, lambda c: f"{c['max_concurrent_steps']}"),
        ("warp-\ngroups", 0.57, True, lambda c: f"{c['wg_dimension']}"),
    ]
    epilogue = lambda c: f"{c['epi_tile_m'] or c['tile_m']} × {c['epi_tile_n'] or c['tile_n']}"
    if len(set(map(epilogue, configs))) > 1:
        columns.append(("epilogue", 0.7, True, epilogue))
    columns.append(("order", 0.5, False, lambda c: f"{c['grid_minor_dim']}, {c['grid_tile_width']}"))
    if any("chunks" in config for config in configs):
        columns.append(("chunks,\nlag", 0.65, False, _announcements))
    placed, x = [], MARGIN
    for heading, width, of_group, text in columns:
        placed.append((heading, x, of_group, text))
        x += width
    return placed, x + 0.1


def _announcements(config) -> str:
    values = ["auto" if config[name] is None else f"{config[name]}" for name in ("chunks", "signal_lag")]
    return "auto" if values == ["auto"] * 2 else ", ".join(values)


def _limits(data) -> tuple[float, float]:
    """Returns the first and the last time that the axis shows; later ones become arrows."""
    times_us = [row["time_us"] for row in data["rows"]]
    best_us = min(times_us)
    few_exceed = lambda cut: sum(time_us > cut * best_us for time_us in times_us) <= _MOST_BEYOND * len(times_us)
    end = next(filter(few_exceed, _CUTS), _CUTS[-1]) * best_us
    if max(times_us) <= end:
        end = max(min(end, row["p90_us"] or row["time_us"]) for row in data["rows"])
    low = min(row["p10_us"] or row["time_us"] for row in data["rows"])
    if data["gemm_only"] and data["gemm_only"]["time_us"] >= _GEMM_IN_SIGHT * best_us:
        low, end = min(low, data["gemm_only"]["time_us"]), max(end, data["gemm_only"]["time_us"])
    return low, max(end, 1.02 * best_us)


def _draw_trial(ax, row, number, end, middle):
    """Draws one dot, its spread, a cross if its result is wrong, and names if it is one that a reader looks for."""
    color, marker = _ORDERS[row["config"]["grid_minor_dim"]]
    is_beyond, x = row["time_us"] > end, min(row["time_us"], end)
    p10_us, p90_us = (row["p10_us"], row["p90_us"]) if row["rounds_us"] else (x, x)
    fill = color if row["rounds_us"] else BACKGROUND
    look = {"color": color, "markerfacecolor": fill, "markeredgewidth": 1.5, "markersize": 6, "linestyle": "none"}
    ax.plot([x], [middle], marker=">" if is_beyond else marker, gid=f"trial-{number}", zorder=5, clip_on=False, **look)
    if row["rounds_us"]:
        # Over the dot: a small spread would hide behind it.
        whisker = {"color": INK, "linewidth": 1.2, "marker": "|", "markersize": 6, "zorder": 6}
        ax.plot([p10_us, p90_us], [middle] * 2, gid=f"spread-{number}", **whisker)
    if row["right"] is False:
        ax.plot([x], [middle], gid=f"wrong-{number}", zorder=7, clip_on=False, **_WRONG)
    names = ["winner" if row["right"] else "fastest, wrong"] * row["is_winner"]
    names += ["without a search"] * row["is_untuned"]
    if names or is_beyond:
        first = ax.get_xlim()[0]
        is_left = x > first + _TEXT_LEFT_FROM * (end - first)
        place = {"xy": (min(x, p10_us) if is_left else max(x, min(end, p90_us)), middle), "ha": "left"}
        place |= {"xytext": (7, 0)} if not is_left else {"xytext": (-7, 0), "ha": "right"}
        look = {"size": CAPTION_SIZE, "weight": "bold" if names else "normal", "va": "center_baseline", "zorder": 8}
        look |= {"path_effects": [withStroke(linewidth=2.5, foreground=BACKGROUND)], "annotation_clip": False}
        text = f"{' and '.join(names)} {row['time_us']:.1f}".lstrip()
        ax.annotate(text, textcoords="offset points", **place, **look)


def _draw_gemm_only(ax, gemm_only, height):
    """Draws the dashed line with its name, or only its name at the left end if the line is out of sight."""
    x, text = gemm_only["time_us"], f"{gemm_only['title']} {gemm_only['time_us']:.1f}"
    first, last = ax.get_xlim()
    if x < first:
        x, text = first, f"◂ {text}"
    else:
        look = {"color": INK, "linewidth": 1.3, "dashes": (4, 2.5), "zorder": 5, "clip_on": False}
        ax.plot([x, x], [0, height + 0.05], gid="gemm-only", **look)
    side = "left" if x < (first + last) / 2 else "right"
    ax.text(x, height + 0.08, text, size=CAPTION_SIZE, ha=side, va="baseline")


def _dress(ax):
    ax.set_yticks([])
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.grid(axis="x", color=RULE, linewidth=0.8, zorder=0)
    ax.set_axisbelow(True)
    ax.tick_params(axis="x", length=0, labelcolor=MUTED)
    ax.set_xlabel("kernel time, µs")


def _key(rows, end) -> list[Line2D]:
    """Returns what the legend shows: the signs that occur."""
    dot = lambda label, **look: Line2D([], [], label=label, linestyle="none", markersize=6, markeredgewidth=1.5, **look)
    orders = {row["config"]["grid_minor_dim"] for row in rows}
    signs = [
        dot(f"order along {name}", color=color, marker=marker)
        for name, (color, marker) in _ORDERS.items()
        if name in orders
    ]
    neutral = {"color": NEUTRAL, "marker": "o"}
    if any(row["rounds_us"] for row in rows):
        signs.append(dot("compared in rounds", **neutral))
    if not all(row["rounds_us"] for row in rows):
        signs.append(dot("tried shortly", **neutral, markerfacecolor=BACKGROUND))
    if any(row["right"] is False for row in rows):
        signs.append(Line2D([], [], label="wrong result", **_WRONG))
    if any(row["time_us"] > end for row in rows):
        signs.append(dot("beyond the axis", color=NEUTRAL, marker=">", markerfacecolor=BACKGROUND))
    return signs
