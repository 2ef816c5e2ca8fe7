"""What does a search for the fastest configuration leave behind?"""

import dataclasses
import datetime

from cmm.provenance import machine, versions
from cmm.results import short_kind
from cmm.roofline import Problem
from cmm.tune.search import CHAINED_CALLS, FINAL_STARTS, SCREENING_STARTS, Search
from cmm.winners import Winner, config_fields


def record(kernel: str, problem: Problem, mesh, rounds: int, outcome: Search) -> dict:
    """Returns what the result file of one search holds, ready for JSON.

    Args:
      kernel: name of the kernel.
      problem: shapes and dtype.
      mesh: the devices.
      rounds: number of rounds that were asked for.
      outcome: the search.
    """
    return {
        "kernel": kernel,
        "problem": dataclasses.asdict(problem),
        "machine": machine(mesh),
        "versions": versions(),
        "distribution": "normal(0, 1)",
        "protocol": (
            "kernel time: its kernel alone, per GPU the median over the calls of a recorded chain, then the slowest "
            f"GPU's; {CHAINED_CALLS} calls on distinct operands in one program, which starts {SCREENING_STARTS} time "
            f"to screen it and {FINAL_STARTS} times in each of up to {rounds} rounds of the finalists, interleaved, "
            "after a check against a float32 reference; median over rounds; one process"
        ),
        "date": datetime.date.today().isoformat(),
        "command": _command(kernel, problem, rounds, outcome.considered),
        "stopped": outcome.stopped,
        "trials": [_trial(trial) for trial in outcome.trials],
        "skipped": [{"config": config_fields(config), "reason": reason} for config, reason in outcome.skipped],
    }


def is_repeat(found: dict, kernel: str, problem: Problem, mesh, rounds: int, candidates: int) -> bool:
    """Whether a record is that of the whole of this search, on such GPUs and with these versions."""
    return (
        found.get("command") == _command(kernel, problem, rounds, candidates)
        and found.get("stopped") is False
        and found.get("machine") == machine(mesh)
        and found.get("versions") == versions()
    )


def winner(found: dict) -> Winner:
    """Returns the winner of a search, from its record, which must have finalists."""
    best, *others = (trial for trial in found["trials"] if trial["rounds_us"])
    return Winner(
        device_kind=found["machine"]["device_kind"],
        runner_up_us=others[0]["time_us"] if others else None,
        **found["problem"],
        **{name: best[name] for name in ("config", "time_us", "right", "error_over_bound")},
        **{name: found[name] for name in ("kernel", "date", "machine", "versions", "command")},
    )


def file_name(kernel: str, p: Problem, device_kind: str) -> str:
    """Returns the name of the result file: kernel, kind of device, number of devices, shapes and dtype."""
    kind = short_kind(device_kind)
    return f"tune_{kernel}_{kind}_d{p.axis_size}_m{p.m_shard}_k{p.k}_n{p.n_shard}_{p.dtype}.json"


def _command(kernel, p, rounds, candidates):
    """Returns the command that repeats the search for one problem, with every default written out."""
    shape = f"--devices {p.axis_size} --m-shard {p.m_shard} --k {p.k} --n-shard {p.n_shard} --dtype {p.dtype}"
    return f"python -m cmm.tune --kernel {kernel} {shape} --rounds {rounds} --candidates {candidates}"


def _trial(trial) -> dict:
    accuracy = trial.candidate.accuracy
    return {
        "config": config_fields(trial.candidate.config),
        "screened_us": trial.screened_us,
        "rounds_us": trial.rounds_us,
        "time_us": trial.time_us,
        "right": accuracy and accuracy.right,
        "error_over_bound": accuracy and accuracy.error_over_bound,
        "relative_error": accuracy and accuracy.relative_error,
    }
