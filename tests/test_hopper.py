"""The Hopper kernels on simulated devices: right, quiet under the race detector, and refused where they cannot run."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cmm
import cmm.interpret as ci
from cmm.hopper import MatmulDimension, TuningConfig, all_gather_lhs_matmul, all_gather_lhs_matmul_fast, matmul

KERNELS = {"readable": all_gather_lhs_matmul, "fast": all_gather_lhs_matmul_fast}
each_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)

SMALL = TuningConfig(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2)
CONFIGS = {
    "warpgroups above each other": SMALL,
    "side by side": dataclasses.replace(SMALL, wg_dimension=MatmulDimension.N),
    "three stages": dataclasses.replace(SMALL, max_concurrent_steps=3),
    "four stages, minor N": dataclasses.replace(SMALL, max_concurrent_steps=4, grid_minor_dim=MatmulDimension.N),
    "one epilogue part": dataclasses.replace(SMALL, epi_tile_m=None, epi_tile_n=None),
    "deep tiles": dataclasses.replace(SMALL, tile_k=128, grid_tile_width=1),
}


def _run(kernel, case, core_count=1, config=SMALL, seed=None, **options):
    function = functools.partial(kernel, config=config)
    with ci.simulate(core_count=core_count, seed=seed, **options) as sim:
        out = sim.run(case.program(function), case.lhs, case.rhs)
    return out, sim


@each_kernel
@pytest.mark.parametrize("core_count", [1, 3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("axis_size", [1, 2, 3, 4, 8])
def test_ring(make_case, axis_size, dtype, core_count, kernel):
    case = make_case(128, 128, 64, dtype, (axis_size,), seed=axis_size)
    out, sim = _run(kernel, case, core_count, seed=1)
    case.assert_right(out)
    one_shard = 128 * 128 * 2
    assert [sim.bytes_sent(device=d) for d in range(axis_size)] == [(axis_size - 1) * one_shard] * axis_size


@each_kernel
@pytest.mark.parametrize("core_count", [1, 2, 3])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_several_tiles_per_cta(make_case, config, core_count, kernel):
    # 2 x 2 tiles or more on at most 3 CTAs: each CTA has several tiles, and not all have as many.
    case = make_case(256, 256, 128, "float16", (3,))
    out, _ = _run(kernel, case, core_count, config, seed=2)
    case.assert_right(out)


@each_kernel
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("late", [ci.Late(3e-6, device=0, cta=0), ci.Late(1e-4, device=1), ci.Late(2e-5, thread=0)])
def test_late_threads(make_case, late, seed, kernel):
    case = make_case(256, 256, 128, "float16", (3,), seed=seed)
    out, _ = _run(kernel, case, 2, seed=seed, late=late)
    case.assert_right(out)


@each_kernel
@pytest.mark.parametrize("axis", ["x", "y"])
def test_two_rings_along_one_axis_of_a_mesh(make_case, axis, kernel):
    case = make_case(128, 128, 64, "float16", (2, 2), axis)
    out, _ = _run(kernel, case, 2, seed=0)
    case.assert_right(out)


@pytest.mark.parametrize("method", [name for name, method in cmm.METHODS.items() if method.needs_hopper])
@pytest.mark.parametrize("in_axes", [(0, 0), (0, None)])
def test_vmap(make_case, in_axes, method):
    cases = [make_case(128, 128, 64, "float16", (3,), seed=seed) for seed in range(2)]
    batch = [jnp.stack([getattr(case, name) for case in cases]) for name in ("lhs", "rhs")]
    operands = [whole if axis == 0 else whole[0] for whole, axis in zip(batch, in_axes, strict=True)]

    def body(lhs, rhs):
        one = functools.partial(cmm.all_gather_matmul, axis_name="x", method=method)
        return jax.vmap(one, in_axes)(lhs, rhs)

    specs = [P(None, *spec) if axis == 0 else spec for spec, axis in zip((P("x"), P(None, "x")), in_axes, strict=True)]
    run = jax.shard_map(body, mesh=cases[0].mesh, in_specs=tuple(specs), out_specs=P(None, None, "x"), axis_names={"x"})
    with ci.simulate(core_count=2, seed=0) as sim:
        out = sim.run(jax.jit(run), *operands)
    for index, case in enumerate(cases):
        case.rhs64 = case.rhs64 if in_axes[1] == 0 else cases[0].rhs64
        case.assert_right(out[index])


@each_kernel
def test_repeated_calls_give_the_same_bits(make_case, kernel):
    case = make_case(256, 128, 128, "bfloat16", (3,))
    first = np.asarray(_run(kernel, case, 2, seed=0)[0].astype(jnp.float32))
    for seed in range(1, 4):
        np.testing.assert_array_equal(np.asarray(_run(kernel, case, 2, seed=seed)[0].astype(jnp.float32)), first)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_local_matmul(make_case, config):
    case = make_case(256, 256, 256, "float16", (1,))
    program = case.program(lambda lhs, rhs, axis: matmul(lhs, rhs, config=config))
    with ci.simulate(core_count=3, seed=0) as sim:
        out = sim.run(program, case.lhs, case.rhs)
    case.assert_right(out)


def test_local_matmul_whose_last_tiles_are_halved(make_case):
    # Ten tiles: seven CTAs have one each, six of them half of one more.
    case = make_case(256, 128, 640, "bfloat16", (1,))
    config = dataclasses.replace(SMALL, tile_n=128)
    assert config.deal(256, 640, 8).with_fewest_ctas().halved == 3
    with ci.simulate(core_count=8, seed=0) as sim:
        out = sim.run(case.program(lambda lhs, rhs, axis: matmul(lhs, rhs, config=config)), case.lhs, case.rhs)
    case.assert_right(out)
    products = [event.cta for event in sim.events if event.kind == "tile_product" and event.thread == 0]
    assert sorted(map(products.count, range(8))) == [0, 2, *[4] * 6]  # Two products for a tile, and for a half.


def test_an_odd_number_of_parts_of_the_epilogue(make_case):
    # Three parts go through two buffers: the first one of a tile meets the last one of the tile before.
    case = make_case(256, 128, 384, "float16", (1,))
    config = dataclasses.replace(SMALL, tile_n=192)
    with ci.simulate(core_count=1, seed=0) as sim:
        case.assert_right(sim.run(case.program(lambda a, b, axis: matmul(a, b, config=config)), case.lhs, case.rhs))


@each_kernel
def test_result_dtype(make_case, kernel):
    case = make_case(128, 128, 64, "float16", (2,))
    function = functools.partial(kernel, config=SMALL, dtype="bfloat16")
    with ci.simulate() as sim:
        out = sim.run(case.program(function), case.lhs, case.rhs)
    assert out.dtype == jnp.bfloat16
    case.assert_right(out)


@each_kernel
@pytest.mark.parametrize("axis_size", [1, 2, 3])
def test_gradients_are_those_of_the_plain_method(make_case, kernel, axis_size):
    case = make_case(128, 128, 64, "float16", (axis_size,))
    shape = (axis_size * 128, axis_size * 64)
    weights = case.put(np.random.default_rng(1).normal(size=shape), "float32", case.columns)

    def gradients(function):
        run = case.program(function)
        return jax.jit(jax.grad(lambda *operands: jnp.sum(run(*operands).astype(jnp.float32) ** 2 * weights), (0, 1)))

    with ci.simulate() as sim:
        ours = sim.run(gradients(functools.partial(kernel, config=SMALL)), case.lhs, case.rhs)
    for mine, plain in zip(ours, gradients(cmm.all_gather_matmul_naive)(case.lhs, case.rhs), strict=True):
        difference = np.asarray(mine, np.float32) - np.asarray(plain, np.float32)
        assert np.linalg.norm(difference) < 2e-3 * np.linalg.norm(np.asarray(plain, np.float32))


@each_kernel
def test_forward_and_second_derivatives(make_case, kernel):
    case = make_case(128, 64, 64, "float16", (2,))
    operands = (case.lhs, case.rhs)

    def derivatives(function):
        run = case.program(function)
        loss = lambda *pair: jnp.sum(run(*pair).astype(jnp.float32) ** 2) / 1e4
        along = lambda *pair: jax.jvp(loss, pair, operands)[1]
        return jax.jit(lambda *pair: (along(*pair), *jax.grad(along, (0, 1))(*pair)))

    with ci.simulate() as sim:
        ours = sim.run(derivatives(functools.partial(kernel, config=SMALL)), *operands)
    for mine, plain in zip(ours, derivatives(cmm.all_gather_matmul_naive)(*operands), strict=True):
        np.testing.assert_allclose(np.float32(mine), np.float32(plain), rtol=2e-2, atol=2e-2)


def _depends_on_the_kernel(text, op):
    """Whether an operation of a lowered program needs what the kernel gives, by way of the operands of all between."""
    (function,) = [one for one in re.split(r"^  func\.func", text, flags=re.MULTILINE) if op in one]
    lines = dict(re.findall(r"^ *(%\w+)(?::\d+)? = (.*)$", function, re.MULTILINE))
    reached, todo = set(), [name for name, line in lines.items() if op in line]
    while todo:
        name = todo.pop()
        if name in lines and name not in reached:
            reached.add(name)
            todo += re.findall(r"%\w+", lines[name])
    return any("@mosaic_gpu" in lines[name] for name in reached)


@each_kernel
@pytest.mark.parametrize("power", [1, 2])
def test_nothing_is_gathered_for_derivatives(kernel, power):
    def lower(*wrt):
        loss = lambda lhs, rhs: jnp.sum(kernel(lhs, rhs, "x").astype(jnp.float32) ** power)
        return ci.lower_for_cuda(
            jax.grad(loss, wrt),
            jax.ShapeDtypeStruct((2048, 4096), jnp.float16),
            jax.ShapeDtypeStruct((4096, 8192), jnp.float16),
            mesh_axes={"x": 2},
            in_specs=(P("x", None), P(None, "x")),
            out_specs=tuple((P("x", None), P(None, "x"))[index] for index in wrt),
        )

    assert "all_gather" not in lower(1)
    both = lower(0, 1)
    assert "all_gather" not in both and both.count("stablehlo.reduce_scatter") == 1
    assert both.count("mosaic_gpu_v2") == 1
    # Beside the kernel, which needs all multiprocessors, it could wait for ever; also if it does not need its result.
    assert _depends_on_the_kernel(both, "reduce_scatter")


LOWERED = {"default": TuningConfig(), "side by side": TuningConfig(128, 128, wg_dimension=MatmulDimension.N)}


@each_kernel
@pytest.mark.parametrize("axis_size", [1, 2, 4, 8])
@pytest.mark.parametrize("config", LOWERED.values(), ids=LOWERED)
def test_ring_lowers_for_cuda(config, axis_size, kernel):
    text = ci.lower_for_cuda(
        lambda lhs, rhs: kernel(lhs, rhs, "x", config=config),
        jax.ShapeDtypeStruct((1024 * axis_size, 4096), jnp.float16),
        jax.ShapeDtypeStruct((4096, 4096 * axis_size), jnp.float16),
        mesh_axes={"x": axis_size},
        in_specs=(P("x", None), P(None, "x")),
        out_specs=P(None, "x"),
    )
    assert text.count("mosaic_gpu_v2") == 1


def _lower_auto(axis_size=8, m_shard=1024, k=4096, n_shard=4096, dtype=jnp.float16, **options):
    return ci.lower_for_cuda(
        lambda lhs, rhs: cmm.all_gather_matmul(lhs, rhs, "x", **options),
        jax.ShapeDtypeStruct((m_shard * axis_size, k), dtype),
        jax.ShapeDtypeStruct((k, n_shard * axis_size), dtype),
        mesh_axes={"x": axis_size},
        in_specs=(P("x", None), P(None, "x")),
        out_specs=P(None, "x"),
    )


@pytest.mark.parametrize("m_shard, k, n_shard", [(128, 4096, 4096), (1024, 4096, 4096), (1024, 1024, 2048)])
def test_auto_takes_the_kernel(m_shard, k, n_shard):
    assert _lower_auto(m_shard=m_shard, k=k, n_shard=n_shard).count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    "unfit",
    [
        {"axis_size": 4},
        {"m_shard": 1000},
        {"dtype": jnp.float32},
        {"precision": "highest"},
        {"m_shard": 64},
        {"m_shard": 512, "k": 1024, "n_shard": 2048},
        {"m_shard": 1024, "k": 2048, "n_shard": 512},
    ],
    ids=["the mesh does not hold all devices", "tiles", "dtype", "precision", "few rows", "short", "narrow"],
)
def test_auto_takes_another_method_where_the_kernel_does_not_fit_or_pay(unfit):
    with pytest.raises(ValueError, match="the lowered program holds no Mosaic GPU kernel"):
        _lower_auto(**unfit)


@each_kernel
def test_ring_along_one_axis_of_a_mesh_lowers_for_cuda(kernel):
    text = ci.lower_for_cuda(
        lambda lhs, rhs: kernel(lhs, rhs, "y"),
        jax.ShapeDtypeStruct((2048, 4096), jnp.bfloat16),
        jax.ShapeDtypeStruct((4096, 8192), jnp.bfloat16),
        mesh_axes={"x": 2, "y": 2},
        in_specs=(P("y", None), P(None, "y")),
        out_specs=P(None, "y"),
    )
    assert text.count("mosaic_gpu_v2") == 1
