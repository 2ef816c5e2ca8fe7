"""Recorded runs: what a result file holds, and how it is written, read and named.

A result file is JSON with one `Run`. It carries everything that a reader needs to judge or repeat a figure: the
command, the date, the machine, versions, shapes, dtype, distribution of the data and protocol.
"""

import dataclasses
import json
import pathlib
import re
from typing import Literal

from cmm.roofline import Problem, published_problem
from cmm.timeline import Span

Status = Literal["measured", "simulated", "skipped", "failed"]
# A method multiplies as much as GEMM only does. No matmul kernel is so much faster than cuBLAS.
_LEAST_KERNEL_RATIO = 0.8
# The reason of a method that was left out by choice, as `cmm.job` gives it.
NOT_ASKED_FOR = "not asked for"


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile of one quantity."""

    median: float
    p10: float
    p90: float


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Raw times of one method in one process, one per round, in microseconds. Equal indices mean the same round.

    Attributes:
      call_us: call times; empty without GPUs.
      kernel_us: kernel times, 0 where no matmul kernel was recognised; empty without GPUs.
      wall_us: times by the host's clock, one call per program.
      wall_in_program_us: times by the host's clock, many calls per program; empty without GPUs.
    """

    call_us: list[float] = dataclasses.field(default_factory=list)
    kernel_us: list[float] = dataclasses.field(default_factory=list)
    wall_us: list[float] = dataclasses.field(default_factory=list)
    wall_in_program_us: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class MethodResult:
    """What one method did in one run.

    Attributes:
      name: that of its rung (see `cmm.rungs.RUNGS`), for a method of this package its key in `cmm.METHODS`.
      title: what tables and figures print.
      status: "measured" on GPUs, "simulated" on CPU devices (its times say nothing about GPUs), "skipped", or, for a
        program in a process of its own, "failed".
      reason: why it was skipped, failed, or ran in some processes only; else empty.
      error_over_bound: largest ratio of an element's error to its bound (see `cmm.reference`), at most 1 if right.
      relative_error: `|out - ref| / |ref|` in the Frobenius norm.
      call_time_us: time in which kernels or copies of one call run on a GPU, the slowest device's; `None` without GPUs.
      wall_time_us: time of one call by the host's clock where each call is a program of its own.
      wall_time_in_program_us: the same where a program holds many calls, as a model does; `None` if not measured.
      ratio_to_gemm_only: call time over that of GEMM only in the same round (wall time where no GPU is).
      kernel_time_us: time of the matmul kernels of one call alone, the slowest device's; `None` if not recorded.
      kernel_ratio_to_gemm_only: kernel time over that of GEMM only in the same round; `None` if not recorded.
      details: what else identifies the program, such as the configuration of a kernel or the version of a library.
    """

    name: str
    title: str
    status: Status
    reason: str = ""
    error_over_bound: float | None = None
    relative_error: float | None = None
    call_time_us: Spread | None = None
    wall_time_us: Spread | None = None
    ratio_to_gemm_only: Spread | None = None
    kernel_time_us: Spread | None = None
    kernel_ratio_to_gemm_only: Spread | None = None
    wall_time_in_program_us: Spread | None = None
    details: str = ""

    @property
    def is_incomplete(self) -> bool:
        """Whether the GPUs' record lacks kernels: it has no times, or shows far less multiplying than there is to do.

        Call and kernel times then say nothing. The host's clock is not concerned.
        """
        ratio = self.kernel_ratio_to_gemm_only
        if self.status == "measured" and self.call_time_us is None:
            return True
        return ratio is not None and ratio.median < _LEAST_KERNEL_RATIO


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of all methods on one problem.

    Attributes:
      problem: shapes, dtype and number of devices.
      machine: name of the device kind as JAX gives it, and what else identifies the machine.
      versions: versions of Python, JAX, jaxlib, CUDA driver and so on.
      simulated: whether the devices were CPU devices that stand in for GPUs.
      distribution: distribution of the inputs.
      protocol: how times were taken, in words.
      date: day of the run, ISO format.
      command: command that produced the file.
      methods: one result per known method.
      gemm_only: name of the method against which ratios are formed: the fastest matmul of the already gathered
        activations.
      rounds: by name of a method that ran, its raw times in each process; empty in files that are older than this.
      processes: number of processes whose rounds are in the record.
      quick: whether it was a quick look, with fewer rounds than a comparison needs.
      peers: programs of others, each in a process of its own. Their ratios are to their own GEMM only.
      first_round: number of the first round, over all processes that have measured the problem.
    """

    problem: Problem
    machine: dict[str, str]
    versions: dict[str, str]
    simulated: bool
    distribution: str
    protocol: str
    date: str
    command: str
    methods: tuple[MethodResult, ...]
    gemm_only: str = "gemm_only"
    rounds: dict[str, list[Rounds]] = dataclasses.field(default_factory=dict)
    processes: int = 1
    quick: bool = False
    peers: tuple[MethodResult, ...] = ()
    first_round: int = 0

    @property
    def total_rounds(self) -> int:
        """Rounds of all processes; of the method that was timed most often, 0 where raw times are not recorded."""
        longest = lambda of_process: max(map(len, vars(of_process).values()))
        return max((sum(map(longest, of_processes)) for of_processes in self.rounds.values()), default=0)

    def method(self, name: str) -> MethodResult:
        """Returns the result of one method, or raises a `KeyError` that lists those of this run."""
        for result in self.methods:
            if result.name == name:
                return result
        raise KeyError(f"{name!r} is not in this run, which has {', '.join(m.name for m in self.methods)}.")

    @property
    def has_published_shape(self) -> bool:
        """Whether it has the shapes of the published table, whatever its dtype and number of devices."""
        usual = published_problem(self.problem.axis_size)
        return dataclasses.replace(self.problem, dtype=usual.dtype) == usual

    @property
    def is_reference_work(self) -> bool:
        """Whether it has the shapes and the dtype of the published table, whatever its number of devices."""
        return self.problem == published_problem(self.problem.axis_size)

    def caption(self) -> str:
        """Returns one line with machine, JAX version, shapes, dtype and date, for figures and tables."""
        p = self.problem
        kind = "simulated CPU devices" if self.simulated else f"x {self.machine['device_kind']}"
        return (
            f"{p.axis_size} {kind}, JAX {self.versions['jax']}, {p.dtype}, per shard M={p.m_shard} K={p.k} "
            f"N={p.n_shard}, {self.distribution}, {self.date}"
        )


def save(run: Run, path) -> pathlib.Path:
    """Writes `run` to `path` as JSON, makes the folder if needed, and returns the path."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(run), indent=1)
    # A list of numbers takes one line. No string matches: strings in JSON hold no line ends.
    path.write_text(re.sub(r"\[\n[^\[\]{}\"]+\]", lambda match: " ".join(match[0].split()), text) + "\n")
    return path


def load(path) -> Run:
    """Reads the run that `save` wrote to `path`."""
    raw = json.loads(pathlib.Path(path).read_text())
    raw["problem"] = Problem(**raw["problem"])
    raw["methods"] = tuple(_method_from_json(method) for method in raw["methods"])
    raw["peers"] = tuple(_method_from_json(peer) for peer in raw.get("peers", ()))
    raw["rounds"] = {name: [Rounds(**of) for of in rounds] for name, rounds in raw.get("rounds", {}).items()}
    return Run(**raw)


def load_all(folder) -> list[Run]:
    """Reads the runs in `folder`, one per problem and kind of device, ordered by dtype and number of devices.

    Of several runs of one problem (files `run_*.json` and `bench_*.json`) the one with the best evidence counts: one
    that was no quick look, one from which no method was left out by choice, one of more processes, one of more rounds,
    in this order. Between equals `run_*.json` comes first.
    """
    folder = pathlib.Path(folder)
    best: dict[tuple, Run] = {}
    for path in (*sorted(folder.glob("run_*.json")), *sorted(folder.glob("bench_*.json"))):
        run = load(path)
        key = (run.problem, run.machine.get("device_kind"), run.simulated)
        best[key] = max(best.get(key, run), run, key=evidence)
    return sorted(best.values(), key=lambda run: (run.problem.dtype, run.problem.axis_size))


def evidence(run: Run) -> tuple:
    """Returns what tells which of two runs of one problem is to be believed: the larger one, see `load_all`."""
    all_asked_for = all(result.reason != NOT_ASKED_FOR for result in run.methods)
    return not run.quick, all_asked_for, run.processes, run.total_rounds


def save_timelines(timelines: dict[str, list[Span]], run: Run, path) -> pathlib.Path:
    """Writes recorded timelines of `run`, one per method, to `path` as JSON, and returns the path."""
    path = pathlib.Path(path)
    rows = {name: [dataclasses.astuple(span) for span in spans] for name, spans in timelines.items()}
    fields = [field.name for field in dataclasses.fields(Span)]
    record = {"caption": run.caption(), "command": run.command, "span_fields": fields, "timelines": rows}
    path.write_text(json.dumps(record, indent=None) + "\n")
    return path


def load_timelines(path) -> tuple[str, dict[str, list[Span]]]:
    """Reads what `save_timelines` wrote: the caption of the run, and the spans of each method."""
    raw = json.loads(pathlib.Path(path).read_text())
    return raw["caption"], {
        name: [Span(**dict(zip(raw["span_fields"], row, strict=True))) for row in rows]
        for name, rows in raw["timelines"].items()
    }


def short_kind(device_kind: str) -> str:
    """Returns the name of a kind of device, as JAX gives it, in the form that names of files have: "h200"."""
    return device_kind.replace("NVIDIA ", "").replace(" ", "_").lower()


def file_name(run: Run, prefix: str = "run") -> str:
    """Returns the name of a run's file: device kind, number of devices, shapes and dtype; nothing changes daily.

    Args:
      run: the run.
      prefix: "run", or for the runs of `python -m cmm.bench` "bench" and "bench_quick".
    """
    p = run.problem
    kind = short_kind(run.machine["device_kind"])
    kind = "simulated" if run.simulated else kind
    return f"{prefix}_{kind}_d{p.axis_size}_m{p.m_shard}_k{p.k}_n{p.n_shard}_{p.dtype}.json"


def timelines_file_name(run: Run) -> str:
    """Returns the name of the file that holds the recorded timelines of `run`, beside that of the run itself."""
    return file_name(run).replace("run_", "timeline_", 1)


_SPREADS = tuple(field.name for field in dataclasses.fields(MethodResult) if field.type == Spread | None)


def _method_from_json(raw: dict) -> MethodResult:
    # A file that is older than a field lacks it.
    return MethodResult(**(raw | {name: Spread(**raw[name]) for name in _SPREADS if raw.get(name) is not None}))
