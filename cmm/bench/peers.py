"""Which programs of others are measured beside the methods, and to which records do their results go?"""

import pathlib
import time
from collections.abc import Iterable, Sequence

from cmm import results
from cmm.bench.child import Plan
from cmm.bench.suites_report import shape_text
from cmm.peers.own_process import PeerResult, run_peer
from cmm.report import is_wrong
from cmm.results import Run
from cmm.roofline import Problem

MODULES = {name: f"cmm.peers.{name}" for name in ("xla_rewrite", "torch_symm_mem")}
# PyTorch alone takes one to three minutes until all of its processes have begun.
LONGEST_S = 420
_AND = " && "  # Between commands that together make a record.


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


def troubles(run: Run, found: Sequence[PeerResult]) -> list[str]:
    """Returns in words which of the peers' results are failures: those that failed, or are wrong.

    One that was skipped is none: a library that is not installed may be left out.

    Args:
      run: the record to which they belong.
      found: the results.
    """
    where = shape_text(run.problem)
    return [
        f"peer {peer.name}, {where}: {peer.reason or 'wrong result'}"
        for peer in found
        if peer.status == "failed" or is_wrong(run, peer)
    ]


def with_command(recorded: str, command: str) -> str:
    """Returns the commands that make a record, after `command` has measured peers for it.

    Args:
      recorded: those that made the record so far.
      command: of `--peers-only`. It takes the place of one that measured the same peers or fewer.
    """
    first, *added = recorded.split(_AND)
    kept = [one for one in added if not _peers_in(one) <= _peers_in(command)]
    return _AND.join((first, *kept, command))


def _peers_in(command) -> set[str]:
    return set(command.partition("--peers ")[2].partition(" ")[0].split(","))


def find_records(
    folder: pathlib.Path, problems: Iterable[Problem], plan: Plan, device_kind: str, *, quick: bool
) -> dict[Problem, Run]:
    """Returns the records of problems that `python -m cmm.bench` has written to `folder`, those that are there.

    Args:
      folder: where to look.
      problems: the problems.
      plan: says whether devices are simulated.
      device_kind: of this machine: peers are compared with what was measured on the same kind of device.
      quick: whether records of quick looks are meant.
    """
    runs = map(results.load, sorted(folder.glob("bench_*.json")))
    here = lambda run: (run.simulated, run.quick, run.machine["device_kind"]) == (plan.simulate, quick, device_kind)
    found = {run.problem: run for run in filter(here, runs)}
    return {problem: found[problem] for problem in problems if problem in found}
