"""Faults planted in the ring kernel: the check that is named for each catches it, and the right kernel stays quiet."""

import functools
import types

import pytest
from fault_verdict import verdict
from jax import lax
from jax.experimental import pallas as pl

import cmm.interpret as ci
from cmm.hopper import TuningConfig, all_gather_lhs_matmul, ring_kernel, slots
from cmm.hopper.ring_kernel import Send
from cmm.schedule import neighbour

CONFIG = TuningConfig(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2)
SEEDS = range(4)


def _replace_pl(**changes):
    """Returns a stand-in for `pl` in the kernel's module, with some functions changed."""
    return types.SimpleNamespace(**(vars(pl) | changes))


def _wait(value_of):
    def wait(semaphore, value, decrement):
        pl.semaphore_wait(semaphore, value=value_of(value), decrement=decrement)

    return {"pl": _replace_pl(semaphore_wait=wait)}


def _signal_unless_device_0(semaphore, device_id):
    pl.when(lax.axis_index("x") != 0)(lambda: pl.semaphore_signal(semaphore, device_id=device_id))


def _announce_before_the_stores_are_complete(self, n_tile):
    @pl.when(self._is_mine(n_tile))
    def _():
        pl.semaphore_signal(self.received, device_id=self.send_dev_id)


def _send_with(**methods):
    return {"Send": type("Send", (Send,), methods)}


def _send_without_waiting(self, image, m_tile, n_tile, k_step):
    @pl.when(self._is_mine(n_tile))
    def _():
        ring_kernel.plgpu.copy_smem_to_gmem(image, self.slot.at[*slots.place(self.plan, m_tile, k_step)])


# What is changed in the kernel's module, and the check that must catch it.
FAULTS = {
    "wait removed": ({"pl": _replace_pl(semaphore_wait=lambda *args, **options: None)}, "race"),
    "wait for one too few": (_wait(lambda value: value - 1), "race"),
    "wait for one too many": (_wait(lambda value: value + 1), "deadlock"),
    "signal before the stores are complete": (
        _send_with(announce=_announce_before_the_stores_are_complete),
        "race",
    ),
    "signal missing": ({"pl": _replace_pl(semaphore_signal=_signal_unless_device_0)}, "deadlock"),
    "stage reused while it is sent": (_send_with(use=_send_without_waiting), "race"),
    "last stage reused while it is sent": (_send_with(finish=lambda self, n_tile: None), "race"),
    "wrong neighbour": ({"neighbour": lambda device, size: neighbour(device, size, "up")}, "value"),
}


def _verdict(case, seed):
    return verdict(all_gather_lhs_matmul, case, seed, 2, CONFIG)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught_and_its_twin_is_not(make_case, monkeypatch, fault):
    changes, check = FAULTS[fault]
    case = make_case(256, 192, 128, "float16", (3,))
    assert {_verdict(case, seed) for seed in SEEDS} == {"quiet"}
    for name, changed in changes.items():
        monkeypatch.setattr(ring_kernel, name, changed)
    # Some seeds order the threads so that a race does no harm and cannot be told from luck; most do not.
    verdicts = [_verdict(case, seed) for seed in SEEDS]
    assert check in verdicts and set(verdicts) <= {check, "quiet"}, verdicts


def test_one_counter_for_all_steps_is_caught(make_case, monkeypatch):
    # The protocol of JAX's example: a fast CTA's signal for the next step stands in for a slow one's for this step.
    class OneCounter:
        def __init__(self, semaphore):
            self.semaphore = semaphore

        @property
        def at(self):
            return [self.semaphore.at[0]] * 8

    steps = iter([1, 2] * 100)

    def wait(semaphore, value, decrement):
        pl.semaphore_wait(semaphore, value=next(steps) * value, decrement=decrement)

    real = pl.get_global
    stand_in = _replace_pl(semaphore_wait=wait, get_global=lambda kind: OneCounter(real(kind)))
    case = make_case(256, 192, 128, "float16", (3,))
    late = ci.Late(2e-5, device=0, cta=0)
    function = functools.partial(all_gather_lhs_matmul, config=CONFIG)

    def run(seed):
        with ci.simulate(core_count=2, seed=seed, late=late) as sim:
            return sim.run(case.program(function), case.lhs, case.rhs)

    for seed in SEEDS:
        case.assert_right(run(seed))
    monkeypatch.setattr(ring_kernel, "pl", stand_in)
    with pytest.raises(ci.RaceError):
        for seed in SEEDS:
            run(seed)


@pytest.mark.slow
def test_no_false_alarm_in_200_shuffled_runs(make_case):
    case = make_case(256, 192, 128, "float16", (3,))
    assert {_verdict(case, seed) for seed in range(200)} == {"quiet"}
