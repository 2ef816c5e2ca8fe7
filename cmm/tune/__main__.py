"""`python -m cmm.tune`: find the fastest configuration of a kernel for a shape on the GPUs of this machine."""

import argparse
import json
import pathlib
import sys
import time

import jax

try:  # The package alone does not need it.
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ModuleNotFoundError as error:
    sys.exit(f"python -m cmm.tune needs {error.name}: in the repository, pip install '.[cli]'")

from cmm import devices, winners
from cmm.cli import positive
from cmm.hopper import tuned
from cmm.measure import spread
from cmm.roofline import Problem, tflops_per_device
from cmm.suites import SUITES, suite
from cmm.tune import search, tuning_record
from cmm.tune.tunable import TUNABLES
from cmm.winners import config_fields

_DESCRIPTION = """\
Tries configurations of a kernel on the GPUs of this machine: all shortly, and the best quarter in several rounds. The
fastest one whose result is right wins. It is written to the user's cache, where calls of the kernel find it, or merged
into another file with --table. Raw results go to the output folder; a search whose result is there is not repeated, so
the same command goes on where it was interrupted.
"""
_EPILOG = """\
examples:
  python -m cmm.tune                                     1024 x 4096 x 4096 per GPU in float16, all GPUs
  python -m cmm.tune --m-shard 512 --k 8192 --n-shard 7168 --dtype bfloat16
  python -m cmm.tune --suite llama3-70b --limit-s 600    several shapes, at most ten minutes
  python -m cmm.tune --kernel jax_example --table cmm/peers/jax_example_best.json
"""
_DTYPES = ("float16", "bfloat16")
_DEFAULT_CANDIDATES = 60
_SHOWN = 5


def main(arguments=None) -> int:
    """Tunes; returns the exit status: 0 if every problem that fits has a winner, 1 if not, 2 if it cannot run here."""
    started = time.monotonic()
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    kernel = TUNABLES[options.kernel]
    try:
        found = _find_gpus(options.devices, kernel)
        problems = _problems(options, len(found))
        options.out.mkdir(parents=True, exist_ok=True)  # Before minutes of measuring, not after them.
        if options.table:
            winners.write(winners.read(options.table), options.table)
    except (OSError, ValueError, RuntimeError) as error:
        console.print(f"[red]{error}", highlight=False, soft_wrap=True)
        return 2
    stop = lambda: options.limit_s is not None and time.monotonic() - started > options.limit_s
    mesh = devices.ring_mesh(found)
    console.rule(f"tuning {kernel.name}")
    console.print(f"{len(found)} x {found[0].device_kind}, JAX {jax.__version__}", highlight=False)
    without_winner = 0
    for index, problem in enumerate(problems):
        if index and stop():
            console.print(f"[yellow]time is up: {len(problems) - index} of {len(problems)} problems are left")
            return 1
        without_winner += not _tune(console, kernel, problem, mesh, options, stop)
    return 1 if without_winner else 0


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m cmm.tune",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--kernel", choices=tuple(TUNABLES), default="pallas_fast", help='default: pallas_fast, which "auto" takes'
    )
    parser.add_argument("--devices", type=positive, metavar="D", help="how many GPUs (default: all)")
    parser.add_argument("--m-shard", type=positive, help="rows of A per device (default: 1024)")
    parser.add_argument("--k", type=positive, help="contraction size (default: 4096)")
    parser.add_argument("--n-shard", type=positive, help="columns of B per device (default: 4096)")
    parser.add_argument("--suite", choices=tuple(SUITES), help="several problems, in place of one shape")
    parser.add_argument("--dtype", choices=_DTYPES, help="default: float16, or those of the suite")
    parser.add_argument("--rounds", type=positive, default=8, help="how often the best are timed (default: 8)")
    parser.add_argument(
        "--candidates",
        type=positive,
        metavar="N",
        help=f"try the N most promising configurations (default: {_DEFAULT_CANDIDATES}, jax_example all)",
    )
    parser.add_argument("--limit-s", type=positive, metavar="S", help="stop after S seconds with what was found so far")
    parser.add_argument(
        "--table", type=pathlib.Path, metavar="FILE", help="merge winners into FILE, not into the cache"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"), help="output folder (default: out)")
    options = parser.parse_args(arguments)
    if options.suite and (options.m_shard or options.k or options.n_shard):
        parser.error("--suite has its own shapes: leave out --m-shard, --k and --n-shard")
    return options


def _find_gpus(count, kernel):
    found = devices.find_devices(count)
    if not str(getattr(found[0], "compute_capability", "")).startswith("9."):
        raise ValueError(
            f"Tuning needs Hopper GPUs, such as H100 or H200; found {len(found)} x {found[0].device_kind}. "
            "Times on other devices say nothing about them."
        )
    if kernel.all_devices and len(found) != jax.device_count():
        raise ValueError(
            f"{kernel.name} works on all {jax.device_count()} GPUs that the process sees, not on {len(found)} of them. "
            "Hide the others with CUDA_VISIBLE_DEVICES."
        )
    return found


def _problems(options, axis_size):
    if options.suite:
        return suite(options.suite, axis_size, options.dtype)
    shape = (options.m_shard or 1024, options.k or 4096, options.n_shard or 4096)
    return [Problem(axis_size, *shape, options.dtype or "float16")]


def _tune(console, kernel, problem, mesh, options, stop) -> bool:
    """Searches for one problem, prints and keeps what was found; says whether it has all that it can have."""
    what = f"{problem.dtype}, per device A [{problem.m_shard}, {problem.k}] and B [{problem.k}, {problem.n_shard}]"
    configs = kernel.candidates(problem, mesh.devices.flat[0])
    configs = configs[: options.candidates or (None if kernel.try_all else _DEFAULT_CANDIDATES)]
    if not configs:
        console.print(f"{what}: left out, no configuration has tiles that divide these sizes", highlight=False)
        return True
    path = options.out / tuning_record.file_name(kernel.name, problem, mesh.devices.flat[0].device_kind)
    earlier = _read(path)
    if tuning_record.is_repeat(earlier, kernel.name, problem, mesh, options.rounds, len(configs)):
        console.print(f"{what}: done before, see {path}; delete it to search again", highlight=False)
        if any(trial["rounds_us"] for trial in earlier["trials"]):
            _keep(console, kernel, options.table, tuning_record.winner(earlier))
        return True
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=1.0)
        report = lambda doing, done: progress.update(task, description=doing, completed=done)
        outcome = search.search(problem, kernel, mesh, configs, options.rounds, report, stop)
    record = tuning_record.record(kernel.name, problem, mesh, options.rounds, outcome)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    _print_outcome(console, what, problem, outcome)
    console.print(f"wrote {path}", highlight=False)
    if outcome.finalists:
        _keep(console, kernel, options.table, tuning_record.winner(record))
    return bool(outcome.finalists)


def _read(path) -> dict:
    """Returns the record in a result file, or an empty one where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keep(console, kernel, table, winner) -> None:
    if table:
        winners.write(winners.merge(winners.read(table), [winner]), table)
        console.print(f"merged into {table}", highlight=False)
    elif not kernel.cached:
        console.print("The winner is in the result file alone; --table FILE keeps it.", highlight=False)
    elif path := tuned.remember([winner]):
        console.print(f"kept in {path}", highlight=False)
        p = winner.problem
        used = tuned.tuned_config(winner.kernel, p.axis_size, p.m_shard, p.n_shard, p.k, p.dtype, winner.device_kind)
        if used is not None and config_fields(used) != winner.config:
            console.print("[yellow]The table that ships with the package has this problem, and calls go on with that.")


def _print_outcome(console, what, problem, outcome):
    if outcome.finalists:
        console.print(_table(what, problem, outcome))
    elif outcome.trials:
        console.print(f"[red]{what}: none of {len(outcome.trials)} configurations gives a right result")
    else:
        reason = escape(outcome.skipped[0][1].partition("\n")[0])
        console.print(f"[red]{what}: no configuration fits; the first one: {reason}", highlight=False, soft_wrap=True)
    if outcome.stopped:
        tried = len(outcome.trials) + len(outcome.skipped)
        console.print(f"[yellow]time is up: {tried} of {outcome.considered} configurations were tried")


def _table(what, problem, outcome):
    caption = f"{len(outcome.trials)} configurations tried, {len(outcome.skipped)} do not fit"
    table = Table(title=what, caption=caption)
    for name in ("kernel, µs", "p10 to p90", "TFLOP/s per GPU", "error / bound"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("configuration", overflow="fold")
    for trial in outcome.finalists[:_SHOWN]:
        times, accuracy = spread(trial.rounds_us), trial.candidate.accuracy
        table.add_row(
            f"{times.median:.1f}",
            f"{times.p10:.1f} to {times.p90:.1f}",
            f"{tflops_per_device(problem, times.median):.0f}",
            f"{accuracy.error_over_bound:.2f}" + " WRONG" * (not accuracy.right),
            ", ".join(f"{name}={value}" for name, value in config_fields(trial.candidate.config).items()),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
