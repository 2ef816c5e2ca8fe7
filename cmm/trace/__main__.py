"""`python -m cmm.trace`: look inside one call of a ring kernel on the GPUs of this machine."""

import argparse
import contextlib
import datetime
import pathlib
import sys

try:  # The package alone does not need it.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ModuleNotFoundError as error:
    sys.exit(f"python -m cmm.trace needs {error.name}: in the repository, pip install '.[cli]'")

from cmm import devices, interpret, provenance
from cmm.cli import positive, repeating
from cmm.roofline import Problem
from cmm.trace import file as trace_file
from cmm.trace.account import file_name as account_file_name, save as save_account
from cmm.trace.account_run import METHODS, measure_account
from cmm.trace.account_table import print_account
from cmm.trace.call import trace_call
from cmm.trace.cost import kernel_times_us
from cmm.trace.record import KERNELS
from cmm.trace.summary import summarize

_DESCRIPTION = """\
Records one call of a ring kernel in a steady chain, from inside: every role of every CTA notes when it loads, waits,
multiplies, sends and signals. Prints what that says in numbers, and writes a file from which figures are drawn. A
second recording, of every single product, says how long roles wait.

With --account it explains instead what every method takes longer than the product alone: a sum of terms, some of them
not attributed to a cause, and the rest that they leave.
"""
_EPILOG = """\
examples:
  python -m cmm.trace                                        1024 x 4096 x 4096 per GPU in float16, all GPUs
  python -m cmm.trace --kernel pallas_fast --perfetto out/trace.json    also for ui.perfetto.dev
  python -m cmm.trace --simulate --devices 3                 the order of events, no times
  python -m cmm.trace --account                              where the time of each method goes
"""
_SIMULATED_CTAS = 2


def main(arguments=None) -> int:
    """Records; returns the exit status: 0, 1 if effects come before causes, or 2 if it cannot run here."""
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        found = devices.find_devices(options.devices, simulate=options.simulate)
        m_shard, k, n_shard = (256, 256, 128) if options.simulate else (1024, 4096, 4096)
        shape = (options.m_shard or m_shard, options.k or k, options.n_shard or n_shard)
        problem = Problem(len(found), *shape, options.dtype)
        mesh = devices.ring_mesh(found)
        options.out.mkdir(parents=True, exist_ok=True)
        with _place(options.simulate) as run:
            if options.account:
                return _account(console, options, problem, mesh, repeating("cmm.trace", arguments))
            record, trace = _record(console, options, problem, mesh, run)
    except (OSError, ValueError, NotImplementedError, RuntimeError) as error:
        console.print(f"[red]{error}", highlight=False, soft_wrap=True)
        return 2
    record |= provenance.machine(mesh) | {"versions": provenance.versions()}
    record |= {"command": repeating("cmm.trace", arguments), "date": datetime.date.today().isoformat()}
    _print(console, record)
    path = trace_file.write(record, options.out / trace_file.file_name(record))
    console.print(f"wrote {path} ({path.stat().st_size / 1024:.0f} KB)", highlight=False)
    if options.perfetto:
        path = trace_file.write_perfetto(trace, options.perfetto)
        console.print(f"wrote {path}; ui.perfetto.dev opens it", highlight=False)
    worst_ns = record["summary"]["causality"]["worst_ns"]
    return 1 if worst_ns is not None and worst_ns > 0 else 0


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m cmm.trace",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kernel", choices=KERNELS, default="pallas", help="default: pallas")
    parser.add_argument("--account", action="store_true", help="where the time of each method goes")
    known = ", ".join(METHODS)
    names = lambda text: tuple(text.split(","))
    parser.add_argument("--methods", type=names, default=METHODS, help=f"of the account (default: {known})")
    parser.add_argument("--rounds", type=positive, default=10, help="of the account (default: 10)")
    parser.add_argument("--devices", type=positive, metavar="D", help="how many GPUs (default: all)")
    parser.add_argument("--m-shard", type=positive, help="rows of A per device (default: 1024, simulated 256)")
    parser.add_argument("--k", type=positive, help="contraction size (default: 4096, simulated 256)")
    parser.add_argument("--n-shard", type=positive, help="columns of B per device (default: 4096, simulated 128)")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16", help="default: float16")
    parser.add_argument("--calls", type=positive, default=20, help="length of the chain (default: 20)")
    parser.add_argument(
        "--every", type=positive, metavar="N", help="note one of N products in the file (default: one in a chunk)"
    )
    parser.add_argument("--simulate", action="store_true", help="simulated devices; times then only order events")
    parser.add_argument("--perfetto", type=pathlib.Path, metavar="FILE", help="write Chrome's trace format, too")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"), help="output folder (default: out)")
    return parser.parse_args(arguments)


def _account(console, options, problem, mesh, command) -> int:
    """Measures, prints and writes an account; returns the exit status: 1 if a method has none."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=1.0)
        show = lambda what, done: progress.update(task, description=what, completed=done)
        account = measure_account(problem, mesh, options.methods, options.rounds, report=show, command=command)
    path = save_account(account, options.out / account_file_name(account))  # First: printing is not worth a loss.
    print_account(console, account)
    console.print(f"wrote {path} ({path.stat().st_size / 1024:.0f} KB)", highlight=False)
    return 0 if len(account.methods) == 1 + len(set(options.methods)) else 1


@contextlib.contextmanager
def _place(simulate):
    """Yields what runs a program."""
    if not simulate:
        yield lambda program, *operands: program(*operands)
        return
    with interpret.simulate(core_count=_SIMULATED_CTAS, seed=0) as simulation:
        yield simulation.run


def _record(console, options, problem, mesh, run):
    calls = 1 if options.simulate else options.calls
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("recording chunks", total=3)
        trace = trace_call(problem, mesh, options.kernel, every=options.every, calls=calls, run=run)
        summary = summarize(trace)
        progress.update(task, description="recording every product", completed=1)
        if trace.layout.every > 1:
            fine = summarize(trace_call(problem, mesh, options.kernel, every=1, calls=calls, run=run))
            summary |= {name: fine[name] for name in ("waits", "hidden_send_share")}
        progress.update(task, description="timing without recording", completed=2)
        cost_us = None
        if not options.simulate:
            cost_us = kernel_times_us(problem, mesh, options.kernel, {"chunks": options.every, "products": 1})
        progress.update(task, description="done", completed=3)
    return trace_file.to_record(trace, problem, summary, cost_us=cost_us), trace


def _print(console, record) -> None:
    summary, problem = record["summary"], record["problem"]
    what = (
        f"{record['kernel']}, {problem['axis_size']} x {record['device_kind']}, {problem['dtype']}, per device "
        f"A [{problem['m_shard']}, {problem['k']}] and B [{problem['k']}, {problem['n_shard']}]"
    )
    console.rule(what)
    if record["simulated"]:
        console.print("[yellow]Simulated devices: times order events, and say nothing about GPUs.")
    table = Table(title="one call, µs")
    table.add_column("device", justify="right")
    for name in ("begins", "ends", "lasts", "CTAs begin within", "CTAs end within", "±"):
        table.add_column(name, justify="right")
    keys = ("device_start_us", "device_end_us", "call_us", "cta_start_spread_us", "cta_end_spread_us")
    for device, row in enumerate(zip(*(summary[key] for key in (*keys, "device_bound_us")))):
        table.add_row(str(device), *(f"{value:.2f}" for value in row))
    console.print(table)
    table = Table(title="who waits, and for what; every product noted")
    for name in ("role", "for"):
        table.add_column(name)
    for name in ("waits", "mean, µs", "longest, µs", "sum per CTA, µs"):
        table.add_column(name, justify="right")
    for wait in summary["waits"]:
        if wait["count"]:
            values = f"{wait['mean_us']:.3f}", f"{wait['max_us']:.2f}", f"{wait['per_cta_us']:.2f}"
            table.add_row(wait["role"], wait["reason"], str(wait["count"]), *values)
    console.print(table)
    for name, key in (("last product of a step to first of the next", "step_change_us"), ("epilogue", "epilogue_us")):
        value = summary[key]
        if value is None:
            continue
        text = f"{value['median']:.2f} µs (p10 {value['p10']:.2f}, p90 {value['p90']:.2f}, max {value['max']:.2f})"
        console.print(f"{name}: {text}", highlight=False)
    if problem["axis_size"] > 1:
        console.print(f"time of sends under products: {100 * summary['hidden_send_share']:.1f} %", highlight=False)
    clock, causality = summary["clock"], summary["causality"]
    console.print(
        f"times within a device are off by {max(clock['error_ns']):.0f} ns at most, by the {clock['source'][0]}; "
        f"timers tick every {max(clock['tick_ns'])} ns, multiprocessors run at {clock['cycles_per_ns'][0]:.3f} GHz; "
        f"around the ring timers differ by {clock['closure_ns']:.0f} ns, which should be 0 "
        f"± {clock['closure_bound_ns']:.0f}",
        highlight=False,
    )
    if causality["checked"]:
        verdict = "none too early" if causality["worst_ns"] <= 0 else f"[red]{causality['worst_ns']:.0f} ns too early"
        console.print(f"waits for signals, against their causes: {causality['checked']}, {verdict}", highlight=False)
    if record["cost_us"]:
        text = ", ".join(f"{name} {value:.1f} µs" for name, value in record["cost_us"].items())
        console.print(f"kernel time by what is noted: {text}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
