"""The context itself: errors end, JAX is left as it was, options do what they say."""

import os
import pathlib
import subprocess
import sys
import time

import interpret_kernels as kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

import cmm.interpret as ci
from cmm.devices import simulated_devices
from cmm.interpret import _jax_private as jax_private, launch


def push(fault=None, num_devices=3):
    x = kernels.blocks(num_devices)
    f = kernels.sharded(
        lambda x: kernels.push_left(x, "x", num_devices, fault), kernels.mesh_of(num_devices), P("x"), P("x")
    )
    return f, x, np.roll(x, -kernels.M, 0)


def test_deadlock_lists_who_waits_for_what_and_where():
    start = time.monotonic()
    with pytest.raises(ci.DeadlockError) as e:
        with ci.simulate() as sim:
            kernels.run_ring(sim, 3, "missing_signal")
    assert time.monotonic() - start < 5
    assert len(e.value.waiting) == 3
    for w in e.value.waiting:
        assert (w.value, w.awaited) == (1, 2)
        assert "semaphore" in w.what and "interpret_kernels.py" in w.source
        assert "warpgroup 0" in w.thread
    assert "value 1, awaits 2" in str(e.value)


@pytest.mark.parametrize("seed", [None, 0])
def test_endless_poll_ends(seed):
    f, x, _ = push("endless_poll")
    start = time.monotonic()
    with pytest.raises(ci.DeadlockError, match="poll"):
        with ci.simulate(seed=seed) as sim:
            sim.run(f, x)
    assert time.monotonic() - start < 5


def test_endless_loop_without_any_operation_ends():
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...]
        n = lax.while_loop(lambda n: n < 1, lambda n: n * 0, 0)
        out_ref[...] = x_ref[...] * n.astype(x_ref.dtype)

    f = jax.jit(lambda x: plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x))
    with pytest.raises(ci.DeadlockError, match="progress for 0.5 s"):
        with ci.simulate(deadlock_timeout_s=0.5) as sim:
            sim.run(f, kernels.blocks(1))


@pytest.mark.parametrize("late", [(), ci.Late(1.0, device=1)])
def test_polling_for_a_late_device_is_no_deadlock(late):
    f, x, want = push("poll")
    with ci.simulate(late=late) as sim:
        np.testing.assert_array_equal(sim.run(f, x), want)


def test_exception_in_a_kernel_ends_and_the_next_call_works():
    bad, x, want = push("peer_out_of_range")
    good, _, _ = push()
    with pytest.raises(ValueError, match=r"index on axis x 99 is not in 0\.\.2"):
        with ci.simulate() as sim:
            sim.run(bad, x)
    with ci.simulate() as sim:
        with pytest.raises(ValueError, match="99"):
            sim.run(bad, x)
        np.testing.assert_array_equal(sim.run(good, x), want)


@pytest.mark.parametrize("fault", ["wait_removed", "missing_signal"])
def test_next_call_works_after_a_failure(fault):
    for _ in range(2):
        with pytest.raises(ci.SimulationError):
            with ci.simulate() as sim:
                kernels.run_ring(sim, 3, fault)
        with ci.simulate() as sim:
            got, want = kernels.run_ring(sim, 3)
        np.testing.assert_array_equal(got, want)


def test_failure_nobody_waited_for_is_raised_at_the_end_of_the_block():
    f, x, _ = push("missing_last_wait")
    with pytest.raises(ci.RaceError):
        with ci.simulate():
            f(x)


def test_failed_kernel_gives_nan_and_later_ones_do_not_run():
    f, x, _ = push("missing_last_wait")
    sim = None
    with pytest.raises(ci.RaceError):
        with ci.simulate() as sim:
            assert np.isnan(np.asarray(f(x), np.float32)).all()
            calls = max(e.call for e in sim.events)
            f(x)
    assert max(e.call for e in sim.events) == calls


def test_record_keeps_races_and_values():
    f, x, want = push("missing_last_wait")
    with ci.simulate(on_race="record") as sim:
        np.testing.assert_array_equal(sim.run(f, x), want)
    assert sim.races and all(isinstance(r, ci.Race) for r in sim.races)
    with ci.simulate(detect_races=False) as sim:
        sim.run(f, x)
    assert not sim.races


def test_same_seed_same_events_and_other_seed_other_order():
    def events(seed):
        with ci.simulate(seed=seed) as sim:
            kernels.run_ring(sim, 4)
        return sim.events

    assert events(3) == events(3)
    assert events(None) == events(None)
    orders = {tuple((e.kind, e.device) for e in events(s)) for s in range(5)}
    assert len(orders) == 5


def test_late_device_starts_last():
    with ci.simulate(late=ci.Late(1e-3, device=2)) as sim:
        kernels.run_ring(sim, 3)
    first = {}
    for e in sim.events:
        if e.kind == "load":
            first.setdefault(e.device, e.start_s)
    assert first[2] >= 1e-3 > max(first[0], first[1])


def test_ctas_per_device_limits_how_many_run_at_once():
    def body(x_ref, out_ref):
        rows = pl.ds(lax.axis_index("cta") * 16, 16)
        out_ref[rows] = x_ref[rows]

    f = jax.jit(
        lambda x: plgpu.kernel(body, grid=(4,), grid_names=("cta",), out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    )
    x = kernels.blocks(1)
    most = {}
    for limit in (1, 2, None):
        with ci.simulate(ctas_per_device=limit) as sim:
            np.testing.assert_array_equal(sim.run(f, x), x)
        spans = [(e.start_s, e.end_s) for e in sim.events if e.kind == "kernel"]
        assert len(spans) == 4
        most[limit] = max(sum(s <= t < e for s, e in spans) for t, _ in spans)
    assert most == {1: 1, 2: 2, None: 4}


def test_ctas_that_are_not_resident_cannot_be_waited_for():
    x = kernels.blocks(2)
    f = kernels.sharded(lambda x: kernels.two_cta_ring(x, "x", 2, False)[None], kernels.mesh_of(2), P("x"), P("x"))
    with pytest.raises(ci.DeadlockError, match="device 1, CTA 1: one of 1 place"):
        with ci.simulate(ctas_per_device=1) as sim:
            sim.run(f, x)


def test_several_kernels_in_one_jit_and_in_a_loop():
    with ci.simulate() as sim:
        got, want = kernels.run_ring(sim, 3, repeats=3)
    np.testing.assert_array_equal(got, want)
    assert {e.call for e in sim.events} == {0, 1, 2}

    x = kernels.blocks(3)
    f = kernels.sharded(
        lambda x: lax.fori_loop(0, 3, lambda _, x: kernels.push_left(x, "x", 3), x), kernels.mesh_of(3), P("x"), P("x")
    )
    with ci.simulate() as sim:
        np.testing.assert_array_equal(sim.run(f, x), x)  # Once around.


@pytest.mark.parametrize("axis", ["x", "y"])
def test_one_axis_of_a_mesh_with_two(axis):
    sizes = {"x": 2, "y": 3}
    devices = np.array(simulated_devices(8)[:6]).reshape(2, 3)
    mesh = jax.sharding.Mesh(devices, ("x", "y"))
    x = kernels.blocks(6)
    f = kernels.sharded(
        lambda x: kernels.ring_all_gather(x, axis, sizes[axis])[None], mesh, P(("x", "y")), P(("x", "y"))
    )
    with ci.simulate() as sim:
        got = np.asarray(sim.run(f, x))
    tiles = x.reshape(2, 3, kernels.M, kernels.K)
    for i in range(2):
        for j in range(3):
            want = tiles[:, j] if axis == "x" else tiles[i]
            np.testing.assert_array_equal(got[3 * i + j], want)


def test_plain_device_number_on_a_mesh_of_two_axes_is_refused():
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...]
        pl.semaphore_signal(pl.get_global(plgpu.SemaphoreType.REGULAR), device_id=jnp.int32(0))

    devices = np.array(simulated_devices(8)[:4]).reshape(2, 2)
    f = kernels.sharded(
        lambda x: plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x),
        jax.sharding.Mesh(devices, ("x", "y")),
        P(("x", "y")),
        P(("x", "y")),
    )
    with pytest.raises(ValueError, match="mesh of 2 axes"):
        with ci.simulate() as sim:
            sim.run(f, kernels.blocks(4))


def test_skipping_the_device_barrier_is_a_race_without_a_handshake():
    def build(skip):
        def body(x_ref, out_ref):
            arrived = pl.get_global(plgpu.SemaphoreType.REGULAR)
            left = {"x": lax.rem(lax.axis_index("x") + 1, jnp.int32(2))}
            plgpu.remote_ref(out_ref, left)[...] = x_ref[...]
            pl.semaphore_signal(arrived, device_id=left)
            pl.semaphore_wait(arrived)

        f = lambda x: plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            compiler_params=plgpu.CompilerParams(skip_device_barrier=skip),
        )(x)
        return kernels.sharded(f, kernels.mesh_of(2), P("x"), P("x"))

    x = kernels.blocks(2)
    with ci.simulate() as sim:
        sim.run(build(False), x)
        with pytest.raises(ci.RaceError, match="start of the kernel"):
            sim.run(build(True), x)


def test_unsupported_operation_is_named_before_anything_runs():
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...]
        plgpu.semaphore_signal_multicast(pl.get_global(plgpu.SemaphoreType.REGULAR), collective_axes="x")

    f = kernels.sharded(
        lambda x: plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x),
        kernels.mesh_of(2),
        P("x"),
        P("x"),
    )
    with pytest.raises(NotImplementedError, match="semaphore_signal_multicast.*test_interpret_simul"):
        with ci.simulate() as sim:
            sim.run(f, kernels.blocks(2))
    assert not sim.events


def test_jax_is_left_as_it_was():
    from jax._src import config
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as hook

    theirs = hook.interpret_pallas_call
    setting = config.pallas_tpu_interpret_mode_context_manager
    for fail in (False, True):
        try:
            with ci.simulate():
                assert hook.interpret_pallas_call is not theirs
                if fail:
                    raise KeyError
        except KeyError:
            pass
        assert hook.interpret_pallas_call is theirs
        assert setting.value is None


def test_outside_the_block_a_traced_function_says_what_is_wrong():
    f, x, want = push()
    with ci.simulate() as sim:
        np.testing.assert_array_equal(sim.run(f, x), want)
    with pytest.raises(ValueError, match="Only interpret mode is supported"):
        f(x)
    with ci.simulate() as sim:
        np.testing.assert_array_equal(sim.run(f, x), want)


def test_missing_private_name_is_reported(monkeypatch):
    monkeypatch.setitem(jax_private._NEEDED, "jax._src.core", ("no_such_name",))
    jax_private.check.cache_clear()
    try:
        with pytest.raises(ci.UnsupportedJaxError, match="0.11.2 and 0.12.0.1.*lacks.*no_such_name"):
            with ci.simulate():
                pass
    finally:
        monkeypatch.undo()
        jax_private.check.cache_clear()
        jax_private.check()


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(on_race="explode"), "on_race"),
        (dict(ctas_per_device=0), "ctas_per_device"),
    ],
)
def test_options_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        with ci.simulate(**options):
            pass


def test_devices_that_do_not_come_are_missed(monkeypatch):
    monkeypatch.setattr(launch, "_MEETING_TIMEOUT_S", 0.1)
    meeting = launch.Meeting(2)
    with pytest.raises(ci.LaunchError, match="only 1 of 2 devices reached"):
        meeting.attend(0, [], lambda inputs: inputs)


def test_explicit_mesh_and_math_through_jax():
    mesh = jax.make_mesh((2,), ("x",), devices=simulated_devices(8)[:2], axis_types=(jax.sharding.AxisType.Explicit,))

    def body(x_ref, out_ref):
        x = x_ref[...]
        out_ref[...] = jnp.tanh(x) @ jnp.ones((kernels.K, kernels.K), x.dtype)

    def shard(x):
        return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    x = kernels.blocks(2)
    with jax.set_mesh(mesh), ci.simulate() as sim:
        placed = jax.sharding.reshard(jnp.asarray(x), P("x", None))
        f = jax.jit(jax.shard_map(shard, out_specs=P("x", None), check_vma=False))
        got = sim.run(f, placed)
    want = np.tanh(x.astype(np.float32)).sum(1, keepdims=True)
    np.testing.assert_allclose(np.asarray(got, np.float32), np.broadcast_to(want, x.shape), atol=0.1)


_SCRIPT = """
import numpy as np, jax, interpret_kernels as kernels, cmm.interpret as ci
from cmm import devices
{start}
with ci.simulate() as sim:
  got, want = kernels.run_ring(sim, 8)
np.testing.assert_array_equal(got, want)
print("right on", len(jax.devices()))
"""


@pytest.mark.parametrize(
    "start, environment",
    [
        ("devices.simulated_devices(8)", {}),
        ("devices.simulated_devices(8)", {"PJRT_NPROC": "1"}),
        ("devices.simulated_devices(8)", {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}),
        ("jax.config.update('jax_num_cpu_devices', 8)", {}),
    ],
)
def test_eight_devices_in_a_new_process(start, environment):
    root = pathlib.Path(__file__).parent
    path = os.pathsep.join([str(root), str(root.parent)])
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(start=start)],
        timeout=120,
        env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert "right on 8" in done.stdout, done.stderr


def test_a_value_from_outside_the_kernel_is_named():
    def shard(x):
        outside = jax.lax.axis_index("x")

        def body(x_ref, out_ref):
            out_ref[...] = x_ref[...] + outside.astype(x_ref.dtype)

        return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    f = kernels.sharded(shard, kernels.mesh_of(2), P("x", None), P("x", None))
    with pytest.raises(ValueError, match=r"uses int32\[\] that was computed outside of it"):
        with ci.simulate() as sim:
            sim.run(f, kernels.blocks(2))


def test_is_active_inside_the_block_only():
    assert not ci.is_active()
    with ci.simulate():
        assert ci.is_active()
    assert not ci.is_active()


def test_two_threads_that_signal_for_ever_are_found():
    def body(x_ref, out_ref):
        semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR((2,)))

        def spin(_):
            pl.semaphore_signal(semaphores.at[1])
            return pl.semaphore_read(semaphores.at[0])

        jax.lax.while_loop(lambda value: value < 1, spin, jnp.int32(0))
        out_ref[...] = x_ref[...]

    def shard(x):
        return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    f = kernels.sharded(shard, kernels.mesh_of(2), P("x", None), P("x", None))
    with pytest.raises(ci.DeadlockError):
        with ci.simulate(deadlock_timeout_s=2) as sim:
            sim.run(f, kernels.blocks(2))


def test_a_single_element_can_be_stored():
    def shard(x):
        def body(x_ref, out_ref, cell):
            out_ref[...] = x_ref[...]
            cell[0] = jnp.int32(5)
            out_ref[0, 0] = cell[0].astype(out_ref.dtype)

        out_type = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return plgpu.kernel(body, out_type=out_type, scratch_types=[plgpu.SMEM((1,), jnp.int32)])(x)

    x = kernels.blocks(2)
    with ci.simulate() as sim:
        out = sim.run(kernels.sharded(shard, kernels.mesh_of(2), P("x", None), P("x", None)), x)
    x[:: kernels.M, 0] = 5
    np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize(
    "options, error",
    [
        (dict(seed="a"), TypeError),
        (dict(seed=1.5), TypeError),
        (dict(deadlock_timeout_s=0), ValueError),
        (dict(late=ci.Late(-1.0)), ValueError),
        (dict(core_count=0), ValueError),
    ],
)
def test_options_of_the_wrong_kind_are_refused_on_entry(options, error):
    with pytest.raises(error):
        with ci.simulate(**options):
            pass


def test_numpy_seeds():
    with ci.simulate(seed=np.int64(3)) as sim:
        got, want = kernels.run_ring(sim, 2)
    np.testing.assert_array_equal(got, want)
