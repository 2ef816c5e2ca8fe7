"""The result ladder: one row per method, for terminals and for the README."""

import dataclasses
from collections.abc import Iterable

from cmm.dispatch import AUTO_KERNEL, METHODS
from cmm.reference import relative_limit
from cmm.results import MethodResult, Run, Spread
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
    "kernel time, µs",
    "TFLOP/s per device",
    "% of peak",
    "x GEMM only",
    "wall in a program, µs",
    "wall alone, µs",
)

# By name, what the README compares with the kernel in its first sentences.
_BESIDE_HEADLINE = {"naive": "Gathering first, by NCCL and cuBLAS, takes", "jax_example": "JAX's example kernel takes"}


def ladder_rows(run: Run) -> list[tuple[str, ...]]:
    """Returns one row of text per method of `run` and per program of its peers, in the order of `HEADER`.

    Rates, shares of the peak and ratios are left out for simulated devices: they would say nothing about a GPU.
    """
    return [_row(run, result) for result in (*run.methods, *run.peers)]


def is_roof(result: MethodResult) -> bool:
    """Whether it multiplies activations that are already gathered, so that it bounds all methods of its run."""
    return result.name.startswith("gemm_only")


def is_wrong(run: Run, result: MethodResult) -> bool:
    """Whether a method ran and its result was wrong, by the element or as a whole (see `cmm.reference`)."""
    if result.error_over_bound is None:
        return False
    limit = relative_limit(run.problem.k, run.problem.dtype)
    return not (result.error_over_bound <= 1 and result.relative_error <= limit)


def _row(run, result):
    if not has_times(result):
        return (result.title, result.status) + ("",) * (len(HEADER) - 2)
    check = f"{result.error_over_bound:.2g}" + (" WRONG" if is_wrong(run, result) else "")
    wall = spread_text(result.wall_time_us)
    if run.simulated:
        return (result.title, result.status, check, "", "", "", "", "", "", wall)
    if result.is_incomplete:
        return (result.title, result.status, check, "incomplete", "", "", "", "", _in_program(result), wall)
    call, kernel = spread_text(result.call_time_us), _kernel(result)
    rate = f"{tflops_per_device(run.problem, result.call_time_us.median):.0f}"
    ratio = spread_text(result.ratio_to_gemm_only, digits=2)
    return (
        result.title,
        result.status,
        check,
        call,
        kernel,
        rate,
        _share_of_peak(run, result),
        ratio,
        _in_program(result),
        wall,
    )


def has_times(result: MethodResult) -> bool:
    """Whether it ran, so that there are times."""
    return result.status in ("measured", "simulated")


def _share_of_peak(run, result) -> str:
    machine = MACHINES_BY_DEVICE_KIND.get(run.machine["device_kind"])
    return f"{100 * utilization(run.problem, result.call_time_us.median, machine):.0f} %" if machine else "peak unknown"


def _kernel(result) -> str:
    return f"{result.kernel_time_us.median:.0f}" if result.kernel_time_us else ""


def _in_program(result) -> str:
    return f"{result.wall_time_in_program_us.median:.0f}" if result.wall_time_in_program_us else ""


def spread_text(spread: Spread, digits: int = 0) -> str:
    """Returns the median with the 10th and 90th percentile in brackets, where these differ."""
    if spread.p10 == spread.p90:  # GEMM only, compared with itself
        return f"{spread.median:.{digits}f}"
    return f"{spread.median:.{digits}f} ({spread.p10:.{digits}f}–{spread.p90:.{digits}f})"


def roof_note(run: Run) -> str:
    """Returns a sentence that says what ratios of `run` are relative to, where that is not plain; else nothing."""
    roofs = [result for result in run.methods if is_roof(result) and has_times(result)]
    if len(roofs) < 2:
        return ""
    return f"GEMM only, to which ratios are formed, is the faster one here: {run.method(run.gemm_only).title}."


def peers_note(run: Run) -> str:
    """Returns a sentence that says what the ratios of peers are relative to, where there are peers; else nothing."""
    measured = [peer.title for peer in run.peers if has_times(peer)]
    return f"In processes of their own, with ratios to their own GEMM only: {'; '.join(measured)}." if measured else ""


def markdown_headline(runs: list[Run]) -> str:
    """Returns in a few sentences what the fastest kernel takes, on most GPUs that it was measured on; else nothing.

    Ratios are those of call times to GEMM only. What the host's clock says follows, where both have such times.
    """
    shown = lambda run, name: next((r for r in run.methods if r.name == name and has_times(r) and r.call_time_us), None)
    run = max((run for run in runs if shown(run, AUTO_KERNEL)), key=lambda run: run.problem.axis_size, default=None)
    if run is None or is_wrong(run, shown(run, AUTO_KERNEL)):
        return ""
    roof, kernel = run.method(run.gemm_only), shown(run, AUTO_KERNEL)
    times = lambda result: f"{result.call_time_us.median:.0f} µs ({result.ratio_to_gemm_only.median:.2f} times)"
    others = [(words, shown(run, name)) for name, words in _BESIDE_HEADLINE.items()]
    p, device = run.problem, run.machine["device_kind"].replace("NVIDIA ", "")
    operands = f"{p.m_shard} × {p.k} activations and {p.k} × {p.n_shard} weights"
    ratio = f"{kernel.ratio_to_gemm_only.median:.2f} times the product alone"
    call = f"{kernel.call_time_us.median:.0f} µs of GPU time, {ratio}"
    where = f"On {p.axis_size} {device} GPUs, {p.dtype}, with {operands} on each"
    first = f"{where}, a call of the fast kernel takes **{call}**"
    beside = "; ".join(f"{words} {times(result)}" for words, result in others if result)
    text = f"{first} ({roof.call_time_us.median:.0f} µs). {beside}." if beside else f"{first}."
    return " ".join(filter(None, [text, _walls_in_words(kernel, shown(run, "naive"))]))


def _walls_in_words(kernel, gathered) -> str:
    if gathered is None or any(not one.wall_time_in_program_us or not one.wall_time_us for one in (kernel, gathered)):
        return ""
    inside, alone = (
        " against ".join(f"{getattr(one, kind).median:.0f} µs" for one in (kernel, gathered))
        for kind in ("wall_time_in_program_us", "wall_time_us")
    )
    return (
        f"By the host's clock, a call in a program of several takes {inside} for gathering first; a call that is a "
        f"program of its own {alone}."
    )


def markdown_ladder(runs: list[Run]) -> str:
    """Returns a Markdown table for each measured run, under its number of GPUs, and then how they were measured.

    Columns of which a run recorded nothing are left out.
    """
    tables = [f"**{run.problem.axis_size} GPUs**\n\n{_markdown_table(run)}" for run in runs]
    details = ["<details><summary>How and where measured</summary>", "", *map(_how_measured, runs), "", "</details>"]
    return "\n".join(["\n\n".join(tables), "", *details])


def markdown_local(runs: list[Run]) -> str:
    """Returns a Markdown table of products on one device, and how they were measured; nothing without runs.

    On an axis of one device a kernel of this package is its local matmul, and every method in plain JAX is GEMM only.
    """
    if not runs:
        return ""
    kernel = next(method.name for method in METHODS.values() if method.needs_hopper)
    shown = []
    for run in runs:
        rows = [one for one in run.methods if has_times(one) and (is_roof(one) or one.name == kernel)]
        rows = [dataclasses.replace(one, title="`cmm.matmul`") if one.name == kernel else one for one in rows]
        shown.append(dataclasses.replace(run, methods=tuple(rows)))
    details = ["<details><summary>How and where measured</summary>", "", *map(_how_measured, shown), "", "</details>"]
    return "\n".join(["\n\n".join(map(_markdown_table, shown)), "", *details])


def _markdown_table(run) -> str:
    rows = [_markdown_cells(run, result) for result in (*run.methods, *run.peers)]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    lines = [markdown_row(columns), markdown_row(["---"] + ["---:"] * (len(columns) - 1))]
    return "\n".join([*lines, *(markdown_row(row[name] for name in columns) for row in rows)])


def _markdown_cells(run, result) -> dict[str, str]:
    """Returns the cells of one method by the titles of their columns."""
    names = ("call, µs", "kernel, µs", "% of peak", "× GEMM only", "wall in a program, µs", "wall alone, µs")
    if not has_times(result):
        return {"method": result.title} | dict.fromkeys(names, "") | {names[0]: result.status}
    if result.is_incomplete:
        walls = (_in_program(result), f"{result.wall_time_us.median:.0f}")
        return {"method": result.title} | dict(zip(names, ("incomplete", "", "", "", *walls)))
    values = (
        spread_text(result.call_time_us) + (" WRONG" if is_wrong(run, result) else ""),
        _kernel(result),
        _share_of_peak(run, result),
        f"{result.ratio_to_gemm_only.median:.2f}",
        _in_program(result),
        f"{result.wall_time_us.median:.0f}",
    )
    return {"method": result.title} | dict(zip(names, values))


def _how_measured(run) -> str:
    programs = [f"{result.title}: {result.details}." for result in (*run.methods, *run.peers) if result.details]
    sentences = [f"{run.caption()}.", f"{run.protocol}.", roof_note(run), peers_note(run), *programs]
    sentences.append(f"Command: `{run.command}`.")
    return "- " + " ".join(filter(None, sentences))


def markdown_published() -> str:
    """Returns the published table as Markdown."""
    rows = [markdown_row(("GPUs", "all-gather, then matmul, µs", "Pallas kernel, µs", "their bound, µs"))]
    rows.append(markdown_row(["---:"] * 4))
    for row in PUBLISHED_ROWS:
        problem = published_problem(row.axis_size)
        cells = [
            f"{time_us:.0f} ({100 * utilization(problem, time_us, H100_SXM):.0f} %)"
            for time_us in (row.reference_us, row.kernel_us, row.bound_us)
        ]
        rows.append(markdown_row((str(row.axis_size), *cells)))
    return "\n".join(rows)


def markdown_row(cells: Iterable[str]) -> str:
    """Returns one line of a Markdown table."""
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
