"""`python -m cmm.peers.torch_symm_mem`: PyTorch's collective matmul on symmetric memory ("async tensor parallelism").

`torch.ops.symm_mem.fused_all_gather_matmul` copies shards from its peers' memory, on two streams by turns, and
multiplies each as soon as it is there. It runs under a CUDA graph, since the host could not start so many small steps
in time. Each GPU has a process of its own (see `cmm.peers.torch_worker`). PyTorch's matmul alone, and its NCCL
all-gather with a matmul after it, run beside it, in graphs too.

NVLink multicast is off unless the environment says otherwise.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

from cmm.measure import spread
from cmm.peers.own_process import PeerResult, add_options, problem_of, report
from cmm.reference import relative_limit
from cmm.roofline import Problem

ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
GEMM_ONLY = "torch_gemm_only"
TITLES = {
    GEMM_ONLY: "GEMM only, PyTorch",
    "torch_nccl": "all-gather + matmul, PyTorch",
    "torch_symm_mem": "symmetric memory, PyTorch",
}


class CannotRun(Exception):
    """Says why this machine does not do."""


class WorkerFailed(Exception):
    """Says which worker ended badly, and how.

    Attributes:
      program: name of the program that it was at, or `None` if it had not begun with one.
    """

    def __init__(self, reason: str, program: str | None):
        super().__init__(reason)
        self.program = program


def main(arguments=None) -> int:
    """Runs one worker per GPU and reports what they measured; returns the exit status, always 0."""
    parser = argparse.ArgumentParser(prog="python -m cmm.peers.torch_symm_mem", description=__doc__.split("\n\n", 1)[1])
    add_options(parser)
    options = parser.parse_args(arguments)
    report(measure(problem_of(options), options.timeout, simulate=options.simulate), options.json)
    return 0


def measure(problem: Problem, timeout_s: float, *, simulate: bool = False) -> list[PeerResult]:
    """Returns one result per program; its status is "skipped" or "failed" where nothing could be measured."""
    # Before PyTorch is imported, here and in the workers, which inherit it.
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        if simulate:
            raise CannotRun("needs GPUs")
        check_machine(problem.axis_size)
    except CannotRun as error:
        return [_without_times(name, "skipped", str(error)) for name in TITLES]
    return run_programs(importlib.import_module("cmm.peers.torch_worker").run, problem, timeout_s)


def run_programs(target: Callable, problem: Problem, timeout_s: float) -> list[PeerResult]:
    """Measures all programs in turn in the same workers. If one fails, new workers measure the others without it.

    Args:
      target: as for `run_workers`; it takes in addition `programs`, the names of those to measure.
      problem: shapes, dtype and number of workers.
      timeout_s: seconds for all. Workers get half of what is left, so that a hang leaves time for the others.
    """
    deadline = time.monotonic() + timeout_s
    found, programs = {}, tuple(TITLES)
    while programs:
        left_s = deadline - time.monotonic()
        limit_s = left_s / 2 if len(programs) > 1 else left_s
        try:
            reports = run_workers(functools.partial(target, programs=programs), problem, limit_s)
            found |= {result.name: result for result in summary(problem, reports)}
            break
        except WorkerFailed as error:
            failed = (error.program,) if error.program in programs else programs
            found |= {name: _without_times(name, "failed", str(error)) for name in failed}
            programs = tuple(name for name in programs if name not in failed)
    return [found[name] for name in TITLES]


def check_machine(gpus: int) -> None:
    """Raises `CannotRun` if PyTorch, its operation or GPUs are missing."""
    if gpus < 2:
        raise CannotRun("needs at least 2 GPUs")
    if importlib.util.find_spec("torch") is None:
        raise CannotRun("PyTorch is not installed")
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("torch.distributed._symmetric_memory")
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries.
        raise CannotRun(f"PyTorch cannot be imported: {error}") from error
    if not torch.cuda.is_available():
        raise CannotRun(f"PyTorch {torch.__version__} finds no CUDA device")
    if torch.cuda.device_count() < gpus:
        raise CannotRun(f"needs {gpus} GPUs, found {torch.cuda.device_count()}")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        raise CannotRun(f"needs PyTorch 2.11 or newer, found {torch.__version__}")
    if not hasattr(torch.ops.symm_mem, "fused_all_gather_matmul"):
        raise CannotRun(f"PyTorch {torch.__version__} has no torch.ops.symm_mem.fused_all_gather_matmul")


def run_workers(target: Callable, problem: Problem, timeout_s: float) -> list[dict]:
    """Runs `target(rank, problem, folder, meet)` once per GPU, each in a process, and returns what they wrote.

    Args:
      target: writes its report to `folder / f"rank{rank}.json"`, or what went wrong to `folder / f"rank{rank}.error"`;
        before it goes on to a program, number and name of this turn to `folder / f"rank{rank}.turn"`. `meet` is a
        barrier of all workers.
      problem: shapes, dtype and number of workers.
      timeout_s: all workers are killed after so many seconds.

    Raises:
      WorkerFailed: one of them crashed or hung. None of them runs any more.
    """
    # A CUDA context does not survive a fork.
    context = multiprocessing.get_context("spawn")
    meet = context.Barrier(problem.axis_size)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        workers = [
            context.Process(target=target, args=(rank, problem, folder, meet), daemon=True)
            for rank in range(problem.axis_size)
        ]
        try:
            for worker in workers:
                worker.start()
            _wait(workers, folder, timeout_s)
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.kill()
                    worker.join()
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(problem.axis_size)]


def _wait(workers, folder, timeout_s):
    deadline = time.monotonic() + timeout_s
    running = dict(enumerate(workers))
    while running:
        rest_s = max(0.0, deadline - time.monotonic())
        if not multiprocessing.connection.wait([worker.sentinel for worker in running.values()], rest_s):
            # One that hangs keeps those that wait for it from getting ahead by more than a turn.
            _, program = min((_turn(rank, folder) for rank in running), key=lambda turn: turn[0])
            ranks = ", ".join(map(str, running))
            reason = f"no answer from the workers of rank {ranks} within {timeout_s:g} s; all were killed"
            raise WorkerFailed(reason, program)
        for rank in [rank for rank, worker in running.items() if not worker.is_alive()]:
            worker = running.pop(rank)
            worker.join()
            if worker.exitcode or not (folder / f"rank{rank}.json").exists():
                raise _last_words(rank, worker.exitcode, folder, len(workers))


def _last_words(rank, exit_code, folder, workers):
    errors = {r: path.read_text() for r in range(workers) if (path := folder / f"rank{r}.error").exists()}
    # The worker that failed first breaks the barrier for all: its own error says more than that of the others.
    own = {r: text for r, text in errors.items() if "BrokenBarrierError" not in text} or errors
    reason = f"rank{rank} ended with exit code {exit_code} and no report"
    if own:
        rank, text = next(iter(own.items()))
        reason = f"rank{rank}: {text}"
    return WorkerFailed(reason, _turn(rank, folder)[1])


def _turn(rank, folder) -> tuple[int, str | None]:
    """Returns number and program of the turn that a worker was at; -1 and `None` before its first."""
    try:
        number, program = (folder / f"rank{rank}.turn").read_text().split()
        return int(number), program
    except (OSError, ValueError):
        return -1, None


def summary(problem: Problem, reports: list[dict]) -> list[PeerResult]:
    """Reduces the workers' reports to results: in each round the slowest GPU counts, and the largest error.

    Args:
      problem: shapes and dtype.
      reports: for each rank `{"programs": {name: {"call_us": [...], "kernel_us": [...], "wall_us": [...],
        "error_over_bound": e, "relative_error": r}}, "protocol": words, "versions": {...}}`, times by round.
    """
    slowest = {
        name: {key: np.max([report["programs"][name][key] for report in reports], axis=0) for key in of_program}
        for name, of_program in reports[0]["programs"].items()
    }
    roof = slowest.get(GEMM_ONLY)
    results = [_result(problem, name, of_program, roof) for name, of_program in slowest.items()]
    shared = {"protocol": reports[0]["protocol"], "versions": reports[0]["versions"], "options": _environment()}
    return [dataclasses.replace(result, **shared) for result in results]


def _result(problem, name, of_program, roof):
    error_over_bound, relative_error = float(of_program["error_over_bound"]), float(of_program["relative_error"])
    errors = {"error_over_bound": error_over_bound, "relative_error": relative_error}
    if not (error_over_bound <= 1 and relative_error <= relative_limit(problem.k, problem.dtype)):
        return PeerResult(name, TITLES[name], "failed", "wrong result", **errors)
    has_kernel = all(of_program["kernel_us"])

    def ratio(key):
        return spread(np.divide(of_program[key], roof[key])) if roof and all(roof[key]) else None

    return PeerResult(
        name,
        TITLES[name],
        "measured",
        **errors,
        call_time_us=spread(of_program["call_us"]),
        wall_time_us=spread(of_program["wall_us"]),
        ratio_to_gemm_only=ratio("call_us"),
        kernel_time_us=spread(of_program["kernel_us"]) if has_kernel else None,
        kernel_ratio_to_gemm_only=ratio("kernel_us") if has_kernel else None,
    )


def _without_times(name, status, reason):
    return PeerResult(name, TITLES[name], status, reason, options=_environment())


def _environment():
    return {name: os.environ[name] for name in ENVIRONMENT}


if __name__ == "__main__":
    sys.exit(main())
