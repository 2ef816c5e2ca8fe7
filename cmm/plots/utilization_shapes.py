"""How close to the peak do calls of other shapes come? A few bars for each problem, two problems side by side."""

from collections.abc import Iterator, Sequence

from cmm.bench.suites_report import BASELINE, beyond_published
from cmm.dispatch import AUTO_KERNEL
from cmm.plots.palette import (
    ACCENT,
    CAPTION_SIZE,
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
from cmm.plots.sweep import sweep_groups
from cmm.plots.sweep_records import FASTER_IN_PERCENT, less_certain_text
from cmm.plots.utilization_shapes_records import has_bars, utilization_shapes_data
from cmm.protocol import LEAST_PROCESSES, LEAST_ROUNDS_IN_ALL
from cmm.results import Run, short_kind
from cmm.roofline import published_problem

# In inches. Problems stand in rows of two.
_COLUMNS, _COLUMN_GAP = 2, 0.4
_HEADER, _ROW, _BAR, _GAP, _AXIS = 0.19, 0.152, 0.14, 0.1, 0.36
# How far text stands from the foot of its bar or from its end, how far it may go beyond the axes, and how wide one of
# its characters is at most on average.
_FOOT, _BEYOND, _CHARACTER = 0.05, 0.28, 0.071
# As in the figure of the published shape: the roof is light grey, what others have made is grey, the kernel blue.
_ROOF_COLOR = tint(NEUTRAL, 0.55)
_COLORS = {BASELINE: NEUTRAL, "jax_example": NEUTRAL, AUTO_KERNEL: ACCENT}


def utilization_shapes_groups(runs: Sequence[Run]) -> Iterator[tuple[str, list[Run]]]:
    """Yields the name of a figure and its runs, for each kind and number of devices.

    Args:
      runs: recorded runs. Those of the published shape are left out, and so are those that have a figure of times
        against rows with the published weights, those of one device, and those of which nothing can be drawn.
    """
    usual = published_problem(1)
    has_usual_weights = lambda run: (run.problem.k, run.problem.n_shard) == (usual.k, usual.n_shard)
    swept = [run for _, group in sweep_groups(runs) for run in group if has_usual_weights(run)]
    groups: dict[str, list[Run]] = {}
    for run in beyond_published(runs):
        if run.problem.axis_size > 1 and run not in swept and has_bars(run):
            kind = short_kind(run.machine["device_kind"])
            groups.setdefault(f"utilization_shapes_{kind}_d{run.problem.axis_size}", []).append(run)
    yield from groups.items()


@styled
def draw_utilization_shapes(runs: Sequence[Run]):
    """Draws the share of the peak of a few methods for each problem, fewest FLOPs first.

    Args, Raises: as `cmm.plots.utilization_shapes_records.utilization_shapes_data`.

    Returns:
      A `matplotlib.figure.Figure`. Bars are medians, whiskers 10th to 90th percentile over rounds.
    """
    data = utilization_shapes_data(runs)
    problems = data["problems"]
    rows = [problems[i : i + _COLUMNS] for i in range(0, len(problems), _COLUMNS)]
    heights = [_ROW * max(len(problem["rows"]) for problem in row) for row in rows]
    body = sum(heights) + len(rows) * (_HEADER + _GAP)
    fig, bottom = page(body + _AXIS, _message(data), _caption(data))
    # More than 100 % is a sign of a wrong measurement or a wrong peak. It must be seen, not cut off.
    widest = max([100, *(105 * bar["utilization"] for bar in _bars(problems))])
    width = (WIDTH - 2 * MARGIN - (_COLUMNS - 1) * _COLUMN_GAP) / _COLUMNS
    top = bottom + _AXIS + body
    for number, problem in enumerate(problems):
        row, column = divmod(number, _COLUMNS)
        low = top - sum(heights[: row + 1]) - (row + 1) * _HEADER - row * _GAP
        place = (MARGIN + column * (width + _COLUMN_GAP), low, width, heights[row])
        ax = axes_at(fig, *place, xlim=(0, widest), ylim=(0, heights[row]))
        _dress(ax, is_lowest=number + _COLUMNS >= len(problems))
        _draw_problem(ax, problem, number)
    x_label = "share of the dense peak, from the time of all kernels and copies of one call"
    fig.text(0.5, (bottom + 0.06) / fig.get_figheight(), x_label, size=SMALL_SIZE, ha="center", va="baseline")
    return fig


def _dress(ax, is_lowest: bool):
    ax.set_yticks([])
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.set_xticks(range(0, 101, 20), [f"{tick} %" for tick in range(0, 101, 20)])
    ax.tick_params(axis="x", length=0, labelsize=CAPTION_SIZE, labelbottom=is_lowest)
    if is_lowest:
        # The numbers of two columns must not meet.
        first, *_, last = ax.get_xticklabels()
        first.set_horizontalalignment("left")
        last.set_horizontalalignment("right")
    ax.grid(axis="x", color=RULE, linewidth=0.8)
    ax.set_axisbelow(True)


def _draw_problem(ax, problem: dict, number: int):
    """Draws the label of a problem and its bars from top to bottom, and in place of a missing bar why it is missing."""
    top = ax.get_ylim()[1]
    heading(ax, 0, top + 0.05, problem["label"], size=CAPTION_SIZE, gid=f"label-{number}")
    if problem["suite"]:
        place = {"ha": "right", "va": "baseline", "gid": f"suite-{number}"}
        ax.text(ax.get_xlim()[1], top + 0.05, problem["suite"], size=CAPTION_SIZE, **place)
    for line, row in enumerate(problem["rows"]):
        middle = top - (line + 0.5) * _ROW
        if row["utilization"] is not None:
            _draw_bar(ax, row, f"bar-{number}-{row['method']}", middle)
        else:
            text = f"{row['title']}: {row['status']}"
            look = {"transform": inches_from(ax), "size": CAPTION_SIZE, "color": MUTED}
            ax.text(_FOOT, middle, text, va="center_baseline", **look)


def _draw_bar(ax, bar: dict, gid: str, middle: float):
    """Draws one bar with its share and its name, at its foot or beside it, and its spread."""
    percent = 100 * bar["utilization"]
    color = _COLORS.get(bar["method"], _ROOF_COLOR)
    block(ax, 0, middle - _BAR / 2, percent, _BAR, color, linewidth=0.6, gid=gid)
    ends = [100 * bar["utilization_at_p90"], 100 * bar["utilization_at_p10"]]
    whisker = {"color": INK, "linewidth": 1.2, "marker": "|", "markersize": 6, "zorder": 6, "clip_on": False}
    ax.plot(ends, [middle, middle], gid=f"{gid}-spread", **whisker)
    text = f"{percent:.0f} %  {bar['title']}"
    width = ax.get_position().width * WIDTH
    percent_per_inch = ax.get_xlim()[1] / width
    needed, beside = _CHARACTER * len(text), max(percent, *ends) / percent_per_inch + _FOOT
    # Inside, left of the whisker, if there is room, else beside it. If there is room nowhere, it lies on the whisker.
    is_inside = _FOOT + needed < ends[0] / percent_per_inch or beside + needed > width + _BEYOND
    x, ink = (_FOOT, text_color(color)) if is_inside else (beside, INK)
    place = {"va": "center_baseline", "zorder": 7, "gid": f"text-{gid}"}
    ax.text(x * percent_per_inch, middle, text, size=CAPTION_SIZE, color=ink, **place)


def _bars(problems: Sequence[dict]) -> list[dict]:
    return [row for problem in problems for row in problem["rows"] if row["utilization"] is not None]


def _message(data: dict) -> str:
    """Returns the title: the shares that the kernel reaches, and how often its calls take less time, or more."""
    problems = data["problems"]
    shares = [100 * bar["utilization"] for bar in _bars(problems) if bar["method"] == AUTO_KERNEL]
    compared = [problem for problem in problems if problem["is_faster"] is not None]
    if not shares:
        return "Share of the peak with other shapes; the fast kernel is not among them"
    ends = dict.fromkeys(f"{share:.0f}" for share in (min(shares), max(shares)))
    message = f"Fast kernel: {' to '.join(ends)} % of peak"
    if compared:
        faster = sum(problem["is_faster"] for problem in compared)
        slower = sum(problem["is_slower"] for problem in compared)
        message += f", beats gathering first in {faster} of {len(compared)} problems"
        message += f", loses in {slower}" if slower else ""
    return message


def _caption(data: dict) -> str:
    peaks = [f"{peak:g} TFLOP/s for {dtype}" for dtype, peak in data["peak_tflops"].items()]
    if len(set(data["peak_tflops"].values())) == 1:
        peaks = [peaks[0].partition(" for ")[0]]
    lines = [
        f"M × K × N per device; 100 % is {', '.join(peaks)}. Bars: medians over rounds; whiskers: 10th to 90th "
        "percentile."
    ]
    problems = data["problems"]
    of_two = [problem["is_faster_gemm_only"] for problem in problems if problem["is_faster_gemm_only"] is not None]
    if of_two and all(of_two):
        where = " where both ran" * (len(of_two) < len(problems))
        lines[0] += f" GEMM only: the faster of XLA and PyTorch{where}."
    if any(problem["is_faster"] is not None for problem in problems):
        loses = "; loses: more time" * any(problem["is_slower"] for problem in problems)
        lines[0] += f" Beats: the kernel's call takes less time in at least {FASTER_IN_PERCENT} % of the rounds{loses}."
    for method in data["not_searched"]:
        labels = "any of these problems" if method["is_all"] else _listed(method["labels"])
        lines.append(f"{method['title']} ran with a setting that was not searched for {labels}.")
    few = [
        f"{less_certain_text(of['processes'], of['rounds'])} ({_listed(of['labels'])})" for of in data["less_certain"]
    ]
    if few:
        limits = f"fewer than {LEAST_PROCESSES} processes or {LEAST_ROUNDS_IN_ALL} rounds in all"
        lines.append(f"Less certain, {limits}: {', '.join(few)}.")
    lines.append(f"Measured: {'; '.join(data['where'])}.")
    return "\n".join(lines)


def _listed(labels: Sequence[str]) -> str:
    """Returns labels in a row, none of which is broken at the end of a line."""
    return "; ".join(label.replace(" ", "\N{NO-BREAK SPACE}") for label in labels)
