"""The main job: run every method on one problem, check it, time it, and return the record."""

import contextlib
import dataclasses
import datetime
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from cmm.completeness import IncompleteRecording
from cmm.devices import is_simulated, random_operands
from cmm.measure import Program, spread
from cmm.protocol import ON_SIMULATED, Protocol, on_gpus
from cmm.provenance import machine, versions
from cmm.recording import GpuEvent
from cmm.reference import Accuracy, compare, make_reference
from cmm.results import MethodResult, Run
from cmm.roofline import Problem
from cmm.rounds import Times, check_recording, time_on_gpus, time_on_host
from cmm.rungs import AXIS, GEMM_ONLY, RUNGS, Rung

_REASON_CHARACTERS = 600  # Compilers say more than fits a table.
_COMPILING_THREADS = 6
_LONGEST_LISTED = 4

# Called with what is being done and the fraction of the whole job that is done, 0 to 1.
Report = Callable[[str, float], None]


class _Skipped(Exception):
    """Says why a rung does not run."""


@dataclasses.dataclass
class _Candidate:
    """A rung that runs: its program, whether its results are right, and its times."""

    rung: Rung
    program: Program
    accuracy: Accuracy
    times: Times = dataclasses.field(default_factory=Times)


def run_ladder(
    problem: Problem,
    mesh: Mesh,
    names: Sequence[str] | None = None,
    report: Report = lambda what, done: None,
    command: str = "cmm.job.run_ladder",
    *,
    rungs: Sequence[Rung] = RUNGS,
    protocol: Protocol | None = None,
    first_round: int = 0,
) -> tuple[Run, dict[str, dict[int, list[GpuEvent]]]]:
    """Runs the methods `names` and the matmul without communication on `problem`.

    Args:
      problem: shapes and dtype; `axis_size` is the size of the mesh.
      mesh: mesh of the one axis "x".
      names: names of rungs that are asked for, by default all. The others appear in the record as skipped.
      report: called as the work goes on.
      command: what the record names as the command that made it.
      rungs: the rows of the ladder in order; `GEMM_ONLY` is one of them, and always runs.
      protocol: how often and in what chains calls are timed, by default `on_gpus(problem)` or `ON_SIMULATED`.
      first_round: number of the first round, over all processes that measure this problem: it decides on the order.

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
    protocol = protocol or (ON_SIMULATED if simulated else on_gpus(problem))
    report("drawing operands", 0.0)
    operands = [random_operands(problem, mesh, seed) for seed in range(protocol.operand_sets)]
    gathered = [(jax.device_put(lhs, jax.NamedSharding(mesh, P(None, None))), rhs) for lhs, rhs in operands]
    candidates, skipped = _candidates(rungs, names, problem, mesh, operands, gathered, report)
    if not simulated:
        report("recording once", 0.3)
        # What the profiler does not see cannot be timed. Better to know it now than after minutes.
        for name, error in check_recording({name: c.program for name, c in candidates.items()}, mesh).items():
            if isinstance(error, IncompleteRecording):
                candidates[name].times.give_up_recording(str(error))
                continue
            if not _may_fail(candidates[name].rung, names):
                raise error
            skipped[name] = _skipped(candidates.pop(name).rung, f"{type(error).__name__}: {error}")
        _roofs(candidates.values())
    timed = [(candidate.program, candidate.times) for candidate in candidates.values()]
    for index in range(protocol.rounds):
        report(f"timing, round {index + 1} of {protocol.rounds}", 0.35 + 0.65 * index / protocol.rounds)
        if simulated:
            time_on_host(timed, first_round + index)
        else:
            time_on_gpus(timed, first_round + index, protocol, mesh)
    roof = _fastest_gemm_only(candidates.values(), simulated)
    results = [skipped.get(rung.name) or _result(candidates[rung.name], roof, simulated) for rung in rungs]
    report("done", 1.0)
    run = Run(
        problem=problem,
        machine=machine(mesh),
        versions=versions(),
        simulated=simulated,
        distribution="normal(0, 1)",
        protocol=protocol.on_host_in_words() if simulated else protocol.in_words(tuple(candidates), first_round),
        date=datetime.date.today().isoformat(),
        command=command,
        methods=tuple(results),
        gemm_only=roof.rung.name,
        first_round=first_round,
        rounds={name: [candidate.times.raw()] for name, candidate in candidates.items()},
    )
    return run, {name: candidate.times.events for name, candidate in candidates.items() if candidate.times.events}


def _candidates(rungs, names, problem, mesh, operands, gathered, report):
    """Returns the rungs that run, compiled and checked on every operand pair, and results of the others, by name."""
    candidates, skipped = {}, {}
    built: dict[str, tuple[Program, list[Future]]] = {}
    pool = ThreadPoolExecutor(_COMPILING_THREADS)
    try:
        # Those that are compiled beside the others first: then they are ready when the others are.
        for index, rung in enumerate(sorted(rungs, key=lambda rung: not rung.beside)):
            report(f"lowering {rung.name}", 0.02 + 0.06 * index / len(rungs))
            with _noting_why_not(rung, names, skipped, expected=(ValueError, NotImplementedError, ImportError)):
                program = _build(rung, names, problem, mesh, gathered if rung.gathered else operands)
                futures = [pool.submit(one.compile) for one in program.lowered] if rung.beside else []
                built[rung.name] = program, futures
        report("computing references", 0.08)
        # One after the other: each needs room for its operands in float32.
        references = [jax.block_until_ready(make_reference(*pair, mesh, AXIS)) for pair in operands]
        for index, rung in enumerate(rungs):
            if rung.name in built:
                report(f"compiling and checking {rung.name}", 0.1 + 0.2 * index / len(rungs))
                program, futures = built[rung.name]
                with _noting_why_not(rung, names, skipped):
                    for future in futures:
                        future.result()
                    for one in program.lowered if not futures else ():
                        one.compile()
                    candidates[rung.name] = _Candidate(rung, program, _worst_accuracy(program, mesh, references))
    finally:
        pool.shutdown(cancel_futures=True)
    return candidates, skipped


def _build(rung, names, problem, mesh, operands) -> Program:
    if rung is not GEMM_ONLY and names is not None and rung.name not in names:
        raise _Skipped("not asked for")
    _check_devices(rung, mesh.devices.flat[0])
    return rung.build(problem, mesh, operands)


@contextlib.contextmanager
def _noting_why_not(rung, names, skipped, expected=()):
    """Puts a result with the reason into `skipped` if the rung cannot run. What is not expected is raised as it is."""
    try:
        yield
    except _Skipped as error:
        skipped[rung.name] = _skipped(rung, str(error))
    except Exception as error:
        if rung is GEMM_ONLY or not (isinstance(error, expected) or _may_fail(rung, names)):
            raise
        kind = "" if isinstance(error, expected) else f"{type(error).__name__}: "
        skipped[rung.name] = _skipped(rung, f"{kind}{error}")


def _may_fail(rung, names) -> bool:
    return rung.peer and names is None


def _skipped(rung, reason) -> MethodResult:
    return MethodResult(rung.name, rung.title, "skipped", reason[:_REASON_CHARACTERS])


def _check_devices(rung, device):
    """Raises the reason why the rung cannot run on devices such as this one, if there is one."""
    if rung.needs and device.platform == "cpu":
        raise _Skipped(f"needs {rung.needs}")
    if rung.needs == "Hopper GPUs" and not device.compute_capability.startswith("9."):
        raise _Skipped(f"needs Hopper GPUs, found {device.device_kind}")


def _worst_accuracy(program, mesh, references) -> Accuracy:
    results = [program.start(*own) for own in program.operands]
    if not is_simulated(mesh.devices.flat):  # There the chain is not timed.
        results += program.start_chain(program.operands)
        references = [*references, *references]
    checks = [compare(program.to_jax(out), one, mesh, AXIS) for out, one in zip(results, references, strict=True)]
    return Accuracy(
        max(check.error_over_bound for check in checks), max(check.relative_error for check in checks), checks[0].limit
    )


def _roofs(candidates):
    roofs = [c for c in candidates if c.rung is GEMM_ONLY or c.rung.gathered and c.accuracy.right]
    if all(c.times.incomplete for c in roofs):
        raise RuntimeError(f"GEMM only cannot be timed, to which ratios are formed: {roofs[0].times.incomplete}")
    return [c for c in roofs if not c.times.incomplete]


def _fastest_gemm_only(candidates, simulated):
    """Returns the roof of the ladder: of the matmuls without communication that are right, the faster one."""
    return min(_roofs(candidates), key=lambda one: np.median(one.times.wall_us if simulated else one.times.call_us))


def _result(candidate, roof, simulated):
    times, of_roof = candidate.times, roof.times
    times_us, roof_us = (t.wall_us if simulated else t.call_us for t in (times, of_roof))
    # Without a recording there are no kernel times; a kernel whose name says nothing has a time of 0.
    kernel_us, roof_kernel_us = (t.kernel_us if all(t.kernel_us) else [] for t in (times, of_roof))
    kernel_ratios = np.divide(times.kernel_us, roof_kernel_us) if times.kernel_us and roof_kernel_us else []
    result = MethodResult(
        name=candidate.rung.name,
        title=candidate.rung.title,
        status="simulated" if simulated else "measured",
        error_over_bound=candidate.accuracy.error_over_bound,
        relative_error=candidate.accuracy.relative_error,
        call_time_us=spread(times.call_us) if times.call_us else None,
        wall_time_us=spread(times.wall_us),
        wall_time_in_program_us=spread(times.wall_in_program_us) if times.wall_in_program_us else None,
        ratio_to_gemm_only=spread(np.divide(times_us, roof_us)) if times_us else None,
        kernel_time_us=spread(kernel_us) if kernel_us else None,
        # 0: a recording without its kernels
        kernel_ratio_to_gemm_only=spread(kernel_ratios) if len(kernel_ratios) else None,
    )
    return dataclasses.replace(result, details="; ".join(filter(None, _details(candidate, result))))


def _details(candidate, result):
    """Yields what identifies the program, and what a reader of its times should know."""
    yield candidate.program.details
    if candidate.times.alone:
        yield f"recorded in sessions of its own in some rounds, since: {candidate.times.alone}"
    if candidate.times.incomplete:
        yield f"no times by the GPUs' record in a process in which it stayed incomplete: {candidate.times.incomplete}"
    elif result.is_incomplete or candidate.times.kernel_us and not result.kernel_time_us:
        longest = list(candidate.times.others_us.items())[:_LONGEST_LISTED]
        listed = ", ".join(f"{name.partition('(')[0]} {time_us:.1f} µs" for name, time_us in longest)
        yield f"recorded beside matmul kernels that are known: {listed or 'nothing'}"
