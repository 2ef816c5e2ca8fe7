"""What is kept of a measurement of overheads, and which tables does it give?"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping

from cmm.overhead.terms import Term, terms
from cmm.results import Spread, short_kind


@dataclasses.dataclass
class Measurement:
    """What was measured on one number of devices.

    Attributes:
      devices: how many.
      m_shard, k, n_shard, dtype: the problem (see `cmm.roofline.Problem`).
      simulated: whether they are simulated, so that times say nothing about GPUs.
      machine, versions: see `cmm.provenance`.
      variants: by name (see `cmm.overhead.programs`): "title", "status" ("measured", "skipped" or "failed"), "reason",
        and "times", the fields of `cmm.overhead.child.Measured`.
      gpu_parts: by name of a variant, what `cmm.overhead.terms.gpu_parts_us` returned, the mean over GPUs.
      host_parts: by name of a variant, what `cmm.overhead.host_trace.split_host_us` returned.
      troubles: what else went wrong.
    """

    devices: int
    m_shard: int
    k: int
    n_shard: int
    dtype: str
    simulated: bool
    machine: dict[str, str]
    versions: dict[str, str]
    variants: dict[str, dict] = dataclasses.field(default_factory=dict)
    gpu_parts: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    host_parts: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    troubles: list[str] = dataclasses.field(default_factory=list)

    def spread(self, name: str, quantity: str = "wall_us") -> Spread | None:
        """Returns a quantity of a variant, or `None` if it was not measured."""
        times = self.variants.get(name, {}).get("times")
        return Spread(**times[quantity]) if times else None

    def terms(self, calls: int) -> list[Term]:
        """Returns the terms of a call's time in programs of so many calls, or none if something needed is missing.

        On one device nothing is collective: there the smallest kernel says what a start costs.
        """
        wall, parts = self.spread(f"kernel_{calls}"), self.gpu_parts.get(f"kernel_{calls}")
        start = self.spread(f"stand_in_{calls}") if self.devices > 1 else self.spread("tiny_kernel")
        if not (wall and parts and start):
            return []
        return terms(parts, wall, start.median * (calls if self.devices > 1 else 1), calls)


@dataclasses.dataclass(frozen=True)
class Record:
    """A run of `python -m cmm.overhead`."""

    date: str
    command: str
    distribution: str
    protocol: str
    measurements: tuple[Measurement, ...]


PROTOCOL = (
    "one process per number of devices; all variants are measured in one pass, then in the next, 4 times; wall time: "
    "two chains of starts, difference per call, 5 rounds in a pass; until a start returns: mean over the longer chain; "
    "on idle GPUs: 10 starts in a pass, each waited for; GPUs recorded over 12 starts with command buffers off, as XLA "
    "does while it is profiled; host traced over 12 starts; medians (10th to 90th percentile)"
)


def file_name(record: Record) -> str:
    """Returns the name of a record's file: kind and number of devices, shapes and dtype."""
    first = record.measurements[0]
    kind = short_kind(first.machine["device_kind"])
    kind = "simulated" if first.simulated else kind
    return f"overhead_{kind}_d{first.devices}_m{first.m_shard}_k{first.k}_n{first.n_shard}_{first.dtype}.json"


def save(record: Record, path) -> pathlib.Path:
    """Writes a record as JSON, makes the folder if needed, and returns the path."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(record), indent=1)
    # An object of numbers takes one line.
    path.write_text(re.sub(r"\{[^\[\]{}\"]*(\"\w+\": [-\d.e]+,?\s*)+\}", _in_one_line, text) + "\n")
    return path


def load(path) -> Record:
    """Reads what `save` wrote."""
    raw = json.loads(pathlib.Path(path).read_text())
    return Record(**raw | {"measurements": tuple(Measurement(**one) for one in raw["measurements"])})


def variant_rows(measurement: Measurement) -> list[tuple[str, ...]]:
    """Returns one row of text per variant that was measured: title and four times."""
    quantities = ("wall_us", "returns_us", "idle_returns_us", "idle_us")
    return [
        (variant["title"], *(_text(measurement.spread(name, quantity)) for quantity in quantities))
        for name, variant in measurement.variants.items()
        if variant["status"] == "measured"
    ]


def reasons(measurement: Measurement) -> dict[str, list[str]]:
    """Returns why variants were not measured, and for each reason their titles."""
    found: dict[str, list[str]] = {}
    for variant in measurement.variants.values():
        if variant["status"] != "measured":
            found.setdefault(f"{variant['status']}: {variant['reason']}", []).append(variant["title"])
    return found


def host_rows(host_parts: Mapping[str, Mapping[str, float]], titles: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Returns a table of the host's parts: a header with the variants' titles, and one row per part."""
    header = ("part of an execution, on each device's thread", *(titles[name] for name in host_parts))
    parts = list(next(iter(host_parts.values()), {}))
    rows = [(part, *(f"{of[part]:.1f}" for of in host_parts.values())) for part in parts]
    return [header, *rows, ("in all", *(f"{sum(of.values()):.1f}" for of in host_parts.values()))]


def _in_one_line(match) -> str:
    return re.sub(r"\s+", " ", match[0])


def _text(spread: Spread | None) -> str:
    return f"{spread.median:.1f} ({spread.p10:.1f}–{spread.p90:.1f})" if spread else ""
