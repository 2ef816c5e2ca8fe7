"""Recording ring kernels from inside: absent unless asked for, complete, right about time, and honest about clocks."""

import ast
import dataclasses
import functools
import importlib.util
import inspect
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cmm.interpret as ci
from cmm import devices
from cmm.hopper import (
    MatmulDimension,
    TuningConfig,
    all_gather_lhs_matmul,
    all_gather_lhs_matmul_fast,
    clocks,
    roles,
)
from cmm.hopper.marks import BEGIN, END, HEADER, LOADER, ROLES, SENDER, TICK, Delay
from cmm.plots.kernel_timeline import draw_kernel_timeline, step_change
from cmm.roofline import Problem
from cmm.trace import __main__ as command, file as trace_file
from cmm.trace.call import read_trace, trace_call
from cmm.trace.critical import call_us, critical_parts_us
from cmm.trace.offsets import Offsets, clock_program, offsets_from
from cmm.trace.record import KERNELS, record_events, recorded_program
from cmm.trace.summary import summarize
from cmm.trace.times import device_times

FUNCTIONS = {"pallas": all_gather_lhs_matmul, "pallas_fast": all_gather_lhs_matmul_fast}
each_kernel = pytest.mark.parametrize("kernel", KERNELS)

SMALL = TuningConfig(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2)
CASES = {
    "two devices": (2, 2, SMALL, None, (256, 512, 192)),
    "three devices": (3, 2, SMALL, 1, (256, 256, 192)),
    "minor N": (
        2,
        3,
        dataclasses.replace(SMALL, grid_minor_dim=MatmulDimension.N, grid_tile_width=2),
        1,
        (384, 512, 192),
    ),
    "two chunks": (2, 4, dataclasses.replace(SMALL, chunks=2, signal_lag=1, grid_tile_width=1), 2, (256, 512, 256)),
}


@functools.cache  # Several tests look at the same call.
def _trace(kernel, axis_size=2, core_count=2, config=SMALL, every=None, shape=(256, 512, 192), seed=0, delay=None):
    mesh = devices.ring_mesh(jax.devices("cpu")[:axis_size])
    problem = Problem(axis_size, *shape, "float16")
    with ci.simulate(seed=seed, core_count=core_count) as sim:
        trace = trace_call(problem, mesh, kernel, config, every=every, calls=1, run=sim.run, delay=delay)
    return trace, sim


@pytest.fixture(scope="module", params=KERNELS)
def traced(request):
    """A recorded call on three devices, every product noted, and what the simulator has seen."""
    return _trace(request.param, axis_size=3, every=1, shape=(256, 256, 192))


def _lower(function, axis_size=2, out_specs=None):
    return ci.lower_for_cuda(
        function,
        jax.ShapeDtypeStruct((1024 * axis_size, 4096), jnp.float16),
        jax.ShapeDtypeStruct((4096, 4096 * axis_size), jnp.float16),
        mesh_axes={"x": axis_size},
        in_specs=(P("x", None), P(None, "x")),
        out_specs=out_specs or P(None, "x"),
    )


class _WithoutHooks(ast.NodeTransformer):
    """Takes everything out of a module that has to do with recording."""

    def visit_With(self, node):
        self.generic_visit(node)
        return node.body if "marks.span" in ast.unparse(node.items[0]) else node

    def visit_Expr(self, node):
        return None if ast.unparse(node).startswith("marks.mark(") else node


def _without_hooks(module):
    spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
    stripped = importlib.util.module_from_spec(spec)
    tree = _WithoutHooks().visit(ast.parse(inspect.getsource(module)))
    assert "marks.span" not in ast.unparse(tree) and "marks.mark(" not in ast.unparse(tree)
    exec(compile(ast.fix_missing_locations(tree), module.__file__, "exec"), vars(stripped))
    return stripped


@each_kernel
def test_without_a_recorder_the_kernel_is_as_if_there_were_none(kernel):
    texts = []
    for bare in (False, True, False):  # One line lowers all, for lowered kernels hold the lines that they come from.
        with pytest.MonkeyPatch.context() as patch:
            function = FUNCTIONS[kernel]
            if bare:
                bare_roles, module = _without_hooks(roles), _without_hooks(sys.modules[function.__module__])
                patch.setattr(module, "roles", bare_roles)
                patch.setattr(sys.modules["cmm.hopper.matmul"], "roles", bare_roles)
                function = getattr(module, function.__name__)
            texts.append(_lower(functools.partial(_along_x, function)))
    before, without, after = (re.sub(r'anonymous_?\d*|kernel_hash = "[^"]*"', "", text) for text in texts)
    # JAX numbers the kernels that it lowers; the one before or the one after has a number of as many digits.
    assert without in (before, after)
    assert "clock64" not in before and "globaltimer" not in before


def _along_x(function, lhs, rhs):
    return function(lhs, rhs, "x")


@each_kernel
@pytest.mark.parametrize("axis_size", [2, 4, 8])
def test_recorded_kernel_lowers_for_cuda(kernel, axis_size):
    record = lambda lhs, rhs: record_events(lhs, rhs, "x", kernel, delay=Delay(0, 1, LOADER, 16))
    text = _lower(record, axis_size, (P(None, "x"), P("x")))
    assert text.count("mosaic_gpu_v2") == 1
    assert "clock64" in text and "globaltimer" in text


@pytest.mark.parametrize("axis_size", [2, 3, 8])
def test_clock_kernel_lowers_for_cuda(axis_size):
    device = jax.sharding.AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((axis_size,), ("x",), abstract_device=device)
    operand = jax.ShapeDtypeStruct((axis_size,), jnp.int32, sharding=jax.sharding.NamedSharding(mesh, P("x")))
    with jax.sharding.use_abstract_mesh(mesh):
        text = clock_program(mesh).trace(operand).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1 and "clock64" in text


@each_kernel
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_mark_is_made_and_causes_come_first(kernel, case):
    trace, _ = _trace(kernel, *case)
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
    trace, _ = _trace(kernel, every=2, shape=(256, 512, 192), config=SMALL, delay=delay)
    (event,) = [e for e in trace.events() if e.kind == "delay"]
    assert (event.device, event.cta, event.role) == (1, 1, ROLES[role])
    assert 18e-6 < event.end_s - event.start_s < 22e-6
    name = "empty" if role == LOADER else "full"
    begin, end = trace.spans(name, role)[:, 1, 1, delay.use // 2] * 1e-9
    assert begin <= event.start_s and event.end_s <= end
    assert trace.missing() == 0 and trace.causality()[1] <= 0


def test_late_cta_is_seen_in_the_waits_of_others():
    usual, _ = _trace("pallas", every=1)
    late, _ = _trace("pallas", every=1, delay=Delay(device=1, cta=0, role=0, use=0, duration_ns=200_000))
    longest = lambda trace, device: np.nanmax(np.diff(trace.spans("ready", LOADER)[:, device], axis=0))
    assert longest(late, 0) > 100e3 > longest(usual, 0)


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


@pytest.mark.parametrize("tick_ns, source", [(32, "timer"), (1000, "cycles")])
def test_the_length_of_a_cycle_may_change(tick_ns, source):
    error_ns, clock = _largest_error_ns(*_fake_record(tick_ns, rates=(1.7, 1.8)))
    assert clock.source == source and clock.disagreement_ns > 1000
    # What cycles cannot tell, the clock at least says.
    assert error_ns <= (32 if source == "timer" else clock.error_ns + tick_ns)
    assert clock.error_ns == 32 if source == "timer" else clock.error_ns > 1000


def test_a_record_of_nothing_is_refused():
    raw, _ = _fake_record(32)
    with pytest.raises(ValueError, match="no record of a call"):
        device_times(np.zeros_like(raw))


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


def test_file_keeps_what_figures_need(traced, tmp_path):
    trace, _ = traced
    problem = Problem(3, 256, 256, 192, "float16")
    path = trace_file.write(trace_file.to_record(trace, problem, summarize(trace)), tmp_path / "trace.json")
    again = trace_file.from_record(trace_file.read(path))
    kept = trace_file.kept_ctas(trace.layout)
    assert [e.kind for e in again.events(kept)] and again.layout == trace.layout
    np.testing.assert_allclose(again.times.marks[:, kept], trace.times.marks[:, kept], atol=0.5, equal_nan=True)
    np.testing.assert_allclose(again.times.end, trace.times.end, atol=0.5)


def test_perfetto_file(traced, tmp_path):
    trace, _ = traced
    rows = json.loads(trace_file.write_perfetto(trace, tmp_path / "p.json", ctas=[0]).read_text())["traceEvents"]
    named = {(r["pid"], r["tid"]) for r in rows if r["name"] == "thread_name"}
    assert {(r["pid"], r["tid"]) for r in rows if r["ph"] != "M"} == named
    assert {r["pid"] for r in rows} == {0, 1, 2}
    for thread in named:
        slices = sorted(
            (r["ts"], r["ts"] + r["dur"]) for r in rows if r["ph"] == "X" and (r["pid"], r["tid"]) == thread
        )
        # One after the other, or one inside the other.
        for index, (_, end) in enumerate(slices):
            assert all(end <= later + 1e-3 or ends <= end + 1e-3 for later, ends in slices[index + 1 :])


def test_numbers(traced):
    trace, _ = traced
    summary = summarize(trace)
    assert len(summary["call_us"]) == 3 and min(summary["call_us"]) > 10
    assert 0 < summary["hidden_send_share"] <= 1
    assert summary["step_change_us"]["count"] == 2 * 2 * 2 * 3  # Roles, CTAs, changes, devices.
    waits = {(w["role"], w["reason"]): w for w in summary["waits"]}
    begin, end = trace.spans("full", 0)
    full = waits["multiplier 0", "full stage"]
    assert full["per_cta_us"] == pytest.approx(np.nansum(end - begin) / 1e3 / 6, abs=2e-3) and not full["sampled"]
    assert waits["loader", "signals"]["count"] == sum(e.kind == "wait" for e in trace.events())


@pytest.mark.parametrize("causal", [False, True])
def test_figure(traced, causal):
    trace, _ = traced
    events = trace.events()
    low_s, high_s = step_change(events)
    assert {e.step for e in events if e.kind == "tile_product" and low_s < e.end_s and e.start_s < high_s} >= {0, 1}
    fig = draw_kernel_timeline(events, "Change of step", causal=causal)
    names = [text.get_text() for text in fig.axes[0].texts]
    assert [name for name in names if name.startswith("device")] == ["device 0", "device 1", "device 2"]
    assert names.count("CTA 0") == names.count("CTA 1") == 3
    with pytest.raises(ValueError, match="Nothing happens"):
        draw_kernel_timeline(events, "Nothing", window_s=(5.0, 6.0))


@each_kernel
def test_command(kernel, tmp_path, capsys):
    shape = ["--devices", "2", "--m-shard", "128", "--k", "256", "--n-shard", "64"]
    arguments = [
        "--simulate",
        "--kernel",
        kernel,
        *shape,
        "--out",
        str(tmp_path),
        "--perfetto",
        str(tmp_path / "p.json"),
    ]
    assert command.main(arguments) == 0
    (path,) = tmp_path.glob("trace_*.json")
    record = trace_file.read(path)
    assert record["simulated"] and record["cost_us"] is None and record["command"].endswith(str(tmp_path / "p.json"))
    assert "Simulated devices" in capsys.readouterr().out


def test_command_says_what_does_not_work(tmp_path, capsys):
    assert command.main(["--devices", "2", "--out", str(tmp_path)]) == 2
    assert "needs Hopper GPUs" in capsys.readouterr().out


def test_wrong_arguments():
    trace = functools.partial(_trace, shape=(128, 256, 64))
    with pytest.raises(ValueError, match="kernel must be one of"):
        trace("ring")
    with pytest.raises(ValueError, match="every=3 must divide 4"):
        trace("pallas", every=3)


@each_kernel
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_parts_of_the_critical_chain_add_up(kernel, case):
    trace, _ = _trace(kernel, *case)
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
    ring, _ = _trace(kernel, *CASES[case])
    assert trace.missing() == 0 and {e.kind for e in trace.events()}.isdisjoint({"send", "signal", "wait"})
    products = lambda t: sorted((e.cta, e.role, e.step, e.tile, e.k_step) for e in t.events(kinds=("tile_product",)))
    assert products(trace) == products(ring)
    for device, call in enumerate(call_us(trace)):
        parts = critical_parts_us(trace, device)
        assert sum(parts.values()) == pytest.approx(call, abs=1e-3)
        assert not any(parts[name] for name in ("device_start", "drain", "announce", "flight", "wait"))


@each_kernel
def test_one_device_is_its_own_twin(kernel):
    trace, _ = _trace(kernel, axis_size=1, every=1, shape=(256, 256, 192))
    assert trace.missing() == 0 and trace.causality() == (0, -np.inf)
    assert summarize(trace)["step_change_us"] is None


def test_a_pause_of_the_sender_lengthens_the_chain_of_the_device_below():
    """The readable kernel on two devices: a CTA of column 0 of device 1 pauses, and device 0 waits for it."""
    usual, _ = _trace("pallas", every=1)
    sender = int(np.flatnonzero((usual.cells.exists & (usual.cells.n_tile == 0)).any(axis=1))[0])
    cell = int(np.flatnonzero(usual.cells.opens_tile[sender] & (usual.cells.n_tile[sender] == 0))[0])
    late, _ = _trace("pallas", every=1, delay=Delay(device=1, cta=sender, role=0, use=cell + 1, duration_ns=200_000))
    more = {name: value - critical_parts_us(usual, 0)[name] for name, value in critical_parts_us(late, 0).items()}
    assert more["products_sending"] > 150
    assert sum(abs(value) for name, value in more.items() if name != "products_sending") < 50
