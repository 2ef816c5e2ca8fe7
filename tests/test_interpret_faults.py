"""Seeded faults: each is caught by the check it names, its twin is quiet."""

import interpret_kernels as kernels
import jax
import numpy as np
import pytest
from interpret_matmul import specialized_matmul
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
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
    f, x, want = kernels.push(fault, num_devices)
    return lambda sim: (np.asarray(sim.run(f, x)), want)


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
        out, a_left = specialized_matmul(a, b, "x", num_devices, fault)
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


# --- Signals that nobody awaits ------------------------------------------------


def signals(num_devices, send, receive, num_ctas=1):
    """A kernel that copies its block; `send` and `receive` get two semaphores, and the devices above and below."""

    def shard(x):
        def body(x_ref, out_ref):
            semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR((2,)))
            me = lax.axis_index("x")
            up, down = ({"x": lax.rem(me + n, num_devices)} for n in (1, num_devices - 1))
            send(semaphores, down)
            rows = pl.ds(lax.axis_index("cta") * (kernels.M // num_ctas), kernels.M // num_ctas)
            out_ref[rows] = x_ref[rows]
            receive(semaphores, up)

        grid = dict(grid=(num_ctas,), grid_names=("cta",))
        return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), **grid)(x)

    x = kernels.blocks(num_devices)
    f = kernels.sharded(shard, kernels.mesh_of(num_devices), P("x"), P("x"))
    return lambda sim: (np.asarray(sim.run(f, x)), x)


def signal_once(semaphores, peer):
    pl.semaphore_signal(semaphores.at[0], device_id=peer)


def signal_both(semaphores, peer):
    pl.semaphore_signal(semaphores.at[0], device_id=peer)
    pl.semaphore_signal(semaphores.at[1], device_id=peer)


def signal_twice(semaphores, peer):
    pl.semaphore_signal(semaphores.at[0], device_id=peer)
    pl.semaphore_signal(semaphores.at[0], device_id=peer)


def wait_for(index, value=1, decrement=True):
    return lambda semaphores, _: pl.semaphore_wait(semaphores.at[index], value=value, decrement=decrement)


def poll(semaphores, _):
    lax.while_loop(lambda _: pl.semaphore_read(semaphores.at[0]) < 2, lambda c: c, 0)


def wait_then_reply(semaphores, up):
    pl.semaphore_wait(semaphores.at[0])
    pl.semaphore_signal(semaphores.at[1], device_id=up)


def wait_reply_and_wait(semaphores, up):
    wait_then_reply(semaphores, up)
    pl.semaphore_wait(semaphores.at[1])


def sibling_waits(semaphores, _):
    pl.when(lax.axis_index("cta") == 1)(lambda: pl.semaphore_wait(semaphores.at[0], value=2))


def nobody_waits(semaphores, _):
    pass


UNHEARD = {  # fault -> (send, receive, a receive that hears all signals, number of CTAs)
    "no_wait": (signal_twice, nobody_waits, wait_for(0, 2), 1),
    "one_too_many": (signal_twice, wait_for(0), wait_for(0, 2), 1),
    "one_too_many_counted": (signal_twice, wait_for(0, 1, False), wait_for(0, 2, False), 1),
    "one_too_many_polled": (signal_twice, nobody_waits, poll, 1),
    # The second signal tells of the first, so the wait for it hears of both.
    "earlier_of_two_semaphores": (signal_both, wait_for(0), wait_for(1), 1),
    "last_reply": (signal_once, wait_then_reply, wait_reply_and_wait, 1),
    "no_cta_waits": (signal_once, nobody_waits, sibling_waits, 2),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", UNHEARD)
def test_remote_signal_that_nobody_awaits(fault, seed):
    send, receive, right, num_ctas = UNHEARD[fault]
    for late in ((), ci.Late(1e-4, device=0)):
        assert verdict(signals(3, send, receive, num_ctas), seed, late=late) == "race"
        assert verdict(signals(3, send, right, num_ctas), seed, late=late) == "right"


def test_report_of_a_signal_names_line_sender_receiver_and_semaphore():
    one_signals_zero = lambda s, down: pl.when(lax.axis_index("x") == 1)(lambda: signal_twice(s, down))
    zero_waits = lambda s, up: pl.when(lax.axis_index("x") == 0)(lambda: wait_for(0)(s, up))
    with ci.simulate(on_race="record") as sim:
        signals(3, one_signals_zero, zero_waits)(sim)
    (race,) = sim.races
    assert race.buffer == "semaphore global 0[0] of device 0"
    assert race.reason.startswith("no wait of device 0 has learned of this remote signal before its kernel ended")
    assert (race.first.action, race.first.device, race.first.region, race.second) == ("signal", 1, (), None)
    assert "test_interpret_faults.py" in race.first.source and "(signal_twice" in race.first.source
    assert str(race).splitlines()[1:] == [
        f"  signal from device 1, CTA 0, warpgroup 0 at {race.first.source}",
        "  end of the owner's kernel",
    ]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("late_device", [0, 1])
def test_signal_is_reported_whether_it_comes_before_or_after_the_end(seed, late_device):
    # Device 1 signals device 0, late or to a late one.
    send = lambda s, down: pl.when(lax.axis_index("x") == 1)(lambda: signal_once(s, down))
    with ci.simulate(seed=seed, on_race="record", late=ci.Late(1e-4, device=late_device)) as sim:
        signals(2, send, nobody_waits)(sim)
    signal = next(e for e in sim.events if e.kind == "signal")
    end = next(e for e in sim.events if e.kind == "kernel" and e.device == 0)
    assert (signal.end_s > end.end_s) == (late_device == 1)
    (race,) = sim.races
    assert (race.first.device, race.buffer) == (1, "semaphore global 0[0] of device 0")


def test_local_signals_that_nobody_awaits_are_harmless():
    plain = lambda s, _: pl.semaphore_signal(s.at[0])
    to_itself = lambda s, _: pl.semaphore_signal(s.at[0], device_id={"x": lax.axis_index("x")})
    for send in (plain, to_itself):
        for seed in SEEDS:
            assert verdict(signals(3, send, nobody_waits), seed) == "right"
            assert verdict(signals(3, send, nobody_waits, num_ctas=2), seed) == "right"


def test_signals_are_not_looked_at_without_race_detection():
    assert verdict(signals(3, signal_twice, nobody_waits), 0, detect_races=False) == "right"


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
