"""What makes a role of a kernel late: it hits whom it names, when it says, and the kernels stay right."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from late_kernels import ANY, Calls, Late, assert_right, draw_late, late_shard, nap_shard

import cmm.interpret as ci
from cmm import devices
from cmm.hopper import MatmulDimension, TuningConfig, all_gather_lhs_matmul, matmul, ring_kernel, roles
from cmm.hopper.plan import Plan
from cmm.roofline import Problem

SMALL = TuningConfig(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2)
CTAS = 2


def _calls(axis_size, sim, dtype="float16", mesh_shape=None, axis="x", **options):
    shape = mesh_shape or (axis_size,)
    mesh = jax.make_mesh(shape, ("x", "y")[: len(shape)], devices=devices.simulated_devices(int(np.prod(shape))))
    problem = Problem(axis_size, 256, 128, 128, dtype)  # 2 x 2 tiles of 2 uses each, on CTAS CTAs
    function = functools.partial(all_gather_lhs_matmul, axis_name=axis, config=SMALL)
    return Calls(function, mesh, problem, axis, num_ctas=CTAS, config=SMALL, run=sim.run, **options)


@pytest.mark.parametrize("as_it_is", [True, False])
@pytest.mark.parametrize("axis_size, dtype", [(2, "float16"), (3, "bfloat16")])
def test_ring_with_somebody_late(axis_size, dtype, as_it_is):
    with ci.simulate(core_count=CTAS, seed=axis_size) as sim:
        _calls(axis_size, sim, dtype, as_it_is=as_it_is).check(4)
    assert any(event.kind == "delay" for event in sim.events)


@pytest.mark.parametrize("axis", ["x", "y"])
def test_two_rings_of_a_mesh_at_once(axis):
    with ci.simulate(core_count=CTAS, seed=0) as sim:
        _calls(2, sim, mesh_shape=(2, 2), axis=axis, as_it_is=False).check(2)


def test_local_matmul_with_somebody_late():
    mesh = devices.ring_mesh(devices.simulated_devices(1))
    function = functools.partial(matmul, config=SMALL)
    with ci.simulate(core_count=CTAS, seed=0) as sim:
        Calls(function, mesh, Problem(1, 256, 128, 128), num_ctas=CTAS, config=SMALL, run=sim.run).check(4)


@pytest.mark.parametrize(
    "late, who",
    [
        (Late(0, 0, roles.LOADER, 0, 3), {(0, 0, roles.LOADER)}),
        (Late(2, 1, 0, 2, 3), {(2, 1, 0)}),
        (Late(1, ANY, 1, 1, 3), {(1, 0, 1), (1, 1, 1)}),
        (Late(1, 1, ANY, 0, 3), {(1, 1, 0), (1, 1, 1), (1, 1, 2)}),
        (Late(1, 1, 0, 0, 0), set()),
    ],
)
def test_the_one_who_is_named_sleeps_at_the_start_of_the_step(late, who):
    with ci.simulate(core_count=CTAS) as sim:
        calls = _calls(3, sim)
        calls.call(calls.operands(0), late)
    naps = [event for event in sim.events if event.kind == "delay"]
    assert {(event.device, event.cta, event.thread) for event in naps} == who
    assert len(naps) == late.naps * len(who)
    for device, cta, thread in who:
        mine = [event for event in sim.events if (event.device, event.cta, event.thread) == (device, cta, thread)]
        first_nap = [event.kind for event in mine].index("delay")
        uses = [event for event in mine[:first_nap] if event.kind in ("load", "tile_product")]
        # Two tiles of two uses in each step; the loader brings A and B for each use.
        assert len(uses) == late.step * 4 * (2 if thread == roles.LOADER else 1)


def test_every_case_is_drawn():
    plan = Plan(1024, 4096, 4096, TuningConfig(), 132)
    rng = np.random.default_rng(0)
    drawn = [draw_late(rng, 2, 2, plan) for _ in range(500)]
    assert {(one.device, one.role, one.step, one.cta) for one in drawn} == {
        (device, role, step, cta)
        for device in range(2)
        for role in range(3)
        for step in range(2)
        for cta in (0, 1, 7, 127, ANY)
    }
    assert {one.before_the_kernel for one in drawn} == {True, False}


def test_a_wait_for_too_few_is_wrong_when_a_sender_is_late(monkeypatch):
    # The same fault as on GPUs, where nothing but the comparison can see it.
    def wait(semaphore, value, **options):
        pl.semaphore_wait(semaphore, value=value - 1, **options)

    def verdict(late):
        with ci.simulate(core_count=CTAS, detect_races=False) as sim:
            calls = _calls(2, sim)
            operands = calls.operands(0)
            measured = calls.measure(*[calls.call(operands, late)] * 2, *operands)
        assert_right(measured, calls.problem, "call 7")

    late = Late(device=0, cta=0, role=0, step=0, naps=30)
    verdict(late)
    with monkeypatch.context() as patch:
        patch.setattr(ring_kernel, "pl", types.SimpleNamespace(**(vars(pl) | {"semaphore_wait": wait})))
        with pytest.raises(AssertionError, match="call 7: the first result has error over bound"):
            verdict(late)


def test_the_comparison_sees_one_wrong_element_and_one_other_bit():
    with ci.simulate(core_count=CTAS) as sim:
        calls = _calls(2, sim)
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


@pytest.mark.parametrize("axis_size", [1, 2, 4])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_late_kernels_lower_for_cuda(config, axis_size):
    function = functools.partial(all_gather_lhs_matmul, axis_name="x", config=config)
    text = ci.lower_for_cuda(
        late_shard(function, ("x",)),
        jax.ShapeDtypeStruct((1024 * axis_size, 4096), jnp.float16),
        jax.ShapeDtypeStruct((4096, 4096 * axis_size), jnp.float16),
        jax.ShapeDtypeStruct((5,), jnp.int32),
        mesh_axes={"x": axis_size},
        in_specs=(P("x", None), P(None, "x"), P()),
        out_specs=P(None, "x"),
    )
    assert text.count("mosaic_gpu_v2") == 1


def test_the_nap_before_a_kernel_lowers_for_cuda():
    who = jax.ShapeDtypeStruct((2,), jnp.int32)
    text = ci.lower_for_cuda(nap_shard(("x",)), who, mesh_axes={"x": 2}, in_specs=P(), out_specs=P("x"))
    assert text.count("mosaic_gpu_v2") == 1
