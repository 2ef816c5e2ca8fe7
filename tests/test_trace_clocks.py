"""Times of a record are fine though timers are coarse, and clocks of devices are brought together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cmm.interpret as ci
from cmm import devices
from cmm.hopper import clocks
from cmm.hopper.marks import BEGIN, END, HEADER, LOADER, TICK
from cmm.trace.offsets import Offsets, clock_program, offsets_from
from cmm.trace.times import device_times


def _fake_record(tick_ns, num_ctas=16, rates=(1.755, 1.755), seed=0):
    """Returns what multiprocessors with clocks of their own note under a timer, and the truth.

    They run at one rate in the first half of the call, at another one in the second.
    """
    rng = np.random.default_rng(seed)
    start_ns, cells = 1_700_000_000_123_456_789, 8
    marks_ns = np.sort(rng.uniform(1e3, 199e3, (num_ctas, 3, cells)), axis=-1)
    begin_ns, end_ns = rng.uniform(0, 1e3, (num_ctas, 3)), rng.uniform(199e3, 200e3, (num_ctas, 3))
    first_cycle = rng.integers(1 << 40, 1 << 44, num_ctas)
    counted = lambda ns: rates[0] * np.minimum(ns, 1e5) + rates[1] * np.maximum(ns - 1e5, 0)
    cycles = lambda ns: first_cycle.reshape(-1, *[1] * (np.ndim(ns) - 1)) + np.rint(counted(ns)).astype(np.int64)
    timer = lambda ns: (start_ns + np.int64(ns)) // tick_ns * tick_ns
    values = np.full((num_ctas, 3, HEADER + cells), np.iinfo(np.int64).max)
    for slot, ns in ((BEGIN, begin_ns), (END, end_ns)):
        values[:, :, slot], values[:, :, slot + 1] = cycles(ns), timer(ns)
    tick = timer(end_ns[:, LOADER]) + tick_ns
    at_tick = cycles((tick - start_ns).astype(float))
    values[:, LOADER, TICK], values[:, LOADER, TICK + 1], values[:, LOADER, TICK + 2] = at_tick - 20, at_tick + 20, tick
    halves = np.stack([values & 0xFFFFFFFF, values >> 32], axis=-1).astype(np.uint32).view(np.int32)
    as_mark = lambda ns: np.stack([cycles(ns), timer(ns)], axis=-1).astype(np.uint32).view(np.int32)
    halves[:, :, HEADER:] = as_mark(marks_ns)
    halves[3, 1, HEADER + 2] = as_mark(begin_ns - 5000)[3, 1]  # Left from an earlier call.
    return halves, marks_ns - (tick[0] - start_ns)


def _largest_error_ns(raw, truth_ns):
    times, _, clock = device_times(raw)
    error = np.abs(times[:, :, HEADER:] - truth_ns)
    assert np.isnan(error[3, 1, 2]) and np.isnan(error).sum() == 1
    return np.nanmax(error), clock


@pytest.mark.parametrize("tick_ns", [1000, 1024])
def test_cycles_give_fine_times_though_the_timer_is_coarse(tick_ns):
    error_ns, clock = _largest_error_ns(*_fake_record(tick_ns))
    assert clock.tick_ns % tick_ns == 0 and clock.cycles_per_ns == pytest.approx(1.755, rel=2e-3)
    assert clock.source == "cycles" and error_ns <= clock.error_ns + tick_ns / 5
    assert clock.disagreement_ns < 150 + 0.2 * tick_ns


def test_what_nobody_wrote_is_no_time_even_if_it_looks_like_nanoseconds_of_this_call():
    raw, truth_ns = _fake_record(32)
    raw[3, 1, HEADER + 2] = raw[3, 1, HEADER + 3] + np.int32([10**8, 0])
    _, clock = _largest_error_ns(raw, truth_ns)
    assert clock.disagreement_ns < 200


@pytest.mark.parametrize("tick_ns, source", [(32, "timer"), (1000, "cycles")])
def test_the_length_of_a_cycle_may_change(tick_ns, source):
    error_ns, clock = _largest_error_ns(*_fake_record(tick_ns, rates=(1.7, 1.8)))
    assert clock.source == source and clock.disagreement_ns > 1000
    # What cycles cannot tell, the clock at least says.
    assert error_ns <= (32 if source == "timer" else clock.error_ns + tick_ns)
    assert clock.error_ns == 32 if source == "timer" else clock.error_ns > 1000


def test_a_record_of_nothing_is_refused():
    raw, _ = _fake_record(32)
    with pytest.raises(ValueError, match="no record of a call: CTA 0 has seen the timer tick at 0 ns"):
        device_times(np.zeros_like(raw))


@pytest.mark.parametrize("slot, what", [(BEGIN, "cycles, role 1 .* begins"), (END + 1, "timer, role 1 .* ends")])
def test_a_clock_that_one_role_has_not_read_is_named(slot, what):
    raw, _ = _fake_record(32)
    raw[5, 1, slot] = 0
    with pytest.raises(ValueError, match=what.replace(".*", "of CTA 5") + " at 0 "):
        device_times(raw)
    raw, _ = _fake_record(32)
    raw[5, LOADER, TICK + 2] = 0
    with pytest.raises(ValueError, match="CTA 5 has seen the timer tick at 0 ns"):
        device_times(raw)


@pytest.mark.parametrize("slot, clock", [(BEGIN, "cycles"), (BEGIN + 1, "timer")])
def test_clocks_that_run_backwards_are_named(slot, clock):
    raw, _ = _fake_record(32)
    raw[3, 1, slot, 1] += 1  # The high half.
    with pytest.raises(ValueError, match=rf"by the {clock}, 1 of 48 roles end .*, such as role 1 of CTA 3, from \d+"):
        device_times(raw)
    standing = raw.copy()
    standing[:, :, slot] = standing[:, :, slot + END - BEGIN]
    with pytest.raises(ValueError, match=f"by the {clock}, all of it takes no time"):
        device_times(standing)


@pytest.mark.parametrize("axis_size", [2, 3, 4])
def test_timers_of_devices_are_brought_together(axis_size):
    mesh = devices.ring_mesh(jax.devices("cpu")[:axis_size])
    operand = jax.device_put(jnp.zeros(axis_size, jnp.int32), jax.sharding.NamedSharding(mesh, P("x")))
    with ci.simulate(seed=1) as sim:
        offsets = offsets_from(sim.run(clock_program(mesh, rounds=5), operand))
    found, bounds = offsets.from_first()
    for device in range(axis_size):
        assert abs(found[device] - device * clocks.SIMULATED_SKEW_NS) <= bounds[device] + 1e-6
    assert abs(offsets.closure_ns) <= offsets.closure_bound_ns < clocks.SIMULATED_SKEW_NS


def test_offsets_go_round_the_ring_the_better_way():
    offsets = Offsets(pair_ns=(10.0, 20.0, -33.0), bound_ns=(1.0, 8.0, 2.0))
    assert offsets.from_first() == ([0, 10.0, 33.0], [0, 1.0, 2.0])
    assert (offsets.closure_ns, offsets.closure_bound_ns) == (-3.0, 11.0)
