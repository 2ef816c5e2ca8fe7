"""PyTorch's programs: each fails alone, the slowest rank counts, and a wrong one has no times."""

import dataclasses
import functools
import importlib.util
import json
import os
import signal
import sys
import time

import numpy as np
import pytest

from cmm.peers import torch_symm_mem
from cmm.results import Spread
from cmm.roofline import Problem

TWO = Problem(2, 32, 64, 64, "float16")


def _report(call_us, error_over_bound=0.1):
    programs = {
        name: {
            "call_us": [factor * us for us in call_us],
            "kernel_us": [us / 2 for us in call_us],
            "wall_us": [us + 1 for us in call_us],
            "error_over_bound": error_over_bound if name == "torch_symm_mem" else 0.1,
            "relative_error": 2e-4,
        }
        for name, factor in (("torch_gemm_only", 1), ("torch_nccl", 3), ("torch_symm_mem", 2))
    }
    return {"programs": programs, "protocol": "words", "versions": {"torch": "2.11"}}


@pytest.fixture
def torch_environment(monkeypatch):
    for name, value in torch_symm_mem.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def _worker_of_programs(rank, problem, folder, meet, programs, faults):
    """Does with each program what `faults` says for it, on GPU 1, and otherwise reports times."""
    try:
        for number, name in enumerate(programs):
            meet.wait()
            (folder / f"rank{rank}.turn").write_text(f"{number} {name}")
            fault = faults.get(name) if rank == 1 else None
            if fault == "raises":
                raise ValueError("no link")
            if fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hangs":
                time.sleep(120)
        meet.wait()
        report = _report([1, 2])
        report["programs"] = {name: report["programs"][name] for name in programs}
        (folder / f"rank{rank}.json").write_text(json.dumps(report))
    except Exception as error:
        (folder / f"rank{rank}.error").write_text(f"{type(error).__name__}: {error}")
        meet.abort()
        sys.exit(1)


def _run_programs(faults, timeout_s=120):
    target = functools.partial(_worker_of_programs, faults=faults)
    return {result.name: result for result in torch_symm_mem.run_programs(target, TWO, timeout_s)}


@pytest.mark.parametrize(
    "fault, reason", [("raises", "rank1: ValueError: no link"), ("dies", "rank1 ended with exit code -9 and no report")]
)
def test_a_program_that_fails_leaves_the_others_their_times(torch_environment, fault, reason):
    results = _run_programs({"torch_symm_mem": fault})
    assert list(results) == list(torch_symm_mem.TITLES)
    fused = results.pop("torch_symm_mem")
    assert (fused.status, fused.reason, fused.call_time_us) == ("failed", reason, None)
    assert all(result.status == "measured" and result.ratio_to_gemm_only for result in results.values())


@pytest.mark.slow
def test_a_program_that_hangs_leaves_the_others_their_times(torch_environment):
    for timeout_s in (10, 40, 160):  # On a busy machine it may take long until the workers have begun.
        results = _run_programs({"torch_symm_mem": "hangs"}, timeout_s)
        if results["torch_nccl"].status == "measured":
            break
    assert {name: result.status for name, result in results.items()} == {
        "torch_gemm_only": "measured",
        "torch_nccl": "measured",
        "torch_symm_mem": "failed",
    }
    assert results["torch_symm_mem"].reason.startswith("no answer from the workers of rank 0, 1")


@pytest.mark.slow
def test_every_program_fails_for_its_own_reason(torch_environment):
    results = _run_programs({"torch_gemm_only": "dies", "torch_nccl": "raises"})
    assert results["torch_gemm_only"].reason == "rank1 ended with exit code -9 and no report"
    assert results["torch_nccl"].reason == "rank1: ValueError: no link"
    fused = results["torch_symm_mem"]
    assert fused.status == "measured" and fused.call_time_us and fused.ratio_to_gemm_only is None


@pytest.mark.slow
def test_without_a_program_to_blame_all_fail(torch_environment):
    results = torch_symm_mem.run_programs(_worker_without_gpu, TWO, 60)
    assert {(result.status, result.reason) for result in results} == {("failed", "rank0: ValueError: no GPU")}


def _worker_without_gpu(rank, problem, folder, meet, programs):
    (folder / f"rank{rank}.error").write_text("ValueError: no GPU")
    sys.exit(1)


def test_the_slowest_rank_of_each_round_counts(torch_environment):
    results = {r.name: r for r in torch_symm_mem.summary(TWO, [_report([1, 5, 3]), _report([4, 2, 6])])}
    fused = results["torch_symm_mem"]
    assert fused.status == "measured" and fused.protocol == "words" and fused.options == torch_symm_mem.ENVIRONMENT
    assert fused.call_time_us.median == 10 and fused.wall_time_us.median == 6 and fused.kernel_time_us.median == 2.5
    assert fused.ratio_to_gemm_only == Spread(2.0, 2.0, 2.0)
    assert results["torch_nccl"].ratio_to_gemm_only.median == 3


@pytest.mark.parametrize("error", [1.5, np.inf, np.nan])
def test_a_wrong_result_has_no_times(torch_environment, error):
    fused = torch_symm_mem.summary(TWO, [_report([1]), _report([1], error)])[-1]
    assert (fused.name, fused.status, fused.call_time_us) == ("torch_symm_mem", "failed", None)


def test_torch_says_why_it_is_skipped(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for problem, simulate, reason in (
        (TWO, False, "not installed"),
        (TWO, True, "needs GPUs"),
        (dataclasses.replace(TWO, axis_size=1), False, "at least 2"),
    ):
        results = torch_symm_mem.measure(problem, 60, simulate=simulate)
        assert [r.name for r in results] == list(torch_symm_mem.TITLES)
        assert all(r.status == "skipped" and reason in r.reason for r in results)
    assert torch_symm_mem.ENVIRONMENT.items() <= os.environ.items()
