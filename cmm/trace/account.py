"""Where does the time of each method go, beyond that of the product alone?

An account is a sum: the kernel time of *GEMM only*, terms, and what they leave unexplained. The total is the time per
call in a program of several calls, by the host's clock. Most terms have a cause; those of `NOT_ATTRIBUTED` are what is
left of a chain when all causes are taken away, or what sets recorded calls apart from usual ones, and count as such.
Terms come from elsewhere than totals:

- `own_products`: kernel time of a method's own matmuls less that of GEMM only. For a ring kernel it is that of its
  twin, where nothing is sent (`cmm.trace.twin`); for a method in plain JAX that of its matmuls while it runs.
- for a ring kernel the parts of its critical chain, recorded from inside, less the same parts of its twin
  (`cmm.trace.critical`).
- `transfer`, `memory`, `barrier`, `gap`: what the GPU does meanwhile where no matmul runs (`cmm.trace.periods`). In a
  gap it does nothing: that is recorded, and not why.
- `recorder`: the GPUs' record tells of recorded calls, totals of usual ones. Recorded ones can take longer, above all
  where the host has much to launch: the recorder takes its time. So both are timed by the host's clock, and this is the
  difference. What is left of the sum then says whether the GPUs' record agrees with the host's clock while both look at
  the same calls; about usual calls it says nothing more.

A ring kernel has a second, sharper sum: its kernel time, by the GPUs' record of calls in which nothing was noted,
against GEMM only, `own_products` and the parts of the chain. Parts of a chain partition the recorded call. So this sum
comes out whatever the parts say, if recorded calls stand for usual ones: it tests that, and not the parts.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable
from typing import NamedTuple

from cmm.results import Spread, short_kind
from cmm.roofline import Problem
from cmm.trace.critical import PARTS

# By name: what a term is, and with which others it belongs together.
TERMS = {"own_products": ("own products against cuBLAS", "products")}
_GROUPS = dict.fromkeys(("products_sending", "products_last"), "products")
_GROUPS |= dict.fromkeys(("drain", "announce", "flight"), "communication")
_GROUPS |= dict.fromkeys(("device_start", "cta_start"), "synchronization")
_GROUPS |= dict.fromkeys(("fill", "epilogue", "end"), "pipeline")
# What is left, by name: no cause is known for it.
_NO_CAUSE = "not attributed"
_GROUPS |= dict.fromkeys(("wait", "refill"), _NO_CAUSE)
TERMS |= {name: (title, _GROUPS[name]) for name, title in PARTS.items()}
TERMS |= {
    "transfer": ("transfers beside which no product runs", "communication"),
    "memory": ("writes and copies beside which no product runs", "memory"),
    "barrier": ("barriers between GPUs", "synchronization"),
    "gap": ("nothing runs", "gaps"),
    "recorder": ("usual calls less recorded ones", _NO_CAUSE),
}
GROUPS = ("products", "communication", "synchronization", "pipeline", "memory", "gaps", _NO_CAUSE)
NOT_ATTRIBUTED = tuple(name for name, (_, group) in TERMS.items() if group == _NO_CAUSE)
# The terms that lie inside a ring kernel.
INSIDE = ("own_products", *PARTS)


@dataclasses.dataclass(frozen=True)
class KernelSum:
    """The kernel time of a ring kernel against GEMM only.

    Attributes:
      difference_us: how much longer it is, by the GPUs' record.
      explained_us: sum of the terms `INSIDE`, those of `NOT_ATTRIBUTED` among them.
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
        """Returns the share of the difference that the sum of terms covers: 1 less what is left, whatever its sign.

        The sum is the twin's kernel time less that of GEMM only, and the recorded call less the recorded call of the
        twin. So the share says how well calls that note what they do stand for usual ones, of the kernel and of its
        twin alike. It does not say that time is attributed to the right parts, or to a cause at all: see `Sums`.
        """
        return 1 - abs(self.rest_us.median / self.difference_us.median) if self.difference_us.median else 0.0


class Sums(NamedTuple):
    """Sums of medians of terms, in µs. Where `absolute_us` is far larger than the others, terms cancel.

    Attributes:
      attributed_us: of terms that have a cause.
      not_attributed_us: of `NOT_ATTRIBUTED`.
      absolute_us: of the absolute values of all of them.
    """

    attributed_us: float
    not_attributed_us: float
    absolute_us: float


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

    def sums(self, names: Iterable[str] = tuple(TERMS)) -> Sums:
        """Returns the sums of the terms of these names, as far as the method has them; not of what they leave."""
        medians_us = {name: self.terms[name].median for name in names if name in self.terms}
        without_cause = sum(value for name, value in medians_us.items() if name in NOT_ATTRIBUTED)
        attributed = sum(medians_us.values()) - without_cause
        return Sums(attributed, without_cause, sum(map(abs, medians_us.values())))


@dataclasses.dataclass(frozen=True)
class Account:
    """The accounts of all methods on one machine and problem; fields as in `cmm.results.Run`.

    Attributes:
      gemm_only_us: kernel time of GEMM only.
      methods: accounts in the order of the ladder.
      skipped: by name, why a method has none, or has lost a round or some of the calls that were recorded from inside.
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


def file_name(account: Account) -> str:
    """Returns the name of an account's file, like that of a run (`cmm.results.file_name`)."""
    p, kind = account.problem, short_kind(account.machine["device_kind"])
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
