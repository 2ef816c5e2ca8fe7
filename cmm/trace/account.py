"""Where does the time of each method go, beyond that of the product alone?

An account is a sum: the kernel time of *GEMM only*, terms that are measured one by one, and what they leave
unexplained. No term is the difference between a total and other terms. The total is the time per call in a program of
several calls, by the host's clock. Terms come from elsewhere:

- `own_products`: kernel time of a method's own matmuls less that of GEMM only. For a ring kernel it is that of its
  twin, where nothing is sent (`cmm.trace.twin`); for a method in plain JAX that of its matmuls while it runs.
- for a ring kernel the parts of its critical chain, recorded from inside, less the same parts of its twin
  (`cmm.trace.critical`).
- `transfer`, `memory`, `barrier`, `gap`: what the GPU does meanwhile where no matmul runs (`cmm.trace.periods`).

A ring kernel has a second, sharper sum: its kernel time, by the GPUs' record of calls in which nothing was noted,
against GEMM only, `own_products` and the parts of the chain.
"""

import dataclasses
import json
import pathlib

import numpy as np

from cmm.measure import spread
from cmm.results import Spread
from cmm.roofline import Problem
from cmm.trace.critical import PARTS

# By name: what a term is, and with which others it belongs together.
TERMS = {"own_products": ("own products against cuBLAS", "products")}
_GROUPS = dict.fromkeys(("products_sending", "products_last"), "products")
_GROUPS |= dict.fromkeys(("drain", "announce", "flight", "wait"), "communication")
_GROUPS |= dict.fromkeys(("device_start", "cta_start"), "synchronization")
_GROUPS |= dict.fromkeys(("fill", "epilogue", "refill", "end"), "pipeline")
TERMS |= {name: (title, _GROUPS[name]) for name, title in PARTS.items()}
TERMS |= {
    "transfer": ("transfers beside which no product runs", "communication"),
    "memory": ("writes and copies beside which no product runs", "memory"),
    "barrier": ("barriers between GPUs", "synchronization"),
    "gap": ("nothing runs", "gaps"),
}
GROUPS = ("products", "communication", "synchronization", "pipeline", "memory", "gaps")
# The terms that lie inside a ring kernel.
INSIDE = ("own_products", *PARTS)


@dataclasses.dataclass(frozen=True)
class KernelSum:
    """The kernel time of a ring kernel against GEMM only.

    Attributes:
      difference_us: how much longer it is, by the GPUs' record.
      explained_us: sum of the terms `INSIDE`.
      rest_us: difference less explained.
      recording_us: how much longer the kernel takes while it notes what it does, less the same of its twin. It is no
        term; it says how well the recorded call stands for the usual one.
      recorded_calls: how many calls were recorded from inside.
      clock_error_ns: how far off times within a device can be.
      device_bound_ns: how far off timers of devices can be; it moves time between `device_start` and `flight` only.
    """

    difference_us: Spread
    explained_us: Spread
    rest_us: Spread
    recording_us: Spread
    recorded_calls: int
    clock_error_ns: float
    device_bound_ns: float

    @property
    def share(self) -> float:
        """Returns the share of the difference that is explained: 1 less what is left, whatever its sign."""
        return 1 - abs(self.rest_us.median / self.difference_us.median) if self.difference_us.median else 0.0


@dataclasses.dataclass(frozen=True)
class MethodAccount:
    """The account of one method.

    Attributes:
      name, title: of its rung (`cmm.rungs`).
      wall_us: time per call in a program, by the host's clock.
      kernel_us: time of its matmul kernels.
      terms: by name (`TERMS`), time beyond GEMM only. Negative ones save time.
      rest_us: what is left of the wall time.
      kernel: for a ring kernel, the sum of its kernel time.
    """

    name: str
    title: str
    wall_us: Spread
    kernel_us: Spread
    terms: dict[str, Spread]
    rest_us: Spread
    kernel: KernelSum | None = None


@dataclasses.dataclass(frozen=True)
class Account:
    """The accounts of all methods on one machine and problem; fields as in `cmm.results.Run`.

    Attributes:
      gemm_only_us: kernel time of GEMM only.
      methods: accounts in the order of the ladder.
      skipped: by name, why a method has none, or has lost a round.
      rounds: how many rounds were measured.
    """

    problem: Problem
    machine: dict[str, str]
    versions: dict[str, str]
    distribution: str
    protocol: str
    date: str
    command: str
    rounds: int
    gemm_only_us: Spread
    methods: tuple[MethodAccount, ...]
    skipped: dict[str, str]

    def caption(self) -> str:
        """Returns one line with machine, JAX version, shapes, dtype and date."""
        p = self.problem
        return (
            f"{p.axis_size} x {self.machine['device_kind']}, JAX {self.versions['jax']}, {p.dtype}, per shard "
            f"M={p.m_shard} K={p.k} N={p.n_shard}, {self.distribution}, {self.date}"
        )


@dataclasses.dataclass(frozen=True)
class Round:
    """What one round has measured of one method, in µs.

    Attributes:
      wall: per call in a program.
      kernel: of its matmul kernels.
      period: as `cmm.trace.periods.period_parts_us` returns it, of the slowest GPU.
      twin: kernel time of its twin; `None` for a method that is no ring kernel, as all that follows.
      parts: of the critical chain.
      twin_parts: the same of the twin.
      recorded, twin_recorded: kernel times while they note what they do.
    """

    wall: float
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
    if one.twin is None:
        return {"own_products": one.period["matmul"] - gemm_us} | outside
    parts = {name: value - one.twin_parts[name] for name, value in one.parts.items()}
    return {"own_products": one.twin - gemm_us} | parts | outside


def _rest(totals, by_name) -> Spread:
    left = spread(np.array(totals) - np.sum(list(by_name.values()), axis=0))
    exact = float(np.median(totals) - sum(np.median(values) for values in by_name.values()))
    return Spread(exact, min(left.p10, exact), max(left.p90, exact))


def file_name(account: Account) -> str:
    """Returns the name of an account's file, like that of a run (`cmm.results.file_name`)."""
    p, kind = account.problem, account.machine["device_kind"].replace("NVIDIA ", "").replace(" ", "_").lower()
    return f"account_{kind}_d{p.axis_size}_m{p.m_shard}_k{p.k}_n{p.n_shard}_{p.dtype}.json"


def save(account: Account, path) -> pathlib.Path:
    """Writes an account as JSON, times to a nanosecond, and returns the path."""
    rounded = json.loads(json.dumps(dataclasses.asdict(account)), parse_float=lambda text: round(float(text), 3))
    path = pathlib.Path(path)
    path.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
    return path


def load(path) -> Account:
    """Reads what `save` has written."""
    raw = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    methods = []
    for of in raw["methods"]:
        kernel = of["kernel"] and KernelSum(**{name: _spread(value) for name, value in of["kernel"].items()})
        terms = {name: Spread(**value) for name, value in of["terms"].items()}
        spreads = {name: Spread(**of[name]) for name in ("wall_us", "kernel_us", "rest_us")}
        methods.append(MethodAccount(of["name"], of["title"], terms=terms, kernel=kernel, **spreads))
    problem, gemm = Problem(**raw["problem"]), Spread(**raw["gemm_only_us"])
    return Account(**raw | {"problem": problem, "gemm_only_us": gemm, "methods": tuple(methods)})


def _spread(value):
    return Spread(**value) if isinstance(value, dict) else value
