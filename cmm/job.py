"""The main job: run every method on one problem, check it, time it, and return the record."""

import dataclasses
import datetime
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from cmm.devices import is_simulated, random_operands
from cmm.dispatch import METHODS
from cmm.measure import ON_GPUS, ON_SIMULATED, blocked_time_us, recorded_call, spread, wall_time_us
from cmm.product import local_matmul
from cmm.provenance import machine, versions
from cmm.recording import GpuEvent
from cmm.reference import Accuracy, accuracy
from cmm.results import MethodResult, Run
from cmm.ring import COPY_ENGINE_OPTIONS
from cmm.roofline import Problem

AXIS = "x"


@dataclasses.dataclass(frozen=True)
class Rung:
    """One row of the ladder.

    Attributes:
      name: what `--methods` takes.
      title: what tables and figures print.
      method: key of `cmm.METHODS`; `None` for the matmul of the already gathered activations.
      compiler_options: options for `jax.jit`.
      needs_gpus: why simulated devices cannot show it, or empty.
    """

    name: str
    title: str
    method: str | None
    compiler_options: dict[str, str] = dataclasses.field(default_factory=dict)
    needs_gpus: str = ""


GEMM_ONLY = Rung("gemm_only", "GEMM only", None)
RUNGS = (
    GEMM_ONLY,
    *(Rung(method.name, method.title, method.name) for method in METHODS.values()),
    Rung("ring_copy_engines", "ring, copy engines", "ring", COPY_ENGINE_OPTIONS, "needs GPUs"),
)
CHOICES = tuple(rung.name for rung in RUNGS if rung is not GEMM_ONLY)

# Called with what is being done and the fraction of the whole job that is done, 0 to 1.
Report = Callable[[str, float], None]


class _Skipped(Exception):
    """Says why a rung does not run."""


@dataclasses.dataclass
class _Candidate:
    """A method that runs: its program, its operand pairs and what was seen of it so far."""

    program: Callable
    operands: Sequence
    accuracy: Accuracy
    call_us: list[float] = dataclasses.field(default_factory=list)
    wall_us: list[float] = dataclasses.field(default_factory=list)
    events: dict[int, list[GpuEvent]] = dataclasses.field(default_factory=dict)


def run_ladder(
    problem: Problem,
    mesh: Mesh,
    names: Sequence[str] = CHOICES,
    report: Report = lambda what, done: None,
    command: str = "cmm.job.run_ladder",
) -> tuple[Run, dict[str, dict[int, list[GpuEvent]]]]:
    """Runs the methods `names` and the matmul without communication on `problem`.

    Args:
      problem: shapes and dtype; `axis_size` is the size of the mesh.
      mesh: mesh of the one axis "x".
      names: names of rungs, from `CHOICES`. The others appear in the record as skipped.
      report: called as the work goes on.
      command: what the record names as the command that made it.

    Returns:
      The record, and for each method that ran on GPUs the events of one recorded call by device. A method that is
      wrong is in the record with its error: see `MethodResult.error_over_bound`.
    """
    simulated = is_simulated(mesh.devices.flat)
    protocol = ON_SIMULATED if simulated else ON_GPUS
    report("drawing operands", 0.0)
    operands = [random_operands(problem, mesh, seed) for seed in range(protocol.operand_sets)]
    candidates, skipped = _prepare(mesh, names, operands, simulated, report)
    for round_index in range(protocol.rounds):
        report(f"timing, round {round_index + 1} of {protocol.rounds}", 0.3 + 0.7 * round_index / protocol.rounds)
        for candidate in candidates.values():
            _time_once(candidate, protocol, simulated)
    gemm_only = candidates[GEMM_ONLY.name]
    results = [skipped.get(rung.name) or _result(rung, candidates[rung.name], gemm_only, simulated) for rung in RUNGS]
    report("done", 1.0)
    run = Run(
        problem=problem,
        machine=machine(mesh),
        versions=versions(),
        simulated=simulated,
        distribution="normal(0, 1)",
        protocol=f"{protocol.rounds} rounds of single calls on the host's clock" if simulated else protocol.in_words(),
        date=datetime.date.today().isoformat(),
        command=command,
        methods=tuple(results),
    )
    return run, {name: candidate.events for name, candidate in candidates.items() if candidate.events}


def _prepare(mesh, names, operands, simulated, report):
    """Compiles and checks every rung; returns those that run and the results of those that do not."""
    candidates, skipped = {}, {}
    for index, rung in enumerate(RUNGS):
        report(f"compiling and checking {rung.name}", 0.05 + 0.25 * index / len(RUNGS))
        try:
            candidates[rung.name] = _candidate(rung, names, mesh, operands, simulated)
        except _Skipped as error:
            skipped[rung.name] = MethodResult(rung.name, rung.title, "skipped", str(error))
    return candidates, skipped


def _candidate(rung, names, mesh, operands, simulated):
    """Returns the rung compiled and checked on every operand pair, or raises the reason why it is skipped."""
    if rung is not GEMM_ONLY and rung.name not in names:
        raise _Skipped("not asked for")
    if simulated and rung.needs_gpus:
        raise _Skipped(rung.needs_gpus)
    lhs_spec, own = P(AXIS, None), operands
    if rung is GEMM_ONLY:
        lhs_spec, own = P(None, None), [(_gather(lhs, mesh), rhs) for lhs, rhs in operands]
    body = jax.shard_map(_body(rung), mesh=mesh, in_specs=(lhs_spec, P(None, AXIS)), out_specs=P(None, AXIS))
    program = jax.jit(body, compiler_options=rung.compiler_options)
    try:
        program.lower(*own[0])
    except (ValueError, NotImplementedError) as error:
        raise _Skipped(str(error)) from error
    checks = [accuracy(program(*mine), *pair, mesh, AXIS) for mine, pair in zip(own, operands, strict=True)]
    worst = Accuracy(
        max(check.error_over_bound for check in checks), max(check.relative_error for check in checks), checks[0].limit
    )
    return _Candidate(program, own, worst)


def _body(rung):
    if rung is GEMM_ONLY:
        return lambda lhs, rhs: local_matmul(lhs, rhs, lhs.dtype)
    return lambda lhs, rhs: METHODS[rung.method].function(lhs, rhs, AXIS)


def _gather(lhs, mesh):
    return jax.device_put(lhs, jax.NamedSharding(mesh, P(None, None)))


def _time_once(candidate, protocol, simulated):
    if simulated:
        candidate.wall_us.append(blocked_time_us(candidate.program, candidate.operands))
        return
    calls, short, long = protocol.recorded_calls, protocol.short_chain, protocol.long_chain
    candidate.wall_us.append(wall_time_us(candidate.program, candidate.operands, short, long))
    call_us, candidate.events = recorded_call(candidate.program, candidate.operands, calls)
    candidate.call_us.append(call_us)


def _result(rung, candidate, gemm_only, simulated):
    times_us, gemm_us = (c.wall_us if simulated else c.call_us for c in (candidate, gemm_only))
    return MethodResult(
        name=rung.name,
        title=rung.title,
        status="simulated" if simulated else "measured",
        error_over_bound=candidate.accuracy.error_over_bound,
        relative_error=candidate.accuracy.relative_error,
        call_time_us=None if simulated else spread(candidate.call_us),
        wall_time_us=spread(candidate.wall_us),
        ratio_to_gemm_only=spread(np.divide(times_us, gemm_us)),
    )
