"""How do several processes measure the same problems, and what is left if one of them dies?

Processes run one after the other, each on all GPUs. This process starts no JAX backend: JAX would reserve most of the
GPUs' memory, and its children need it. A process that dies, hangs or breaks on a problem is replaced by another one for
the problems that are left; that problem then lacks the rounds of one process.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence

from cmm import results
from cmm.bench.child import Plan
from cmm.bench.children import follow, python_module
from cmm.bench.suites_report import shape_text
from cmm.results import Run
from cmm.roofline import Problem

CHILD = python_module("cmm.bench.child")


class Refused(Exception):
    """Says why nothing can be measured here."""


@dataclasses.dataclass
class Collected:
    """What the processes have brought so far.

    Attributes:
      machine: the devices and the version of JAX, in words; empty before the first process has started.
      problems: what is measured.
      runs: by index of the problem, a record of each process that measured it.
      troubles: what went wrong, in words.
      time_is_up: whether it ended before all was measured.
    """

    machine: str = ""
    problems: list[Problem] = dataclasses.field(default_factory=list)
    runs: dict[int, list[Run]] = dataclasses.field(default_factory=dict)
    troubles: list[str] = dataclasses.field(default_factory=list)
    time_is_up: bool = False


# Called with the process, the problem's place among all (or `None` before the first), what it does, and the fraction of
# the whole that is done.
OnProgress = Callable[[int, int | None, str, float], None]


def collect(
    plan: Plan,
    processes: int,
    silence_s: float,
    collected: Collected,
    on_progress: OnProgress = lambda process, problem, what, done: None,
    on_result: Callable[[int], None] = lambda problem: None,
    child: Sequence[str] = CHILD,
) -> None:
    """Measures what `plan` says in so many processes, one after the other, and adds it to `collected`.

    Args:
      plan: what to measure; `todo`, `first_round` and `folder` (within `plan.folder`) of each process are set here.
      processes: number of processes that measure each problem.
      silence_s: a process that says nothing for so long is killed.
      collected: where records and troubles go as soon as they are there, so that nothing is lost on Ctrl-C.
      on_progress: called as the work goes on.
      on_result: called with the index of a problem of which a process has just brought its record.
      child: command to which the path of a plan is added.

    Raises:
      Refused: the first process says that this machine or this plan does not do.
    """
    for process in range(processes):
        folder = pathlib.Path(plan.folder, str(process))
        folder.mkdir(parents=True, exist_ok=True)
        todo = None
        while todo is None or todo:
            begun = process > 0 or todo is not None
            if collected.time_is_up or begun and plan.time_is_up():
                collected.time_is_up = True
                return
            first_round = process * plan.rounds
            own_plan = dataclasses.replace(plan, folder=str(folder), todo=todo, first_round=first_round)
            todo = _OneProcess(own_plan, process, processes, collected, on_progress, on_result).run(child, silence_s)


@dataclasses.dataclass
class _OneProcess:
    """One child: what it was told and what it has said."""

    plan: Plan
    process: int
    processes: int
    collected: Collected
    on_progress: OnProgress
    on_result: Callable[[int], None]
    at: int | None = None
    last_words: str = ""
    ended: set[int] = dataclasses.field(default_factory=set)
    refused: str = ""
    told_failure: bool = False

    def run(self, child, silence_s) -> list[int]:
        """Follows the child to its end and returns the problems that are left for another one."""
        self.on_progress(self.process, None, "starting", self.process / self.processes)
        path = pathlib.Path(self.plan.folder, "plan.json")
        path.write_text(json.dumps(dataclasses.asdict(self.plan)))
        trouble = follow([*child, str(path)], self._hear, silence_s)
        if self.refused:
            if not self.collected.problems:
                raise Refused(self.refused)
            self._trouble(self.refused)
            return []
        if trouble and not self.told_failure:
            self._trouble(trouble + (f" (while {self.last_words})" if self.last_words else ""))
            if self.at is not None:
                self.ended.add(self.at)
        todo = range(len(self.collected.problems)) if self.plan.todo is None else self.plan.todo
        left = [index for index in todo if index not in self.ended]
        if left and not self.collected.time_is_up and not (trouble and self.ended):
            if not trouble:
                self._trouble("ended without measuring all")
            return []
        return left

    def _hear(self, event):
        match event:
            case {"event": "start", "machine": machine, "problems": problems}:
                self.collected.machine = self.collected.machine or machine
                self.collected.problems = self.collected.problems or [Problem(**fields) for fields in problems]
            case {"event": "progress", "problem": index, "what": what, "done": done}:
                self.at, self.last_words = index, what
                count = len(self.collected.problems)
                self.on_progress(self.process, index, what, (self.process + (index + done) / count) / self.processes)
            case {"event": "result", "problem": index}:
                self.collected.runs.setdefault(index, []).append(results.load(self.plan.record(index)))
                self.ended.add(index)
                self.at, self.last_words = None, ""
                self.on_result(index)
            case {"event": "failed", "problem": index, "reason": reason}:
                self.told_failure = True
                self.ended.add(index)
                self._trouble(f"failed: {reason}")
            case {"event": "time is up"}:
                self.collected.time_is_up = True
            case {"event": "refused", "reason": reason}:
                self.refused = reason

    def _trouble(self, what):
        problem = "" if self.at is None else f", {shape_text(self.collected.problems[self.at])}"
        self.collected.troubles.append(f"process {self.process + 1} of {self.processes}{problem}: {what}")
