"""Which programs of others are measured beside the methods, and to which records do their results go?"""

import pathlib
import time
from collections.abc import Iterable

from cmm import results
from cmm.bench.child import Plan
from cmm.peers.own_process import PeerResult, run_peer
from cmm.results import Run
from cmm.roofline import Problem

MODULES = {name: f"cmm.peers.{name}" for name in ("xla_rewrite", "torch_symm_mem")}
# PyTorch alone takes one to three minutes until all of its processes have begun.
LONGEST_S = 420


def measure(name: str, problem: Problem, plan: Plan, longest_s: float = LONGEST_S) -> list[PeerResult]:
    """Measures one of `MODULES` in a process of its own; a result says why it failed, or that time was up.

    Args:
      name: key of `MODULES`.
      problem: shapes, dtype and number of devices.
      plan: says how many rounds, until when, and whether devices are simulated.
      longest_s: the process is killed after so many seconds.
    """
    left_s = longest_s if plan.until is None else min(longest_s, plan.until - time.time())
    if left_s <= 0:
        return [PeerResult(name, name, "skipped", "time was up")]
    return run_peer(MODULES[name], problem, left_s, simulate=plan.simulate, arguments=("--rounds", str(plan.rounds)))


def find_records(folder: pathlib.Path, problems: Iterable[Problem], plan: Plan, *, quick: bool) -> dict[Problem, Run]:
    """Returns the records of problems that `python -m cmm.bench` has written to `folder`, those that are there.

    Args:
      folder: where to look.
      problems: the problems.
      plan: says whether devices are simulated.
      quick: whether records of quick looks are meant.
    """
    runs = map(results.load, sorted(folder.glob("bench_*.json")))
    found = {run.problem: run for run in runs if run.simulated == plan.simulate and run.quick == quick}
    return {problem: found[problem] for problem in problems if problem in found}
