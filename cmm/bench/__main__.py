"""`python -m cmm.bench`: measures suites of problems in several processes, for comparisons that hold."""

import dataclasses
import datetime
import sys
import tempfile
import time

try:  # The package alone does not need it.
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
except ModuleNotFoundError as error:
    sys.exit(f"python -m cmm.bench needs {error.name}: in the repository, pip install '.[cli]'")

from cmm import report
from cmm.bench import machine, peers, records
from cmm.bench.merge import merge, with_peers
from cmm.bench.options import command_of, parse, plan_of
from cmm.bench.processes import Collected, Refused, collect
from cmm.bench.suites_report import shape_text, sweeps
from cmm.bench.tables import print_run, print_sweep
from cmm.protocol import LEAST_PROCESSES, LEAST_ROUNDS_IN_ALL

# What a shell reports for a command that Ctrl-C has ended: 128 and the number of the signal.
_INTERRUPTED = 130


def main(arguments=None) -> int:
    """Measures; returns 0 if all is measured and right, peers too, 1 if not, 2 if it cannot run, 130 after Ctrl-C."""
    started = time.time()
    options = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    until = started + options.limit_s if options.limit_s else None
    collected, merged = Collected(), {}
    try:
        options.out.mkdir(parents=True, exist_ok=True)  # Before minutes of measuring, not after them.
        with tempfile.TemporaryDirectory() as folder:
            plan = plan_of(options, folder, until)
            (_measure_peers if options.peers_only else _measure)(console, options, plan, collected, merged)
        interrupted = False
    except (OSError, Refused) as error:
        console.print(f"[red]{escape(str(error))}", highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        interrupted = True
    _print_all(console, options, collected, merged)
    if interrupted:
        console.print("[red]Interrupted.")
        return _INTERRUPTED
    wrong = [result for run in merged.values() for result in run.methods if report.is_wrong(run, result)]
    return int(bool(wrong or collected.troubles or len(merged) < max(1, len(collected.problems))))


def _measure(console, options, plan, collected, merged) -> None:
    """Runs the processes and then the peers; fills `merged`, by index of the problem, and writes it as it grows."""

    def keep(index):
        command = command_of(options, plan, collected.problems[index].axis_size)
        merged[index] = merge(collected.runs[index], command, quick=options.quick)
        _write(console, options, merged[index], f"{merged[index].processes} of {options.processes} processes")

    with _progress(console) as progress:
        task = progress.add_task("starting", total=1.0)

        def show(process, index, what, done):
            where = f"process {process + 1} of {options.processes}"
            where += f", problem {index + 1} of {len(collected.problems)}" if index is not None else ""
            progress.update(task, description=f"{where}: {what}", completed=done)

        collect(plan, options.processes, options.timeout_s, collected, show, keep)
        _add_peers(console, progress, options, plan, collected, merged)


def _measure_peers(console, options, plan, collected, merged) -> None:
    """Runs the peers alone and adds their results to the records of this kind of GPU that are there."""
    try:
        problems = plan.problems(options.devices)
    except ValueError as error:
        raise Refused(str(error)) from error
    kind = machine.device_kind(options.devices, simulate=options.simulate)
    found = peers.find_records(options.out, problems, plan, kind, quick=options.quick)
    if not found:
        raise Refused(
            f"{options.out} holds no record of these problems from {kind}: measure them first, without --peers-only."
        )
    collected.problems = problems
    command = command_of(options, plan, options.devices)
    merged |= {
        index: dataclasses.replace(found[problem], command=peers.with_command(found[problem].command, command))
        for index, problem in enumerate(problems)
        if problem in found
    }
    with _progress(console) as progress:
        _add_peers(console, progress, options, plan, collected, merged)


def _add_peers(console, progress, options, plan, collected, merged) -> None:
    task = progress.add_task("peers", total=len(merged) * len(options.peers), visible=bool(options.peers))
    for index in sorted(merged):
        for name in options.peers:
            progress.update(task, description=f"{name}: {shape_text(merged[index].problem)}")
            found = peers.measure(name, merged[index].problem, plan, options.peer_timeout_s)
            merged[index] = with_peers(merged[index], found, datetime.date.today().isoformat())
            collected.troubles += peers.troubles(merged[index], found)
            _write(console, options, merged[index], name)
            progress.advance(task)


def _progress(console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _write(console, options, run, what) -> None:
    """Writes a record and says so."""
    path, kept = records.write(run, options.out, "bench_quick" if options.quick else "bench")
    console.print(f"wrote {path}: {what}", highlight=False, soft_wrap=True)
    if kept:
        old = path.name.removeprefix(records.PARTIAL)
        console.print(
            f"[yellow]kept {old}, which holds more: {kept.processes} processes, {kept.total_rounds} rounds in all, "
            f"against {run.processes} and {run.total_rounds}, or more methods. Remove it if it is out of date.",
            highlight=False,
            soft_wrap=True,
        )


def _print_all(console, options, collected, merged) -> None:
    runs = [merged[index] for index in sorted(merged)]
    if collected.machine:
        console.rule(f"benchmark: {collected.machine}")
    for run in runs:
        print_run(console, run)
    for sweep in sweeps(runs):
        print_sweep(console, sweep)
    too_few = options.processes < LEAST_PROCESSES or options.processes * options.rounds < LEAST_ROUNDS_IN_ALL
    if runs and too_few and not (options.simulate or options.peers_only):
        console.print(f"[yellow]A comparison needs {LEAST_PROCESSES} processes, {LEAST_ROUNDS_IN_ALL} rounds in all.")
    if collected.time_is_up:
        console.print(f"[yellow]time is up: not every problem was measured by {options.processes} processes")
    for trouble in collected.troubles:
        console.print(f"[red]{escape(trouble)}", highlight=False, soft_wrap=True)
    for index, problem in enumerate(collected.problems):
        if index not in merged:
            console.print(f"[red]not measured: {shape_text(problem)}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
