"""Which rungs run, which are skipped and why, and what their times are compared with."""

import dataclasses

import jax
import pytest

from cmm import devices, interpret, job, rungs
from cmm.measure import Protocol, RecordedCall
from cmm.peers import jax_example
from cmm.product import local_matmul
from cmm.reference import accuracy
from cmm.roofline import Problem
from cmm.rungs import GEMM_ONLY, Rung, in_shard_map

PROBLEM = Problem(2, 4, 8, 4)
PROTOCOL = Protocol(3, 2, recorded_starts=2, short_chain=1, long_chain=2, short_starts=1, long_starts=2)


def _gathered(lhs, rhs, _):
    return local_matmul(lhs, rhs, lhs.dtype)


def _naive(lhs, rhs, axis):
    return rungs.METHODS["naive"].function(lhs, rhs, axis)


def _fails_with(error):
    def build(problem, mesh, operands):
        raise error

    return build


def _record(monkeypatch, times_us):
    """Lets simulated devices pass for GPUs that record call and kernel times: each rung's, round by round."""
    in_order = iter([time_us for of_round in zip(*times_us.values(), strict=True) for time_us in of_round])

    def recorded_chain(program, starts):
        program.wait(program.start_chain(program.operands))
        # One start is recorded before the rounds, to see whether it can be.
        return RecordedCall(*(next(in_order) if starts == PROTOCOL.recorded_starts else (1, 1)), {})

    monkeypatch.setattr(job, "is_simulated", lambda devices: False)
    monkeypatch.setattr(job, "recorded_chain", recorded_chain)


def _ladder(*more, **options):
    mesh = devices.ring_mesh(jax.devices("cpu")[:2])
    run, _ = job.run_ladder(PROBLEM, mesh, rungs=(GEMM_ONLY, *more), protocol=PROTOCOL, **options)
    return run


@pytest.mark.parametrize("error", [ValueError("no"), NotImplementedError("no"), ImportError("no")])
@pytest.mark.parametrize("names", [None, ("odd",)])
def test_what_says_that_it_cannot_run_is_skipped(error, names):
    result = _ladder(Rung("odd", "odd", _fails_with(error)), names=names).method("odd")
    assert (result.status, result.reason) == ("skipped", "no")


def test_what_dies_is_not_skipped_unless_it_is_a_peer_that_nobody_asked_for():
    dies = Rung("odd", "odd", _fails_with(RuntimeError("broken")))
    peer = dataclasses.replace(dies, peer=True)
    with pytest.raises(RuntimeError, match="broken"):
        _ladder(dies)
    with pytest.raises(RuntimeError, match="broken"):
        _ladder(peer, names=("odd",))
    result = _ladder(peer).method("odd")
    assert (result.status, result.reason) == ("skipped", "RuntimeError: broken")
    # The same holds for one that dies when it runs.
    program = in_shard_map(_naive)
    dies = Rung("odd", "odd", lambda *args: dataclasses.replace(program(*args), start=lambda lhs, rhs: lhs.broken))
    assert _ladder(dataclasses.replace(dies, peer=True)).method("odd").reason.startswith("AttributeError: ")
    with pytest.raises(AttributeError):
        _ladder(dies)


def test_the_roof_cannot_be_skipped_or_left_out(monkeypatch):
    mesh = devices.ring_mesh(jax.devices("cpu")[:2])
    with pytest.raises(ValueError, match="GEMM_ONLY"):
        job.run_ladder(PROBLEM, mesh, rungs=rungs.RUNGS[2:])
    with pytest.raises(ValueError, match="magic"):
        job.run_ladder(PROBLEM, mesh, ("magic",))
    broken = dataclasses.replace(GEMM_ONLY, build=_fails_with(ValueError("broken")))
    monkeypatch.setattr(job, "GEMM_ONLY", broken)
    with pytest.raises(ValueError, match="broken"):
        job.run_ladder(PROBLEM, mesh, rungs=(broken,), protocol=PROTOCOL)


def test_ratios_are_per_round_and_to_the_faster_roof(monkeypatch):
    # Call and kernel time of each rung in three rounds. In the second round the other roof is the slower one.
    times_us = {
        "gemm_only": [(20, 16), (20, 16), (20, 16)],
        "other": [(10, 8), (30, 24), (10, 8)],
        "method": [(20, 12), (30, 48), (10, 16)],
        "unknown": [(40, 0), (40, 0), (40, 0)],
    }
    _record(monkeypatch, times_us)
    run = _ladder(
        Rung("other", "other roof", in_shard_map(_gathered, gathered=True), gathered=True),
        Rung("method", "method", in_shard_map(_naive)),
        Rung("unknown", "kernels of unknown names", in_shard_map(_naive)),
    )
    assert run.gemm_only == "other"
    method, unknown = run.method("method"), run.method("unknown")
    assert (method.call_time_us.median, method.kernel_time_us.median) == (20, 16)
    # 20 / 10, 30 / 30, 10 / 10, and 12 / 8, 48 / 24, 16 / 8.
    assert (method.ratio_to_gemm_only.median, method.kernel_ratio_to_gemm_only.median) == (1, 2)
    assert run.method("other").ratio_to_gemm_only.median == 1
    assert unknown.kernel_time_us is None and unknown.kernel_ratio_to_gemm_only.median == 0 and unknown.is_incomplete


def test_a_wrong_matmul_is_no_roof(monkeypatch):
    _record(monkeypatch, {"gemm_only": [(20, 20)] * 3, "other": [(10, 10)] * 3})
    wrong = in_shard_map(lambda lhs, rhs, _: 1.1 * _gathered(lhs, rhs, _), gathered=True)
    assert _ladder(Rung("other", "wrong roof", wrong, gathered=True)).gemm_only == "gemm_only"


def test_a_peer_that_the_profiler_does_not_see_is_skipped(monkeypatch):
    _record(monkeypatch, {"gemm_only": [(20, 20)] * 3})
    seen = job.recorded_chain
    unseen = in_shard_map(_naive)

    def recorded_chain(program, starts):
        if program.wait is not jax.block_until_ready:
            raise RuntimeError("The profiler recorded no GPU events.")
        return seen(program, starts)

    monkeypatch.setattr(job, "recorded_chain", recorded_chain)
    odd = Rung("odd", "odd", lambda *args: dataclasses.replace(unseen(*args), wait=lambda results: None), peer=True)
    assert _ladder(odd).method("odd").reason == "RuntimeError: The profiler recorded no GPU events."
    with pytest.raises(RuntimeError, match="recorded no GPU events"):
        _ladder(odd, names=("odd",))


def test_hopper_kernels_are_skipped_on_other_gpus():
    class Device:
        platform, compute_capability, device_kind = "gpu", "8.0", "NVIDIA A100"

    for rung in rungs.RUNGS:
        if rung.needs == "Hopper GPUs":
            with pytest.raises(job._Skipped, match="needs Hopper GPUs, found NVIDIA A100"):
                job._check_devices(rung, Device)
        else:
            job._check_devices(rung, Device)
    assert {"pallas", "jax_example"} <= {rung.name for rung in rungs.RUNGS if rung.needs == "Hopper GPUs"}


@pytest.mark.parametrize("name", ["pallas", "jax_example"])
def test_kernels_are_built_as_they_are_called(name):
    # Inside a simulation kernels run on simulated devices; the ladder itself does not simulate them.
    problem = Problem(2, 128, 128, 256)
    mesh = devices.ring_mesh(jax.devices("cpu")[:2])
    operands = [devices.random_operands(problem, mesh, 0)]
    (rung,) = [rung for rung in rungs.RUNGS if rung.name == name]
    with interpret.simulate(seed=0) as sim, jax_example.pretend_machine(2, core_count=4):
        program = rung.build(problem, mesh, operands)
        out = sim.run(program.start, *program.operands[0])
    assert accuracy(out, *operands[0], mesh, "x").right
    assert ("tile_m=128" in program.details) == (name == "jax_example")
