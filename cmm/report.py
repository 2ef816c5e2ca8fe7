"""The result ladder: one row per method, for terminals and for the README."""

from cmm.reference import relative_limit
from cmm.results import MethodResult, Run
from cmm.roofline import (
    H100_SXM,
    MACHINES_BY_DEVICE_KIND,
    PUBLISHED_ROWS,
    published_problem,
    tflops_per_device,
    utilization,
)

HEADER = (
    "method",
    "status",
    "error / bound",
    "call time, µs",
    "TFLOP/s per device",
    "% of peak",
    "x GEMM only",
    "wall time, µs",
)


def ladder_rows(run: Run) -> list[tuple[str, ...]]:
    """Returns one row of text per method of `run`, in the order of `HEADER`.

    Rates, shares of the peak and ratios are left out for simulated devices: they would say nothing about a GPU.
    """
    return [_row(run, result) for result in run.methods]


def is_wrong(run: Run, result: MethodResult) -> bool:
    """Whether a method ran and its result was wrong, by the element or as a whole (see `cmm.reference`)."""
    if result.error_over_bound is None:
        return False
    limit = relative_limit(run.problem.k, run.problem.dtype)
    return not (result.error_over_bound <= 1 and result.relative_error <= limit)


def _row(run, result):
    if result.status == "skipped":
        return (result.title, "skipped", "", "", "", "", "", "")
    check = f"{result.error_over_bound:.2g}" + (" WRONG" if is_wrong(run, result) else "")
    wall = _spread(result.wall_time_us)
    if run.simulated:
        return (result.title, result.status, check, "", "", "", "", wall)
    ratio = _spread(result.ratio_to_gemm_only, digits=2)
    time_us = result.call_time_us.median
    machine = MACHINES_BY_DEVICE_KIND.get(run.machine["device_kind"])
    share = f"{100 * utilization(run.problem, time_us, machine):.0f} %" if machine else "peak unknown"
    rate = f"{tflops_per_device(run.problem, time_us):.0f}"
    return (result.title, result.status, check, _spread(result.call_time_us), rate, share, ratio, wall)


def _spread(spread, digits=0) -> str:
    if spread.p10 == spread.p90:  # GEMM only, compared with itself
        return f"{spread.median:.{digits}f}"
    return f"{spread.median:.{digits}f} ({spread.p10:.{digits}f}–{spread.p90:.{digits}f})"


def markdown_ladder(runs: list[Run]) -> str:
    """Returns one Markdown table of measured runs that differ in their number of GPUs, with the caption of each.

    Args:
      runs: runs with the same methods, shapes per device and dtype.
    """
    sizes = [run.problem.axis_size for run in runs]
    columns = ("call, µs", "% of peak", "× GEMM only", "wall, µs")
    header = [f"{size} GPUs: {column}" for size in sizes for column in columns]
    lines = [_markdown_row(["method", *header]), _markdown_row(["---"] + ["---:"] * len(header))]
    tables = [dict(zip((result.name for result in run.methods), ladder_rows(run), strict=True)) for run in runs]
    for result in runs[0].methods:
        cells = [cell for table in tables for cell in _markdown_cells(table[result.name])]
        lines.append(_markdown_row([result.title, *cells]))
    captions = [f"{run.caption()}. {run.protocol}. Command: `{run.command}`." for run in runs]
    details = ["<details><summary>How and where measured</summary>", "", *_bullets(captions), "", "</details>"]
    return "\n".join([*lines, "", *details])


def _markdown_cells(row):
    _, status, _, call, _, share, ratio, wall = row
    return ("skipped", "", "", "") if status == "skipped" else (call, share, ratio, wall)


def _bullets(lines):
    return [f"- {line}" for line in lines]


def markdown_published() -> str:
    """Returns the published table as Markdown."""
    rows = [_markdown_row(("GPUs", "all-gather, then matmul, µs", "Pallas kernel, µs", "their bound, µs"))]
    rows.append(_markdown_row(["---:"] * 4))
    for row in PUBLISHED_ROWS:
        problem = published_problem(row.axis_size)
        cells = [
            f"{time_us:.0f} ({100 * utilization(problem, time_us, H100_SXM):.0f} %)"
            for time_us in (row.reference_us, row.kernel_us, row.bound_us)
        ]
        rows.append(_markdown_row((str(row.axis_size), *cells)))
    return "\n".join(rows)


def _markdown_row(cells) -> str:
    return "| " + " | ".join(cells) + " |"


def replace_between_markers(text: str, name: str, content: str) -> str:
    """Returns `text` with what stands between `<!-- name -->` and `<!-- /name -->` replaced by `content`.

    Raises:
      ValueError: the markers are not both there, in order.
    """
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found_start, rest = text.partition(start)
    _, found_end, after = rest.partition(end)
    if not (found_start and found_end):
        raise ValueError(f"The markers {start} and {end} are not both in the text.")
    return f"{before}{start}\n{content}\n{end}{after}"
