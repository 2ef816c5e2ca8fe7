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
import os
import sys
import time
from collections.abc import Callable

import numpy as np

from cmm.measure import spread
from cmm.peers.own_process import PeerResult, add_options, problem_of, report
from cmm.peers.workers import WorkerFailed, run_workers, stage_file
from cmm.protocol import ON_GPUS
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


def main(arguments=None) -> int:
    """Runs one worker per GPU and reports what they measured; returns the exit status, always 0."""
    parser = argparse.ArgumentParser(prog="python -m cmm.peers.torch_symm_mem", description=__doc__.split("\n\n", 1)[1])
    add_options(parser)
    options = parser.parse_args(arguments)
    found = measure(problem_of(options), options.timeout, options.rounds, simulate=options.simulate)
    report(found, options.json)
    return 0


def measure(
    problem: Problem, timeout_s: float, rounds: int = ON_GPUS.rounds, *, simulate: bool = False
) -> list[PeerResult]:
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
    return run_programs(functools.partial(_start_worker, rounds=rounds), problem, timeout_s)


def _start_worker(rank, problem, folder, meet, programs, rounds) -> None:
    """Runs `cmm.peers.torch_worker.run`, and notes what is in the way if PyTorch cannot even be imported."""
    try:
        stage_file(folder, rank).write_text("importing PyTorch")
        worker = importlib.import_module("cmm.peers.torch_worker")
    except BaseException as error:
        (folder / f"rank{rank}.error").write_text(f"{type(error).__name__}: {error}")
        raise
    worker.run(rank, problem, folder, meet, programs, rounds)


def run_programs(target: Callable, problem: Problem, timeout_s: float) -> list[PeerResult]:
    """Measures all programs in turn in the same workers. If one fails, new workers measure the others without it.

    Args:
      target: as for `run_workers`; it takes in addition `programs`, the names of those to measure.
      problem: shapes, dtype and number of workers.
      timeout_s: seconds for all. A hang is noticed earlier (see `run_workers`), and leaves time for the others.
    """
    deadline = time.monotonic() + timeout_s
    found, programs = {}, tuple(TITLES)
    while programs:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            reports = run_workers(functools.partial(target, programs=programs), problem, left_s)
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
