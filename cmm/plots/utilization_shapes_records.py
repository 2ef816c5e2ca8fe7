"""What share of the peak do records of shapes beyond the published one show, and how certain are they?"""

import dataclasses
from collections.abc import Sequence

from cmm.bench.suites_report import BASELINE, shape_text, shape_texts, where_text
from cmm.dispatch import AUTO_KERNEL
from cmm.plots.rates import utilization_data
from cmm.plots.sweep_records import is_faster, not_searched
from cmm.protocol import LEAST_PROCESSES, LEAST_ROUNDS_IN_ALL
from cmm.report import is_roof, is_wrong
from cmm.results import NOT_ASKED_FOR, MethodResult, Run
from cmm.roofline import Problem
from cmm.suites import SUITES, suite

_EXAMPLE = "jax_example"
_SUITE_TITLES = {
    "W1": "published shape",
    "llama3-8b": "Llama-3 8B",
    "llama3-70b": "Llama-3 70B",
    "llama3-405b": "Llama-3 405B",
    "m-sweep": "sweep over M",
}


@dataclasses.dataclass(frozen=True)
class _Rates:
    """A run, the bars of its right results by method, and by method why others have none."""

    run: Run
    right: dict[str, dict]
    reasons: dict[str, str]

    @property
    def bars(self) -> dict[str, dict]:
        """Those that the figure shows, from top to bottom."""
        return {name: self.right[name] for name in _shown(self.run) if name in self.right}


def utilization_shapes_data(runs: Sequence[Run]) -> dict:
    """Returns what `cmm.plots.utilization_shapes.draw_utilization_shapes` draws.

    Each of `problems`, fewest FLOPs first, has `rows`: shares of the peak of GEMM only (the one to which ratios are
    formed), all-gather + matmul, the kernel that `method="auto"` takes, and JAX's example. A method that was tried and
    has no right result has a row with a reason and without a share. The call of the kernel `is_faster` than gathering
    first if it takes less time in the sense of `cmm.plots.sweep_records.is_faster`, `is_slower` if gathering first
    does; both are `None` if that is not known. `is_faster_gemm_only` says whether GEMM only is the faster one of
    several that were measured; it is `None` if there is one alone.

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
    rates = [_rates(run) for run in sorted(runs, key=lambda run: (run.problem.flops_per_device, run.problem.dtype))]
    if empty := [of_run.run.caption() for of_run in rates if not of_run.bars]:
        raise ValueError(f"No share of a peak can be drawn of {'; '.join(empty)}. Leave it out.")
    ((device_kind, axis_size),) = kinds
    runs = [of_run.run for of_run in rates]
    return {
        "device_kind": device_kind,
        "axis_size": axis_size,
        "problems": [_problem(of_run) for of_run in rates],
        "peak_tflops": {
            of_run.run.problem.dtype: bar["peak_tflops"] for of_run in rates for bar in of_run.bars.values()
        },
        "less_certain": _less_certain(runs),
        "not_searched": _not_searched(rates),
        "where": list(dict.fromkeys(map(where_text, runs))),
        "sources": [run.caption() for run in runs],
    }


def has_bars(run: Run) -> bool:
    """Returns whether the figure has something to draw of a run."""
    return bool(_rates(run).bars)


def suite_title(problem: Problem) -> str:
    """Returns what figures call the suite of `cmm.suites` that holds `problem`, in whatever dtype; else nothing."""
    for name in SUITES:
        try:
            found = suite(name, problem.axis_size, problem.dtype)
        except ValueError:  # Its sizes do not divide by this number of devices.
            continue
        if problem in found:
            return _SUITE_TITLES[name]
    return ""


def _shown(run: Run) -> tuple[str, ...]:
    return run.gemm_only, BASELINE, AUTO_KERNEL, _EXAMPLE


def _rates(run: Run) -> _Rates:
    data = utilization_data([run], ())
    right = {bar["method"]: bar for bar in data["bars"] if not is_wrong(run, run.method(bar["method"]))}
    return _Rates(run, right, {entry["method"]: entry["reason"] for entry in data["left_out"]})


def _problem(rates: _Rates) -> dict:
    run, p = rates.run, rates.run.problem
    return {
        "label": shape_text(p),
        "suite": suite_title(p),
        **dataclasses.asdict(p),
        "flops_per_device": p.flops_per_device,
        "processes": run.processes,
        "rounds": run.total_rounds,
        "rows": _rows(rates),
        "is_faster_gemm_only": _is_faster_gemm_only(rates),
        "is_faster": is_faster(run, "call_us"),
        "is_slower": is_faster(run, "call_us", BASELINE, AUTO_KERNEL),
    }


def _rows(rates: _Rates) -> list[dict]:
    """Returns the rows from top to bottom. What nobody asked for has none."""
    run, drawn = rates.run, rates.bars
    results = {result.name: result for result in run.methods if result.reason != NOT_ASKED_FOR}
    return [
        _with_shares(drawn[name]) if name in drawn else _without_share(run, results[name], rates.reasons.get(name))
        for name in _shown(run)
        if name in results
    ]


def _is_faster_gemm_only(rates: _Rates) -> bool | None:
    times_us = {name: bar["time_us"] for name, bar in rates.right.items() if is_roof(rates.run.method(name))}
    return min(times_us, key=times_us.__getitem__) == rates.run.gemm_only if len(times_us) > 1 else None


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


def _labels(runs: Sequence[Run]) -> list[str]:
    return shape_texts([run.problem for run in runs])


def _less_certain(runs: Sequence[Run]) -> list[dict]:
    """Returns which problems fewer processes or rounds have measured than a comparison needs, fewest rounds first."""
    groups: dict[tuple[int, int], list[Run]] = {}
    for run in runs:
        if run.processes < LEAST_PROCESSES or run.total_rounds < LEAST_ROUNDS_IN_ALL:
            groups.setdefault((run.processes, run.total_rounds), []).append(run)
    return [
        {"processes": processes, "rounds": rounds, "labels": _labels(groups[processes, rounds])}
        for processes, rounds in sorted(groups)
    ]


def _not_searched(rates: Sequence[_Rates]) -> list[dict]:
    """Returns which methods ran with a setting that their record says nobody searched for these problems."""
    found = not_searched((of_run.run, of_run.run.method(name)) for of_run in rates for name in of_run.bars)
    return [
        {"title": title, "labels": _labels(of_title), "is_all": len(of_title) == len(rates)}
        for title, of_title in found.items()
    ]
