"""On real GPUs: every rung of the ladder that can run does, is right, and has the times that tables show."""

import pytest

from cmm import devices, job, rungs
from cmm.protocol import Protocol
from cmm.roofline import Problem

pytestmark = pytest.mark.gpu


def test_ladder(gpus):
    problem = Problem(len(gpus), 256, 512, 512)
    protocol = Protocol(2, 2, recorded_starts=2, short_chain=2, long_chain=6, short_starts=1, long_starts=3)
    # Asked for by name, so that nothing that dies is skipped.
    run, events = job.run_ladder(problem, devices.ring_mesh(gpus), rungs.CHOICES, protocol=protocol)
    assert run.gemm_only in ("gemm_only", "gemm_only_torch")
    for result in run.methods:
        if result.status == "skipped":
            print(f"{result.name}: skipped, {result.reason}")
            continue
        assert result.error_over_bound <= 1, result.name
        assert len(events[result.name]) == len(gpus), f"{result.name}: not every GPU was recorded"
        assert result.kernel_time_us and result.kernel_ratio_to_gemm_only, f"{result.name}: no kernel was recognised"
    ran = {result.name for result in run.methods if result.status == "measured"}
    assert {"gemm_only", "naive", "ring", "ring_bidirectional", "ring_copy_engines"} <= ran
    if gpus[0].compute_capability.startswith("9."):
        assert "pallas" in ran
