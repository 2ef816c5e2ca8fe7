"""Programs that can be simulated: several kernels, other meshes, devices of a new process, odd stores."""

import os
import pathlib
import subprocess
import sys

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


def test_several_kernels_in_one_jit_and_in_a_loop():
    with ci.simulate() as sim:
        got, want = kernels.run_ring(sim, 3, repeats=3)
    np.testing.assert_array_equal(got, want)
    assert {e.call for e in sim.events} == {0, 1, 2}

    x = kernels.blocks(3)
    f = kernels.sharded(lambda x: lax.fori_loop(0, 3, lambda _, x: kernels.push_left(x, "x", 3), x), kernels.mesh_of(3))
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


def test_explicit_mesh_and_math_through_jax():
    mesh = jax.make_mesh((2,), ("x",), devices=simulated_devices(8)[:2], axis_types=(jax.sharding.AxisType.Explicit,))

    def body(x_ref, out_ref):
        x = x_ref[...]
        out_ref[...] = jnp.tanh(x) @ jnp.ones((kernels.K, kernels.K), x.dtype)

    x = kernels.blocks(2)
    with jax.set_mesh(mesh), ci.simulate() as sim:
        placed = jax.sharding.reshard(jnp.asarray(x), P("x", None))
        f = jax.jit(jax.shard_map(lambda x: kernels.kernel_like(x, body), out_specs=P("x", None), check_vma=False))
        got = sim.run(f, placed)
    want = np.tanh(x.astype(np.float32)).sum(1, keepdims=True)
    np.testing.assert_allclose(np.asarray(got, np.float32), np.broadcast_to(want, x.shape), atol=0.1)


def test_a_single_element_can_be_stored():
    def body(x_ref, out_ref, cell):
        out_ref[...] = x_ref[...]
        cell[0] = jnp.int32(5)
        out_ref[0, 0] = cell[0].astype(out_ref.dtype)

    shard = lambda x: kernels.kernel_like(x, body, scratch_types=[plgpu.SMEM((1,), jnp.int32)])
    x = kernels.blocks(2)
    with ci.simulate() as sim:
        out = sim.run(kernels.sharded(shard, kernels.mesh_of(2)), x)
    x[:: kernels.M, 0] = 5
    np.testing.assert_array_equal(out, x)


def test_skipping_the_device_barrier_is_a_race_without_a_handshake():
    def build(skip):
        def body(x_ref, out_ref):
            arrived = pl.get_global(plgpu.SemaphoreType.REGULAR)
            left = {"x": lax.rem(lax.axis_index("x") + 1, jnp.int32(2))}
            plgpu.remote_ref(out_ref, left)[...] = x_ref[...]
            pl.semaphore_signal(arrived, device_id=left)
            pl.semaphore_wait(arrived)

        params = plgpu.CompilerParams(skip_device_barrier=skip)
        return kernels.sharded(lambda x: kernels.kernel_like(x, body, compiler_params=params), kernels.mesh_of(2))

    x = kernels.blocks(2)
    with ci.simulate() as sim:
        sim.run(build(False), x)
        with pytest.raises(ci.RaceError, match="start of the kernel"):
            sim.run(build(True), x)


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
