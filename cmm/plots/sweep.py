"""From how many rows on does a kernel pay? Call time and kernel time of every method against rows per device."""

from collections.abc import Iterator, Sequence

from matplotlib.ticker import NullFormatter, NullLocator

from cmm.bench.merge import ratio
from cmm.bench.suites_report import sweeps
from cmm.dispatch import METHODS
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
from cmm.plots.shapes import MARGIN, axes_at, heading, page
from cmm.report import is_roof, is_wrong
from cmm.results import MethodResult, Run
from cmm.roofline import published_problem

_BASELINE = "naive"
_PANELS = {"call_us": "Call", "kernel_us": "Matmul kernels alone"}
_LEFT, _GAP, _RIGHT, _HEIGHT, _BELOW = MARGIN + 0.55, 0.35, 0.3, 3.3, 0.55
_KEY_LINE, _KEY_COLUMNS = 0.23, 3
# Colour, marker and width. Markers differ too, so that no line depends on its colour.
_LOOKS = {
    "gemm_only": (INK, None, 1.6),
    "gemm_only_torch": (MUTED, None, 1.6),
    _BASELINE: (NEUTRAL, "s", 2.2),
    "ring": (DEVICE_COLORS[1], "^", 1.4),
    "ring_bidirectional": (DEVICE_COLORS[3], "v", 1.4),
    "ring_copy_engines": (DEVICE_COLORS[2], "D", 1.4),
    "pallas": (DEVICE_COLORS[4], "P", 1.4),
    "pallas_fast": (ACCENT, "o", 2.8),
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
        short = kind.replace("NVIDIA ", "").replace(" ", "_").lower()
        for group in sweeps([run for run in measured if run.machine["device_kind"] == kind]):
            p = group[0].problem
            usual = published_problem(p.axis_size)
            is_usual = (p.k, p.n_shard, p.dtype) == (usual.k, usual.n_shard, usual.dtype)
            name = f"time_against_rows_{short}_d{p.axis_size}"
            yield (name if is_usual else f"{name}_k{p.k}_n{p.n_shard}_{p.dtype}"), group


def sweep_data(runs: Sequence[Run]) -> dict:
    """Returns what `draw_sweep` draws.

    Results that are wrong, incomplete or missing are left out. `crossing` compares the call times of a kernel, the one
    with the shortest call in the last run, with gathering first: `below_rows` are the most rows with which the kernel
    is not faster beyond the spread, and `from_rows` the next more that were measured.

    Args:
      runs: runs on GPUs that differ only in their rows per device, fewest rows first.

    Raises:
      ValueError: there is no run, or a run is simulated.
    """
    if not runs or any(run.simulated for run in runs):
        raise ValueError("The figure needs runs that were measured on GPUs.")
    found = {result.name: result for run in runs for result in run.methods if _is_right(run, result)}
    titles = {name: result.title for name, result in found.items()}
    about = lambda name: {"name": name, "title": titles[name], "is_roof": is_roof(found[name])}
    p = runs[0].problem
    return {
        "axis_size": p.axis_size,
        "k": p.k,
        "n_shard": p.n_shard,
        "dtype": p.dtype,
        "rows": [run.problem.m_shard for run in runs],
        "methods": [about(name) | _points(runs, name) for name in titles],
        "crossing": _crossing(runs, titles),
        "sources": list(dict.fromkeys(run.caption() for run in runs)),
    }


def _is_right(run: Run, result: MethodResult) -> bool:
    measured = result.status == "measured" and result.call_time_us is not None
    return measured and not result.is_incomplete and not is_wrong(run, result)


def _result(run: Run, name: str) -> MethodResult | None:
    return next((result for result in run.methods if result.name == name and _is_right(run, result)), None)


def _points(runs, name) -> dict:
    """Returns rows, median, 10th and 90th percentile of both times of a method."""
    points: dict[str, list] = {kind: [] for kind in _PANELS}
    for run in runs:
        if result := _result(run, name):
            for kind, time in zip(_PANELS, (result.call_time_us, result.kernel_time_us), strict=True):
                if time is not None:
                    points[kind].append([run.problem.m_shard, time.median, time.p10, time.p90])
    return points


def _crossing(runs, titles) -> dict | None:
    """Returns the comparison that `sweep_data` describes; `None` where nothing can be compared."""
    kernels = [name for name in titles if name in METHODS and METHODS[name].needs_hopper]
    last = runs[-1]
    there = [name for name in kernels if _result(last, name)]
    if not there:
        return None
    kernel = min(there, key=lambda name: _result(last, name).call_time_us.median)
    faster = [(run.problem.m_shard, _is_faster(run, kernel)) for run in runs]
    faster = [(rows, yes) for rows, yes in faster if yes is not None]
    if not faster:
        return None
    not_yet = [rows for rows, yes in faster if not yes]
    after = [rows for rows, yes in faster if yes and rows > max(not_yet, default=0)]
    return {
        "kernel": kernel,
        "title": titles[kernel],
        "below_rows": max(not_yet, default=None),
        "from_rows": min(after, default=None),
    }


def _is_faster(run, kernel) -> bool | None:
    """Whether the kernel's call is shorter beyond the spread; `None` if one of the two was not measured."""
    own, other = _result(run, kernel), _result(run, _BASELINE)
    if own is None or other is None:
        return None
    found = ratio(run, kernel, _BASELINE)
    return found.p90 < 1 if found else own.call_time_us.p90 < other.call_time_us.p10


@styled
def draw_sweep(runs: Sequence[Run]):
    """Draws call time and kernel time of every method against rows per device, and where a kernel begins to pay.

    Args, Raises: as `sweep_data`.

    Returns:
      A `matplotlib.figure.Figure`. Points are medians, whiskers 10th to 90th percentile over rounds.
    """
    data = sweep_data(runs)
    key = _KEY_LINE * -(-len(data["methods"]) // _KEY_COLUMNS)
    fig, bottom = page(_HEIGHT + _BELOW + key + 0.3, _message(data), _caption(data))
    width = (WIDTH - _LEFT - _GAP - _RIGHT) / 2
    values = [point[i] for m in data["methods"] for kind in _PANELS for point in m[kind] for i in (1, 2, 3)]
    limits = (0.8 * min(values), 1.25 * max(values))
    low = bottom + key + _BELOW
    axes = []
    for number, (kind, name) in enumerate(_PANELS.items()):
        place = (_LEFT + number * (width + _GAP), low, width, _HEIGHT)
        ax = axes_at(fig, *place, xscale="log", yscale="log", ylim=limits)
        _dress(ax, data["rows"], name, with_unit=number == 0)
        for method in data["methods"]:
            _draw_method(ax, method, kind)
        axes.append(ax)
    if data["crossing"]:
        _mark_crossing(axes[0], data["crossing"])
    handles, names = axes[0].get_legend_handles_labels()
    place = {"loc": "upper left", "bbox_to_anchor": (_LEFT / WIDTH, (bottom + key + 0.05) / fig.get_figheight())}
    look = {"frameon": False, "fontsize": SMALL_SIZE, "borderaxespad": 0, "borderpad": 0, "handlelength": 2.6}
    fig.legend(handles, names, ncols=_KEY_COLUMNS, **place, **look)
    return fig


def _dress(ax, rows, name, with_unit):
    ax.set_xlim(rows[0] / 1.2, rows[-1] * 1.2)
    # With many sizes there is room for the number of every second one.
    every = 2 if len(rows) > 6 else 1
    ax.set_xticks(rows, [str(size) if (len(rows) - 1 - i) % every == 0 else "" for i, size in enumerate(rows)])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.grid(axis="y", color=RULE, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.set_xlabel("M: rows of A per device")
    if with_unit:
        ax.set_ylabel("time, µs")
    else:
        ax.tick_params(axis="y", labelleft=False)
    heading(ax, 0, 1.04, name, transform=ax.transAxes, size=SMALL_SIZE + 1)


def _draw_method(ax, method, kind):
    color, marker, width = _LOOKS.get(method["name"], _OTHER_LOOK)
    rows, median, p10, p90 = zip(*method[kind]) if method[kind] else ((),) * 4
    look = {"dashes": (4, 2.5)} if method["is_roof"] else {}
    look |= {"color": color, "marker": marker, "linewidth": width, "markersize": 5.5, "markeredgecolor": INK}
    ax.plot(rows, median, label=method["title"], gid=f"{kind}-{method['name']}", markeredgewidth=0.5, zorder=4, **look)
    ax.vlines(rows, p10, p90, color=INK, linewidth=1, zorder=3)


def _mark_crossing(ax, crossing):
    """Shades the rows with which the kernel does not pay, up to the fewest measured ones with which it does."""
    below, first = crossing["below_rows"], crossing["from_rows"]
    if below is None:
        return
    ax.axvspan(ax.get_xlim()[0], below, color=tint(DEVICE_COLORS[5], 0.16), linewidth=0, zorder=0, gid="not-faster")
    if first is not None:
        ax.axvspan(below, first, color=tint(DEVICE_COLORS[5], 0.07), linewidth=0, zorder=0, gid="crossing")
    text = f"M of {below} and less:\nnot faster than\ngathering first"
    place = {"transform": ax.get_xaxis_transform(), "size": CAPTION_SIZE, "ha": "left", "va": "top", "zorder": 6}
    ax.text(ax.get_xlim()[0] * 1.08, 0.98, text, linespacing=1.3, **place)


def _message(data) -> str:
    crossing = data["crossing"]
    if not crossing:
        return "Call and kernel time against rows per device"
    title = crossing["title"][0].upper() + crossing["title"][1:]
    if crossing["from_rows"] is None:
        return f"{title}: not faster than gathering first"
    if crossing["below_rows"] is None:
        return f"{title}: faster than gathering first wherever it ran"
    return f"{title}: faster than gathering first from M = {crossing['from_rows']} on"


def _caption(data) -> str:
    where = f"D={data['axis_size']}, {data['dtype']}, per device K={data['k']} N={data['n_shard']}"
    lines = [
        f"{where}. Points: medians over rounds; whiskers: 10th to 90th percentile. Dashed: "
        "activations that are already gathered.",
    ]
    if data["crossing"]:
        lines.append(
            "Faster: of the ratios of call times within a round, 90 % are below 1. Between measured M nothing is known."
        )
    first, last = data["sources"][0], len(data["sources"])
    lines.append(
        f"Measured: {first}" + (f"; the other {last - 1} runs are named in the figure's data." if last > 1 else ".")
    )
    return "\n".join(lines)
