"""The Hopper kernels on real GPUs: right for new operands, poisoned memory and late devices, and bitwise repeatable."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from cmm import devices, reference
from cmm.hopper import MatmulDimension, TuningConfig, all_gather_lhs_matmul, matmul
from cmm.roofline import Problem

pytestmark = pytest.mark.gpu

CONFIGS = {
    "default": TuningConfig(),
    "side by side": TuningConfig(128, 128, wg_dimension=MatmulDimension.N),
    "small tiles, two stages": TuningConfig(64, 64, max_concurrent_steps=2),
}


def _program(mesh, function, **options):
    return jax.jit(
        jax.shard_map(
            lambda lhs, rhs: function(lhs, rhs, "x", **options),
            mesh=mesh,
            in_specs=(P("x", None), P(None, "x")),
            out_specs=P(None, "x"),
        )
    )


def _poison(problem, mesh):
    """Fills free memory with NaN, so that what a kernel does not write cannot look right by chance."""
    rows = NamedSharding(mesh, P("x", None))
    shape = (problem.axis_size * problem.axis_size * problem.m_shard, 2 * problem.k + problem.n_shard)
    jax.block_until_ready(jax.jit(lambda: jnp.full(shape, jnp.nan, problem.dtype), out_shardings=rows)())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_ring(gpus, config, dtype):
    mesh = devices.ring_mesh(gpus)
    for m_shard, k, n_shard in ((1024, 4096, 4096), (128, 64, 256), (384, 1024, 768)):
        problem = Problem(len(gpus), m_shard, k, n_shard, dtype)
        run = _program(mesh, all_gather_lhs_matmul, config=config)
        for seed in range(3):
            operands = devices.random_operands(problem, mesh, seed)
            _poison(problem, mesh)
            out = run(*operands)
            assert reference.accuracy(out, *operands, mesh, "x").right
            _poison(problem, mesh)
            assert bool(jnp.all(run(*operands) == out))


def test_late_device(gpus):
    # A long product before the call on one device: the others start, and wait for its shards inside the kernel.
    mesh = devices.ring_mesh(gpus)
    problem = Problem(len(gpus), 1024, 4096, 4096)

    def late(lhs, rhs, axis, device):
        def busy(x):
            return jax.lax.fori_loop(0, 20, lambda _, y: jnp.tanh(y @ rhs[:, : y.shape[1]]), x)

        first = jax.lax.cond(jax.lax.axis_index(axis) == device, busy, lambda x: x, lhs)
        return all_gather_lhs_matmul(lhs + 0 * first, rhs, axis)

    for device in range(len(gpus)):
        run = _program(mesh, functools.partial(late, device=device))
        for seed in range(3):
            operands = devices.random_operands(problem, mesh, seed)
            assert reference.accuracy(run(*operands), *operands, mesh, "x").right


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_local_matmul(gpus, config):
    mesh = devices.ring_mesh(gpus[:1])
    for shape in ((1024, 4096, 4096), (128, 64, 256), (384, 1024, 768)):
        operands = devices.random_operands(Problem(1, *shape), mesh, 0)
        out = _program(mesh, lambda lhs, rhs, axis, **options: matmul(lhs, rhs, **options), config=config)(*operands)
        assert reference.accuracy(out, *operands, mesh, "x").right


def test_gradients(gpus):
    mesh = devices.ring_mesh(gpus)
    operands = devices.random_operands(Problem(len(gpus), 256, 512, 256), mesh, 0)
    run = _program(mesh, all_gather_lhs_matmul)
    d_lhs, d_rhs = jax.jit(jax.grad(lambda *o: jnp.sum(run(*o).astype(jnp.float32) ** 2), (0, 1)))(*operands)
    lhs, rhs = (np.asarray(x, np.float64) for x in operands)
    for ours, exact in ((d_lhs, 2 * lhs @ rhs @ rhs.T), (d_rhs, 2 * lhs.T @ (lhs @ rhs))):
        assert np.linalg.norm(np.asarray(ours, np.float64) - exact) < 3e-3 * np.linalg.norm(exact)
