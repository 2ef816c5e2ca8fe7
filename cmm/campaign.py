"""`python -m cmm.campaign`: record everything that a machine with GPUs can show, in one go.

GPU time is scarce and machines come and go. So one command runs whatever the project claims about GPUs: tests under
stress, the ladder, larger problems, where the time goes, and the notebooks. Each stage is a process of its own with a
limit, for a kernel that misses a signal hangs. A stage that fails stops no other one.
"""

import argparse
import contextlib
import dataclasses
import itertools
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

try:  # The package alone does not need them.
    import psutil
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ModuleNotFoundError as error:
    sys.exit(f"python -m cmm.campaign needs {error.name}: in the repository, pip install '.[cli]'")

from cmm.cli import positive

_DESCRIPTION = """\
Runs all that needs GPUs, on all GPUs of this machine: stress tests, the benchmark of the ladder and of larger problems,
the account of where the time goes, wall time, and every notebook, whose outputs are saved in place. Run it in the
repository. Result files go to --out, and what each stage printed to --out/logs. Copy results to figures/data, and
`make figures` shows them. All stages may take longer than --limit-s: those that matter most come first, and those for
which no time is left are named.
"""
_LIMIT_S = 570
_LEAST_S = 10  # A stage with less time left than this is not begun.


@dataclasses.dataclass(frozen=True)
class Stage:
    """One command of a campaign.

    Attributes:
      name: what `--only` takes.
      arguments: of the Python interpreter.
      limit_s: it is killed after so many seconds.
      environment: variables that it gets in addition.
      least_gpus: it makes sense on so many.
    """

    name: str
    arguments: Sequence[str]
    limit_s: float
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    least_gpus: int = 2


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a stage.

    Attributes:
      name: of the stage.
      verdict: "ok", or what went wrong, or why it was not run.
      seconds: how long it ran.
    """

    name: str
    verdict: str
    seconds: float


def stages(out: pathlib.Path, stress_calls: int) -> list[Stage]:
    """Returns the stages of a campaign, what matters most first.

    Args:
      out: folder for result files.
      stress_calls: calls of each kernel and dtype in the stress test.
    """
    module = lambda name, *arguments: ("-m", name, *arguments)
    tests = ("pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu")
    stress = {"CMM_STRESS_CALLS": str(stress_calls)}
    llama = ("--suite", "llama3-70b,llama3-405b", "--rounds", "4", "--timeout-s", "100")
    fault = ("--out", str(out / "counting_fault.json"))
    return [
        Stage("tests", module(*tests, "tests/test_gpu_primitives.py", "tests/test_gpu_hopper.py"), 200, stress),
        Stage(
            "ladder", module("cmm.bench", "--suite", "W1", "--rounds", "8", "--timeout-s", "60", "--out", str(out)), 150
        ),
        Stage("account", module("cmm.trace", "--account", "--out", str(out)), 90),
        Stage("rungs", module("cmm.ladder", "--out", str(out)), 110),
        Stage("counting fault", module("cmm.peers.counting_fault", *fault), 60, least_gpus=3),
        Stage("larger", module("cmm.bench", *llama, "--out", str(out)), 220),
        Stage("notebooks", ("notebooks/execute.py",), 240),
        Stage("wall time", module("cmm.overhead", "--out", str(out)), 120),
    ]


def run(
    planned: Sequence[Stage],
    logs: pathlib.Path,
    limit_s: float,
    num_gpus: int,
    begin: Callable[[Stage], None] = lambda stage: None,
) -> list[Outcome]:
    """Runs stages one after the other, each with its own limit and within what is left of `limit_s`.

    Args:
      planned: the stages.
      logs: folder for what they print.
      limit_s: seconds for all of them.
      num_gpus: number of GPUs here.
      begin: called before each stage.

    Returns:
      An outcome for each stage.
    """
    logs.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + limit_s
    outcomes = []
    for stage in planned:
        begin(stage)
        left_s = until - time.monotonic()
        if num_gpus < stage.least_gpus:
            outcomes.append(Outcome(stage.name, f"needs {stage.least_gpus} GPUs", 0.0))
        elif left_s < _LEAST_S:
            outcomes.append(Outcome(stage.name, "no time left", 0.0))
        else:
            outcomes.append(_run_stage(stage, logs / f"{stage.name.replace(' ', '_')}.txt", min(stage.limit_s, left_s)))
    return outcomes


def _run_stage(stage, log, limit_s) -> Outcome:
    started = time.monotonic()
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | stage.environment
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *stage.arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            status = process.wait(limit_s)
            verdict = "ok" if status == 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            verdict = f"killed after {limit_s:.0f} s"
        finally:
            _kill_with_descendants(process)
    return Outcome(stage.name, verdict, time.monotonic() - started)


def _kill_with_descendants(process) -> None:
    """Ends a process and all that it has started, if it still runs: what hangs on a GPU would disturb what follows."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for descendant in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
    process.kill()
    process.wait()


def main(arguments=None) -> int:
    """Runs a campaign; returns 0 if every stage that could run went well, 1 if not, 2 if there are too few GPUs."""
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    num_gpus = _count_gpus()
    if num_gpus < 2:
        console.print(f"[red]A campaign needs at least 2 GPUs, {num_gpus} can be seen here.")
        return 2
    planned = [stage for stage in stages(options.out, options.stress_calls) if stage.name in options.only]
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        console.print(f"[red]{error}")
        return 2
    columns = (TextColumn("{task.description:<15}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=len(planned))
        done = iter(range(len(planned)))
        begin = lambda stage: progress.update(task, description=stage.name, completed=next(done))
        outcomes = run(planned, options.out / "logs", options.limit_s, num_gpus, begin)
        progress.update(task, description="done", completed=len(planned))
    table = Table("stage", "result", "seconds", title=f"{num_gpus} GPUs; output in {options.out}/logs")
    for outcome in outcomes:
        table.add_row(outcome.name, outcome.verdict, f"{outcome.seconds:.0f}")
    console.print(table)
    return int(any(outcome.verdict != "ok" and not outcome.verdict.startswith("needs") for outcome in outcomes))


def _count_gpus() -> int:
    """Returns the number of GPUs that a stage sees, without starting a JAX backend: it would hold their memory."""
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    count = sum(line.startswith("GPU ") for line in listed.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    names = [name.strip() for name in visible.split(",")]
    is_valid = lambda name: name.startswith("GPU-") or name.isdigit() and int(name) < count
    return len(list(itertools.takewhile(is_valid, names)))  # CUDA ignores all from the first one that it does not know.


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m cmm.campaign", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [stage.name for stage in stages(pathlib.Path(), 0)]
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=names,
        metavar="NAME[,NAME]",
        help=f"of {', '.join(names)} (default: all)",
    )
    parser.add_argument(
        "--limit-s", type=positive, default=_LIMIT_S, metavar="S", help=f"seconds in all (default: {_LIMIT_S})"
    )
    parser.add_argument(
        "--stress-calls", type=positive, default=500, metavar="N", help="of each kernel and dtype (default: 500)"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"), help="output folder (default: out)")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.only) - set(names)):
        parser.error(f"--only: unknown {', '.join(unknown)}; known: {', '.join(names)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
