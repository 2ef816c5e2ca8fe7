"""`python -m cmm.bench`: measures suites of problems in several processes, for comparisons that hold."""

import argparse
import dataclasses
import functools
import os
import pathlib
import sys
import tempfile
import time

try:  # The package alone does not need it.
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
except ModuleNotFoundError as error:
    sys.exit(f"python -m cmm.bench needs {error.name}: in the repository, pip install '.[cli]'")

from cmm import report, results
from cmm.bench import peers
from cmm.bench.child import Plan
from cmm.bench.merge import merge, with_peers
from cmm.bench.processes import Collected, Refused, collect
from cmm.bench.suites_report import shape_text, sweeps
from cmm.bench.tables import print_run, print_sweep
from cmm.cli import positive
from cmm.protocol import ON_SIMULATED
from cmm.roofline import ITEMSIZE_BYTES
from cmm.rungs import CHOICES
from cmm.suites import SUITES

_DESCRIPTION = """\
Measures every method on suites of problems, in several processes one after the other. In a process, methods are
interleaved by round, and all its problems follow each other. Each result is checked against a float32 reference first.
Medians and ratios are taken over the rounds of all processes. A result file is written for each problem as soon as a
process has measured it; `--out figures/data` puts it where `make figures` finds it.
"""
_EPILOG = """\
examples:
  python -m cmm.bench                                        suite W1, all GPUs, 3 processes
  python -m cmm.bench --suite m-sweep --quick --limit-s 500  a look at ten sizes
  python -m cmm.bench --m-shard 512 --k 8192 --n-shard 7168 --dtype bfloat16 --peers
  python -m cmm.bench --suite llama3-8b,llama3-70b --out figures/data
  python -m cmm.bench --devices 2 --peers-only --out figures/data
"""
_PROCESSES, _ROUNDS, _QUICK_ROUNDS, _SIMULATED_PROCESSES = 3, 8, 5, 2
_LEAST_PROCESSES, _LEAST_ROUNDS_IN_ALL = 3, 20
# What a shell reports for a command that Ctrl-C has ended: 128 and the number of the signal.
_INTERRUPTED = 130


def main(arguments=None) -> int:
    """Measures; returns 0 if all is measured and right, 1 if not, 2 if it cannot run here, 130 after Ctrl-C."""
    started = time.time()
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    until = started + options.limit_s if options.limit_s else None
    collected, merged = Collected(), {}
    try:
        options.out.mkdir(parents=True, exist_ok=True)  # Before minutes of measuring, not after them.
        with tempfile.TemporaryDirectory() as folder:
            plan = _plan(options, folder, until)
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


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m cmm.bench",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    known = functools.partial(_names, known=tuple(SUITES)), functools.partial(_names, known=CHOICES)
    add("--suite", type=known[0], metavar="NAME[,NAME]", help=f"of {', '.join(SUITES)} (default: W1)")
    add("--m-shard", type=positive, help="rows of A per device: one shape, in place of a suite")
    add("--k", type=positive, help="contraction size (default: 4096)")
    add("--n-shard", type=positive, help="columns of B per device (default: 4096)")
    add("--dtype", choices=tuple(ITEMSIZE_BYTES), help="default: those of the suite; of one shape float16")
    add("--devices", type=positive, metavar="D", help="how many GPUs (default: all)")
    add("--methods", type=known[1], metavar="NAME[,NAME]", help=f"of {', '.join(CHOICES)} (default: all)")
    add(
        "--peers",
        type=functools.partial(_names, known=tuple(peers.MODULES)),
        nargs="?",
        const=tuple(peers.MODULES),
        default=(),
        metavar="NAME[,NAME]",
        help=f"measure programs of others afterwards, too, of {', '.join(peers.MODULES)} (without a name: both)",
    )
    add("--peers-only", action="store_true", help="measure peers alone, and add them to the records that are in --out")
    add("--peer-timeout-s", type=positive, default=peers.LONGEST_S, metavar="S", help="default: %(default)s")
    add("--processes", type=positive, metavar="N", help=f"default: {_PROCESSES}")
    add("--rounds", type=positive, metavar="N", help=f"in each process (default: {_ROUNDS})")
    add("--quick", action="store_true", help=f"one process, {_QUICK_ROUNDS} rounds: a look, no basis for comparisons")
    add("--limit-s", type=positive, metavar="S", help="begin no further problem after S seconds; keep what is there")
    add("--timeout-s", type=positive, default=180, metavar="S", help="kill a process silent for S s (default: 180)")
    add("--simulate", action="store_true", help="simulated CPU devices and tiny problems: tries it, measures nothing")
    add("--out", type=pathlib.Path, default=pathlib.Path("out"), help="output folder (default: out)")
    options = parser.parse_args(arguments)
    if options.suite and (options.m_shard or options.k or options.n_shard):
        parser.error("--suite has its own shapes: leave out --m-shard, --k and --n-shard")
    if options.quick and options.processes:
        parser.error("--quick is one process: leave out --processes")
    if options.peers_only and not options.devices:
        parser.error("--peers-only needs --devices, to know the problems without starting JAX here")
    if options.peers_only and options.methods:
        parser.error("--peers-only measures no methods: leave out --methods")
    options.peers = options.peers or tuple(peers.MODULES) * options.peers_only
    processes = _SIMULATED_PROCESSES if options.simulate else _PROCESSES
    options.processes = 1 if options.quick else options.processes or processes
    rounds = ON_SIMULATED.rounds if options.simulate else _ROUNDS
    options.rounds = options.rounds or min(rounds, _QUICK_ROUNDS if options.quick else rounds)
    return options


def _names(text, known):
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return names


def _plan(options, folder, until) -> Plan:
    one_shape = options.m_shard or options.k or options.n_shard
    shape = (options.m_shard or 1024, options.k or 4096, options.n_shard or 4096) if one_shape else ()
    return Plan(
        folder=folder,
        suites=() if one_shape else options.suite or ("W1",),
        shape=shape,
        dtype=options.dtype,
        devices=options.devices,
        methods=options.methods,
        rounds=options.rounds,
        simulate=options.simulate,
        until=until,
    )


def _measure(console, options, plan, collected, merged) -> None:
    """Runs the processes and then the peers; fills `merged`, by index of the problem, and writes it as it grows."""

    def keep(index):
        command = _command(options, plan, collected.problems[index].axis_size)
        merged[index] = merge(collected.runs[index], command, quick=options.quick)
        _write(console, options, merged[index], f"{merged[index].processes} of {options.processes} processes")

    with _progress(console) as progress:
        task = progress.add_task("starting", total=1.0)

        def show(process, index, what, done):
            where = f"process {process + 1} of {options.processes}"
            where += f", problem {index + 1} of {len(collected.problems)}" if index is not None else ""
            progress.update(task, description=f"{where}: {what}", completed=done)

        collect(plan, options.processes, options.timeout_s, collected, show, keep)
        _add_peers(console, progress, options, plan, merged)


def _measure_peers(console, options, plan, collected, merged) -> None:
    """Runs the peers alone and adds their results to the records that are there."""
    try:
        problems = plan.problems(options.devices)
    except ValueError as error:
        raise Refused(str(error)) from error
    records = peers.find_records(options.out, problems, plan, quick=options.quick)
    if not records:
        raise Refused(f"{options.out} holds no record of these problems: measure them first, without --peers-only.")
    collected.problems = problems
    # A record that was measured without peers is now what the same command with --peers makes.
    with_peers_too = lambda run: run.command if " --peers" in run.command else f"{run.command} --peers"
    merged |= {
        index: dataclasses.replace(records[problem], command=with_peers_too(records[problem]))
        for index, problem in enumerate(problems)
        if problem in records
    }
    with _progress(console) as progress:
        _add_peers(console, progress, options, plan, merged)


def _add_peers(console, progress, options, plan, merged) -> None:
    task = progress.add_task("peers", total=len(merged) * len(options.peers), visible=bool(options.peers))
    for index in sorted(merged):
        for name in options.peers:
            progress.update(task, description=f"{name}: {shape_text(merged[index].problem)}")
            found = peers.measure(name, merged[index].problem, plan, options.peer_timeout_s)
            merged[index] = with_peers(merged[index], found)
            _write(console, options, merged[index], name)
            progress.advance(task)


def _progress(console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _write(console, options, run, what) -> None:
    """Writes a record and says so. Whoever kills this process finds the old file or the new one, no mixture."""
    path = options.out / results.file_name(run, "bench_quick" if options.quick else "bench")
    temporary = results.save(run, path.with_name(f".{path.name}.tmp"))
    os.replace(temporary, path)
    console.print(f"wrote {path}: {what}", highlight=False, soft_wrap=True)


def _command(options, plan, axis_size) -> str:
    """Returns the command that repeats the benchmark, with every default written out."""
    names = ("m-shard", "k", "n-shard")
    shape = " ".join(f"--{name} {size}" for name, size in zip(names, plan.shape)) or f"--suite {','.join(plan.suites)}"
    words = [f"python -m cmm.bench {shape}", f"--dtype {options.dtype}" * bool(options.dtype), f"--devices {axis_size}"]
    words.append(f"--methods {','.join(options.methods or CHOICES)}")
    words.append("--quick" if options.quick else f"--processes {options.processes}")
    words.append(f"--rounds {options.rounds}")
    words.append(f"--peers {','.join(options.peers)}" if options.peers else "")
    words.append("--simulate" * options.simulate)
    return " ".join(filter(None, words))


def _print_all(console, options, collected, merged) -> None:
    runs = [merged[index] for index in sorted(merged)]
    if collected.machine:
        console.rule(f"benchmark: {collected.machine}")
    for run in runs:
        print_run(console, run)
    for sweep in sweeps(runs):
        print_sweep(console, sweep)
    too_few = options.processes < _LEAST_PROCESSES or options.processes * options.rounds < _LEAST_ROUNDS_IN_ALL
    if runs and too_few and not (options.simulate or options.peers_only):
        console.print(f"[yellow]A comparison needs {_LEAST_PROCESSES} processes, {_LEAST_ROUNDS_IN_ALL} rounds in all.")
    if collected.time_is_up:
        console.print(f"[yellow]time is up: not every problem was measured by {options.processes} processes")
    for trouble in collected.troubles:
        console.print(f"[red]{escape(trouble)}", highlight=False, soft_wrap=True)
    for index, problem in enumerate(collected.problems):
        if index not in merged:
            console.print(f"[red]not measured: {shape_text(problem)}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
