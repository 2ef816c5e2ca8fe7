"""Seeded faults: each is caught by the check it names, its twin is quiet."""

import interpret_kernels as kernels
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cmm.interpret as ci

SEEDS = (None, 0, 1, 2)


def verdict(run, seed, **options):
    """What a run ends in: "race", "deadlock", "value" or "right"."""
    try:
        with ci.simulate(seed=seed, **options) as sim:
            got, want = run(sim)
    except ci.RaceError:
        return "race"
    except ci.DeadlockError:
        return "deadlock"
    return "right" if np.array_equal(got, want) else "value"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", kernels.RING_FAULTS)
def test_fault_in_ring_is_caught(fault, seed):
    num_devices, check = kernels.RING_FAULTS[fault]
    run = lambda sim: kernels.run_ring(sim, num_devices, fault)
    assert verdict(run, seed) == check


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8])
def test_right_ring_is_right_and_quiet(num_devices, seed):
    run = lambda sim: kernels.run_ring(sim, num_devices)
    assert verdict(run, seed) == "right"


def test_values_alone_miss_a_race():
    num_devices, fault = 4, "slot_reused_too_early"
    run = lambda sim: kernels.run_ring(sim, num_devices, fault)
    seeds = range(10)
    assert "right" in {verdict(run, s, detect_races=False) for s in seeds}
    assert {verdict(run, s) for s in seeds} == {"race"}


def push(num_devices, fault):
    x = kernels.blocks(num_devices)
    f = kernels.sharded(
        lambda x: kernels.push_left(x, "x", num_devices, fault), kernels.mesh_of(num_devices), P("x"), P("x")
    )
    return lambda sim: (np.asarray(sim.run(f, x)), np.roll(x, -kernels.M, 0))


@pytest.mark.parametrize("seed", SEEDS)
def test_leaving_before_the_neighbour_has_written(seed):
    assert verdict(push(3, "missing_last_wait"), seed) == "race"
    assert verdict(push(3, None), seed) == "right"
    assert verdict(push(3, "poll"), seed) == "right"


def test_report_names_the_end_of_the_kernel():
    with pytest.raises(ci.RaceError, match="end of its owner's kernel"):
        with ci.simulate() as sim:
            push(2, "missing_last_wait")(sim)


def two_ctas(num_devices, one_counter, delay_cta=None):
    x = kernels.blocks(num_devices)
    f = kernels.sharded(
        lambda x: kernels.two_cta_ring(x, "x", num_devices, one_counter, delay_cta)[None],
        kernels.mesh_of(num_devices),
        P("x"),
        P("x"),
    )
    want = np.broadcast_to(
        x.reshape(1, num_devices, kernels.M, kernels.K), (num_devices, num_devices, kernels.M, kernels.K)
    )
    return lambda sim: (np.asarray(sim.run(f, x)), want)


@pytest.mark.parametrize("late", [ci.Late(1e-4, device=0, cta=1), ci.Late(1e-4, device=0, cta=0)])
def test_one_counter_for_all_steps_needs_three_devices_and_a_late_cta(late):
    assert verdict(two_ctas(3, one_counter=True), None, late=late) == "race"
    assert verdict(two_ctas(3, one_counter=False), None, late=late) == "right"
    assert verdict(two_ctas(2, one_counter=True), None, late=late) == "right"


def test_delay_in_the_kernel_shows_it_too():
    assert verdict(two_ctas(3, True, delay_cta=1), None) == "race"
    assert verdict(two_ctas(3, False, delay_cta=1), None) == "right"


def test_a_late_cta_makes_the_values_wrong():
    run = two_ctas(3, one_counter=True)
    late = ci.Late(1e-4, device=0, cta=1)
    assert verdict(run, None, late=late, detect_races=False) == "value"


def specialized(num_devices, fault, k=256):
    rng = np.random.default_rng(1)
    a = rng.normal(size=(num_devices * 64, k)).astype(np.float16)
    b = rng.normal(size=(k, num_devices * 64)).astype(np.float16)

    def f(a, b):
        out, a_left = kernels.specialized_matmul(a, b, "x", num_devices, fault)
        return out, a_left

    f = kernels.sharded(f, kernels.mesh_of(num_devices), (P("x"), P(None, "x")), (P("x"), P("x")))
    wide_a, wide_b = a.astype(np.float32), b.astype(np.float32)
    out = np.concatenate([wide_a[d * 64 : (d + 1) * 64] @ wide_b[:, d * 64 : (d + 1) * 64] for d in range(num_devices)])

    def run(sim):
        got, a_left = sim.run(f, a, b)
        np.testing.assert_array_equal(a_left, np.roll(a, -64, 0))
        np.testing.assert_allclose(got, out, rtol=1e-5, atol=1e-4)
        return np.zeros(1), np.zeros(1)

    return run


@pytest.mark.parametrize("fault", ["missing_empty_wait", "missing_read_wait", "missing_wgmma_wait"])
def test_fault_in_specialized_kernel_is_a_race(fault):
    for seed in SEEDS:
        try:
            found = verdict(specialized(2, fault), seed)
        except AssertionError:  # The values are wrong as well.
            pytest.fail("values were compared although there are races")
        except ci.BarrierError:
            found = "race" if fault == "missing_empty_wait" else "barrier"
        assert found == "race"


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_right_specialized_kernel_is_right_and_quiet(num_devices):
    for seed in SEEDS:
        assert verdict(specialized(num_devices, None), seed) == "right"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring", "specialized", "two_ctas", "push"])
def test_no_false_alarm_in_200_shuffled_runs(name):
    run = {
        "ring": lambda sim: kernels.run_ring(sim, 4),
        "specialized": specialized(3, None),
        "two_ctas": two_ctas(3, one_counter=False),
        "push": push(3, "poll"),
    }[name]
    assert {verdict(run, seed) for seed in range(200)} == {"right"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", kernels.RING_FAULTS)
def test_no_missed_fault_in_50_shuffled_runs(fault):
    num_devices, check = kernels.RING_FAULTS[fault]
    run = lambda sim: kernels.run_ring(sim, num_devices, fault)
    assert {verdict(run, seed) for seed in range(50)} == {check}
