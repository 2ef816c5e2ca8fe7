"""From how many rows on is the fast kernel faster than gathering first? What the records of a sweep say, by panel."""

from collections.abc import Iterable, Sequence

from cmm.bench.merge import ratios
from cmm.bench.suites_report import BASELINE, where_text
from cmm.dispatch import AUTO_KERNEL
from cmm.report import is_roof, is_wrong
from cmm.results import MethodResult, Run, Spread

# By the field of `cmm.results.Rounds`, that of `cmm.results.MethodResult` and what the panel is called.
PANELS = {
    "call_us": ("call_time_us", "Call, on the GPU"),
    "wall_in_program_us": ("wall_time_in_program_us", "Wall time in a program"),
    "wall_us": ("wall_time_us", "Wall time, one call per program"),
    "kernel_us": ("kernel_time_us", "Matmul kernels alone"),
}
# A call of the kernel does more than its matmul kernel, so these are not compared with gathering first.
_NOT_COMPARED = ("kernel_us",)
_ON_GPU = ("call_us", "kernel_us")
_NOT_SEARCHED = "not searched for this problem"  # So `cmm.rungs` ends the details of JAX's example.
# Of the rounds, in %, a method must take less time at least in these to be called faster.
FASTER_IN_PERCENT = 90


def sweep_data(runs: Sequence[Run]) -> dict:
    """Returns what `cmm.plots.sweep.draw_sweep` draws.

    Results that are wrong or missing are left out, and of an incomplete recording the times that the GPUs recorded.
    `panels` are the kinds of time that some run has. For each of them but the kernels alone, `crossings` compare the
    kernel that `method="auto"` takes with gathering first, where `is_faster` knows. `below_rows` are the most rows with
    which it is not faster, and `from_rows` the next more that were measured.

    Args:
      runs: runs on GPUs that differ only in their rows per device, fewest rows first.

    Raises:
      ValueError: there is no run, or a run is simulated.
    """
    if not runs or any(run.simulated for run in runs):
        raise ValueError("The figure needs runs that were measured on GPUs.")
    shown = [(run, result) for run in runs for result in run.methods if _has_any_time(run, result)]
    found = {result.name: result for _, result in shown}
    about = lambda name: {"name": name, "title": found[name].title, "is_roof": is_roof(found[name])}
    methods = [about(name) | {kind: _points(runs, name, kind) for kind in PANELS} for name in found]
    p = runs[0].problem
    return {
        "axis_size": p.axis_size,
        "k": p.k,
        "n_shard": p.n_shard,
        "dtype": p.dtype,
        "rows": [run.problem.m_shard for run in runs],
        "panels": [kind for kind in PANELS if any(method[kind] for method in methods)],
        "methods": methods,
        "crossings": {kind: _crossing(runs, kind) for kind in PANELS if kind not in _NOT_COMPARED},
        "single_processes": _single_processes(runs),
        "not_searched": [
            {"title": title, "rows": [run.problem.m_shard for run in of_title]}
            for title, of_title in not_searched(shown).items()
        ],
        "where": list(dict.fromkeys(map(where_text, runs))),
        "sources": list(dict.fromkeys(run.caption() for run in runs)),
    }


def is_faster(run: Run, kind: str, name: str = AUTO_KERNEL, other: str = BASELINE) -> bool | None:
    """Returns whether a method takes less time than another in nearly all rounds.

    Args:
      run: a record of both.
      kind: field of `cmm.results.Rounds`.
      name: name of the method.
      other: the one it is compared with.

    Returns:
      Whether it takes less time in at least `FASTER_IN_PERCENT` % of the rounds in which both were timed: of six rounds
      in all six, of twelve in eleven. `None`, not known, if one of the two was not measured or is wrong, or if the
      record holds no raw rounds.
    """
    if _time_of(run, name, kind) is None or _time_of(run, other, kind) is None:
        return None
    of_rounds = ratios(run, name, other, kind)
    return 100 * sum(value < 1 for value in of_rounds) >= FASTER_IN_PERCENT * len(of_rounds) if of_rounds else None


def less_certain_text(processes: int, rounds: int) -> str:
    """Returns in words how many processes have measured, and in how many rounds in all; 0 if that is not recorded."""
    if processes == 1:
        return f"one process of {rounds} rounds" if rounds else "one process"
    return f"{processes} processes, {rounds} rounds in all" if rounds else f"{processes} processes"


def not_searched(shown: Iterable[tuple[Run, MethodResult]]) -> dict[str, list[Run]]:
    """Returns by title the runs in which a method had a setting that its record says nobody searched for the problem.

    Args:
      shown: what a figure shows: a run, and one of its methods.
    """
    found: dict[str, list[Run]] = {}
    for run, result in shown:
        if _NOT_SEARCHED in result.details:
            found.setdefault(result.title, []).append(run)
    return found


def _time(run: Run, result: MethodResult, kind: str) -> Spread | None:
    """Returns one kind of time of a method if it was measured and its result is right."""
    if result.status != "measured" or is_wrong(run, result) or (kind in _ON_GPU and result.is_incomplete):
        return None
    return getattr(result, PANELS[kind][0])


def _has_any_time(run, result) -> bool:
    return any(_time(run, result, kind) for kind in PANELS)


def _time_of(run, name, kind) -> Spread | None:
    return next((_time(run, result, kind) for result in run.methods if result.name == name), None)


def _points(runs, name, kind) -> list[list]:
    """Returns rows, median, 10th and 90th percentile of each run."""
    times = [(run.problem.m_shard, _time_of(run, name, kind)) for run in runs]
    return [[rows, time.median, time.p10, time.p90] for rows, time in times if time]


def _crossing(runs, kind) -> dict | None:
    """Returns the comparison that `sweep_data` describes; `None` where nothing can be compared."""
    compared = [(run.problem.m_shard, is_faster(run, kind)) for run in runs]
    compared = [(rows, yes) for rows, yes in compared if yes is not None]
    if not compared:
        return None
    below = max((rows for rows, yes in compared if not yes), default=None)
    return {
        "below_rows": below,
        "from_rows": min((rows for rows, yes in compared if yes and rows > (below or 0)), default=None),
    }


def _single_processes(runs) -> list[dict]:
    """Returns which rows one process alone has measured, by the number of its rounds; 0 where that is not recorded."""
    rows: dict[int, list[int]] = {}
    for run in (run for run in runs if run.processes == 1):
        rows.setdefault(run.total_rounds, []).append(run.problem.m_shard)
    return [{"rounds": rounds, "rows": of_rounds} for rounds, of_rounds in rows.items()]
