"""How do methods compare over several problems? Tables of ratios, sweeps over rows, and the README's compact table.

Comparisons with NCCL + cuBLAS use call times, comparisons between kernels and with GEMM only kernel times. A ratio is
the median of ratios within a round, with its 10th and 90th percentile. A difference inside this spread is none.
"""

from collections.abc import Sequence

from cmm.bench.merge import ratio
from cmm.dispatch import METHODS
from cmm.report import has_times, is_roof, is_wrong, markdown_row, spread_text
from cmm.results import MethodResult, Run
from cmm.roofline import Problem, published_problem

RATIO_HEADER = ("method", "kernel time / GEMM only", "call time / GEMM only", "call time / NCCL + cuBLAS")
_BASELINE = "naive"
_LEAST_FOR_SWEEP = 3
_MARK = "*"


def ratio_rows(run: Run) -> list[tuple[str, ...]]:
    """Returns one row of text per method that was measured, in the order of `RATIO_HEADER`; none if simulated."""
    measured = [] if run.simulated else [result for result in run.methods if has_times(result)]
    return [
        (
            result.title,
            _ratio_text(result.kernel_ratio_to_gemm_only),
            _ratio_text(result.ratio_to_gemm_only),
            _ratio_text(ratio(run, result.name, _BASELINE)),
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


def best_kernel(run: Run) -> MethodResult | None:
    """Returns the kernel of this package with the shortest kernel time among right ones, if there is one."""
    kernels = [
        result
        for result in run.methods
        if result.name in METHODS and METHODS[result.name].needs_hopper and _is_comparable(run, result)
    ]
    return min((k for k in kernels if k.kernel_time_us), key=lambda k: k.kernel_time_us.median, default=None)


def beyond_published(runs: Sequence[Run]) -> list[Run]:
    """Returns the measured runs whose shapes are not those of the published table, smallest products first."""
    shape = lambda p: (p.m_shard, p.k, p.n_shard)
    others = [run for run in runs if not run.simulated and shape(run.problem) != shape(published_problem(1))]
    return sorted(others, key=lambda run: (run.problem.dtype, run.problem.axis_size, run.problem.flops_per_device))


def markdown_beyond(runs: Sequence[Run]) -> str:
    """Returns a compact Markdown table with a row per run, and how they were measured; nothing without runs."""
    if not runs:
        return ""
    header = ("dtype, per GPU M × K × N", "GPUs", "GEMM only, kernel µs", "NCCL + cuBLAS, call µs")
    header += ("best kernel", "kernel µs", "call µs", "kernel / GEMM only", "call / NCCL + cuBLAS")
    lines = [markdown_row(header), markdown_row(["---", "---:", "---:", "---:", "---"] + ["---:"] * 4)]
    lines += [markdown_row(_beyond_cells(run)) for run in runs]
    lead = "Other shapes. Ratios are medians of ratios within a round (10th to 90th percentile)."
    how = dict.fromkeys(map(_how_measured, runs))
    return "\n".join(
        [lead, "", *lines, "", "<details><summary>How and where measured</summary>", "", *how, "", "</details>"]
    )


def shape_text(problem: Problem) -> str:
    """Returns dtype and sizes per device in a few characters."""
    return f"{problem.dtype}, {problem.m_shard} × {problem.k} × {problem.n_shard}"


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


def _beyond_cells(run) -> list[str]:
    by_name = {result.name: result for result in run.methods}
    roof, baseline, kernel = by_name[run.gemm_only], by_name.get(_BASELINE), best_kernel(run)
    cells = [shape_text(run.problem), str(run.problem.axis_size)]
    cells.append(f"{roof.kernel_time_us.median:.0f}" if roof.kernel_time_us else "not recorded")
    measured = baseline is not None and has_times(baseline) and not baseline.is_incomplete
    cells.append(
        spread_text(baseline.call_time_us) + " WRONG" * is_wrong(run, baseline) if measured else "not measured"
    )
    if kernel is None:
        return cells + ["none ran"] + [""] * 4
    cells += [kernel.title, f"{kernel.kernel_time_us.median:.0f}", spread_text(kernel.call_time_us)]
    return cells + [_ratio_text(kernel.kernel_ratio_to_gemm_only), _ratio_text(ratio(run, kernel.name, _BASELINE))]


def _how_measured(run) -> str:
    where = f"{run.problem.axis_size} x {run.machine['device_kind']}, JAX {run.versions['jax']}, {run.distribution}"
    return f"- {where}, {run.date}. {run.protocol}. Command: `{run.command}`."
