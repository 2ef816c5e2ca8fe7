"""How do times grow with the rows per device? The figure of all methods, with shading up to where the kernel pays."""

from collections.abc import Iterator, Sequence

from matplotlib.ticker import NullFormatter, NullLocator

from cmm.bench.suites_report import BASELINE, sweeps
from cmm.dispatch import AUTO_KERNEL
from cmm.plots.palette import (
    ACCENT,
    CAPTION_SIZE,
    DEVICE_COLORS,
    INK,
    MUTED,
    NEUTRAL,
    RULE,
    SMALL_SIZE,
    WIDTH,
    styled,
    tint,
)
from cmm.plots.shapes import MARGIN, axes_at, heading, key_at, page
from cmm.plots.sweep_records import FASTER_IN_PERCENT, PANELS, less_certain_text, sweep_data
from cmm.results import Run, short_kind
from cmm.roofline import published_problem

_Y_LABELS = {
    "call_us": "call time, µs",
    "wall_in_program_us": "wall time, µs",
    "wall_us": "wall time, µs",
    "kernel_us": "kernel time, µs",
}
# In inches. Panels stand in rows of two; the numbers and the name of the horizontal axis stand below the lowest.
_COLUMNS, _LEFT, _COLUMN_GAP, _RIGHT = 2, MARGIN + 0.6, 0.85, 0.2
_PANEL_HEIGHT, _ROW_GAP, _BELOW, _ABOVE = 2.6, 0.5, 0.6, 0.3
_KEY_LINE, _KEY_COLUMNS = 0.23, 3
# Colour, marker and width. Markers differ too, so that no line depends on its colour.
_LOOKS = {
    "gemm_only": (INK, None, 1.6),
    "gemm_only_torch": (MUTED, None, 1.6),
    BASELINE: (NEUTRAL, "s", 2.2),
    "ring": (DEVICE_COLORS[1], "^", 1.4),
    "ring_bidirectional": (DEVICE_COLORS[3], "v", 1.4),
    "ring_copy_engines": (DEVICE_COLORS[2], "D", 1.4),
    "pallas": (DEVICE_COLORS[4], "P", 1.4),
    AUTO_KERNEL: (ACCENT, "o", 2.8),
    "jax_example": (DEVICE_COLORS[5], "X", 1.4),
}
_OTHER_LOOK = (DEVICE_COLORS[6], "*", 1.4)


def sweep_groups(runs: Sequence[Run]) -> Iterator[tuple[str, list[Run]]]:
    """Yields the name of a figure and its runs, for each group of three or more that differ in their rows alone.

    Args:
      runs: recorded runs. Simulated ones are left out, and so is what one device measured: it gathers nothing.
    """
    measured = [run for run in runs if not run.simulated and run.problem.axis_size > 1]
    for kind in dict.fromkeys(run.machine["device_kind"] for run in measured):
        for group in sweeps([run for run in measured if run.machine["device_kind"] == kind]):
            p = group[0].problem
            usual = published_problem(p.axis_size)
            is_usual = (p.k, p.n_shard, p.dtype) == (usual.k, usual.n_shard, usual.dtype)
            name = f"time_against_rows_{short_kind(kind)}_d{p.axis_size}"
            yield (name if is_usual else f"{name}_k{p.k}_n{p.n_shard}_{p.dtype}"), group


@styled
def draw_sweep(runs: Sequence[Run]):
    """Draws every kind of time of every method against rows per device, and up to where the kernel does not pay.

    Args, Raises: as `cmm.plots.sweep_records.sweep_data`.

    Returns:
      A `matplotlib.figure.Figure`. Points are medians, whiskers 10th to 90th percentile over rounds. A kind of time
      that no run has recorded has no panel.
    """
    data = sweep_data(runs)
    key = _KEY_LINE * -(-len(data["methods"]) // _KEY_COLUMNS)
    row_count = -(-len(data["panels"]) // _COLUMNS)
    body = row_count * _PANEL_HEIGHT + (row_count - 1) * _ROW_GAP
    fig, bottom = page(key + _BELOW + body + _ABOVE, _message(data), _caption(data))
    low = bottom + key + _BELOW
    axes = [_panel(fig, data, number, low) for number in range(len(data["panels"]))]
    key_at(fig, _LEFT, bottom + key + 0.05, _KEY_COLUMNS, axes[0].get_legend_handles_labels()[0], handlelength=2.6)
    return fig


def _panel(fig, data, number, low):
    """Draws one kind of time. All panels have the same limits, so that they can be compared."""
    kind = data["panels"][number]
    row, column = divmod(number, _COLUMNS)
    rows_below = (len(data["panels"]) - 1) // _COLUMNS - row
    width = (WIDTH - _LEFT - _RIGHT - (_COLUMNS - 1) * _COLUMN_GAP) / _COLUMNS
    left, bottom = _LEFT + column * (width + _COLUMN_GAP), low + rows_below * (_PANEL_HEIGHT + _ROW_GAP)
    values = [point[i] for m in data["methods"] for kind in data["panels"] for point in m[kind] for i in (1, 2, 3)]
    limits = {"ylim": (0.8 * min(values), 1.25 * max(values)), "xlim": (data["rows"][0] / 1.2, data["rows"][-1] * 1.2)}
    ax = axes_at(fig, left, bottom, width, _PANEL_HEIGHT, xscale="log", yscale="log", **limits)
    _dress(ax, data["rows"], kind, is_lowest=number + _COLUMNS >= len(data["panels"]))
    for method in data["methods"]:
        _draw_method(ax, method, kind)
    if crossing := data["crossings"].get(kind):
        _mark_crossing(ax, crossing)
    return ax


def _dress(ax, rows, kind, is_lowest):
    # With many sizes there is room for the number of every second one.
    every = 2 if len(rows) > 6 else 1
    ax.set_xticks(rows, [str(size) if (len(rows) - 1 - i) % every == 0 else "" for i, size in enumerate(rows)])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.grid(axis="y", color=RULE, linewidth=0.8)
    ax.set_axisbelow(True)
    if is_lowest:
        ax.set_xlabel("M: rows of A per device")
    else:
        ax.tick_params(axis="x", labelbottom=False)
    ax.set_ylabel(_Y_LABELS[kind])
    heading(ax, 0, 1.04, PANELS[kind][1], transform=ax.transAxes, size=SMALL_SIZE + 1)


def _draw_method(ax, method, kind):
    color, marker, width = _LOOKS.get(method["name"], _OTHER_LOOK)
    rows, median, p10, p90 = zip(*method[kind]) if method[kind] else ((),) * 4
    look = {"dashes": (4, 2.5)} if method["is_roof"] else {}
    look |= {"color": color, "marker": marker, "linewidth": width, "markersize": 5.5, "markeredgecolor": INK}
    look["zorder"] = 5 if method["name"] == AUTO_KERNEL else 4
    ax.plot(rows, median, label=method["title"], gid=f"{kind}-{method['name']}", markeredgewidth=0.5, **look)
    ax.vlines(rows, p10, p90, color=INK, linewidth=1, zorder=3)


def _mark_crossing(ax, crossing):
    """Shades the rows with which the kernel does not pay, up to the fewest measured ones with which it does."""
    below, first = crossing["below_rows"], crossing["from_rows"]
    if below is None:
        return
    ax.axvspan(ax.get_xlim()[0], below, color=tint(DEVICE_COLORS[5], 0.16), linewidth=0, zorder=0, gid="not-faster")
    if first is not None:
        ax.axvspan(below, first, color=tint(DEVICE_COLORS[5], 0.07), linewidth=0, zorder=0, gid="crossing")
    text = f"M ≤ {below}: not reliably faster\nthan gathering first"
    place = {"transform": ax.get_xaxis_transform(), "size": CAPTION_SIZE, "ha": "left", "va": "top", "zorder": 6}
    ax.text(ax.get_xlim()[0] * 1.08, 0.88, text, linespacing=1.3, **place)


def _message(data) -> str:
    on_gpu, in_program = (_pays_where(data["crossings"][kind]) for kind in ("call_us", "wall_in_program_us"))
    if not (on_gpu or in_program):
        return "Times of a call against rows per device"
    if on_gpu == in_program:
        return f"Fast kernel beats gathering first at {on_gpu}, on the GPU and in a program"
    places = ((on_gpu, "on the GPU"), (in_program, "in a program"))
    return "Fast kernel beats gathering first at " + ", ".join(f"{at} {where}" for at, where in places if at)


def _pays_where(crossing) -> str:
    if crossing is None:
        return ""
    return "no M" if crossing["from_rows"] is None else f"M ≥ {crossing['from_rows']}"


def _caption(data) -> str:
    where = f"D={data['axis_size']}, {data['dtype']}, per device K={data['k']} N={data['n_shard']}"
    lines = [
        f"{where}. Points: medians over rounds; whiskers: 10th to 90th percentile. Dashed: activations that are "
        "already gathered.",
    ]
    if "wall_in_program_us" in data["panels"]:
        lines.append("Wall time in a program: per call, where one program holds several calls.")
    if any(data["crossings"].values()):
        lines.append(
            "Reliably faster: the fast kernel takes less time than gathering first in at least "
            f"{FASTER_IN_PERCENT} % of the rounds. Between measured M nothing is known."
        )
    for single in data["single_processes"]:
        lines.append(f"Less certain, {less_certain_text(1, single['rounds'])}: {_rows_text(single['rows'])}.")
    for method in data["not_searched"]:
        lines.append(f"{method['title']} ran with a setting that was not searched for {_rows_text(method['rows'])}.")
    lines.append(f"Measured: {'; '.join(data['where'])}.")
    return "\n".join(lines)


def _rows_text(rows) -> str:
    return f"M = {', '.join(map(str, rows))}"
