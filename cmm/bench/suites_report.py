"""How do methods compare over several problems? Tables of ratios, sweeps over rows, and the README's compact table.

Comparisons with NCCL + cuBLAS use call times, comparisons between kernels and with GEMM only kernel times. A ratio is
the median of ratios within a round, with its 10th and 90th percentile. A difference inside this spread is none.
"""

import re
from collections.abc import Sequence

from cmm.bench.merge import ratio
from cmm.dispatch import AUTO_KERNEL
from cmm.report import has_times, is_roof, is_wrong, markdown_row, spread_text
from cmm.results import NOT_ASKED_FOR, Run
from cmm.roofline import Problem

RATIO_HEADER = ("method", "kernel time / GEMM only", "call time / GEMM only", "call time / NCCL + cuBLAS")
BASELINE = "naive"
_LEAST_FOR_SWEEP = 3
_MARK = "*"
_UNFIT, _UNMEASURED = "none fits", "not measured"


def ratio_rows(run: Run) -> list[tuple[str, ...]]:
    """Returns one row of text per method that was measured, in the order of `RATIO_HEADER`; none if simulated."""
    measured = [] if run.simulated else [result for result in run.methods if has_times(result)]
    return [
        (
            result.title,
            _ratio_text(result.kernel_ratio_to_gemm_only),
            _ratio_text(result.ratio_to_gemm_only),
            _ratio_text(ratio(run, result.name, BASELINE)),
        )
        for result in measured
    ]


def sweeps(runs: Sequence[Run]) -> list[list[Run]]:
    """Returns the groups of at least three runs that differ only in their rows per device, fewest rows first."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        p = run.problem
        groups.setdefault((p.axis_size, p.k, p.n_shard, p.dtype, run.simulated), []).append(run)
    return [sorted(g, key=lambda run: run.problem.m_shard) for g in groups.values() if len(g) >= _LEAST_FOR_SWEEP]


def sweep_table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of a table of call time and kernel time against rows per device.

    Args:
      runs: runs that differ in their rows per device.

    Returns:
      A row per run: the rows of `A`, and for each method "call / kernel" in µs. The method of the shortest call time is
      marked, and so are methods that rounds do not tell apart from it; GEMM only is no method. Simulated runs have the
      time on this CPU and no mark.
    """
    titles = {result.name: result.title for run in runs for result in run.methods if has_times(result)}
    return ["M per device", *titles.values()], [_sweep_row(run, titles) for run in runs]


def fastest(run: Run) -> list[str]:
    """Returns the right method of the shortest call time, and those whose difference from it is inside the spread.

    GEMM only is no method.
    """
    methods = [result for result in run.methods if _is_comparable(run, result) and not is_roof(result)]
    if not methods:
        return []
    first = min(methods, key=lambda result: result.call_time_us.median).name
    ties = (result.name for result in methods if (found := ratio(run, result.name, first)) and found.p10 <= 1)
    return list(dict.fromkeys((first, *ties)))


def beyond_published(runs: Sequence[Run]) -> list[Run]:
    """Returns the measured runs whose shapes are not those of the published table, smallest products first."""
    others = [run for run in runs if not run.simulated and not run.has_published_shape]
    return sorted(others, key=lambda run: (run.problem.dtype, run.problem.axis_size, run.problem.flops_per_device))


def markdown_beyond(runs: Sequence[Run]) -> str:
    """Returns a compact Markdown table with a row per run, and how they were measured; nothing without runs.

    The kernel in it is the one that `method="auto"` takes, whether another was faster or not.
    """
    if not runs:
        return ""
    dtypes = {run.problem.dtype for run in runs}
    sizes = shape_text if len(dtypes) > 1 else _sizes
    header = ("M × K × N per GPU", "GPUs", "GEMM only, kernel µs", "fast kernel, kernel µs", "kernel / GEMM only")
    header += ("NCCL + cuBLAS, call µs", "fast kernel, call µs", "ratio of calls", "ratio of walls in a program")
    rows = [(sizes(run.problem), *_beyond_cells(run)) for run in runs]
    lines = [markdown_row(header), markdown_row(["---"] + ["---:"] * (len(header) - 1)), *map(markdown_row, rows)]
    how = [_how_measured(group, with_dtype=len(dtypes) > 1) for group in _measured_together(runs)]
    details = ["<details><summary>How and where measured</summary>", "", *how, "", "</details>"]
    return "\n".join([_beyond_lead(dtypes, rows), "", *lines, "", *details])


def shape_text(problem: Problem) -> str:
    """Returns dtype and sizes per device in a few characters."""
    return shape_texts([problem])[0]


def shape_texts(problems: Sequence[Problem], with_dtype: bool = True) -> list[str]:
    """Returns dtype and sizes per device as `shape_text`, but one text for all problems that differ in rows alone."""
    rows: dict[tuple, list[str]] = {}
    for p in problems:
        rows.setdefault((f"{p.dtype}, " if with_dtype else "", p.k, p.n_shard), []).append(str(p.m_shard))
    return [f"{dtype}{', '.join(m)} × {k} × {n}" for (dtype, k, n), m in rows.items()]


def where_text(run: Run) -> str:
    """Returns on which devices, with which JAX and data, and on which day a run was measured."""
    devices = f"{run.problem.axis_size} x {run.machine['device_kind']}"
    return f"{devices}, JAX {run.versions['jax']}, {run.distribution}, {run.date}"


def shared_protocol(protocols: Sequence[str]) -> str:
    """Returns what all of these protocols say (see `cmm.protocol.Protocol.in_words`), without what differs."""
    clauses = [protocol.split("; ") for protocol in protocols]
    if len({len(of_one) for of_one in clauses}) > 1:
        return "; ".join(clause for clause in clauses[0] if all(clause in of_one for of_one in clauses))
    return "; ".join(filter(None, map(_shared_parts, zip(*clauses))))


def _sizes(problem) -> str:
    return shape_texts([problem], with_dtype=False)[0]


def _is_comparable(run, result) -> bool:
    measured = result.call_time_us is not None and has_times(result) and not result.is_incomplete
    return measured and not is_wrong(run, result)


def _ratio_text(spread) -> str:
    return spread_text(spread, digits=2) if spread else ""


def _sweep_row(run, titles) -> list[str]:
    by_name = {result.name: result for result in run.methods}
    best = [] if run.simulated else fastest(run)
    cells = (_sweep_cell(run, by_name.get(name)) + _MARK * (name in best) for name in titles)
    return [str(run.problem.m_shard), *cells]


def _sweep_cell(run, result) -> str:
    if result is None or not has_times(result):
        return "–"
    wrong = " WRONG" * is_wrong(run, result)
    if run.simulated:
        return f"{result.wall_time_us.median:.0f}{wrong}"
    if result.is_incomplete:
        return f"incomplete{wrong}"
    kernel = f" / {result.kernel_time_us.median:.0f}" if result.kernel_time_us else ""
    return f"{result.call_time_us.median:.0f}{kernel}{wrong}"


def _beyond_lead(dtypes, rows) -> str:
    where = f"Other shapes, {min(dtypes)}" if len(dtypes) == 1 else "Other shapes"
    lead = (
        f"{where}: the fast kernel against all-gather + matmul (NCCL + cuBLAS). Times are medians over rounds; ratios "
        "are medians of ratios within a round (10th to 90th percentile). Below 1 the fast kernel takes less time."
    )
    if any(_UNFIT in row for row in rows):
        lead += f' Where "{_UNFIT}", and in steps of few FLOPs, `method="auto"` takes all-gather + matmul.'
    return lead


def _beyond_cells(run) -> list[str]:
    by_name = {result.name: result for result in run.methods}
    roof, baseline, kernel = by_name[run.gemm_only], by_name.get(BASELINE), by_name.get(AUTO_KERNEL)
    cells = [str(run.problem.axis_size)]
    cells.append(f"{roof.kernel_time_us.median:.0f}" if roof.kernel_time_us else "not recorded")
    measured = baseline is not None and has_times(baseline) and not baseline.is_incomplete
    gathered = f"{baseline.call_time_us.median:.0f}" + " WRONG" * is_wrong(run, baseline) if measured else _UNMEASURED
    if kernel is None or not _is_comparable(run, kernel):
        return [*cells, _why_no_times(run, kernel), "", gathered, "", "", ""]
    kernel_us = f"{kernel.kernel_time_us.median:.0f}" if kernel.kernel_time_us else "not recorded"
    ratios = (ratio(run, AUTO_KERNEL, BASELINE, kind) for kind in ("call_us", "wall_in_program_us"))
    own = [f"{kernel.call_time_us.median:.0f}", *map(_ratio_text, ratios)]
    return [*cells, kernel_us, _ratio_text(kernel.kernel_ratio_to_gemm_only), gathered, *own]


def _why_no_times(run, kernel) -> str:
    if kernel is not None and is_wrong(run, kernel):
        return "WRONG"
    # Left out by choice, or its record lacks kernels. Else it was skipped because shapes or GPUs are not fit for it.
    if kernel is None or has_times(kernel) or kernel.reason == NOT_ASKED_FOR:
        return _UNMEASURED
    return _UNFIT


def _measured_together(runs) -> list[list[Run]]:
    """Returns the groups of runs that one place, day and command, rows apart, has in common."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        about = (where_text(run), *run.machine.items(), *run.versions.items(), run.processes, run.quick)
        groups.setdefault((*about, _any_rows(run.command)), []).append(run)
    return list(groups.values())


def _any_rows(command) -> str:
    return re.sub(r"(--m-shard) \d+", r"\1 M", command)


def _how_measured(runs, with_dtype) -> str:
    shapes = "; ".join(shape_texts([run.problem for run in runs], with_dtype))
    protocols = [run.protocol for run in runs]
    protocol = shared_protocol(protocols)
    rest = " What differs by shape is in `figures/data`." if any(one != protocol for one in protocols) else ""
    is_same = len({run.command for run in runs}) == 1
    command = runs[0].command if is_same else _any_rows(runs[0].command)
    return f"- {shapes}: {where_text(runs[0])}. {protocol}.{rest} Command: `{command}`."


def _shared_parts(clauses) -> str:
    split = [re.split(r"(: |, )", clause) for clause in clauses]
    texts, marks = split[0][::2], [*split[0][1::2], ""]
    kept = [(text, mark) for text, mark in zip(texts, marks, strict=True) if all(text in one[::2] for one in split)]
    return "".join(text + mark for text, mark in kept[:-1]) + "".join(text for text, _ in kept[-1:])
