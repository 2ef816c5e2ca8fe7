"""How are the terms of an account formed from what its rounds have measured?"""

import dataclasses

import numpy as np

from cmm.measure import spread
from cmm.results import Spread
from cmm.trace.account import INSIDE, TERMS, KernelSum, MethodAccount


@dataclasses.dataclass(frozen=True)
class Round:
    """What one round has measured of one method, in µs.

    Attributes:
      wall: per call in a program, by the host's clock.
      wall_recorded: the same while GPUs are recorded.
      kernel: of its matmul kernels.
      period: as `cmm.trace.periods.period_parts_us` returns it, of the slowest GPU.
      twin: kernel time of its twin; `None` for a method that is no ring kernel, as all that follows.
      parts: of the critical chain.
      twin_parts: the same of the twin.
      recorded, twin_recorded: kernel times while they note what they do.
    """

    wall: float
    wall_recorded: float
    kernel: float
    period: dict[str, float]
    twin: float | None = None
    parts: dict[str, float] | None = None
    twin_parts: dict[str, float] | None = None
    recorded: float | None = None
    twin_recorded: float | None = None


def account_of(name: str, title: str, rounds: list[Round], gemm_only_us: list[float], **recorded) -> MethodAccount:
    """Forms the account of a method.

    Args:
      name, title: of its rung.
      rounds: at least one.
      gemm_only_us: kernel time of GEMM only in the same rounds.
      **recorded: for a ring kernel `recorded_calls`, `clock_error_ns` and `device_bound_ns` of its `KernelSum`.

    Returns:
      Medians and spreads over rounds. `rest_us` has its own spread, and the median that makes the sum of medians exact.
    """
    terms = [_terms(one, gemm) for one, gemm in zip(rounds, gemm_only_us, strict=True)]
    names = [name for name in TERMS if name in terms[0]]
    totals = [one.wall - gemm for one, gemm in zip(rounds, gemm_only_us)]
    by_name = {name: [of_round[name] for of_round in terms] for name in names}
    kernel = None
    if rounds[0].twin is not None:
        difference = [one.kernel - gemm for one, gemm in zip(rounds, gemm_only_us)]
        inside = {name: by_name[name] for name in INSIDE}
        added = [(one.recorded - one.kernel) - (one.twin_recorded - one.twin) for one in rounds]
        explained = spread(np.sum(list(inside.values()), axis=0))
        kernel = KernelSum(spread(difference), explained, _rest(difference, inside), spread(added), **recorded)
    return MethodAccount(
        name=name,
        title=title,
        wall_us=spread([one.wall for one in rounds]),
        kernel_us=spread([one.kernel for one in rounds]),
        terms={name: spread(values) for name, values in by_name.items()},
        rest_us=_rest(totals, by_name),
        kernel=kernel,
    )


def _terms(one: Round, gemm_us: float) -> dict[str, float]:
    outside = {name: value for name, value in one.period.items() if name != "matmul"}
    outside["recorder"] = one.wall - one.wall_recorded
    if one.twin is None:
        return {"own_products": one.period["matmul"] - gemm_us} | outside
    parts = {name: value - one.twin_parts[name] for name, value in one.parts.items()}
    return {"own_products": one.twin - gemm_us} | parts | outside


def _rest(totals, by_name) -> Spread:
    left = spread(np.array(totals) - np.sum(list(by_name.values()), axis=0))
    exact = float(np.median(totals) - sum(np.median(values) for values in by_name.values()))
    return Spread(exact, min(left.p10, exact), max(left.p90, exact))
