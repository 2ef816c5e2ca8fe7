"""What makes a role of a kernel late: it hits whom it names, when it says, and the kernels stay right."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from late_kernels import ANY, SENDER, Calls, Late, assert_right, draw_late, late_shard, nap_shard

import cmm.interpret as ci
from cmm import devices
from cmm.hopper import (
    MatmulDimension,
    TuningConfig,
    all_gather_lhs_matmul,
    all_gather_lhs_matmul_fast,
    fast_kernel,
    matmul,
    ring_kernel,
    roles,
)
from cmm.hopper.plan import Plan
from cmm.roofline import Problem

KERNELS = {"readable": all_gather_lhs_matmul, "fast": all_gather_lhs_matmul_fast}
each_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
MODULES = {all_gather_lhs_matmul: ring_kernel, all_gather_lhs_matmul_fast: fast_kernel}

SMALL = TuningConfig(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2)
CTAS = 2


def _calls(kernel, axis_size, sim, dtype="float16", mesh_shape=None, axis="x", k=128, config=SMALL, **options):
    shape = mesh_shape or (axis_size,)
    mesh = jax.make_mesh(shape, ("x", "y")[: len(shape)], devices=devices.simulated_devices(int(np.prod(shape))))
    problem = Problem(axis_size, 256, k, 128, dtype)  # 2 x 2 tiles on CTAS CTAs; of 2 uses each if k is 128
    function = functools.partial(kernel, axis_name=axis, config=config)
    options |= {"num_ctas": CTAS, "config": config, "has_sender": kernel is all_gather_lhs_matmul_fast}
    return Calls(function, mesh, problem, axis, run=sim.run, **options)


@each_kernel
@pytest.mark.parametrize("axis_size, dtype, as_it_is", [(2, "float16", True), (3, "bfloat16", False)])
def test_ring_with_somebody_late(kernel, axis_size, dtype, as_it_is):
    with ci.simulate(core_count=CTAS, seed=axis_size) as sim:
        _calls(kernel, axis_size, sim, dtype, as_it_is=as_it_is).check(4)
    assert any(event.kind == "delay" for event in sim.events)


@pytest.mark.parametrize("chunks, lag", [(1, 0), (2, 2)])
def test_chunks_and_lags_with_somebody_late(chunks, lag):
    config = dataclasses.replace(SMALL, chunks=chunks, signal_lag=lag)
    with ci.simulate(core_count=CTAS, seed=lag) as sim:
        _calls(all_gather_lhs_matmul_fast, 3, sim, k=256, config=config, as_it_is=False).check(2, first_seed=lag)


@pytest.mark.parametrize("kernel, axis", [("readable", "x"), ("fast", "y")])
def test_two_rings_of_a_mesh_at_once(kernel, axis):
    with ci.simulate(core_count=CTAS, seed=0) as sim:
        _calls(KERNELS[kernel], 2, sim, mesh_shape=(2, 2), axis=axis, as_it_is=False).check(2)


def test_local_matmul_with_somebody_late():
    mesh = devices.ring_mesh(devices.simulated_devices(1))
    function = functools.partial(matmul, config=SMALL)
    with ci.simulate(core_count=CTAS, seed=0) as sim:
        Calls(function, mesh, Problem(1, 256, 128, 128), num_ctas=CTAS, config=SMALL, run=sim.run).check(4)


# By role: the events of one use, and how many of them there are.
EVENTS = {0: ("tile_product", 1), 1: ("tile_product", 1), roles.LOADER: ("load", 2), SENDER: ("barrier_wait", 1)}


@each_kernel
@pytest.mark.parametrize(
    "late, who",
    [
        (Late(0, 0, roles.LOADER, 0, 0, 3), {(0, 0, roles.LOADER)}),
        (Late(2, 0, roles.LOADER, 1, 3, 3), {(2, 0, roles.LOADER)}),
        (Late(2, 1, 0, 2, 0, 3), {(2, 1, 0)}),
        (Late(1, ANY, 1, 1, 0, 3), {(1, 0, 1), (1, 1, 1)}),
        (Late(1, 1, ANY, 0, 0, 3), {(1, 1, 0), (1, 1, 1), (1, 1, roles.LOADER), (1, 1, SENDER)}),
        (Late(2, 0, SENDER, 1, 0, 3), {(2, 0, SENDER)}),
        (Late(0, ANY, SENDER, 0, 1, 3), {(0, 0, SENDER), (0, 1, SENDER)}),
        (Late(1, 1, 0, 0, 0, 0), set()),
    ],
)
def test_the_one_who_is_named_sleeps_before_the_use(kernel, late, who):
    with ci.simulate(core_count=CTAS) as sim:
        calls = _calls(kernel, 3, sim)
        calls.call(calls.operands(0), late)
    if kernel is all_gather_lhs_matmul:
        who = {one for one in who if one[-1] != SENDER}
    naps = [event for event in sim.events if event.kind == "delay"]
    assert {(event.device, event.cta, _role(event)) for event in naps} == who
    assert len(naps) == late.naps * len(who)
    for device, cta, role in who:
        mine = [event for event in sim.events if (event.device, event.cta, _role(event)) == (device, cta, role)]
        before = [event.kind for event in mine[: [event.kind for event in mine].index("delay")]]
        kind, each = EVENTS[role]
        # Two tiles of two uses in each step; B of the loader's own use is on its way when it sleeps.
        assert before.count(kind) == each * (late.step * 4 + late.use) + (role == roles.LOADER)


@pytest.mark.parametrize("role", [0, roles.LOADER, SENDER, ANY])
@pytest.mark.parametrize("cta, has_tile", [(0, False), (2, True), (ANY, True)])
def test_the_one_who_is_named_sleeps_where_rounds_span_steps(role, cta, has_tile):
    # 1 tile in each of 3 steps, on 4 CTAs: CTA 0 has that of step 0, CTA 2 that of step 2, CTA 3 nothing.
    mesh = jax.make_mesh((3,), ("x",), devices=devices.simulated_devices(3))
    function = functools.partial(all_gather_lhs_matmul_fast, axis_name="x", config=SMALL)
    late = Late(device=1, cta=cta, role=role, step=2, use=0, naps=2)
    with ci.simulate(core_count=4) as sim:
        options = {"num_ctas": 4, "config": SMALL, "has_sender": True, "run": sim.run}
        calls = Calls(function, mesh, Problem(3, 128, 128, 64, "float16"), **options)
        calls.call(calls.operands(0), late)
    naps = {(event.device, event.cta, _role(event)) for event in sim.events if event.kind == "delay"}
    each = (0, 1, roles.LOADER, SENDER) if role == ANY else (role,)
    assert naps == ({(1, 2, one) for one in each} if has_tile else set())


def test_ring_whose_rounds_span_steps_with_somebody_late():
    mesh = jax.make_mesh((3,), ("x",), devices=devices.simulated_devices(3))
    function = functools.partial(all_gather_lhs_matmul_fast, axis_name="x", config=SMALL)
    with ci.simulate(core_count=4, seed=0) as sim:
        options = {"num_ctas": 4, "config": SMALL, "has_sender": True, "as_it_is": False, "run": sim.run}
        Calls(function, mesh, Problem(3, 256, 128, 64, "float16"), **options).check(4)


def _role(event):
    """Returns the role of the thread of an event: the fast kernel's sender is warp 1 of the loader's warpgroup."""
    return SENDER if event.warp == 1 else event.thread


@pytest.mark.parametrize("has_sender", [False, True])
def test_every_case_is_drawn(has_sender):
    plan = Plan(1024, 4096, 4096, TuningConfig(), 132)
    rng = np.random.default_rng(0)
    drawn = [draw_late(rng, 2, 2, plan, has_sender) for _ in range(1000)]
    assert {(one.device, one.role, one.step, one.cta) for one in drawn} == {
        (device, role, step, cta)
        for device in range(2)
        for role in (0, 1, roles.LOADER, *[SENDER] * has_sender, ANY)
        for step in range(2)
        for cta in (0, 1, 7, 127, ANY)
    }
    assert {one.before_the_kernel for one in drawn} == {True, False}
    uses = [one.use for one in drawn]
    assert set(uses) == set(range(64)) and 400 < uses.count(0) < 600


@pytest.mark.parametrize("has_sender, most", [(False, {0: 3, 1: 1, 2: 1, ANY: 1}), (True, {0: 3, 1: 3, 2: 1, ANY: 1})])
def test_uses_are_drawn_from_those_of_the_cta(has_sender, most):
    # 4 tiles on 3 CTAs: only CTA 0 has two of them. In the fast kernel rounds span steps, and the others follow CTA 1.
    plan = Plan(256, 128, 128, SMALL, 3)
    rng = np.random.default_rng(0)
    drawn = [draw_late(rng, 2, 2, plan, has_sender) for _ in range(500)]
    assert {one.cta: max(o.use for o in drawn if o.cta == one.cta) for one in drawn} == most
    assert {(one.cta, one.step) for one in drawn} == {(cta, step) for cta in most for step in range(2)}


@each_kernel
def test_a_wait_for_too_few_is_wrong_when_a_sender_is_late(kernel, monkeypatch):
    # The same fault as on GPUs, where nothing but the comparison can see it.
    def wait(semaphore, value, **options):
        pl.semaphore_wait(semaphore, value=value - 1, **options)

    def verdict(late):
        with ci.simulate(core_count=CTAS, detect_races=False) as sim:
            calls = _calls(kernel, 2, sim)
            operands = calls.operands(0)
            measured = calls.measure(*[calls.call(operands, late)] * 2, *operands)
        assert_right(measured, calls.problem, "call 7")

    role = 0 if kernel is all_gather_lhs_matmul else SENDER
    late = Late(device=0, cta=0, role=role, step=0, naps=30)
    verdict(late)
    with monkeypatch.context() as patch:
        patch.setattr(MODULES[kernel], "pl", types.SimpleNamespace(**(vars(pl) | {"semaphore_wait": wait})))
        with pytest.raises(AssertionError, match="call 7: the first result has error over bound"):
            verdict(late)


def test_the_comparison_sees_one_wrong_element_and_one_other_bit():
    with ci.simulate(core_count=CTAS) as sim:
        calls = _calls(all_gather_lhs_matmul, 2, sim)
        operands = calls.operands(0)
        out = calls.call(operands)

        def judge(first, second):
            first, second = (jax.device_put(x, out.sharding) for x in (first, second))
            assert_right(calls.measure(first, second, *operands), calls.problem, "call")

        def changed(change):
            bits = np.array(out)
            bits[300, 200] = change(bits[300, 200])
            return bits

        judge(out, out)
        with pytest.raises(AssertionError, match="second result has error over bound"):
            judge(out, changed(lambda x: x + np.float16(0.5)))
        with pytest.raises(AssertionError, match="first result has error over bound .*inf"):
            judge(changed(lambda x: np.nan), out)
        with pytest.raises(AssertionError, match="differ in their bits: .0. 1."):
            judge(out, changed(lambda x: np.nextafter(x, np.float16(0))))


CONFIGS = {
    "default": TuningConfig(),
    "side by side": TuningConfig(128, 128, wg_dimension=MatmulDimension.N),
    "small tiles, two stages": TuningConfig(64, 64, max_concurrent_steps=2),
}
FAST_CONFIGS = CONFIGS | {"two chunks, late signals": TuningConfig(chunks=2, signal_lag=32)}
TO_LOWER = [
    *[pytest.param(all_gather_lhs_matmul, config, 2, id=f"readable, {name}") for name, config in CONFIGS.items()],
    *[pytest.param(all_gather_lhs_matmul_fast, config, 2, id=f"fast, {name}") for name, config in FAST_CONFIGS.items()],
    *[pytest.param(kernel, TuningConfig(), 4, id=f"{name}, 4 devices") for name, kernel in KERNELS.items()],
    pytest.param(all_gather_lhs_matmul, TuningConfig(), 1, id="local"),
]


@pytest.mark.parametrize("kernel, config, axis_size", TO_LOWER)
def test_late_kernels_lower_for_cuda(kernel, config, axis_size):
    function = functools.partial(kernel, axis_name="x", config=config)
    text = ci.lower_for_cuda(
        late_shard(function, ("x",)),
        jax.ShapeDtypeStruct((1024 * axis_size, 4096), jnp.float16),
        jax.ShapeDtypeStruct((4096, 4096 * axis_size), jnp.float16),
        jax.ShapeDtypeStruct((6,), jnp.int32),
        mesh_axes={"x": axis_size},
        in_specs=(P("x", None), P(None, "x"), P()),
        out_specs=P(None, "x"),
    )
    assert text.count("mosaic_gpu_v2") == 1


def test_the_nap_before_a_kernel_lowers_for_cuda():
    who = jax.ShapeDtypeStruct((2,), jnp.int32)
    text = ci.lower_for_cuda(nap_shard(("x",)), who, mesh_axes={"x": 2}, in_specs=P(), out_specs=P("x"))
    assert text.count("mosaic_gpu_v2") == 1
