"""What does each change on the way from the readable ring kernel to the fast one gain? Bars of times, and of gains."""

from cmm.ladder import ASIDE, SWITCHES, gain
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
    text_color,
    tint,
)
from cmm.plots.shapes import MARGIN, axes_at, block, heading, inches_from, page
from cmm.results import Run

_LEFT, _MIDDLE, _RIGHT, _GAINS = MARGIN + 2.2, 0.55, 0.25, 1.85
_ROW, _BAR, _AXIS, _HEADER = 0.36, 0.24, 0.5, 0.3
_COLORS = {"naive": NEUTRAL, ASIDE: DEVICE_COLORS[4]}


def ladder_data(run: Run) -> dict:
    """Returns what `draw_ladder` draws: the rows from top to bottom, and what the dashed line is.

    Times are those of matmul kernels; that of all-gather + matmul is of the whole call. A gain is what a rung takes
    less than the one before it in the same round. Rows without a complete recording are left out.
    """
    rows, before = [], None
    for result in run.methods:
        whole_call = result.name == "naive"
        time = result.call_time_us if whole_call else result.kernel_time_us
        if result.status != "measured" or time is None or result.is_incomplete:
            before = None if result.name in SWITCHES else before
            continue
        gained = gain(run, result.name, before) if before and result.name in SWITCHES else None
        before = result.name if result.name in SWITCHES else before
        rows.append(
            {"name": result.name, "title": result.title + (" (call)" if whole_call else "")}
            | {"time_us": [time.median, time.p10, time.p90]}
            | {"gain_us": [gained.median, gained.p10, gained.p90] if gained else None}
        )
    roof = next((row for row in rows if row["name"] == run.gemm_only), None)
    line = {"roof_us": roof["time_us"][0], "roof": roof["title"]} if roof else {"roof_us": None, "roof": ""}
    return {"rows": rows, "source": run.caption()} | line


@styled
def draw_ladder(run: Run):
    """Draws one bar for each rung of a measured ladder (`cmm.ladder`), and beside it what the change has gained.

    Args:
      run: a record with raw rounds, measured on GPUs.

    Returns:
      A `matplotlib.figure.Figure`. Bars are medians, whiskers 10th to 90th percentile over rounds.

    Raises:
      ValueError: nothing in the record was measured.
    """
    data = ladder_data(run)
    rows = data["rows"]
    if not rows:
        raise ValueError("Nothing in this record was measured on GPUs.")
    height = _ROW * len(rows)
    fig, bottom = page(height + _AXIS + _HEADER, _message(data), _caption(data))
    width = WIDTH - _LEFT - _MIDDLE - _GAINS - _RIGHT
    most = 1.04 * max(row["time_us"][2] for row in rows)
    ax = axes_at(fig, _LEFT, bottom + _AXIS, width, height, xlim=(0, most), ylim=(0, height))
    _dress(ax, "time, µs")
    ends = [value for row in rows for value in row["gain_us"] or ()]
    room = 0.08 * max(map(abs, ends), default=1)
    limits = (min([0.0, *ends]) - room, max([0.0, *ends]) + 6 * room)
    gains = axes_at(fig, WIDTH - _RIGHT - _GAINS, bottom + _AXIS, _GAINS, height, xlim=limits, ylim=(0, height))
    _dress(gains, "gained by this change, µs")
    gains.plot([0, 0], [0, height], color=INK, linewidth=1.0, zorder=5)
    for number, row in enumerate(rows):
        middle = height - (number + 0.5) * _ROW
        _draw_time(ax, row, middle)
        if row["gain_us"]:
            _draw_gain(gains, row, middle, room)
    if data["roof_us"]:
        look = {"color": INK, "linewidth": 1.3, "dashes": (4, 2.5), "zorder": 6, "clip_on": False}
        ax.plot([data["roof_us"]] * 2, [0, height + 0.05], gid="roof", **look)
        heading(ax, data["roof_us"], height + 0.1, data["roof"], size=CAPTION_SIZE, weight="normal", ha="center")
    return fig


def _draw_time(ax, row, middle):
    median, p10, p90 = row["time_us"]
    name = {"transform": inches_from(ax), "size": SMALL_SIZE, "va": "center_baseline"}
    ax.text(MARGIN - _LEFT, middle, row["title"], **name)
    roof = row["name"].startswith("gemm_only")
    color = tint(NEUTRAL, 0.45) if roof else _COLORS.get(row["name"], ACCENT)
    block(ax, 0, middle - _BAR / 2, median, _BAR, color, gid=f"time-{row['name']}")
    inside = {"size": SMALL_SIZE, "color": text_color(color), "va": "center_baseline", "zorder": 7}
    ax.text(0.02 * ax.get_xlim()[1], middle, f"{median:.1f}", **inside)
    _whisker(ax, p10, p90, middle)


def _draw_gain(ax, row, middle, room):
    median, p10, p90 = row["gain_us"]
    block(ax, min(0.0, median), middle - _BAR / 2, abs(median), _BAR, DEVICE_COLORS[2], gid=f"gain-{row['name']}")
    _whisker(ax, p10, p90, middle)
    ax.text(max(0.0, median, p90) + room, middle, f"{median:+.1f}", size=SMALL_SIZE, va="center_baseline", zorder=7)


def _whisker(ax, low, high, middle):
    ax.plot([low, high], [middle] * 2, color=INK, linewidth=1.2, marker="|", markersize=6, zorder=6)


def _dress(ax, label):
    ax.set_yticks([])
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.grid(axis="x", color=RULE, linewidth=0.8, zorder=0)
    ax.set_axisbelow(True)
    ax.tick_params(axis="x", length=0, labelcolor=MUTED)
    ax.set_xlabel(label)


def _message(data) -> str:
    """Returns the title: how far the rungs lead, and what is left to the roof."""
    steps = {row["name"]: row["time_us"][0] for row in data["rows"] if row["name"] in SWITCHES}
    first, last = list(SWITCHES)[0], list(SWITCHES)[-1]
    if not {first, last} <= set(steps):
        return "What each change gains"
    left = f"; the product alone takes {data['roof_us']:.0f}" if data["roof_us"] else ""
    return f"From {steps[first]:.0f} to {steps[last]:.0f} µs in {len(SWITCHES) - 1} changes{left}"


def _caption(data) -> str:
    lines = [
        "Time of the matmul kernels of one call, of the slowest GPU; of all-gather + matmul the whole call. Each rung "
        "has all changes above it. Bars: medians over rounds; whiskers: 10th to 90th percentile.",
        "Gains: this rung against the one above it, in the same round.",
    ]
    if any(row["name"] == ASIDE for row in data["rows"]):
        lines.append("Last row: the second change without the first.")
    return "\n".join([*lines, f"Measured: {data['source']}."])
