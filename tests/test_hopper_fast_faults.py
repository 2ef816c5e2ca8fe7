"""Faults planted in the fast kernel: the check that is named for each catches it, and the right kernel stays quiet."""

import dataclasses
import types

import pytest
from fault_verdict import verdict
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cmm.hopper import TuningConfig, all_gather_lhs_matmul_fast, fast_kernel
from cmm.hopper.sends import SendPlan, plan_sends
from cmm.schedule import neighbour

CONFIG = TuningConfig(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2, chunks=2, signal_lag=2)
SEEDS = range(3)


def _stand_in(module, **changes):
    return types.SimpleNamespace(**(vars(module) | changes))


def _wait(value_of):
    def wait(semaphore, value, decrement):
        pl.semaphore_wait(semaphore, value=value_of(value), decrement=decrement)

    return {"pl": _stand_in(pl, semaphore_wait=wait)}


def _signal_unless_device_0(semaphore, device_id):
    pl.when(lax.axis_index("x") != 0)(lambda: pl.semaphore_signal(semaphore, device_id=device_id))


def _skip_waits(read_only):
    def wait(count, wait_read_only=False):
        if wait_read_only != read_only:
            plgpu.wait_smem_to_gmem(count, wait_read_only=wait_read_only)

    return {"plgpu": _stand_in(plgpu, wait_smem_to_gmem=wait)}


def _sends(cls=SendPlan, **changes):
    def plan(tiles):
        fields = vars(plan_sends(tiles)) | changes
        return cls(**fields)

    return {"plan_sends": plan}


class _FirstOfChunk(SendPlan):
    def is_last_of_chunk(self, k_step):
        return lax.rem(k_step, self.chunk_steps) < self.columns


# What is changed in the kernel's module, and the check that must catch it.
FAULTS = {
    "wait removed": ({"pl": _stand_in(pl, semaphore_wait=lambda *args, **options: None)}, "race"),
    "wait for one too few": (_wait(lambda value: value - 1), "race"),
    "wait for one too many": (_wait(lambda value: value + 1), "deadlock"),
    "signal missing": ({"pl": _stand_in(pl, semaphore_signal=_signal_unless_device_0)}, "deadlock"),
    "signal before the store is complete": (_skip_waits(read_only=False), "race"),
    "stage reused while it is sent": (_skip_waits(read_only=True), "race"),
    "signal after the first part of a chunk": (_sends(_FirstOfChunk, lag=0), "race"),
    "waits in a circle": (_sends(chunks=1, lag=2), "deadlock"),
    "wrong neighbour": ({"neighbour": lambda device, size: neighbour(device, size, "up")}, "value"),
}


# Where rounds span steps, signals do not wait for the next tile, so there is no such circle; see
# test_a_signal_does_not_wait_for_the_next_tile of tests/test_hopper_rounds.py.
SPANNING = {name: fault for name, fault in FAULTS.items() if name != "waits in a circle"}
ALL = [(4, name, fault) for name, fault in FAULTS.items()] + [(3, name, fault) for name, fault in SPANNING.items()]


def _verdict(case, seed, core_count=4, config=CONFIG):
    return verdict(all_gather_lhs_matmul_fast, case, seed, core_count, config)


@pytest.mark.parametrize("core_count", [3, 4])  # 4 tiles: on 3 CTAs, rounds span steps.
@pytest.mark.parametrize("k", [256, 512])
def test_the_right_kernel_stays_quiet(make_case, k, core_count):
    case = make_case(256, k, 128, "float16", (3,))
    assert {_verdict(case, seed, core_count) for seed in SEEDS} == {"quiet"}


@pytest.mark.parametrize("core_count, fault, planted", [pytest.param(*a, id=f"{a[1]}, {a[0]} CTAs") for a in ALL])
def test_fault_is_caught(make_case, monkeypatch, core_count, fault, planted):
    changes, check = planted
    case = make_case(256, 512 if "part" in fault else 256, 128, "float16", (3,))
    for name, changed in changes.items():
        monkeypatch.setattr(fast_kernel, name, changed)
    # Some seeds order the threads so that a race does no harm and cannot be told from luck; most do not.
    verdicts = [_verdict(case, seed, core_count) for seed in SEEDS]
    assert check in verdicts and set(verdicts) <= {check, "quiet"}, verdicts


LAGS = [(1, 0), (2, 4), (4, 2), (8, 1)]


@pytest.mark.parametrize("chunks, lag", LAGS)
@pytest.mark.parametrize("core_count", [1, 3, 5])
def test_no_wait_in_a_circle(make_case, chunks, lag, core_count):
    # The longest lags that are allowed, with one tile per CTA and with several.
    config = dataclasses.replace(CONFIG, chunks=chunks, signal_lag=lag, max_concurrent_steps=3)
    case = make_case(256, 512, 128, "float16", (3,))
    assert _verdict(case, 0, core_count, config) == "quiet"


@pytest.mark.slow
@pytest.mark.parametrize("core_count", [3, 4])
def test_no_false_alarm_in_200_shuffled_runs(make_case, core_count):
    case = make_case(256, 256, 128, "float16", (3,))
    assert {_verdict(case, seed, core_count) for seed in range(200)} == {"quiet"}
