"""`python -m cmm`: run every method on the devices of this machine, check it, time it and draw it."""

import argparse
import pathlib
import sys
import textwrap

import jax

try:  # The package alone does not need these.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table

    from cmm.plots.run import draw_run
except ModuleNotFoundError as error:
    sys.exit(f"python -m cmm needs {error.name}: in the repository, pip install '.[cli]'")

from cmm import devices, recording, report, results
from cmm.cli import positive
from cmm.job import AXIS, run_ladder
from cmm.roofline import ITEMSIZE_BYTES, MACHINES_BY_DEVICE_KIND, Problem, bounds
from cmm.rungs import CHOICES

_DESCRIPTION = """\
Runs every known way to compute AllGather(A) @ B on the devices of this machine. Checks each against a float32
reference, prints how fast each is, and writes a result file and figures.

All GPUs of the machine are used. Without a GPU, CPU devices stand in for them: results are checked all the same, but
times then say nothing about GPUs.
"""
_EPILOG = """\
examples:
  python -m cmm                                  all methods, all devices
  python -m cmm --devices 4 --dtype bfloat16     four devices
  python -m cmm --m-shard 256 --k 8192 --n-shard 3584 --methods naive,ring
  python -m cmm --simulate                       CPU devices although there are GPUs
"""


# What a shell reports for a command that Ctrl-C has ended: 128 and the number of the signal.
_INTERRUPTED = 130


def main(arguments=None) -> int:
    """Runs the main job; returns the exit status: 0 if every method that ran is right, 130 after Ctrl-C."""
    options = _parse(arguments)
    # Where there is no terminal to measure, as in CI, the table still gets the room that it needs.
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        return _run(options, console)
    except KeyboardInterrupt:
        console.print("[red]Interrupted.")
        return _INTERRUPTED


def _run(options, console) -> int:
    try:
        options.out.mkdir(parents=True, exist_ok=True)  # Before minutes of measuring, not after them.
        found = devices.find_devices(options.devices, simulate=options.simulate)
    except (OSError, ValueError, RuntimeError) as error:
        console.print(f"[red]{error}", highlight=False)
        return 2
    simulated = devices.is_simulated(found)
    problem = _problem(options, len(found), simulated)
    _print_header(console, found, problem, simulated)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=1.0)
        run, events = run_ladder(
            problem,
            devices.ring_mesh(found, AXIS),
            options.methods,
            lambda what, done: progress.update(task, description=what, completed=done),
            _command(options, problem),
        )
    _print_ladder(console, run)
    _write(console, options.out, run, events)
    wrong = [result.title for result in run.methods if report.is_wrong(run, result)]
    if wrong:
        console.print(f"[red]Wrong results: {', '.join(wrong)}.")
    return 1 if wrong else 0


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m cmm",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--devices", type=positive, metavar="D", help="how many (default: all GPUs, or 8 simulated)")
    parser.add_argument("--simulate", action="store_true", help="use simulated CPU devices even where there are GPUs")
    parser.add_argument("--m-shard", type=positive, help="rows of A per device (default: 1024, simulated 64)")
    parser.add_argument("--k", type=positive, help="contraction size (default: 4096, simulated 256)")
    parser.add_argument("--n-shard", type=positive, help="columns of B per device (default: 4096, simulated 128)")
    parser.add_argument("--dtype", choices=tuple(ITEMSIZE_BYTES), default="float16", help="default: float16")
    parser.add_argument(
        "--methods",
        type=_method_names,
        metavar="NAME[,NAME]",
        help=f"which of {', '.join(CHOICES)} to run (default: all)",
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"), help="output folder (default: out)")
    return parser.parse_args(arguments)


def _method_names(text):
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in CHOICES]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(CHOICES)}")
    return names


def _problem(options, axis_size, simulated):
    m_shard, k, n_shard = (64, 256, 128) if simulated else (1024, 4096, 4096)
    shape = (options.m_shard or m_shard, options.k or k, options.n_shard or n_shard)
    return Problem(axis_size, *shape, options.dtype)


def _command(options, problem):
    """Returns the command that repeats this run, with every default written out."""
    p = problem
    shape = f"--devices {p.axis_size} --m-shard {p.m_shard} --k {p.k} --n-shard {p.n_shard} --dtype {p.dtype}"
    return f"python -m cmm {shape} --methods {','.join(options.methods or CHOICES)}" + " --simulate" * options.simulate


def _print_header(console, found, problem, simulated):
    p = problem
    console.rule("collective matmul: AllGather(A) @ B")
    if simulated:
        console.print(
            f"[yellow]No GPU in use: {len(found)} simulated CPU devices.[/] Results are checked; "
            "times mean nothing about GPUs."
        )
    else:
        console.print(f"{len(found)} x {found[0].device_kind}, JAX {jax.__version__}")
    console.print(
        f"{p.dtype}, per device A [{p.m_shard}, {p.k}] and B [{p.k}, {p.n_shard}]: "
        f"{p.flops_per_device / 1e9:.4g} GFLOP, {p.bytes_received_per_device / 1e6:.4g} MB to receive"
    )
    machine = MACHINES_BY_DEVICE_KIND.get(found[0].device_kind)
    if machine and p.dtype in machine.peak_flops_per_s:
        limit = bounds(p, machine)
        console.print(
            f"at data-sheet rates: T_math {limit.t_math_us:.0f} µs, T_comms {limit.t_comms_us:.0f} µs; "
            f"overlapped at least {limit.t_lower_us:.0f} µs, one after the other {limit.t_upper_us:.0f} µs"
        )


def _print_ladder(console, run):
    table = Table(title="result ladder", caption=run.caption())
    columns = list(report.HEADER)
    if run.simulated:
        columns[-1] = "time on this CPU, µs"
    rows = report.ladder_rows(run)
    # Columns that no row fills are left out: a simulated run has no rates. So is the status where all is measured but
    # what is listed below, so that the table fits into 120 columns; headings are broken for the same reason.
    shown = [
        i for i in range(len(columns)) if any(row[i] for row in rows) and (run.simulated or columns[i] != "status")
    ]
    for i in shown:
        table.add_column("\n".join(textwrap.wrap(columns[i], 8)), justify="left" if i < 2 else "right", no_wrap=i == 0)
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    console.print(table)
    if report.roof_note(run):
        console.print(report.roof_note(run), highlight=False)
    for result in run.methods:
        if result.details:
            console.print(f"{result.title}: {result.details}", highlight=False, markup=False)
        if result.status == "skipped":
            console.print(f"{result.title}: skipped, {result.reason}", highlight=False, markup=False)


def _write(console, out, run, events):
    written = [results.save(run, out / results.file_name(run))]
    timelines = {name: recording.to_spans(call) for name, call in events.items()}
    if timelines:
        written.append(results.save_timelines(timelines, run, out / results.timelines_file_name(run)))
    written += draw_run(run, timelines, out / "figures")
    for path in written:
        console.print(f"wrote {path}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
