"""What a call records from inside is complete, and agrees with what the simulator has seen."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from traced_calls import CASES, SMALL, each_kernel, traced_call

import cmm.interpret as ci
from cmm.hopper import (
    clocks,
)
from cmm.hopper.marks import LOADER, ROLES, SENDER, Delay
from cmm.trace.record import KERNELS, record_events


@pytest.fixture(scope="module", params=KERNELS)
def traced(request):
    """A recorded call on three devices, every product noted, and what the simulator has seen."""
    return traced_call(request.param, axis_size=3, every=1, shape=(256, 256, 192))


@each_kernel
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_mark_is_made_and_causes_come_first(kernel, case):
    trace, _ = traced_call(kernel, *case)
    assert trace.missing() == 0
    checked, worst_ns = trace.causality()
    assert checked and worst_ns <= 0
    times = trace.times
    assert np.nanmin(times.marks) >= 0 and np.nanmax(times.marks) <= times.end.max()
    for name in ("empty", "full", "store"):
        for role in range(trace.layout.num_roles):
            begin, end = trace.spans(name, role)
            assert not (end < begin).any()


@each_kernel
@pytest.mark.parametrize("seed", range(2))
def test_result_is_right(make_case, kernel, seed):
    case = make_case(256, 256, 192, "float16", (3,), seed=seed)
    program = jax.jit(
        jax.shard_map(
            lambda lhs, rhs: record_events(lhs, rhs, "x", kernel, SMALL),
            mesh=case.mesh,
            in_specs=(case.rows, case.columns),
            out_specs=(case.columns, P("x")),
        )
    )
    with ci.simulate(core_count=2, seed=seed) as sim:  # Raises if there is a race.
        out, raw = sim.run(program, case.lhs, case.rhs)
    case.assert_right(out)
    assert raw.shape[:3] == (3, 2, 3 if kernel == "pallas" else 4)


def test_times_are_those_of_the_simulator(traced):
    trace, sim = traced
    call = sorted({e.call for e in sim.events if e.kind == "tile_product"})[-1]
    seen = [e for e in sim.events if e.call == call]
    for device in range(3):
        for cta in range(2):
            mine = [e for e in trace.events([cta]) if e.device == device]
            theirs = [e for e in seen if (e.device, e.cta) == (device, cta)]
            ends = lambda events: np.sort([e.end_s for e in events if e.kind == "wait"])
            assert len(ends(mine)) and len(ends(mine)) == len(ends(theirs))
            # The first CTA begins a moment after the call, and operations between two marks take a moment, too.
            assert np.abs(ends(theirs) - ends(mine)).max() < 1e-6 < clocks.SIMULATED_SKEW_NS * 1e-9
            for kind in ("send", "signal", "tile_product"):
                count = [sum(e.kind == kind for e in events) for events in (mine, theirs)]
                assert count[0] == count[1], kind
            flops = [sum(e.flops for e in events) for events in (mine, theirs)]
            assert flops[0] == flops[1]


def test_bytes_sent(traced):
    trace, _ = traced
    one_shard = 256 * 256 * 2
    assert [ci.bytes_sent(trace.events(), device=d, peer=(d - 1) % 3) for d in range(3)] == [2 * one_shard] * 3


def test_wrong_offsets_break_causality(traced):
    trace, _ = traced
    # As if nobody had brought the timers together: each device 100 µs ahead of the one before.
    shift = lambda times: times + 1e5 * np.arange(3).reshape(-1, *[1] * (times.ndim - 1))
    times = dataclasses.replace(trace.times, marks=shift(trace.times.marks))
    assert dataclasses.replace(trace, times=times).causality()[1] > 1e4


@pytest.mark.parametrize("kernel, role", [(k, r) for k in KERNELS for r in range(4) if (k, r) != ("pallas", SENDER)])
def test_planted_delay_is_seen_where_it_is(kernel, role):
    delay = Delay(device=1, cta=1, role=role, use=12)
    config = dataclasses.replace(SMALL, chunks=4)  # Chunks of two products, of which every second is noted.
    trace, _ = traced_call(kernel, every=2, shape=(256, 512, 192), config=config, delay=delay)
    (event,) = [e for e in trace.events() if e.kind == "delay"]
    assert (event.device, event.cta, event.role) == (1, 1, ROLES[role])
    assert 18e-6 < event.end_s - event.start_s < 22e-6
    name = "empty" if role == LOADER else "full"
    begin, end = trace.spans(name, role)[:, 1, 1, delay.use // 2] * 1e-9
    assert begin <= event.start_s and event.end_s <= end
    assert trace.missing() == 0 and trace.causality()[1] <= 0


def test_late_cta_is_seen_in_the_waits_of_others():
    usual, _ = traced_call("pallas", every=1)
    late, _ = traced_call("pallas", every=1, delay=Delay(device=1, cta=0, role=0, use=0, duration_ns=200_000))
    longest = lambda trace, device: np.nanmax(np.diff(trace.spans("ready", LOADER)[:, device], axis=0))
    assert longest(late, 0) > 100e3 > longest(usual, 0)


def test_wrong_arguments():
    trace = functools.partial(traced_call, shape=(128, 256, 64))
    with pytest.raises(ValueError, match="kernel must be one of"):
        trace("ring")
    with pytest.raises(ValueError, match="every=3 must divide 4"):
        trace("pallas", every=3)
