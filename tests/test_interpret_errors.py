"""A simulated call that cannot go on ends soon, says why, and leaves the next call as it was."""

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
from cmm.interpret import launch


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
    f, x, _ = kernels.push("endless_poll")
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

    f = jax.jit(lambda x: kernels.kernel_like(x, body))
    with pytest.raises(ci.DeadlockError, match="progress for 0.5 s"):
        with ci.simulate(deadlock_timeout_s=0.5) as sim:
            sim.run(f, kernels.blocks(1))


def test_two_threads_that_signal_for_ever_are_found():
    def body(x_ref, out_ref):
        semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR((2,)))

        def spin(_):
            pl.semaphore_signal(semaphores.at[1])
            return pl.semaphore_read(semaphores.at[0])

        jax.lax.while_loop(lambda value: value < 1, spin, jnp.int32(0))
        out_ref[...] = x_ref[...]

    f = kernels.sharded(lambda x: kernels.kernel_like(x, body), kernels.mesh_of(2))
    with pytest.raises(ci.DeadlockError):
        with ci.simulate(deadlock_timeout_s=2) as sim:
            sim.run(f, kernels.blocks(2))


@pytest.mark.parametrize("late", [(), ci.Late(1.0, device=1)])
def test_polling_for_a_late_device_is_no_deadlock(late):
    f, x, want = kernels.push("poll")
    with ci.simulate(late=late) as sim:
        np.testing.assert_array_equal(sim.run(f, x), want)


def test_ctas_that_are_not_resident_cannot_be_waited_for():
    x = kernels.blocks(2)
    f = kernels.sharded(lambda x: kernels.two_cta_ring(x, "x", 2, False)[None], kernels.mesh_of(2))
    with pytest.raises(ci.DeadlockError, match="device 1, CTA 1: one of 1 place"):
        with ci.simulate(ctas_per_device=1) as sim:
            sim.run(f, x)


def test_devices_that_do_not_come_are_missed(monkeypatch):
    monkeypatch.setattr(launch, "_MEETING_TIMEOUT_S", 0.1)
    meeting = launch.Meeting(2)
    with pytest.raises(ci.LaunchError, match="only 1 of 2 devices reached"):
        meeting.attend(0, [], lambda inputs: inputs)


def test_exception_in_a_kernel_ends_and_the_next_call_works():
    bad, x, want = kernels.push("peer_out_of_range")
    good, _, _ = kernels.push()
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
    f, x, _ = kernels.push("missing_last_wait")
    with pytest.raises(ci.RaceError):
        with ci.simulate():
            f(x)


def test_failed_kernel_gives_nan_and_later_ones_do_not_run():
    f, x, _ = kernels.push("missing_last_wait")
    sim = None
    with pytest.raises(ci.RaceError):
        with ci.simulate() as sim:
            assert np.isnan(np.asarray(f(x), np.float32)).all()
            calls = max(e.call for e in sim.events)
            f(x)
    assert max(e.call for e in sim.events) == calls


def test_unsupported_operation_is_named_before_anything_runs():
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...]
        plgpu.semaphore_signal_multicast(pl.get_global(plgpu.SemaphoreType.REGULAR), collective_axes="x")

    f = kernels.sharded(lambda x: kernels.kernel_like(x, body), kernels.mesh_of(2))
    with pytest.raises(NotImplementedError, match="semaphore_signal_multicast.*test_interpret_errors"):
        with ci.simulate() as sim:
            sim.run(f, kernels.blocks(2))
    assert not sim.events


def test_a_value_from_outside_the_kernel_is_named():
    def shard(x):
        outside = jax.lax.axis_index("x")

        def body(x_ref, out_ref):
            out_ref[...] = x_ref[...] + outside.astype(x_ref.dtype)

        return kernels.kernel_like(x, body)

    f = kernels.sharded(shard, kernels.mesh_of(2))
    with pytest.raises(ValueError, match=r"uses int32\[\] that was computed outside of it"):
        with ci.simulate() as sim:
            sim.run(f, kernels.blocks(2))


def test_plain_device_number_on_a_mesh_of_two_axes_is_refused():
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...]
        pl.semaphore_signal(pl.get_global(plgpu.SemaphoreType.REGULAR), device_id=jnp.int32(0))

    devices = np.array(simulated_devices(8)[:4]).reshape(2, 2)
    mesh, spec = jax.sharding.Mesh(devices, ("x", "y")), P(("x", "y"))
    f = kernels.sharded(lambda x: kernels.kernel_like(x, body), mesh, spec, spec)
    with pytest.raises(ValueError, match="mesh of 2 axes"):
        with ci.simulate() as sim:
            sim.run(f, kernels.blocks(4))
