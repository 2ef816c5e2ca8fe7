"""Recording ring kernels on real GPUs: right, complete, causal, and a planted pause is seen where it is.

`-s` shows what was found: resolution and agreement of clocks, and what recording costs. Each kernel is compiled once as
it is, once recorded, and once for each planted pause; that takes most of the time.
"""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from rich.console import Console

import cmm
from cmm import devices
from cmm.hopper.marks import LOADER, ROLES, SENDER, Delay
from cmm.roofline import Problem
from cmm.trace import file as trace_file
from cmm.trace.account_run import measure_account
from cmm.trace.account_table import print_account
from cmm.trace.call import read_trace, trace_call
from cmm.trace.cells import cells_of
from cmm.trace.cost import kernel_times_us
from cmm.trace.critical import call_us, critical_parts_us
from cmm.trace.offsets import Offsets
from cmm.trace.record import KERNELS, recorded_program
from cmm.trace.summary import summarize

pytestmark = pytest.mark.gpu

SHAPE = (1024, 4096, 4096)
CTA = 3
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


@pytest.fixture(scope="module")
def mesh():
    """All GPUs; skips where there are fewer than two, or not of the Hopper generation."""
    try:
        found = jax.devices("gpu")
    except RuntimeError:
        found = []
    if len(found) < 2 or not found[0].compute_capability.startswith("9."):
        pytest.skip(f"needs 2 Hopper GPUs, found {[device.device_kind for device in found]}")
    return devices.ring_mesh(found)


def _problem(mesh):
    return Problem(mesh.size, *SHAPE, "float16")


@functools.cache  # Several tests look at the same call.
def _trace(kernel, mesh):
    return trace_call(_problem(mesh), mesh, kernel)


@each_kernel
def test_recorded_kernel_gives_the_same_bits(mesh, kernel):
    operands = devices.random_operands(_problem(mesh), mesh, seed=1)
    plain = jax.shard_map(
        lambda lhs, rhs: cmm.all_gather_matmul(lhs, rhs, "x", method=kernel),
        mesh=mesh,
        in_specs=(P("x", None), P(None, "x")),
        out_specs=P(None, "x"),
    )
    recorded, _ = recorded_program(_problem(mesh), mesh, kernel)
    expected = np.asarray(jax.jit(plain)(*operands))
    for _ in range(3):
        out, _ = recorded(*operands)
        np.testing.assert_array_equal(np.asarray(out), expected)


@each_kernel
def test_call_is_complete_and_causal(mesh, kernel, tmp_path):
    trace = _trace(kernel, mesh)
    summary = summarize(trace)
    path = trace_file.write(trace_file.to_record(trace, _problem(mesh), summary), tmp_path / "trace.json")
    print(f"\n{kernel}: {summary}\nfile: {path.stat().st_size / 1024:.0f} KB")
    assert trace.missing() == 0
    checked, worst_ns = trace.causality()
    assert checked and worst_ns <= 0
    assert abs(trace.offsets.closure_ns) <= trace.offsets.closure_bound_ns
    for clock in trace.clocks:
        assert 0.3 < clock.cycles_per_ns < 2.5 and clock.tick_ns <= 2000
        # Where only cycles are fine enough, they change their length during a call.
        assert clock.error_ns <= (100 if clock.source == "timer" else 5000)
    # A signal to a neighbour and back takes about 3 µs.
    assert max(trace.offsets.bound_ns) < 2500
    # Sends of a whole call, and no time outside of it.
    assert np.nanmin(trace.times.marks) >= 0 and np.nanmax(trace.times.marks) <= trace.times.end.max()
    assert 20 < min(summary["call_us"]) and max(summary["call_us"]) < 2000


def _plant(kernel, mesh, role):
    """Returns a pause in the second cell of step 1 of a CTA, or in its only one."""
    _, layout = recorded_program(_problem(mesh), mesh, kernel)
    cells = cells_of(layout)
    k_step = min(layout.every, layout.plan.k_steps - layout.every)
    cell = np.flatnonzero(cells.exists[CTA] & (cells.step[CTA] == 1) & (cells.k_step[CTA] == k_step))[0]
    return Delay(device=1, cta=CTA, role=role, use=int(cell) * layout.every), cell


@pytest.mark.parametrize(
    "kernel, role", [("pallas", 0), ("pallas", LOADER), ("pallas_fast", 1), ("pallas_fast", SENDER)]
)
def test_planted_pause_is_seen_where_it_is(mesh, kernel, role):
    delay, cell = _plant(kernel, mesh, role)
    trace = trace_call(_problem(mesh), mesh, kernel, delay=delay)
    (event,) = trace.events(kinds=("delay",))
    length_us = (event.end_s - event.start_s) * 1e6
    name = "empty" if role == LOADER else "full"
    begin, end = trace.spans(name, role)[:, 1, CTA, cell] * 1e-3
    usual = np.diff(_trace(kernel, mesh).spans(name, role)[:, 1, CTA, cell], axis=0)[0] * 1e-3
    print(f"\n{kernel}, {ROLES[role]}: pause of {length_us:.2f} µs in a wait of {end - begin:.2f} µs, else {usual:.2f}")
    assert (event.device, event.cta, event.role) == (1, CTA, ROLES[role])
    assert abs(length_us - 20) <= 2
    assert begin <= event.start_s * 1e6 and event.end_s * 1e6 <= end
    assert end - begin > usual
    assert trace.missing() == 0 and trace.causality()[1] <= 0


@each_kernel
def test_what_recording_costs(mesh, kernel):
    times_us = kernel_times_us(_problem(mesh), mesh, kernel, {"chunks": None, "products": 1})
    print(f"\n{kernel}: kernel time in µs by what is noted: {times_us}")
    assert 0 < times_us["nothing"] and times_us["products"] < 2 * times_us["nothing"]


@each_kernel
def test_twin_gives_the_same_bits_and_sends_nothing(mesh, kernel):
    lhs, rhs = devices.random_operands(_problem(mesh), mesh, seed=1)
    expected, _ = recorded_program(_problem(mesh), mesh, kernel)[0](lhs, rhs)
    program, layout = recorded_program(_problem(mesh), mesh, kernel, twin=True)
    out, raw = program(jax.device_put(lhs, NamedSharding(mesh, P(None, None))), rhs)
    # Each device of the ring begins with its own shard, the twin with the first: the same products in another order.
    np.testing.assert_array_equal(np.asarray(out), np.asarray(expected))
    trace = read_trace(kernel, layout, raw, Offsets.none(mesh.size))
    assert trace.missing() == 0 and trace.causality()[0] == 0


@each_kernel
def test_one_device(mesh, kernel):
    problem = Problem(1, mesh.size * SHAPE[0], *SHAPE[1:], "float16")
    trace = trace_call(problem, devices.ring_mesh(mesh.devices.flat[:1]), kernel)
    parts = critical_parts_us(trace, 0)
    print(f"\n{kernel} on one device: {parts}")
    assert trace.missing() == 0
    assert sum(parts.values()) == pytest.approx(call_us(trace)[0], abs=1e-3)


def test_account_explains_what_kernels_take_longer(mesh):
    account = measure_account(_problem(mesh), mesh, ("naive", *KERNELS), rounds=8)
    print_account(Console(width=160), account)
    assert [method.name for method in account.methods] == ["gemm_only", "naive", *KERNELS], account.skipped
    *_, readable, fast = account.methods
    # What no term explains is at most 5 % of the call, and of the kernel little more than the spread of its times.
    for method in account.methods:
        assert abs(method.rest_us.median) < 0.05 * method.wall_us.median
    for method in (readable, fast):
        assert abs(method.kernel.rest_us.median) < 0.02 * method.kernel_us.median
        assert method.kernel.clock_error_ns <= 100
        # Noting what happens must not change what happens.
        assert abs(method.kernel.recording_us.median) < 0.02 * method.kernel_us.median
