"""`python -m cmm.ladder`: what does each change on the way from the readable ring kernel to the fast one gain?"""

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping

import jax
from jax.sharding import Mesh, PartitionSpec as P

from cmm import devices, results
from cmm.bench.child import Plan
from cmm.bench.children import python_module, say
from cmm.bench.merge import merge
from cmm.bench.processes import Collected, Refused, collect
from cmm.cli import positive
from cmm.job import AXIS, Report, run_ladder
from cmm.measure import Program, spread
from cmm.protocol import ON_SIMULATED, on_gpus
from cmm.report import is_wrong
from cmm.results import Run, Spread
from cmm.roofline import Problem
from cmm.rungs import RUNGS, Rung, in_shard_map

_DESCRIPTION = """\
Measures the ladder from the readable ring kernel to the fast one, one change at a time, on all GPUs of this machine:
with the product alone (XLA's and PyTorch's), all-gather + matmul, and the fast kernel as it is tuned. Several processes
one after the other, methods interleaved by round. Each result is checked first. Writes one result file.
"""
_PROCESSES, _ROUNDS, _LIMIT_S, _SILENCE_S = 3, 8, 85, 60
_SIMULATED_SHAPE, _SIMULATED_CTAS = (256, 512, 128), 4

# By name in result files: the switches of `cmm.hopper.ladder.ladder_kernel`, each time one more.
SWITCHES: Mapping[str, dict] = {
    "ladder_readable": {},
    "ladder_spread": {"spread_sends": True},
    "ladder_warp": {"spread_sends": True, "sender_warp": True},
    "ladder_chunks": {"spread_sends": True, "sender_warp": True, "chunks": 8},
    "ladder_late": {"spread_sends": True, "sender_warp": True, "chunks": 8, "late_signals": True},
}
TITLES: Mapping[str, str] = {
    "ladder_readable": "readable kernel",
    "ladder_spread": "+ all columns send",
    "ladder_warp": "+ a sender warp",
    "ladder_chunks": "+ chunks of k",
    "ladder_late": "+ late signals",
}
# Off the ladder: the second change without the first.
ASIDE, ASIDE_SWITCHES, ASIDE_TITLE = "ladder_warp_alone", {"sender_warp": True}, "sender warp, column 0 only"
_ROOFS_AND_BASELINE, TUNED = ("gemm_only", "gemm_only_torch", "naive"), "fast kernel, tuned"


def rungs(config=None) -> tuple[Rung, ...]:
    """Returns the rows of this ladder, for `cmm.job.run_ladder`.

    Args:
      config: tiles of the rungs of `SWITCHES` and `ASIDE`, by default those that the readable kernel takes by itself.
    """
    known = {rung.name: rung for rung in RUNGS}
    first, tuned = [known[name] for name in _ROOFS_AND_BASELINE], dataclasses.replace(known["pallas_fast"], title=TUNED)
    own = [_rung(name, TITLES[name], switches, config) for name, switches in SWITCHES.items()]
    return (*first, *own, tuned, _rung(ASIDE, ASIDE_TITLE, ASIDE_SWITCHES, config))


def measure(
    problem: Problem,
    mesh: Mesh,
    report: Report = lambda what, done: None,
    command: str = "cmm.ladder.measure",
    *,
    rounds: int = _ROUNDS,
    first_round: int = 0,
    config=None,
) -> Run:
    """Measures the ladder in this process. On simulated devices it checks results, and times say nothing.

    Args:
      problem, mesh, report, command, first_round: as for `cmm.job.run_ladder`.
      rounds: how often each rung is timed.
      config: as for `rungs`.
    """
    protocol = ON_SIMULATED if devices.is_simulated(mesh.devices.flat) else on_gpus(problem)
    protocol = dataclasses.replace(protocol, rounds=rounds)
    how = {"rungs": rungs(config), "protocol": protocol, "first_round": first_round}
    return run_ladder(problem, mesh, report=report, command=command, **how)[0]


def gain(run: Run, name: str, other: str, kind: str = "kernel_us") -> Spread | None:
    """Returns by how much `name` takes less time than `other` in the same round, in µs; `None` if a time is missing.

    Args:
      run: a record with raw rounds.
      name: name of a rung.
      other: the one it is compared with.
      kind: field of `cmm.results.Rounds`.
    """
    gains: list[float] = []
    for own, its in zip(run.rounds.get(name, ()), run.rounds.get(other, ())):
        # A kernel time of 0 says that no kernel was recognised.
        gains += [b - a for a, b in zip(getattr(own, kind), getattr(its, kind)) if a and b]
    return spread(gains) if gains else None


def _rung(name, title, switches, config) -> Rung:
    def build(problem, mesh, operands):
        from cmm import hopper  # Imports Pallas, which a machine without GPUs need not.
        from cmm.hopper.ladder import ladder_kernel

        p, gpu = problem, mesh.devices.flat[0]
        words = ", ".join(f"{switch}={value}" for switch, value in switches.items())
        if devices.is_simulated(mesh.devices.flat):
            tiles = config or hopper.TuningConfig(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2)
            return Program(_in_simulator(ladder_kernel(config=tiles, **switches), mesh), operands, details=words)
        sizes = (p.m_shard, p.n_shard, p.k, p.dtype)
        tiles = config or hopper.chosen_config("pallas", p.axis_size, *sizes, gpu.device_kind, gpu.core_count)
        program = in_shard_map(ladder_kernel(config=tiles, **switches))(problem, mesh, operands)
        return dataclasses.replace(program, details=words)

    return Rung(name, title, build, beside=True)


def _in_simulator(function, mesh):
    """Returns a function of global operands that runs a kernel on simulated devices, with the race detector."""
    from cmm import interpret

    specs = {"in_specs": (P(AXIS, None), P(None, AXIS)), "out_specs": P(None, AXIS)}
    program = jax.jit(jax.shard_map(lambda lhs, rhs: function(lhs, rhs, AXIS), mesh=mesh, **specs))

    def start(*pair):
        with interpret.simulate(core_count=_SIMULATED_CTAS) as simulation:
            return simulation.run(program, *pair)

    return start


# The command


def main(arguments=None) -> int:
    """Measures, prints and writes; returns 0 if all is measured and right, 1 if not, 2 if it cannot run here."""
    began = time.time()
    options = _parse(arguments)
    if options.child:
        return _child(Plan(**json.loads(pathlib.Path(options.child).read_text())))
    try:  # The package alone does not need it.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from cmm.bench.tables import print_run
    except ModuleNotFoundError as error:
        sys.exit(f"python -m cmm.ladder needs {error.name}: in the repository, pip install '.[cli]'")
    console = Console(width=None if sys.stdout.isatty() else 120)
    collected, path = Collected(), None
    try:
        options.out.mkdir(parents=True, exist_ok=True)  # Before a minute of measuring, not after it.
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress, tempfile.TemporaryDirectory() as folder:
            task = progress.add_task("starting", total=1.0)

            def show(process, index, what, done):
                where = f"process {process + 1} of {options.processes}: {what}"
                progress.update(task, description=where, completed=done)

            # All processes take about as long: so the last one that begins ends in time.
            until = began + options.limit_s * (1 - 1 / options.processes)
            command = python_module("cmm.ladder", "--child")
            collect(_plan(options, folder, until), options.processes, _SILENCE_S, collected, show, child=command)
    except (OSError, Refused) as error:
        console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        return 2
    finally:  # Also after Ctrl-C: what some processes have measured is worth keeping.
        if runs := collected.runs.get(0):
            run = merge(runs, _command(options, runs[0].problem))
            print_run(console, run)
            path = results.save(run, options.out / results.file_name(run, "ladder"))
            console.print(
                f"wrote {path}: {len(runs)} of {options.processes} processes", highlight=False, soft_wrap=True
            )
        for trouble in collected.troubles:
            console.print(trouble, style="red", highlight=False, markup=False, soft_wrap=True)
    return int(path is None or bool(collected.troubles) or any(is_wrong(run, one) for one in run.methods))


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m cmm.ladder", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--devices", type=positive, metavar="D", help="how many GPUs (default: all)")
    add("--m-shard", type=positive, help="rows of A per device (default: 1024, simulated 256)")
    add("--k", type=positive, help="contraction size (default: 4096, simulated 512)")
    add("--n-shard", type=positive, help="columns of B per device (default: 4096, simulated 128)")
    add("--dtype", choices=("float16", "bfloat16"), default="float16", help="default: float16")
    add("--processes", type=positive, default=_PROCESSES, metavar="N", help=f"default: {_PROCESSES}")
    add("--rounds", type=positive, default=_ROUNDS, metavar="N", help=f"in each process (default: {_ROUNDS})")
    add("--limit-s", type=positive, default=_LIMIT_S, metavar="S", help=f"for all processes (default: {_LIMIT_S})")
    add("--simulate", action="store_true", help="simulated devices, a tiny problem: checks results, measures nothing")
    add("--out", type=pathlib.Path, default=pathlib.Path("out"), help="output folder (default: out)")
    add("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sizes = _SIMULATED_SHAPE if options.simulate else (1024, 4096, 4096)
    for name, size in zip(("m_shard", "k", "n_shard"), sizes):
        setattr(options, name, getattr(options, name) or size)
    return options


def _plan(options, folder, until) -> Plan:
    shape = (options.m_shard, options.k, options.n_shard)
    fields = {name: getattr(options, name) for name in ("dtype", "devices", "rounds", "simulate")}
    return Plan(folder, shape=shape, until=until, **fields)


def _command(options, p) -> str:
    shape = f"--devices {p.axis_size} --m-shard {p.m_shard} --k {p.k} --n-shard {p.n_shard} --dtype {p.dtype}"
    often = f"--processes {options.processes} --rounds {options.rounds} --limit-s {options.limit_s}"
    return f"python -m cmm.ladder {shape} {often}" + " --simulate" * options.simulate


def _child(plan: Plan) -> int:
    """Measures in this process by a plan, and tells the one that has started it; see `cmm.bench.child`."""
    try:
        found = devices.gpus_or_simulated(plan.devices, plan.simulate, "python -m cmm.ladder measures GPUs")
    except (ValueError, RuntimeError) as error:
        say("refused", reason=str(error))
        return 2
    (problem,) = plan.problems(len(found))
    kind = found[0].device_kind
    say("start", machine=f"{len(found)} x {kind}, JAX {jax.__version__}", problems=[dataclasses.asdict(problem)])
    report = lambda what, done: say("progress", problem=0, what=what, done=done)
    often = {"rounds": plan.rounds, "first_round": plan.first_round}
    try:
        run = measure(problem, devices.ring_mesh(found, AXIS), report, **often)
    except Exception as error:
        traceback.print_exc()
        say("failed", problem=0, reason=f"{type(error).__name__}: {error}"[:600])
        return 1
    results.save(run, plan.record(0))
    say("result", problem=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
