"""The main job: run every method on one problem, check it, time it, and return the record."""

import dataclasses
import datetime
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from cmm.devices import is_simulated, random_operands
from cmm.measure import (
    ON_GPUS,
    ON_SIMULATED,
    Program,
    Protocol,
    blocked_time_us,
    recorded_chain,
    spread,
    wall_time_in_program_us,
    wall_time_us,
)
from cmm.provenance import machine, versions
from cmm.recording import GpuEvent
from cmm.reference import Accuracy, accuracy
from cmm.results import MethodResult, Rounds, Run
from cmm.roofline import Problem
from cmm.rungs import AXIS, GEMM_ONLY, RUNGS, Rung

# Called with what is being done and the fraction of the whole job that is done, 0 to 1.
Report = Callable[[str, float], None]


class _Skipped(Exception):
    """Says why a rung does not run."""


@dataclasses.dataclass
class _Candidate:
    """A rung that runs: its program and what was seen of it so far, one time per round."""

    rung: Rung
    program: Program
    accuracy: Accuracy
    call_us: list[float] = dataclasses.field(default_factory=list)
    kernel_us: list[float] = dataclasses.field(default_factory=list)
    wall_us: list[float] = dataclasses.field(default_factory=list)
    wall_in_program_us: list[float] = dataclasses.field(default_factory=list)
    events: dict[int, list[GpuEvent]] = dataclasses.field(default_factory=dict)


def run_ladder(
    problem: Problem,
    mesh: Mesh,
    names: Sequence[str] | None = None,
    report: Report = lambda what, done: None,
    command: str = "cmm.job.run_ladder",
    *,
    rungs: Sequence[Rung] = RUNGS,
    protocol: Protocol | None = None,
) -> tuple[Run, dict[str, dict[int, list[GpuEvent]]]]:
    """Runs the methods `names` and the matmul without communication on `problem`.

    Args:
      problem: shapes and dtype; `axis_size` is the size of the mesh.
      mesh: mesh of the one axis "x".
      names: names of rungs that are asked for, by default all. The others appear in the record as skipped.
      report: called as the work goes on.
      command: what the record names as the command that made it.
      rungs: the rows of the ladder in order; `GEMM_ONLY` is one of them, and always runs.
      protocol: how often and in what chains calls are timed, by default `ON_GPUS` or `ON_SIMULATED`.

    Returns:
      The record, and for each method that ran on GPUs the events of one recorded call by device. A method that is
      wrong is in the record with its error: see `MethodResult.error_over_bound`.

    Raises:
      ValueError: a name is that of no rung, or `GEMM_ONLY` is missing.
    """
    known = [rung.name for rung in rungs]
    if GEMM_ONLY not in rungs or not set(names or ()) <= set(known):
        raise ValueError(f"names must be among those of rungs, and GEMM_ONLY one of these: got {names} and {known}.")
    simulated = is_simulated(mesh.devices.flat)
    protocol = protocol or (ON_SIMULATED if simulated else ON_GPUS)
    report("drawing operands", 0.0)
    operands = [random_operands(problem, mesh, seed) for seed in range(protocol.operand_sets)]
    gathered = [(jax.device_put(lhs, jax.NamedSharding(mesh, P(None, None))), rhs) for lhs, rhs in operands]
    candidates, skipped = {}, {}
    for index, rung in enumerate(rungs):
        report(f"compiling and checking {rung.name}", 0.05 + 0.25 * index / len(rungs))
        try:
            candidates[rung.name] = _candidate(rung, names, problem, mesh, operands, gathered)
        except _Skipped as error:
            skipped[rung.name] = MethodResult(rung.name, rung.title, "skipped", str(error))
    for round_index in range(protocol.rounds):
        report(f"timing, round {round_index + 1} of {protocol.rounds}", 0.3 + 0.7 * round_index / protocol.rounds)
        for candidate in candidates.values():
            _time_once(candidate, protocol, simulated)
    roof = _fastest_gemm_only(candidates.values(), simulated)
    results = [skipped.get(rung.name) or _result(candidates[rung.name], roof, simulated) for rung in rungs]
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
        gemm_only=roof.rung.name,
        rounds={
            name: [Rounds(one.call_us, one.kernel_us, one.wall_us, one.wall_in_program_us)]
            for name, one in candidates.items()
        },
    )
    return run, {name: candidate.events for name, candidate in candidates.items() if candidate.events}


def _candidate(rung, names, problem, mesh, operands, gathered):
    """Returns the rung compiled and checked on every operand pair, or raises the reason why it is skipped."""
    if rung is not GEMM_ONLY and names is not None and rung.name not in names:
        raise _Skipped("not asked for")
    _check_devices(rung, mesh.devices.flat[0])
    by_chance = Exception if rung.peer and names is None else ()
    try:
        program = rung.build(problem, mesh, gathered if rung.gathered else operands)
    except (ValueError, NotImplementedError, ImportError) as error:
        if rung is GEMM_ONLY:
            raise
        raise _Skipped(str(error)) from error
    except by_chance as error:
        raise _Skipped(f"{type(error).__name__}: {error}") from error
    try:
        candidate = _Candidate(rung, program, _worst_accuracy(program, mesh, operands))
        if not is_simulated(mesh.devices.flat):
            # What the profiler does not see cannot be timed. Better to know it now than after minutes.
            recorded_chain(program, 1)
        return candidate
    except by_chance as error:
        raise _Skipped(f"{type(error).__name__}: {error}") from error


def _check_devices(rung, device):
    """Raises the reason why the rung cannot run on devices such as this one, if there is one."""
    if rung.needs and device.platform == "cpu":
        raise _Skipped(f"needs {rung.needs}")
    if rung.needs == "Hopper GPUs" and not device.compute_capability.startswith("9."):
        raise _Skipped(f"needs Hopper GPUs, found {device.device_kind}")


def _worst_accuracy(program, mesh, operands) -> Accuracy:
    results = [program.start(*own) for own in program.operands]
    if not is_simulated(mesh.devices.flat):  # There the chain is not timed.
        results += program.start_chain(program.operands)
        operands = [*operands, *operands]
    checks = [accuracy(program.to_jax(out), *pair, mesh, AXIS) for out, pair in zip(results, operands, strict=True)]
    return Accuracy(
        max(check.error_over_bound for check in checks), max(check.relative_error for check in checks), checks[0].limit
    )


def _time_once(candidate, protocol, simulated):
    program = candidate.program
    if simulated:
        candidate.wall_us.append(blocked_time_us(program.start, program.operands))
        return
    chains = protocol.short_chain, protocol.long_chain
    candidate.wall_us.append(wall_time_us(program.start, program.operands, *chains, program.wait))
    candidate.wall_in_program_us.append(wall_time_in_program_us(program, protocol.short_starts, protocol.long_starts))
    call = recorded_chain(program, protocol.recorded_starts)
    candidate.call_us.append(call.time_us)
    candidate.kernel_us.append(call.kernel_us)
    candidate.events = call.events


def _fastest_gemm_only(candidates, simulated):
    """Returns the roof of the ladder: of the matmuls without communication that are right, the faster one."""
    roofs = [c for c in candidates if c.rung is GEMM_ONLY or c.rung.gathered and c.accuracy.right]
    return min(roofs, key=lambda candidate: np.median(candidate.wall_us if simulated else candidate.call_us))


def _result(candidate, roof, simulated):
    times_us, roof_us = (c.wall_us if simulated else c.call_us for c in (candidate, roof))
    # Without a recording there are no kernel times; a kernel whose name says nothing has a time of 0.
    kernel_us, roof_kernel_us = (c.kernel_us if all(c.kernel_us) else [] for c in (candidate, roof))
    ratios = np.divide(candidate.kernel_us, roof_kernel_us) if candidate.kernel_us and roof_kernel_us else []
    return MethodResult(
        name=candidate.rung.name,
        title=candidate.rung.title,
        status="simulated" if simulated else "measured",
        error_over_bound=candidate.accuracy.error_over_bound,
        relative_error=candidate.accuracy.relative_error,
        call_time_us=None if simulated else spread(candidate.call_us),
        wall_time_us=spread(candidate.wall_us),
        wall_time_in_program_us=spread(candidate.wall_in_program_us) if candidate.wall_in_program_us else None,
        ratio_to_gemm_only=spread(np.divide(times_us, roof_us)),
        kernel_time_us=spread(kernel_us) if kernel_us else None,
        kernel_ratio_to_gemm_only=spread(ratios) if len(ratios) else None,  # 0: a recording without its kernels
        details=candidate.program.details,
    )
