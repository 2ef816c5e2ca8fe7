"""`python -m cmm.bench.child PLAN`: what does one process of a benchmark measure?

It measures one problem after the other, since starting takes longer than most of them, and writes the record of each,
with raw rounds, as soon as it is there. `cmm.bench.processes` starts it and follows its events. After a problem that
fails it ends: an error on a GPU may have spoiled all that comes after it in the same process.
"""

import dataclasses
import gc
import json
import pathlib
import sys
import time
import traceback
from collections.abc import Callable, Sequence

import jax

from cmm import devices, results
from cmm.bench.children import say
from cmm.job import AXIS, run_ladder
from cmm.protocol import ON_GPUS, ON_SIMULATED, on_gpus
from cmm.results import NOT_ASKED_FOR
from cmm.roofline import Problem
from cmm.rungs import GEMM_ONLY, RUNGS, Rung
from cmm.suites import suite

# Simulated devices get the problems of a suite in this part of their sizes: they show that all runs, not how fast.
_SIMULATED_PART = 64
_REASON_CHARACTERS = 600


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
      folder: where records go, as `INDEX.json` by the problem's place in `problems`.
      suites: names of suites; empty if `shape` says what to measure.
      shape: `(m_shard, k, n_shard)`.
      dtype: dtype of `shape`; for suites, in place of their own.
      devices: how many, `None` for all GPUs.
      methods: names of rungs, `None` for all. GEMM only always runs.
      rounds: rounds per problem.
      first_round: number of the first of them, over all processes.
      simulate: use simulated devices.
      todo: which of the problems, `None` for all.
      until: time of `time.time()` after which no further problem begins, or `None`. The first one always does.
    """

    folder: str
    suites: Sequence[str] = ()
    shape: Sequence[int] = ()
    dtype: str | None = None
    devices: int | None = None
    methods: Sequence[str] | None = None
    rounds: int = ON_GPUS.rounds
    first_round: int = 0
    simulate: bool = False
    todo: Sequence[int] | None = None
    until: float | None = None

    def problems(self, axis_size: int) -> list[Problem]:
        """Returns the problems on so many devices, each once; raises what `cmm.suites.suite` raises."""
        if self.shape:
            return [Problem(axis_size, *self.shape, self.dtype or "float16")]
        found = [problem for name in self.suites for problem in suite(name, axis_size, self.dtype)]
        return list(dict.fromkeys(map(_small, found) if self.simulate else found))

    def time_is_up(self) -> bool:
        """Whether no further problem may begin."""
        return self.until is not None and time.time() >= self.until

    def record(self, index: int) -> pathlib.Path:
        """Returns where the record of a problem goes."""
        return pathlib.Path(self.folder, f"{index}.json")


def rungs_for(methods: Sequence[str] | None) -> tuple[Rung, ...]:
    """Returns all rungs, of which only GEMM only and `methods` run. One that breaks is skipped with its reason.

    A benchmark of many problems goes on without a method that one of them breaks.
    """

    def as_wanted(rung):
        if rung is GEMM_ONLY:
            return rung
        if methods is None or rung.gathered or rung.name in methods:
            return dataclasses.replace(rung, peer=True)
        return dataclasses.replace(rung, build=_not_asked_for, needs="")

    return tuple(map(as_wanted, RUNGS))


def main(arguments=None) -> int:
    """Measures by a plan; returns 0 if all went well, 1 if a problem failed, 2 if this machine or plan does not do."""
    (path,) = arguments or sys.argv[1:]
    plan = Plan(**json.loads(pathlib.Path(path).read_text()))
    try:
        found = devices.gpus_or_simulated(plan.devices, plan.simulate, "python -m cmm.bench measures GPUs")
        problems = plan.problems(len(found))
    except (ValueError, RuntimeError) as error:
        say("refused", reason=str(error))
        return 2
    machine = f"{len(found)} x {found[0].device_kind}, JAX {jax.__version__}"
    say("start", machine=machine, problems=[dataclasses.asdict(problem) for problem in problems])
    return _measure(plan, problems, devices.ring_mesh(found, AXIS))


def _measure(plan, problems, mesh) -> int:
    todo = range(len(problems)) if plan.todo is None else plan.todo
    for place, index in enumerate(todo):
        if place and plan.time_is_up():
            say("time is up")
            return 0
        say("progress", problem=index, what="starting", done=0.0)
        gc.collect()  # Operands of the last problem may hang in cycles, and the next ones need their memory.
        protocol = ON_SIMULATED if plan.simulate else on_gpus(problems[index])
        try:
            run, _ = run_ladder(
                problems[index],
                mesh,
                report=_reporter(index),
                rungs=rungs_for(plan.methods),
                protocol=dataclasses.replace(protocol, rounds=plan.rounds),
                first_round=plan.first_round,
            )
        except Exception as error:
            traceback.print_exc()
            say("failed", problem=index, reason=f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS])
            return 1
        results.save(run, plan.record(index))
        say("result", problem=index)
    return 0


def _reporter(index) -> Callable[[str, float], None]:
    return lambda what, done: say("progress", problem=index, what=what, done=done)


def _not_asked_for(problem, mesh, operands):
    raise NotImplementedError(NOT_ASKED_FOR)


def _small(problem: Problem) -> Problem:
    sizes = {name: max(1, getattr(problem, name) // _SIMULATED_PART) for name in ("m_shard", "k", "n_shard")}
    return dataclasses.replace(problem, **sizes)


if __name__ == "__main__":
    sys.exit(main())
