"""`python -m cmm.overhead`: where does the time go between a kernel on the GPU and a call on the host's clock?"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

try:  # The package alone does not need it.
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
except ModuleNotFoundError as error:
    sys.exit(f"python -m cmm.overhead needs {error.name}: in the repository, pip install '.[cli]'")

from cmm.bench.children import follow, python_module
from cmm.cli import positive, repeating
from cmm.overhead import overhead_record
from cmm.overhead.child import Plan
from cmm.overhead.overhead_record import Measurement, Record
from cmm.overhead.terms import Term

_DESCRIPTION = """\
Splits the wall time of a call into kernel, barrier, fill of semaphores, gaps and the start of a program, and shows
how it changes with calls per program, loops, donation, placement and command buffers. Takes three minutes at most.
"""
_CHILD = "cmm.overhead.child"
_SILENCE_S = 45.0  # Compilation of a program of 16 calls takes several seconds.
_SHARE_OF_FIRST = 0.75  # Of the time that is left, for each number of devices but the last.
_IN_PROGRAM = 8
_SIMULATED_SIZE = 64


def main(arguments=None) -> int:
    """Measures, prints and writes; returns the exit status: 0 if every variant that runs here was measured, else 1."""
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 150)
    ends = time.time() + options.limit_s
    measurements: list[Measurement] = []
    counts = options.devices or [None, 1]
    for index, count in enumerate(counts):
        if measurements and count == measurements[0].devices:
            continue
        # One device multiplies what each of many does.
        factor = measurements[0].devices if measurements and count == 1 else 1
        left_s = max(0.0, ends - time.time())
        until = time.time() + left_s * (_SHARE_OF_FIRST if index < len(counts) - 1 else 1)
        shape = (factor * options.m_shard, options.k, options.n_shard, options.dtype)
        plan = Plan(count, *shape, until=until, simulate=options.simulate)
        try:
            environment = [] if options.simulate else _environment(count)
        except ValueError as error:
            console.print(f"[red]{escape(str(error))}", highlight=False, soft_wrap=True)
            return 1
        measurement = run(plan, environment, console.print)
        if measurement:
            measurements.append(measurement)
            _print(console, measurement)
    if not measurements:
        return 1
    today, command = datetime.date.today().isoformat(), repeating("cmm.overhead", arguments)
    record = Record(today, command, "normal(0, 1)", overhead_record.PROTOCOL, tuple(measurements))
    path = overhead_record.save(record, options.out / overhead_record.file_name(record))
    console.print(f"{record.protocol}.\nWritten: {path}", highlight=False, markup=False, soft_wrap=True)
    failed = [one for of in measurements for one in of.variants.values() if one["status"] == "failed"]
    return 1 if failed else 0


def run(
    plan: Plan,
    environment: Sequence[str] = (),
    report: Callable[[str], None] = print,
    silence_s: float = _SILENCE_S,
    child: Sequence[str] = (),
) -> Measurement | None:
    """Measures on one number of devices. A variant that crashes or hangs is noted, and the next process goes on.

    Args:
      plan: what to measure; `done` is set here.
      environment: "NAME=value" for the processes.
      report: called with a line of text as the work goes on.
      silence_s: a process that says nothing for so long is killed.
      child: the command to which the path of a plan is added; by default this package's own.

    Returns:
      What was measured, or `None` if no process found its devices.
    """
    heard = _Heard(plan)
    child = child or python_module(_CHILD)
    command = ["env", *environment, *child] if environment else list(child)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "plan.json")
        while not heard.ended:
            known = len(heard.variants)
            path.write_text(json.dumps(dataclasses.asdict(plan) | {"done": list(heard.variants)}))
            trouble = follow([*command, str(path)], heard, silence_s)
            heard.close(trouble)
            if trouble:
                report(trouble)
            if len(heard.variants) == known:
                break  # It did not come far enough to begin one: nor would the next.
    return heard.measurement


class _Heard:
    """What the processes have said."""

    def __init__(self, plan: Plan):
        self.plan, self.measurement, self.ended, self._at = plan, None, False, None

    @property
    def variants(self) -> dict:
        return self.measurement.variants if self.measurement else {}

    def __call__(self, event) -> None:
        kind, name = event["event"], event.get("name")
        if kind == "machine" and self.measurement is None:
            shape = (self.plan.m_shard, self.plan.k, self.plan.n_shard, self.plan.dtype)
            told = {key: event[key] for key in ("simulated", "machine", "versions")}
            self.measurement = Measurement(event["devices"], *shape, **told)
        elif kind == "begin":
            self._at = name, event["title"]
        elif kind in ("measured", "skipped", "failed"):
            told = {"title": event["title"], "status": kind, "reason": event.get("reason", "")}
            self.variants[name] = told | ({"times": event["times"]} if kind == "measured" else {})
        elif kind in ("gpu_parts", "host_parts"):
            getattr(self.measurement, kind)[name] = event["parts"]
        elif kind.startswith("no_"):
            self.measurement.troubles.append(f"{name}: {event['reason']}")
        elif kind == "end":
            self.ended = True

    def close(self, trouble: str) -> None:
        """Notes what the process that has ended was about, if it did not end well."""
        if trouble and self._at:
            name, title = self._at
            if name in self.variants:
                self.measurement.troubles.append(f"after {name}: {trouble}")
            else:
                self.variants[name] = {"title": title, "status": "failed", "reason": trouble}
        self._at = None


def _environment(count: int | None) -> list[str]:
    """Returns what shows so many GPUs to a process: a kernel wants a mesh of all GPUs that it sees.

    Raises:
      ValueError: the user has made fewer visible.
    """
    if count is None:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        ids = [str(index) for index in range(count)]
    else:
        ids = [name for name in visible.split(",") if name.strip()]
        if len(ids) < count:
            raise ValueError(f"{count} GPUs are asked for, CUDA_VISIBLE_DEVICES={visible!r} names {len(ids)}.")
    return [f"CUDA_VISIBLE_DEVICES={','.join(ids[:count])}"]


def _print(console, measurement: Measurement) -> None:
    m = measurement
    console.print()
    what = "simulated: times say nothing about GPUs" if m.simulated else m.machine["device_kind"]
    title = f"{m.devices} x {what}, JAX {m.versions['jax']}, per device {m.m_shard} x {m.k} x {m.n_shard}, {m.dtype}"
    header = ("µs", "wall, per call", "start returns", "start returns, idle", "start to end, idle")
    _table(console, title, [header, *overhead_record.variant_rows(m)])
    for reason, titles in overhead_record.reasons(m).items():
        console.print(f"{'; '.join(titles)}: {reason}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    for calls in (1, _IN_PROGRAM):
        if found := m.terms(calls):
            how = "each call a program" if calls == 1 else f"{calls} calls in a program"
            _table(console, f"terms of a call's wall time, {how}", [("term", "µs", "evidence"), *_term_rows(found)])
    if m.host_parts:
        titles = {name: variant["title"] for name, variant in m.variants.items()}
        _table(console, "the host's part of a start, traced, µs", overhead_record.host_rows(m.host_parts, titles))
    for trouble in m.troubles:
        console.print(trouble, style="yellow", highlight=False, markup=False, soft_wrap=True)


def _term_rows(found: Sequence[Term]):
    total = sum(term.time_us for term in found)
    rows = [(term.name, f"{term.time_us:.1f}", term.evidence) for term in found]
    return [*rows, ("wall time", f"{total:.1f}", "host's clock, median")]


def _table(console, title, rows) -> None:
    console.print(title, style="bold", highlight=False, soft_wrap=True)
    table = Table()
    for place, column in enumerate(rows[0]):
        numbers = place > 0 and column != "evidence"
        table.add_column(column, justify="right" if numbers else "left")
    for row in rows[1:]:
        table.add_row(*map(escape, row))
    console.print(table)


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m cmm.overhead", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--devices", type=positive, nargs="+", metavar="D", help="numbers of GPUs, largest first (default: all, and 1)"
    )
    parser.add_argument("--m-shard", type=positive, help="rows of A per device (default: 1024, simulated 64)")
    parser.add_argument("--k", type=positive, help="contraction size (default: 4096, simulated 64)")
    parser.add_argument("--n-shard", type=positive, help="columns of B per device (default: 4096, simulated 64)")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16", help="default: float16")
    parser.add_argument("--simulate", action="store_true", help="use simulated devices even where there are GPUs")
    parser.add_argument("--limit-s", type=positive, default=170, metavar="S", help="no variant begins later")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"), help="output folder (default: out)")
    options = parser.parse_args(arguments)
    for name, size in (("m_shard", 1024), ("k", 4096), ("n_shard", 4096)):
        setattr(options, name, getattr(options, name) or (_SIMULATED_SIZE if options.simulate else size))
    return options


if __name__ == "__main__":
    sys.exit(main())
