"""Where does communication stop being hidden? Predicted times against rows and against columns per shard."""

import dataclasses

from matplotlib.ticker import NullFormatter, NullLocator

from cmm import roofline
from cmm.plots.palette import CAPTION_SIZE, DEVICE_COLORS, INK, MUTED, RULE, SMALL_SIZE, WIDTH, styled
from cmm.plots.shapes import MARGIN, axes_at, heading, page

SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

_CURVES = {
    "t_upper_us": "$T_{upper}$",
    "t_lower_us": "$T_{lower}$",
    "t_math_us": "$T_{math}$",
    "t_comms_us": "$T_{comms}$",
}
_COLORS = {"t_math_us": DEVICE_COLORS[0], "t_comms_us": DEVICE_COLORS[5], "t_lower_us": INK, "t_upper_us": INK}
_LEFT, _GAP, _RIGHT = MARGIN + 0.6, 1.0, 0.75
_HEIGHT = 3.1


def bounds_data(
    problem: roofline.Problem | None = None, machine: roofline.Machine = roofline.H100_SXM, sizes=SIZES
) -> dict:
    """Returns what `draw_roofline_bounds` draws: bounds for each size of `m_shard`, and for each of `n_shard`.

    Args:
      problem: the sizes that do not vary; by default the published problem on 4 devices.
      machine: the machine.
      sizes: rows, and columns, per shard.

    Raises:
      ValueError: the machine has no known peak for the dtype.
    """
    problem = problem or roofline.published_problem(4)
    hidden = _columns_that_hide(problem, machine)
    # The lower bound has its corner where the times are equal: a straight line past it would cut it off.
    corner = {round(hidden)} if min(sizes) < hidden < max(sizes) else set()
    return {
        "problem": dataclasses.asdict(problem),
        "machine": machine.name,
        "sizes": list(sizes),
        "series": {
            "m_shard": _series(problem, machine, "m_shard", sizes),
            "n_shard": _series(problem, machine, "n_shard", sorted({*sizes} | corner)),
        },
        "n_shard_where_hidden": hidden,
        "n_shard_where_a_hop_hides": _columns_that_hide_a_hop(problem, machine),
        "source": f"predicted by cmm.roofline.bounds; {machine.source}",
    }


def _series(problem: roofline.Problem, machine: roofline.Machine, name: str, values) -> list[dict]:
    """Returns the bounds of `problem` with each of `values` in place of its size `name`."""
    rows = []
    for value in values:
        bounds = roofline.bounds(dataclasses.replace(problem, **{name: value}), machine)
        rows.append({name: value} | dataclasses.asdict(bounds))
    return rows


def _columns_that_hide(problem: roofline.Problem, machine: roofline.Machine) -> float:
    """Returns the columns per shard at which all transfers take as long as all products."""
    # T_math is proportional to the columns of a shard, T_comms does not depend on them.
    bounds = roofline.bounds(dataclasses.replace(problem, n_shard=1), machine)
    return bounds.t_comms_us / bounds.t_math_us


def _columns_that_hide_a_hop(problem: roofline.Problem, machine: roofline.Machine) -> int:
    """Returns the fewest columns per shard with which one hop hides behind one product."""
    low, high = 0, 1
    while not roofline.hop_hides(dataclasses.replace(problem, n_shard=high), machine):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        hides = roofline.hop_hides(dataclasses.replace(problem, n_shard=middle), machine)
        low, high = (low, middle) if hides else (middle, high)
    return high


@styled
def draw_roofline_bounds(
    problem: roofline.Problem | None = None, machine: roofline.Machine = roofline.H100_SXM, sizes=SIZES
):
    """Draws `T_math`, `T_comms`, `T_lower` and `T_upper` against the rows and against the columns of a shard.

    Both times are proportional to the rows, so these do not decide which is longer: the columns do, since products
    grow with them and transfers do not. Hence two panels.

    Args, Raises: as `bounds_data`.

    Returns:
      A `matplotlib.figure.Figure`. All of it is predicted.

    Source: the roofline model as in "How to Scale Your Model" (Austin et al., 2025), chapter on rooflines.
    """
    data = bounds_data(problem, machine, sizes)
    alone = data["problem"]["axis_size"] == 1
    title = "One device: nothing to hide" if alone else "Columns per shard, not rows, decide whether transfers hide"
    fig, bottom = page(_HEIGHT + 1.15, title, _caption(data))
    width = (WIDTH - _LEFT - _GAP - _RIGHT) / 2
    limits = _limits(data)
    for index, (name, rows) in enumerate(data["series"].items()):
        left = _LEFT + index * (width + _GAP)
        ax = axes_at(fig, left, bottom + 0.72, width, _HEIGHT, xscale="log", yscale="log", ylim=limits)
        _dress(ax, name, data, with_unit=index == 0)
        curves = _draw_curves(ax, name, rows)
        _label_ends(ax, curves)
        if name == "n_shard" and not alone:
            _mark_crossing(ax, data)
    return fig


def _limits(data: dict) -> tuple[float, float]:
    """Returns the range of both time axes: one range, so that the panels can be compared."""
    times = [row[curve] for rows in data["series"].values() for row in rows for curve in _CURVES if row[curve] > 0]
    return min(times) / 1.5, max(times) * 1.6


def _draw_curves(ax, name: str, rows) -> dict[str, float]:
    """Draws the curves that are not zero, and returns where each ends."""
    ends = {}
    for curve in _CURVES:
        times = [row[curve] for row in rows]
        if not any(times):
            continue
        bound = curve in ("t_lower_us", "t_upper_us")
        # The lower bound lies on one of the two times: dashed and on top, it lets that one shine through.
        look = {"dashes": (4, 2.5), "linewidth": 1.5, "zorder": 4} if bound else {"linewidth": 3.2, "zorder": 3}
        gid = f"{curve}-{name}"
        ax.plot([row[name] for row in rows], times, color=_COLORS[curve], gid=gid, solid_capstyle="butt", **look)
        ends[curve] = times[-1]
    return ends


def _label_ends(ax, ends: dict[str, float]):
    """Writes the names of curves at their right ends, moved apart where ends lie together."""
    height = ax.get_window_extent().height / ax.figure.dpi
    to_axes = ax.transScale + ax.transLimits
    curves = sorted(ends, key=lambda curve: (ends[curve], curve == "t_upper_us", curve == "t_lower_us"))
    places = [to_axes.transform((1, ends[curve]))[1] * height for curve in curves]
    for curve, place in zip(curves, _apart(places, 0.21), strict=True):
        settings = {"transform": ax.transAxes, "size": SMALL_SIZE, "color": _COLORS[curve]}
        ax.text(1.03, place / height, _CURVES[curve], va="center_baseline", **settings)


def _apart(places, least: float) -> list[float]:
    """Returns the rising `places` moved as little as needed to be `least` apart."""
    places = list(places)
    for _ in range(100):
        for index in range(len(places) - 1):
            lack = least - (places[index + 1] - places[index])
            if lack > 0:
                places[index] -= lack / 2
                places[index + 1] += lack / 2
    return places


def _mark_crossing(ax, data: dict):
    """Shades the columns per shard with which transfers take longer than products."""
    columns = data["n_shard_where_hidden"]
    low, high = ax.get_xlim()
    if not low < columns < high:
        return
    ax.axvspan(low, columns, color=DEVICE_COLORS[5], alpha=0.12, linewidth=0, zorder=0, gid="communication-shows")
    ax.axvline(columns, color=MUTED, linewidth=1, zorder=1)
    place = {"transform": ax.get_xaxis_transform(), "size": CAPTION_SIZE, "ha": "right", "va": "top"}
    ax.text(columns / 1.15, 0.97, f"N < {columns:.0f}:\ntransfers take longer", linespacing=1.3, **place)


def _dress(ax, name: str, data: dict, with_unit: bool):
    sizes = data["sizes"]
    ax.set_xlim(sizes[0], sizes[-1])
    # A tick at every size, a number at every second, as there is no room for more.
    ax.set_xticks(sizes, [str(size) if index % 2 == 0 else "" for index, size in enumerate(sizes)])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.grid(axis="y", color=RULE, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.set_xlabel({"m_shard": "M: rows of A per shard", "n_shard": "N: columns of B per shard"}[name])
    if with_unit:
        ax.set_ylabel("time, µs")
    p = data["problem"]
    fixed = f"N = {p['n_shard']}" if name == "m_shard" else f"M = {p['m_shard']}"
    heading(ax, 0, 1.06, fixed, transform=ax.transAxes, size=SMALL_SIZE + 1)


def _caption(data: dict) -> str:
    p = data["problem"]
    lines = [
        f"Predicted, not measured: {data['machine']}, D={p['axis_size']}, {p['dtype']}, K={p['k']}.",
        "T_math: all FLOPs at peak rate. T_comms: all received bytes at link rate.",
        "T_lower: the larger of the two, perfect overlap. T_upper: their sum, no overlap.",
    ]
    if p["axis_size"] > 1:
        columns = data["n_shard_where_a_hop_hides"]
        lines.append(f"In a ring every hop must hide behind one product, which takes N of {columns} or more.")
    lines.append("Not in the model: launches, signals, and reading B from memory, which counts most when M is small.")
    return " ".join(lines)
