"""`python -m cmm.bench`: measures suites of problems in several processes, for comparisons that hold."""

import argparse
import functools
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
from cmm.bench.child import Plan
from cmm.bench.merge import merge, with_peers
from cmm.bench.processes import Collected, Refused, collect
from cmm.bench.suites_report import shape_text, sweeps
from cmm.bench.tables import print_run, print_sweep
from cmm.cli import positive
from cmm.measure import ON_GPUS, ON_SIMULATED
from cmm.peers.own_process import PeerResult, run_peer
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
"""
PEERS = ("cmm.peers.xla_rewrite", "cmm.peers.torch_symm_mem")
_PROCESSES, _QUICK_ROUNDS, _SIMULATED_PROCESSES = 3, 5, 2
_LONGEST_PEER_S = 300
_LEAST_PROCESSES, _LEAST_ROUNDS = 3, 20
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
            _measure(console, options, _plan(options, folder, until), collected, merged)
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
    add("--peers", action="store_true", help="measure XLA's rewriting and PyTorch's symmetric memory afterwards, too")
    add("--processes", type=positive, metavar="N", help=f"default: {_PROCESSES}")
    add("--rounds", type=positive, metavar="N", help=f"in each process (default: {ON_GPUS.rounds})")
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
    processes = _SIMULATED_PROCESSES if options.simulate else _PROCESSES
    options.processes = 1 if options.quick else options.processes or processes
    rounds = (ON_SIMULATED if options.simulate else ON_GPUS).rounds
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

    def keep(index, peers=()):
        command = _command(options, plan, collected.problems[index].axis_size)
        merged[index] = with_peers(merge(collected.runs[index], command, quick=options.quick), peers)
        name = results.file_name(merged[index], "bench_quick" if options.quick else "bench")
        path = results.save(merged[index], options.out / name)
        what = f"{merged[index].processes} of {options.processes} processes" + ", peers" * bool(peers)
        console.print(f"wrote {path}: {what}", highlight=False, soft_wrap=True)

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=1.0)

        def show(process, index, what, done):
            where = f"process {process + 1} of {options.processes}"
            where += f", problem {index + 1} of {len(collected.problems)}" if index is not None else ""
            progress.update(task, description=f"{where}: {what}", completed=done)

        collect(plan, options.processes, options.timeout_s, collected, show, keep)
        if options.peers:
            peers_task = progress.add_task("peers", total=len(merged) * len(PEERS))
            for index in sorted(merged):
                found: list[PeerResult] = []
                for module in PEERS:
                    what = f"problem {index + 1} of {len(collected.problems)}: {module}"
                    progress.update(peers_task, description=what)
                    found += _peer(module, collected.problems[index], plan)
                    progress.advance(peers_task)
                keep(index, found)


def _peer(module, problem, plan) -> list[PeerResult]:
    left_s = _LONGEST_PEER_S if plan.until is None else min(_LONGEST_PEER_S, plan.until - time.time())
    if left_s <= 0:
        name = module.rpartition(".")[2]
        return [PeerResult(name, name, "skipped", "time was up")]
    return run_peer(module, problem, left_s, simulate=plan.simulate)


def _command(options, plan, axis_size) -> str:
    """Returns the command that repeats the benchmark, with every default written out."""
    names = ("m-shard", "k", "n-shard")
    shape = " ".join(f"--{name} {size}" for name, size in zip(names, plan.shape)) or f"--suite {','.join(plan.suites)}"
    words = [f"python -m cmm.bench {shape}", f"--dtype {options.dtype}" * bool(options.dtype), f"--devices {axis_size}"]
    words.append(f"--methods {','.join(options.methods or CHOICES)}")
    words.append("--quick" if options.quick else f"--processes {options.processes}")
    words.append(f"--rounds {options.rounds}")
    words += ["--peers"] * options.peers + ["--simulate"] * options.simulate
    return " ".join(filter(None, words))


def _print_all(console, options, collected, merged) -> None:
    runs = [merged[index] for index in sorted(merged)]
    if collected.machine:
        console.rule(f"benchmark: {collected.machine}")
    for run in runs:
        print_run(console, run)
    for sweep in sweeps(runs):
        print_sweep(console, sweep)
    if runs and not options.simulate and (options.processes < _LEAST_PROCESSES or options.rounds < _LEAST_ROUNDS):
        console.print(f"[yellow]A comparison needs {_LEAST_PROCESSES} processes of {_LEAST_ROUNDS} rounds.")
    if collected.time_is_up:
        console.print(f"[yellow]time is up: not every problem was measured by {options.processes} processes")
    for trouble in collected.troubles:
        console.print(f"[red]{escape(trouble)}", highlight=False, soft_wrap=True)
    for index, problem in enumerate(collected.problems):
        if index not in merged:
            console.print(f"[red]not measured: {shape_text(problem)}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
