"""What share of the peak do records of shapes beyond the published one show, and how certain are they?"""

import dataclasses
import re
from collections.abc import Sequence

from cmm.bench.suites_report import BASELINE, where_text
from cmm.dispatch import AUTO_KERNEL
from cmm.plots.rates import utilization_data
from cmm.plots.sweep_records import NOT_SEARCHED, evidence, is_faster
from cmm.protocol import LEAST_PROCESSES, LEAST_ROUNDS_IN_ALL
from cmm.report import is_wrong
from cmm.results import NOT_ASKED_FOR, MethodResult, Run
from cmm.roofline import Problem
from cmm.suites import SUITES, suite

_EXAMPLE = "jax_example"


def utilization_shapes_data(runs: Sequence[Run]) -> dict:
    """Returns what `cmm.plots.utilization_shapes.draw_utilization_shapes` draws.

    Each of `problems`, fewest FLOPs first, has `rows`: shares of the peak of GEMM only (the one to which ratios are
    formed), all-gather + matmul, the kernel that `method="auto"` takes, and JAX's example. A method that was tried and
    has no right result has a row with a reason and without a share. The kernel `is_faster` than gathering first if its
    call takes less time in 90 % of the rounds, `is_slower` if it takes more; both are `None` if one of the two was not
    measured.

    Args:
      runs: runs on GPUs of one kind, all on the same number of them.

    Raises:
      ValueError: there is no run, a run is simulated or has nothing to draw, or machines or numbers of devices differ.
    """
    if not runs or any(run.simulated for run in runs):
        raise ValueError("The figure needs runs that were measured on GPUs.")
    kinds = {(run.machine["device_kind"], run.problem.axis_size) for run in runs}
    if len(kinds) > 1:
        raise ValueError(f"One figure shows one kind and number of devices, got {sorted(kinds)}.")
    if empty := [run.caption() for run in runs if not has_bars(run)]:
        raise ValueError(f"No share of a peak can be drawn of {'; '.join(empty)}. Leave it out.")
    ((device_kind, axis_size),) = kinds
    runs = sorted(runs, key=lambda run: (run.problem.flops_per_device, run.problem.dtype))
    return {
        "device_kind": device_kind,
        "axis_size": axis_size,
        "problems": [_problem(run) for run in runs],
        "peak_tflops": {run.problem.dtype: bar["peak_tflops"] for run in runs for bar in _bars(run)},
        "less_certain": _less_certain(runs),
        "not_searched": _not_searched(runs),
        "where": list(dict.fromkeys(map(where_text, runs))),
        "sources": [run.caption() for run in runs],
    }


def has_bars(run: Run) -> bool:
    """Returns whether the figure has something to draw of a run."""
    return bool(_bars(run))


def suite_title(problem: Problem) -> str:
    """Returns what figures call the suite of `cmm.suites` that holds `problem`, in whatever dtype; else nothing."""
    for name in SUITES:
        try:
            found = suite(name, problem.axis_size, problem.dtype)
        except ValueError:  # Its sizes do not divide by this number of devices.
            continue
        if problem in found:
            return re.sub(r"^llama3-(\w+)$", lambda match: f"Llama-3 {match[1].upper()}", name)
    return ""


def _shown(run: Run) -> tuple[str, ...]:
    return run.gemm_only, BASELINE, AUTO_KERNEL, _EXAMPLE


def _bars(run: Run) -> list[dict]:
    """Returns the bars of the right results, from top to bottom."""
    by_name = {bar["method"]: bar for bar in utilization_data([run], ())["bars"]}
    return [by_name[name] for name in _shown(run) if name in by_name and not is_wrong(run, run.method(name))]


def _problem(run: Run) -> dict:
    p = run.problem
    processes, rounds = evidence(run)
    return {
        "label": _label([run]),
        "suite": suite_title(p),
        **dataclasses.asdict(p),
        "flops_per_device": p.flops_per_device,
        "processes": processes,
        "rounds": rounds,
        "rows": _rows(run),
        "is_faster": is_faster(run, "call_us"),
        "is_slower": is_faster(run, "call_us", BASELINE, AUTO_KERNEL),
    }


def _rows(run: Run) -> list[dict]:
    """Returns the rows from top to bottom. What nobody asked for has none."""
    drawn = {bar["method"]: bar for bar in _bars(run)}
    results = {result.name: result for result in run.methods if result.reason != NOT_ASKED_FOR}
    why = {entry["method"]: entry["reason"] for entry in utilization_data([run], ())["left_out"]}
    return [
        _with_shares(drawn[name]) if name in drawn else _without_share(run, results[name], why.get(name))
        for name in _shown(run)
        if name in results
    ]


def _with_shares(bar: dict) -> dict:
    """Returns a row with shares of the peak. The slowest calls, at the 90th percentile of time, have the lowest."""
    shares = {f"utilization_at_{p}": bar["utilization"] * bar["time_us"] / bar[f"{p}_us"] for p in ("p10", "p90")}
    return {name: bar[name] for name in ("method", "title", "time_us", "p10_us", "p90_us", "utilization")} | shares


def _without_share(run: Run, result: MethodResult, reason: str | None) -> dict:
    status = "incomplete recording" if result.status == "measured" else result.status
    status = "wrong result" if is_wrong(run, result) else status
    about = {"method": result.name, "title": result.title, "utilization": None, "status": status}
    # What was measured completely can only be wrong.
    return about | {"reason": reason or status}


def _label(runs: Sequence[Run]) -> str:
    """Returns sizes per device and dtype of runs that differ in their rows alone."""
    p = runs[0].problem
    return f"{', '.join(str(run.problem.m_shard) for run in runs)} × {p.k} × {p.n_shard}, {p.dtype}"


def _labels(runs: Sequence[Run]) -> list[str]:
    together: dict[tuple, list[Run]] = {}
    for run in runs:
        together.setdefault((run.problem.k, run.problem.n_shard, run.problem.dtype), []).append(run)
    return [_label(group) for group in together.values()]


def _less_certain(runs: Sequence[Run]) -> list[dict]:
    """Returns which problems fewer processes or rounds have measured than a comparison needs, fewest rounds first."""
    groups: dict[tuple[int, int], list[Run]] = {}
    for run in runs:
        processes, rounds = evidence(run)
        if processes < LEAST_PROCESSES or rounds < LEAST_ROUNDS_IN_ALL:
            groups.setdefault((processes, rounds), []).append(run)
    return [
        {"processes": processes, "rounds": rounds, "labels": _labels(groups[processes, rounds])}
        for processes, rounds in sorted(groups)
    ]


def _not_searched(runs: Sequence[Run]) -> list[dict]:
    """Returns which methods ran with a setting that their record says nobody searched for these problems."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        for bar in _bars(run):
            if NOT_SEARCHED in run.method(bar["method"]).details:
                found.setdefault(bar["title"], []).append(run)
    return [
        {"title": title, "labels": _labels(of_title), "is_all": len(of_title) == len(runs)}
        for title, of_title in found.items()
    ]
