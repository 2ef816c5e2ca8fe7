"""The chain of events that decides how long a call takes, and the twin of the call that sends nothing."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from traced_calls import CASES, each_kernel, traced_call

import cmm.interpret as ci
from cmm.hopper.marks import Delay
from cmm.roofline import Problem
from cmm.trace.call import read_trace
from cmm.trace.critical import call_us, critical_parts_us
from cmm.trace.offsets import Offsets
from cmm.trace.record import recorded_program
from cmm.trace.summary import summarize


@each_kernel
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_parts_of_the_critical_chain_add_up(kernel, case):
    trace, _ = traced_call(kernel, *case)
    for device, call in enumerate(call_us(trace)):
        parts = critical_parts_us(trace, device)
        assert sum(parts.values()) == pytest.approx(call, abs=1e-3)
        assert min(value for name, value in parts.items() if name != "device_start") >= 0


@each_kernel
@pytest.mark.parametrize("case", ["three devices", "minor N"])
def test_twin_makes_the_same_products_and_sends_nothing(make_case, kernel, case):
    axis_size, core_count, config, every, shape = CASES[case]
    operands = make_case(*shape[:2], shape[2], "float16", (axis_size,))
    problem = Problem(axis_size, *shape, "float16")
    lhs = operands.put(np.asarray(operands.lhs), "float16", P(None, None))
    with ci.simulate(core_count=core_count) as sim:
        program, layout = recorded_program(problem, operands.mesh, kernel, config, every, twin=True)
        out, raw = sim.run(program, lhs, operands.rhs)
    operands.assert_right(out)
    trace = read_trace(kernel, layout, raw, Offsets.none(axis_size))
    ring, _ = traced_call(kernel, *CASES[case])
    assert trace.missing() == 0 and {e.kind for e in trace.events()}.isdisjoint({"send", "signal", "wait"})
    products = lambda t: sorted((e.cta, e.role, e.step, e.tile, e.k_step) for e in t.events(kinds=("tile_product",)))
    assert products(trace) == products(ring)
    for device, call in enumerate(call_us(trace)):
        parts = critical_parts_us(trace, device)
        assert sum(parts.values()) == pytest.approx(call, abs=1e-3)
        assert not any(parts[name] for name in ("device_start", "drain", "announce", "flight", "wait"))


@each_kernel
def test_one_device_is_its_own_twin(kernel):
    trace, _ = traced_call(kernel, axis_size=1, every=1, shape=(256, 256, 192))
    assert trace.missing() == 0 and trace.causality() == (0, -np.inf)
    assert summarize(trace)["step_change_us"] is None


@pytest.mark.slow
def test_a_pause_of_the_sender_lengthens_the_chain_of_the_device_below():
    """The readable kernel on two devices: a CTA of column 0 of device 1 pauses, and device 0 waits for it."""
    usual, _ = traced_call("pallas", every=1)
    sender = int(np.flatnonzero((usual.cells.exists & (usual.cells.n_tile == 0)).any(axis=1))[0])
    cell = int(np.flatnonzero(usual.cells.opens_tile[sender] & (usual.cells.n_tile[sender] == 0))[0])
    late, _ = traced_call(
        "pallas", every=1, delay=Delay(device=1, cta=sender, role=0, use=cell + 1, duration_ns=200_000)
    )
    more = {name: value - critical_parts_us(usual, 0)[name] for name, value in critical_parts_us(late, 0).items()}
    assert more["products_sending"] > 150
    assert sum(abs(value) for name, value in more.items() if name != "products_sending") < 50
