"""How are the accounts of all methods measured, in one run on one machine?"""

import datetime
import time
from collections.abc import Callable, Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec as P

from cmm import devices, provenance
from cmm.chain import chained
from cmm.measure import Program, spread, wall_time_in_program_us
from cmm.protocol import order_in_round
from cmm.recording import make_mark
from cmm.roofline import Problem
from cmm.rungs import AXIS, GEMM_ONLY, RUNGS, in_shard_map
from cmm.trace.account import Account, MethodAccount
from cmm.trace.account_round import (
    CALLS,
    LONG_STARTS,
    SHORT_STARTS,
    STARTS,
    Method,
    Recorded,
    Wall,
    read_round,
    record_round,
    record_walls,
)
from cmm.trace.account_terms import account_of
from cmm.trace.call import OffsetsAround
from cmm.trace.record import KERNELS, multiply_as_twin, record_events, record_twin, recorded_program

METHODS = ("naive", "ring", "ring_copy_engines", *KERNELS)
_FEWEST_ROUNDS = 3


def measure_account(
    problem: Problem,
    mesh,
    names: Sequence[str] = METHODS,
    rounds: int = 10,
    budget_s: float = 60.0,
    report: Callable[[str, float], None] = lambda what, done: None,
    command: str = "cmm.trace.account_run.measure_account",
) -> Account:
    """Measures the accounts of some methods.

    Args:
      problem: shapes and dtype.
      mesh: Hopper GPUs along the one axis "x", two or more.
      names: of rungs; those that cannot run here are in the account as skipped.
      rounds: every program is recorded once in each, and seven calls of each kernel also from inside.
      budget_s: no round begins after so many seconds of rounds, but a few are measured in any case.
      report: called as the work goes on, with the fraction that is done.
      command: what the file names as the command that made it.

    Raises:
      ValueError: there is no such rung, or one device only.
      NotImplementedError: the devices are simulated: nothing records them.
      RuntimeError: GEMM only could not be measured.
    """
    known = {rung.name: rung for rung in RUNGS}
    if not set(names) <= set(known) - {GEMM_ONLY.name}:
        raise ValueError(f"Methods must be among {', '.join(name for name in known if name != GEMM_ONLY.name)}.")
    if devices.is_simulated(mesh.devices.flat):
        raise NotImplementedError("An account needs GPUs: simulated devices have no times to account for.")
    if mesh.size < 2:
        raise ValueError("An account needs two devices or more: on one there is nothing to communicate.")
    report("drawing operands", 0.0)
    pairs = [devices.random_operands(problem, mesh, seed, AXIS) for seed in range(CALLS)]
    gathered = [(jax.device_put(lhs, NamedSharding(mesh, P(None, None))), rhs) for lhs, rhs in pairs]
    gemm = Method(GEMM_ONLY.name, GEMM_ONLY.title, GEMM_ONLY.build(problem, mesh, gathered))
    methods, skipped = [gemm], {}
    around = OffsetsAround(mesh)
    for number, name in enumerate(names):
        report(f"compiling {name}", 0.02 + 0.38 * number / len(names))
        try:
            method = _build(known[name], problem, mesh, pairs, gathered)
            _warm_up(method)
            methods.append(method)
        except Exception as error:  # One method that fails does not take the others with it.
            skipped[name] = f"{type(error).__name__}: {error}"
    began, done, mark = time.monotonic(), 0, make_mark(mesh)
    while done < rounds and (done < _FEWEST_ROUNDS or time.monotonic() - began < budget_s):
        report(f"round {done + 1} of {rounds}", 0.4 + 0.6 * done / rounds)
        in_order = [methods[place] for place in order_in_round(len(methods), done)]
        try:
            walls = _walls(in_order, mark, mesh.size, recorded_first=done % 2 == 1)
            pieces = record_round(in_order, around, mark, mesh.size)
        except Exception as error:
            skipped[f"round {done + 1}"] = f"{type(error).__name__}: {error}"
            walls = [], []
        for method, wall_us, wall in zip(in_order, *walls):
            try:
                method.rounds[done] = read_round(method, wall_us, wall, pieces)
            except Exception as error:
                skipped[f"{method.name}, round {done + 1}"] = f"{type(error).__name__}: {error}"
        done += 1
    report("done", 1.0)
    skipped |= _unreadable(methods)
    if not gemm.rounds:
        raise RuntimeError(f"GEMM only could not be measured: {list(skipped.values())}")
    accounts = [_account(method, gemm) for method in methods if set(method.rounds) & set(gemm.rounds)]
    return Account(
        problem=problem,
        machine=provenance.machine(mesh),
        versions=provenance.versions(),
        distribution="normal(0, 1)",
        protocol=(
            f"{done} rounds, methods interleaved in an order that changes by round; "
            f"{CALLS} calls on distinct operand pairs chained in a program, "
            f"started {STARTS} times while recorded, one profile a round, the first start and the first call of each "
            "start not counted; the last start also from inside; "
            f"wall time: {SHORT_STARTS} and {LONG_STARTS} starts, difference per call, as usual and while GPUs are "
            f"recorded, taking turns to be first; what runs beside kernels, and gaps: in those {LONG_STARTS} starts "
            "but the first; parts of chains: mean over the middle half of the recorded calls of a "
            "round, by their length; medians over rounds, one process"
        ),
        date=datetime.date.today().isoformat(),
        command=command,
        rounds=done,
        gemm_only_us=spread([one.kernel for one in gemm.rounds.values()]),
        methods=tuple(accounts),
        skipped=skipped,
    )


def _build(rung, problem, mesh, pairs, gathered) -> Method:
    method = Method(rung.name, rung.title, rung.build(problem, mesh, pairs))
    if rung.name in KERNELS:
        bare = in_shard_map(
            lambda lhs, rhs, axis: multiply_as_twin(lhs, rhs, axis, rung.name), gathered=True, check_vma=False
        )
        method.twin = bare(problem, mesh, gathered)
        method.recorded = _recorded(rung.name, problem, mesh, pairs, twin=False)
        method.twin_recorded = _recorded(rung.name, problem, mesh, gathered, twin=True)
    return method


def _recorded(kernel, problem, mesh, pairs, twin) -> Recorded:
    """Returns a program of calls that note as little as the parts of chains need."""
    _, layout = recorded_program(problem, mesh, kernel, twin=twin)
    every = layout.plan.k_steps if kernel == "pallas" else layout.every
    _, layout = recorded_program(problem, mesh, kernel, every=every, twin=twin)
    function = record_twin if twin else record_events
    one = lambda lhs, rhs: function(lhs, rhs, AXIS, kernel, every=every)
    specs = (P(None, None) if twin else P(AXIS, None), P(None, AXIS)), (P(None, AXIS), P(AXIS))
    ins, outs = ([spec] * len(pairs) for spec in specs)
    chain = jax.shard_map(chained(one), mesh=mesh, in_specs=(ins,), out_specs=outs, check_vma=False)
    return Recorded(Program(lambda *pair: chain([pair]), pairs, start_chain=jax.jit(chain)), layout)


def _warm_up(method) -> None:
    for program in method.programs().values():
        program.wait(program.start_chain(program.operands))


def _walls(methods, mark, gpus, recorded_first) -> tuple[list[float], list[Wall]]:
    """Returns the time per call of each method by the host's clock: as usual, and while GPUs are recorded."""
    usual = lambda: [wall_time_in_program_us(method.program, SHORT_STARTS, LONG_STARTS) for method in methods]
    if recorded_first:
        walls = record_walls(methods, mark, gpus)
        return usual(), walls
    return usual(), record_walls(methods, mark, gpus)


def _unreadable(methods) -> dict[str, str]:
    """Returns what to say of recorded calls that could not be read: of each program how many, and the first reason."""
    return {
        f"{method.name}, {len(reasons)} calls ({kind})": reasons[0]
        for method in methods
        for kind, reasons in method.unreadable.items()
    }


def _account(method, gemm) -> MethodAccount:
    common = sorted(set(method.rounds) & set(gemm.rounds))
    details = {}
    if method.traces:
        details = {
            "recorded_calls": len(method.traces),
            "clock_error_ns": max(clock.error_ns for trace in method.traces for clock in trace.clocks),
            "device_bound_ns": max(max(trace.offsets.from_first()[1]) for trace in method.traces),
        }
    gemm_us = [gemm.rounds[number].kernel for number in common]
    return account_of(method.name, method.title, [method.rounds[number] for number in common], gemm_us, **details)
