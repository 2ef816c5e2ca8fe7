"""`python -m cmm.loopback`: how fast are the ring kernels on a single GPU that is its own neighbour?"""

import argparse
import dataclasses
import datetime
import json
import math
import pathlib
import sys
import time

import jax
import jax.numpy as jnp

from cmm import devices, provenance, reference
from cmm.bench.records import PARTIAL
from cmm.bench.suites_report import shape_text, shape_texts
from cmm.cli import positive, repeating
from cmm.measure import Program, spread
from cmm.protocol import order_in_round
from cmm.report import markdown_row, spread_text
from cmm.results import Spread, short_kind
from cmm.roofline import Problem
from cmm.rounds import record_all
from cmm.suites import SUITES, suite
from cmm.winners import config_fields

_DESCRIPTION = """\
Runs both ring kernels on one Hopper GPU that is its own neighbour: it sends to itself, signals itself, and multiplies
what has arrived. So whoever has a single GPU can see whether they run, and how long their products, sends and signals
take, but for the way over NVLink. Compares kernel times with the product alone, of as many rows.
"""
_ROWS, _STEPS = (64, 128, 256, 512, 1024), (2, 4, 8)
_CALLS, _STARTS = 8, 2
KERNELS = ("pallas", "pallas_fast")
GEMM_ONLY = "gemm_only"
_HEADER = ("M × K × N per GPU", "steps", "GEMM only, µs", "one kernel, µs", "one kernel, fast, µs", "fast / GEMM only")


def measure(problem: Problem, gpu: jax.Device, rounds: int) -> dict:
    """Times both kernels and the product alone on one GPU, interleaved by round; returns a row of the record.

    Args:
      problem: what each device of the ring would have; its `axis_size` is the number of steps.
      gpu: the GPU.
      rounds: how often each is timed.

    Raises:
      RuntimeError: the profiler does not see the kernels, or loses some again and again.
    """
    p, mesh = problem, devices.ring_mesh([gpu])
    pairs = [_operands(p, gpu, seed) for seed in range(_CALLS)]
    programs, found = {}, {}
    for kernel in KERNELS:
        start, about = _looped(kernel, p, gpu)
        found[kernel] = about
        if start is not None:
            programs[kernel] = Program(lambda lhs, rhs, start=start: start(lhs, rhs)[0], pairs)
            found[kernel] |= _check(start, pairs[0], p.axis_size)
    tiled = [(jax.block_until_ready(jnp.tile(lhs, (p.axis_size, 1))), rhs) for lhs, rhs in pairs]
    programs[GEMM_ONLY] = Program(jax.jit(lambda lhs, rhs: jnp.dot(lhs, rhs, preferred_element_type=lhs.dtype)), tiled)
    found[GEMM_ONLY] = {}
    times: dict[str, list[float]] = {name: [] for name in programs}
    names = list(programs)
    for program in programs.values():  # Compiles, and warms the GPU up.
        jax.block_until_ready(program.start_chain(program.operands))
    for number in range(rounds):
        in_order = [names[place] for place in order_in_round(len(names), number)]
        calls, _ = record_all([programs[name] for name in in_order], _STARTS, mesh)
        for name, call in zip(in_order, calls, strict=True):
            if isinstance(call, RuntimeError):
                raise call
            times[name].append(call.kernel_us)
    for name in programs:
        found[name]["rounds_us"] = times[name]
    return {"problem": dataclasses.asdict(p), "methods": found}


def ratio(row: dict, name: str) -> Spread | None:
    """Returns the time of a kernel over that of the product alone, within rounds; `None` if it was not timed."""
    own = row["methods"][name].get("rounds_us")
    return spread([a / b for a, b in zip(own, row["methods"][GEMM_ONLY]["rounds_us"])]) if own else None


def load_all(folder) -> list[dict]:
    """Returns the records of this command in a folder, by name."""
    return [json.loads(path.read_text()) for path in sorted(pathlib.Path(folder).glob("loopback_*.json"))]


def markdown(record: dict) -> str:
    """Returns a Markdown table of a record, and how it was measured."""
    lines = [markdown_row(_HEADER), markdown_row(["---:"] * len(_HEADER))]
    lines += [markdown_row(cells) for cells in _cells(record)]
    m = record["machine"]["device_kind"]
    asked = record["asked"]
    part = f"{len(record['rows'])} of {asked} problems, then it ended. " * (len(record["rows"]) < asked)
    dtypes = ", ".join(dict.fromkeys(row["problem"]["dtype"] for row in record["rows"]))
    how = f"{part}1 x {m}, JAX {record['versions']['jax']}, {dtypes}, {record['distribution']}, {record['date']}"
    how += f". {record['protocol']}. Command: `{record['command']}`."
    details = ["<details><summary>How and where measured</summary>", "", f"- {how}", "", "</details>"]
    return "\n".join([*lines, "", *details])


def _looped(kernel, p, gpu):
    """Returns the looped kernel and what it is, or `None` and why it cannot run."""
    from cmm.hopper.loopback import looped_back, plan_loop  # Imports Pallas, which a machine without GPUs need not.

    try:
        plan = plan_loop(kernel, p.axis_size, p.m_shard, p.k, p.n_shard, p.dtype, gpu, gpu.core_count)
    except ValueError as error:
        return None, {"skipped": str(error)}
    return looped_back(kernel, plan, p.axis_size, p.dtype, gpu), {"config": config_fields(plan.config)}


def _operands(p, gpu, seed):
    """Returns normal operands on one GPU. Those of `cmm.devices` are sharded along a ring's axis."""
    keys = jax.random.split(jax.device_put(jax.random.key(seed), gpu))
    return jax.random.normal(keys[0], (p.m_shard, p.k), p.dtype), jax.random.normal(keys[1], (p.k, p.n_shard), p.dtype)


def _check(start, pair, steps) -> dict:
    """Compares the product of each step with a float32 reference, and what was received with what was sent."""
    out, slots = start(*pair)
    blocks = out.reshape(steps, -1, out.shape[-1])
    product, bound = jax.jit(reference.product_and_bound, static_argnums=2)(*pair, out.dtype)
    same = bool((blocks == blocks[0]).all() & (slots == pair[0]).all())
    error_over_bound = float((jnp.abs(blocks[0].astype(jnp.float32) - product) / bound).max())
    finite = math.isfinite(error_over_bound)
    return {
        "right": same and finite and error_over_bound <= 1,
        "error_over_bound": error_over_bound if finite else None,
    }


def _cells(record) -> list[tuple[str, ...]]:
    rows, several = [], len({row["problem"]["dtype"] for row in record["rows"]}) > 1
    for row in record["rows"]:
        times = [row["methods"][name].get("rounds_us") for name in (GEMM_ONLY, *KERNELS)]
        wrong = [" WRONG" * (row["methods"][name].get("right") is False) for name in (GEMM_ONLY, *KERNELS)]
        cells = [f"{spread(own).median:.1f}{w}" if own else "none fits" for own, w in zip(times, wrong)]
        found = ratio(row, "pallas_fast")
        p = Problem(**row["problem"])
        shape = shape_texts([p], with_dtype=several)[0]
        rows.append((shape, str(p.axis_size), *cells, spread_text(found, 2) if found else ""))
    return rows


def main(arguments=None) -> int:
    """Measures, prints and writes; returns 0 if all is right, 1 if not, 2 if it cannot run here."""
    options = _parse(arguments)
    try:  # The package alone does not need it.
        from rich.console import Console
        from rich.progress import Progress
        from rich.table import Table
    except ModuleNotFoundError as error:
        sys.exit(f"python -m cmm.loopback needs {error.name}: in the repository, pip install '.[cli]'")
    console = Console(width=None if sys.stdout.isatty() else 120)
    gpu = jax.devices()[0]
    if not getattr(gpu, "compute_capability", "").startswith("9."):
        console.print(f"python -m cmm.loopback needs a Hopper GPU, found {gpu.device_kind}.", style="red")
        return 2
    try:
        options.out.mkdir(parents=True, exist_ok=True)  # Before a minute of measuring, not after it.
    except OSError as error:
        console.print(str(error), style="red", highlight=False, markup=False)
        return 2
    try:
        problems = _problems(options)
    except ValueError as error:
        console.print(str(error), style="red", highlight=False, markup=False)
        return 2
    path, record = _path(options, gpu, problems), _new_record(options, devices.ring_mesh([gpu]), len(problems))
    until, rows = time.monotonic() + options.limit_s, record["rows"]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("starting", total=len(problems))
        for problem in problems:
            if time.monotonic() > until:
                break
            progress.update(task, description=f"{shape_text(problem)}, {problem.axis_size} steps")
            rows.append(measure(problem, gpu, options.rounds))
            path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")  # What is measured stays.
            progress.advance(task)
    table = Table(title=f"one {gpu.device_kind} that is its own neighbour")
    for title in _HEADER:
        table.add_column(title, justify="right")
    for cells in _cells(record):
        table.add_row(*cells)
    console.print(table)
    console.print(f"wrote {path}: {len(rows)} of {len(problems)} problems", highlight=False, soft_wrap=True)
    wrong = [row for row in rows if any(method.get("right") is False for method in row["methods"].values())]
    return int(bool(wrong) or len(rows) < len(problems))


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m cmm.loopback", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    listed = lambda values: " ".join(map(str, values))
    add(
        "--steps",
        type=at_least_2,
        nargs="+",
        default=_STEPS,
        metavar="D",
        help=f"as on D devices (default: {listed(_STEPS)})",
    )
    add("--m-shard", type=positive, nargs="+", metavar="M", help=f"rows of A (default: {listed(_ROWS)})")
    add("--k", type=positive, help="contraction size (default: 4096)")
    add("--n-shard", type=positive, help="columns of B (default: 4096)")
    add("--suite", choices=SUITES, nargs="+", help="the shapes of suites as on D devices, in place of one weight")
    add("--dtype", choices=("float16", "bfloat16"), help="default: float16, or those of the suite")
    add("--rounds", type=positive, default=8, metavar="N", help="default: 8")
    add("--limit-s", type=positive, default=300, metavar="S", help="no problem begins later (default: 300)")
    add("--out", type=pathlib.Path, default=pathlib.Path("out"), help="output folder (default: out)")
    options = parser.parse_args(arguments)
    if options.suite and (options.m_shard or options.k or options.n_shard):
        parser.error("--suite has shapes of its own: leave out --m-shard, --k and --n-shard")
    options.suite = options.suite and list(dict.fromkeys(options.suite))
    options.m_shard, options.k, options.n_shard = options.m_shard or _ROWS, options.k or 4096, options.n_shard or 4096
    options.command = repeating("cmm.loopback", arguments)
    return options


def at_least_2(text: str) -> int:
    """Reads a whole number of at least 2, for `argparse`, whose messages have the name of this function."""
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"must be at least 2, got {value}: with one step there is nothing to send")
    return value


def _problems(options) -> list[Problem]:
    """Returns what is measured, in the order of the table.

    Raises:
      ValueError: a suite does not divide by a number of steps.
    """
    if options.suite:
        named = [(name, steps) for name in options.suite for steps in options.steps]
        return [problem for name, steps in named for problem in suite(name, steps, options.dtype)]
    return [
        Problem(steps, m_shard, options.k, options.n_shard, options.dtype or "float16")
        for m_shard in options.m_shard
        for steps in options.steps
    ]


def _path(options, gpu, problems) -> pathlib.Path:
    """Returns where the record goes: beside one with more problems or rounds, not over it."""
    what = "-".join(options.suite) if options.suite else f"k{options.k}_n{options.n_shard}"
    dtypes = "-".join(dict.fromkeys(problem.dtype for problem in problems))
    name = f"loopback_{short_kind(gpu.device_kind)}_{what}_{dtypes}.json"
    path = options.out / name
    if path.exists():
        rows = json.loads(path.read_text())["rows"]
        rounds = max((len(row["methods"][GEMM_ONLY]["rounds_us"]) for row in rows), default=0)
        if (len(rows), rounds) > (len(problems), options.rounds):
            return options.out / f"{PARTIAL}{name}"
    return path


def _new_record(options, mesh, asked) -> dict:
    return {
        "machine": provenance.machine(mesh),
        "versions": provenance.versions(),
        "distribution": "normal(0, 1)",
        "protocol": (
            f"One GPU that is its own neighbour; kernel time: median over {_CALLS} calls on distinct operand pairs, "
            f"started {_STARTS} times, but the first of each; {options.rounds} rounds, interleaved in an order that "
            "changes by round; medians over rounds, one process; ratios within a round, 10th to 90th percentile"
        ),
        "date": datetime.date.today().isoformat(),
        "command": options.command,
        "asked": asked,
        "rows": [],
    }


if __name__ == "__main__":
    sys.exit(main())
