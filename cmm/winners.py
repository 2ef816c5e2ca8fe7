"""Which configuration won for which problem, and how is that kept in a file?

A file of winners is JSON: a list of records, one for each kernel, kind of device and problem. Each says how it was
found, so that it can be judged and repeated.
"""

import dataclasses
import enum
import json
import os
import pathlib
import warnings
from collections.abc import Iterable, Sequence

from cmm.roofline import Problem


@dataclasses.dataclass(frozen=True)
class Winner:
    """The fastest configuration that a search found.

    Attributes:
      kernel: name of the kernel, as `python -m cmm.tune --kernel` takes it.
      device_kind: the GPU's name, as JAX gives it.
      axis_size, m_shard, k, n_shard, dtype: the problem (see `cmm.roofline.Problem`).
      config: the fields of the configuration; dimensions are "M" or "N".
      time_us: time of the kernel alone in one call, the slowest GPU's, median over rounds.
      runner_up_us: the same of the second best, or `None` if there was only one.
      right: whether the result was right (see `cmm.reference`).
      error_over_bound: largest ratio of an element's error to its bound.
      date: day of the search, ISO format.
      machine: what identifies the machine.
      versions: versions of Python and libraries.
      command: the command that repeats the search for this problem.
    """

    kernel: str
    device_kind: str
    axis_size: int
    m_shard: int
    k: int
    n_shard: int
    dtype: str
    config: dict
    time_us: float
    runner_up_us: float | None
    right: bool
    error_over_bound: float
    date: str
    machine: dict[str, str]
    versions: dict[str, str]
    command: str

    def __post_init__(self):
        _ = self.problem  # Checks sizes and dtype.
        if not isinstance(self.config, dict):
            raise ValueError(f"config must be an object with the fields of a configuration, got {self.config!r}.")
        if not (isinstance(self.time_us, int | float) and self.time_us > 0):
            raise ValueError(f"time_us must be a positive number, got {self.time_us!r}.")

    @property
    def problem(self) -> Problem:
        """The problem that the configuration won."""
        return Problem(self.axis_size, self.m_shard, self.k, self.n_shard, self.dtype)

    @property
    def key(self) -> tuple:
        """What there is one winner for."""
        return (self.kernel, self.device_kind, self.dtype, self.axis_size, self.k, self.n_shard, self.m_shard)


def config_fields(config) -> dict:
    """Returns the fields of a configuration as JSON takes them; dimensions become "M" or "N"."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value.name if isinstance(value, enum.Enum) else value for name, value in values.items()}


def find(winners: Iterable[Winner], kernel: str, device_kind: str, problem: Problem) -> Winner | None:
    """Returns the winner of exactly this kernel, kind of device and problem, if there is one."""
    for winner in winners:
        if (winner.kernel, winner.device_kind, winner.problem) == (kernel, device_kind, problem):
            return winner
    return None


def read(path) -> list[Winner]:
    """Reads the winners in `path`. Records that lack a field or hold impossible values are left out.

    `path` may be any object with `read_text`, such as a resource of a package. A file that is missing holds none.

    Raises:
      OSError: the file cannot be read.
      ValueError: it does not hold a JSON list.
    """
    path = pathlib.Path(path) if isinstance(path, str) else path
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} does not hold tuned configurations: it is not JSON ({error}).") from error
    if not isinstance(records, list):
        raise ValueError(f"{path} does not hold tuned configurations: it must be a list, got {type(records).__name__}.")
    return [winner for winner in map(_from_json, records) if winner]


def read_or_warn(path) -> list[Winner]:
    """Reads as `read` does, but a file that cannot be read holds none, and a warning says so."""
    try:
        return read(path)
    except (OSError, ValueError) as error:
        warnings.warn(f"Tuned configurations are left out: {error}", stacklevel=2)
        return []


def merge(old: Iterable[Winner], new: Iterable[Winner]) -> list[Winner]:
    """Returns both, ordered by their keys. Where both hold a winner for the same key the new one stays."""
    by_key = {winner.key: winner for winner in (*old, *new)}
    return [by_key[key] for key in sorted(by_key)]


def write(winners: Sequence[Winner], path) -> None:
    """Writes `winners` to `path`, and makes its folder if needed. Readers see the old file or the new one, no mixture.

    Raises:
      OSError: the folder or the file cannot be written.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps([dataclasses.asdict(w) for w in winners], indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _from_json(record) -> Winner | None:
    names = [field.name for field in dataclasses.fields(Winner)]
    try:
        return Winner(**{name: record[name] for name in names})
    except (KeyError, TypeError, ValueError):
        return None
