"""Kernels that stay on their device, on several devices at once."""

import functools

import interpret_kernels as kernels
import interpret_local_kernels as local_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu
from jax.sharding import PartitionSpec as P

import cmm.interpret as ci


def run_local(function, x, num_devices, **options):
    f = kernels.sharded(function, kernels.mesh_of(num_devices), P("x"), P("x"))
    with ci.simulate(**options) as sim:
        return np.asarray(sim.run(f, x)), sim


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_copy_through_shared_memory(num_devices, seed):
    x = kernels.blocks(num_devices)
    y, _ = run_local(local_kernels.scale_local, x, num_devices, seed=seed)
    np.testing.assert_array_equal(y, 2 * x)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(
    "fault, reason",
    [
        ("missing_barrier_wait", "nothing waited for the first access"),
        ("missing_commit", "no commit_smem"),
    ],
)
def test_local_fault_is_a_race(fault, reason, seed):
    x = kernels.blocks(2)
    with pytest.raises(ci.RaceError, match=reason):
        run_local(functools.partial(local_kernels.scale_local, fault=fault), x, 2, seed=seed)


def test_report_names_lines_devices_and_threads():
    x = kernels.blocks(2)
    with pytest.raises(ci.RaceError) as e:
        run_local(functools.partial(local_kernels.scale_local, fault="missing_commit"), x, 2)
    race = e.value.races[0]
    assert (race.first.action, race.first.by) == ("write", "thread")
    assert (race.second.action, race.second.by) == ("read", "TMA")
    assert race.first.device in (0, 1) and race.first.thread == "warpgroup 0"
    lines = open(local_kernels.__file__).read().splitlines()
    number = int(race.first.source.split(":")[1].split()[0])
    assert "smem[...] * 2" in lines[number - 1]
    number = int(race.second.source.split(":")[1].split()[0])
    assert "copy_smem_to_gmem(smem, out_ref)" in lines[number - 1]
    assert "interpret_local_kernels.py" in str(race)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_shared_memory_given_out_again_while_tma_reads_it(seed):
    x = kernels.blocks(1)
    y, _ = run_local(local_kernels.reuse_of_shared_memory, x, 1, seed=seed)
    np.testing.assert_array_equal(y, x)
    broken = functools.partial(local_kernels.reuse_of_shared_memory, fault="scope_left_too_early")
    with pytest.raises(ci.RaceError, match="freed and given out again"):
        run_local(broken, x, 1, seed=seed)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_wgmma_needs_a_fence_after_a_threads_write(seed):
    x = kernels.blocks(1)
    y, _ = run_local(local_kernels.product_of_written_tile, x, 1, seed=seed)
    wide = x.astype(np.float32)
    np.testing.assert_allclose(y, wide @ wide, rtol=1e-5, atol=1e-4)
    broken = functools.partial(local_kernels.product_of_written_tile, fault="missing_commit_before_wgmma")
    with pytest.raises(ci.RaceError, match="no commit_smem"):
        run_local(broken, x, 1, seed=seed)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_commit_covers_only_what_was_written_before_it(seed):
    x = kernels.blocks(1)
    y, _ = run_local(local_kernels.write_after_commit, x, 1, seed=seed)
    np.testing.assert_array_equal(y, 3 * x)
    with pytest.raises(ci.RaceError, match="no commit_smem"):
        run_local(functools.partial(local_kernels.write_after_commit, fault="missing_second_commit"), x, 1, seed=seed)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_entering_a_collective_scope_synchronizes_threads(seed):
    x = kernels.blocks(1)
    y, _ = run_local(local_kernels.hand_over_by_scope, x, 1, seed=seed)
    np.testing.assert_array_equal(y, 2 * x)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_warpgroup_knows_what_its_warps_have_waited_for(seed):
    x = kernels.blocks(1)
    y, _ = run_local(local_kernels.warps_load, x, 1, seed=seed)
    np.testing.assert_array_equal(y, x)
    with pytest.raises(ci.RaceError) as e:
        run_local(functools.partial(local_kernels.warps_load, fault="warp_does_not_wait"), x, 1, seed=seed)
    assert any(
        {r.first.action, r.second.action} == {"read", "write"} and {r.first.by, r.second.by} == {"thread", "TMA"}
        for r in e.value.races
        if r.second is not None
    )


def config(**kwargs):
    return hopper_matmul_mgpu.TuningConfig(
        tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2, epi_tile_n=None, epi_tile_m=None, **kwargs
    )


@pytest.mark.parametrize("core_count", [1, 2, 3])
@pytest.mark.parametrize("wg_dimension", list(hopper_matmul_mgpu.MatmulDimension))
def test_jax_hopper_matmul_is_right_and_quiet(wg_dimension, core_count):
    # Several tiles per CTA, each a warp-specialized pipeline.
    num_devices = 2
    rng = np.random.default_rng(0)
    a = rng.normal(size=(num_devices * 256, 192)).astype(np.float16)
    b = rng.normal(size=(192, 256)).astype(np.float16)
    local = functools.partial(_launch, core_count=core_count, wg_dimension=wg_dimension)
    f = kernels.sharded(local, kernels.mesh_of(num_devices), (P("x"), P()), P("x"))
    want = a.astype(np.float32) @ b.astype(np.float32)
    for seed in (None, 0):
        with ci.simulate(seed=seed) as sim:
            out = np.asarray(sim.run(f, a, b), np.float32)
        np.testing.assert_allclose(out, want, rtol=2e-3, atol=2e-2)


def _launch(a, b, core_count, wg_dimension):
    def body(a_ref, b_ref, out_ref):
        hopper_matmul_mgpu.kernel(a_ref, b_ref, None, out_ref, config=config(wg_dimension=wg_dimension))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype),
        grid=(core_count,),
        grid_names=("cluster_grid",),
        cluster=(1,),
        cluster_names=("cluster",),
        num_threads=3,
        thread_name="wg",
    )(a, b)


def test_emit_pipeline():
    def body(x_ref, y_ref, out_ref):
        def step(_, x_smem, y_smem, o_smem):
            o_smem[...] = x_smem[...] + y_smem[...]

        spec = plgpu.BlockSpec((16, K), lambda i: (i, 0))
        plgpu.emit_pipeline(step, grid=(4,), in_specs=[spec, spec], out_specs=[spec], max_concurrent_steps=2)(
            x_ref, y_ref, out_ref
        )

    K = kernels.K
    x = kernels.blocks(2)
    add = lambda x: plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, x)
    for seed in (None, 0, 1):
        y, _ = run_local(add, x, 2, seed=seed)
        np.testing.assert_array_equal(y, x + x)


def test_core_map_over_a_mesh_of_threads():
    mesh = plgpu.Mesh(num_threads=2, thread_name="wg")

    def double(x):
        out = jax.new_ref(jnp.zeros_like(x))
        x_ref = jax.new_ref(x)
        half = x.shape[0] // 2

        @pl.core_map(mesh)
        def _():
            rows = pl.ds(lax.axis_index("wg") * half, half)
            out[rows] = x_ref[rows] * 2

        return out[...]

    x = kernels.blocks(2)
    y, _ = run_local(double, x, 2)
    np.testing.assert_array_equal(y, 2 * x)


def test_two_threads_that_write_the_same_rows_race():
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] + lax.axis_index("wg").astype(x_ref.dtype)

    f = lambda x: plgpu.kernel(body, num_threads=2, thread_name="wg", out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(
        x
    )
    with pytest.raises(ci.RaceError, match="nothing orders"):
        run_local(f, kernels.blocks(1), 1)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_dtypes_and_math_that_numpy_does_not_know(dtype):
    def body(x_ref, out_ref):
        x = x_ref[...]
        out_ref[...] = jnp.tanh(x) + jnp.exp(-x * x) * jnp.where(x > 0, x, 1)

    f = lambda x: plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    x = jnp.asarray(kernels.blocks(2), dtype)
    y, _ = run_local(f, x, 2)
    want = jnp.tanh(x) + jnp.exp(-x * x) * jnp.where(x > 0, x, 1)
    np.testing.assert_allclose(np.asarray(y, np.float32), np.asarray(want, np.float32), rtol=1e-2, atol=1e-2)


def test_integer_arithmetic_matches_jax():
    n = np.array([-7, -1, 0, 3, 7, 2**31 - 1, -(2**31), 9], np.int32)
    d = np.array([2, -3, 5, -2, 3, 7, 3, -4], np.int32)
    ops = [
        lax.div,
        lax.rem,
        lax.add,
        lax.mul,
        lax.sub,
        lax.max,
        lax.bitwise_xor,
        lambda a, b: lax.shift_left(a, b & 7),
        jnp.remainder,
        jnp.floor_divide,
    ]

    def body(n_ref, d_ref, out_ref):
        for i, op in enumerate(ops):
            out_ref[i] = op(n_ref[...], d_ref[...])

    f = lambda n, d: plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((len(ops), 8), jnp.int32))(n, d)
    with ci.simulate() as sim:
        got = sim.run(jax.jit(f), n, d)
    np.testing.assert_array_equal(got, np.stack([op(n, d) for op in ops]))


def test_large_operands_do_not_hang():
    x = np.zeros((2 * 2048, 1024), np.float32)

    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] + 1

    f = lambda x: plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    y, _ = run_local(f, x, 2)
    assert (y == 1).all()


def test_out_of_bounds_read_is_an_error():
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[pl.ds(lax.axis_index("wg") + 1, 64)]

    f = lambda x: plgpu.kernel(body, num_threads=1, thread_name="wg", out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(
        x
    )
    with pytest.raises(IndexError, match="out of bounds"):
        run_local(f, kernels.blocks(1), 1)
