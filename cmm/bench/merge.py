"""What do several processes that measured the same problem say together?

Medians and percentiles are taken over the rounds of all processes. A ratio is formed within one round of one process,
and only then are ratios of all rounds put together.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from cmm.measure import spread
from cmm.peers.own_process import PeerResult
from cmm.protocol import order_in_words
from cmm.report import is_roof, is_wrong
from cmm.results import MethodResult, Rounds, Run, Spread

# How the protocol of one process ends (see `cmm.protocol.Protocol.in_words`).
_ONE_PROCESS = ", one process"


def merge(runs: Sequence[Run], command: str, *, quick: bool = False) -> Run:
    """Merges the records of processes that measured one problem with the same rungs.

    Args:
      runs: one record per process, with raw rounds.
      command: what the record names as the command that made it.
      quick: whether it was a quick look; the protocol then says so.

    Returns:
      One record. A method that ran in some processes only is in it with the rounds of those, and its reason says so.

    Raises:
      ValueError: the records are of different problems, machines or versions, or there is none.
    """
    kinds = {(run.problem, run.simulated, *run.machine.items(), *run.versions.items()) for run in runs}
    if len(kinds) != 1:
        raise ValueError(f"Merging needs records of one problem on one machine, got {len(kinds)} kinds.")
    first = runs[0]
    names = [result.name for result in first.methods]
    rounds = {name: [run.rounds.get(name, [Rounds()])[0] for run in runs] for name in names}
    rounds = {name: of_processes for name, of_processes in rounds.items() if any(_times(r) for r in of_processes)}
    merged = dataclasses.replace(
        first,
        protocol=_protocol(runs, quick),
        command=command,
        rounds=rounds,
        processes=len(runs),
        quick=quick,
        methods=tuple(_without_ratios(name, runs, rounds.get(name)) for name in names),
    )
    roof = _fastest_roof(merged)
    methods = tuple(_with_ratios(merged, result, roof) for result in merged.methods)
    return dataclasses.replace(merged, methods=methods, gemm_only=roof)


def ratio(run: Run, name: str, other: str, kind: str = "call_us") -> Spread | None:
    """Returns the spread of the time of `name` over that of `other`, formed in each round.

    Args:
      run: a record with raw rounds.
      name: name of a method.
      other: the one it is compared with.
      kind: field of `Rounds`.

    Returns:
      `None` if there is no round in which both were timed.
    """
    quotients = ratios(run, name, other, kind)
    return spread(quotients) if quotients else None


def ratios(run: Run, name: str, other: str, kind: str = "call_us") -> list[float]:
    """Returns the ratios of which `ratio` gives the spread, one for each round in which both were timed."""
    quotients: list[float] = []
    for own, its in zip(run.rounds.get(name, ()), run.rounds.get(other, ())):
        times_us, others_us = getattr(own, kind), getattr(its, kind)
        # A kernel time of 0 says that no kernel was recognised: the ratio is 0, and the recording incomplete.
        if times_us and others_us and all(others_us):
            quotients.extend(np.divide(times_us, others_us).tolist())
    return quotients


def with_peers(run: Run, peers: Sequence[PeerResult], date: str = "") -> Run:
    """Returns `run` with the results of peers, which were measured in processes of their own.

    They take the place of older results of the same peer. Peers of the same module begin with the same word.

    Args:
      run: a record.
      peers: the results.
      date: day on which they were measured, ISO format, for their details.
    """
    new = tuple(_as_method(peer, date) for peer in peers)
    words = {_first_word(result) for result in new}
    return dataclasses.replace(run, peers=(*(old for old in run.peers if _first_word(old) not in words), *new))


def _first_word(result) -> str:
    return result.name.partition("_")[0]


def _times(rounds: Rounds) -> list[float]:
    return rounds.call_us or rounds.wall_us


def _protocol(runs, quick) -> str:
    words = runs[0].protocol
    if len(runs) > 1:
        words = words.replace(order_in_words([_order(runs[0])]), order_in_words([*map(_order, runs)]))
        words = f"{len(runs)} processes of {words}"
        if words.endswith(_ONE_PROCESS):
            words = words.removesuffix(_ONE_PROCESS) + " of all processes"
    return f"quick look: {words}" if quick else words


def _order(run) -> tuple[list[str], range]:
    """Returns which methods a process has timed, in the order of the ladder, and the numbers of its rounds."""
    count = max((len(of[0].wall_us) for of in run.rounds.values()), default=0)
    return list(run.rounds), range(run.first_round, run.first_round + count)


def _without_ratios(name, runs, rounds) -> MethodResult:
    results = [run.method(name) for run in runs]
    ran = [result for result in results if result.error_over_bound is not None]
    reasons = "; ".join(dict.fromkeys(result.reason for result in results if result.reason))
    if not ran or not rounds:
        return dataclasses.replace(results[0], reason=reasons)
    partly = f"ran in {len(ran)} of {len(runs)} processes: {reasons}" if len(ran) < len(runs) else ""
    together = {
        kind: [time for of_process in rounds for time in getattr(of_process, kind)]
        for kind in ("call_us", "kernel_us", "wall_us", "wall_in_program_us")
    }
    call_us, kernel_us, wall_us, wall_in_program_us = together.values()
    return dataclasses.replace(
        ran[0],
        reason=partly,
        # np.max, unlike max, lets a NaN through.
        error_over_bound=float(np.max([result.error_over_bound for result in ran])),
        relative_error=float(np.max([result.relative_error for result in ran])),
        call_time_us=spread(call_us) if call_us else None,
        kernel_time_us=spread(kernel_us) if kernel_us and all(kernel_us) else None,
        wall_time_us=spread(wall_us),
        wall_time_in_program_us=spread(wall_in_program_us) if wall_in_program_us else None,
        details="; ".join(dict.fromkeys(result.details for result in ran if result.details)),
    )


def _fastest_roof(run) -> str:
    """Returns the name of the faster GEMM only, of those that were timed in every process and are right."""
    time = lambda result: result.wall_time_us if run.simulated else result.call_time_us
    timed = [result for result in run.methods if is_roof(result) and time(result)]
    of_rounds = lambda rounds: rounds.wall_us if run.simulated else rounds.call_us
    everywhere = [result for result in timed if all(map(of_rounds, run.rounds[result.name]))]
    right = [result for result in everywhere if not is_wrong(run, result)]
    return min(right or everywhere or timed, key=lambda result: time(result).median).name


def _with_ratios(run, result, roof) -> MethodResult:
    return dataclasses.replace(
        result,
        ratio_to_gemm_only=ratio(run, result.name, roof, "wall_us" if run.simulated else "call_us"),
        kernel_ratio_to_gemm_only=ratio(run, result.name, roof, "kernel_us"),
    )


def _as_method(peer: PeerResult, date: str) -> MethodResult:
    """Puts what only a peer's result has into words, since a `MethodResult` has no fields for it."""
    fields = {field.name: getattr(peer, field.name) for field in dataclasses.fields(MethodResult)}
    groups = (
        (peer.details,),
        (f"{name} {version}" for name, version in peer.versions.items()),
        (f"{name}={value}" for name, value in peer.options.items()),
        (peer.protocol,),
    )
    groups = (*(groups if peer.status in ("measured", "simulated") else ()), (date and f"run on {date}",))
    details = "; ".join(filter(None, (", ".join(filter(None, group)) for group in groups)))
    return MethodResult(**(fields | {"details": details}))
