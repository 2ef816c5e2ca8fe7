"""The kernels as parts of a model: varying axes, 64-bit mode, rematerialization, axes of jax.vmap, derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import cmm
import cmm.interpret as ci
from cmm.hopper import requirements

SMALL = cmm.TuningConfig(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2)
KERNELS = [name for name, method in cmm.METHODS.items() if method.needs_hopper]
each_kernel = pytest.mark.parametrize("kernel", KERNELS)

ROWS, COLUMNS = P("x", None), P(None, "x")

small_matmul = functools.partial(cmm.matmul, config=SMALL)


def _lower(function, axis_size=2, m_shard=1024, k=4096, n_shard=4096, out_specs=COLUMNS):
    return ci.lower_for_cuda(
        function,
        jax.ShapeDtypeStruct((m_shard * axis_size, k), jnp.float16),
        jax.ShapeDtypeStruct((k, n_shard * axis_size), jnp.float16),
        mesh_axes={"x": axis_size},
        in_specs=(ROWS, COLUMNS),
        out_specs=out_specs,
    )


def _counts(text) -> dict:
    names = {"kernels": "mosaic_gpu_v2", "products": "stablehlo.dot_general", "gathers": "stablehlo.all_gather"}
    return {name: text.count(part) for name, part in names.items()}


def _loss(kernel):
    return lambda lhs, rhs: jnp.sum(cmm.all_gather_matmul(lhs, rhs, "x", method=kernel).astype(jnp.float32) ** 2)


def test_a_local_product_that_differs_by_device_is_not_taken_for_replicated(make_case):
    case = make_case(128, 128, 64, "float16", (2,))
    whole = P(None, None)
    run = lambda out_specs: jax.shard_map(small_matmul, mesh=case.mesh, in_specs=(ROWS, whole), out_specs=out_specs)
    operands = case.lhs, case.put(case.rhs64[:, :64], "float16", whole)
    with ci.simulate():
        with pytest.raises(ValueError, match="out_specs which require replication"):
            jax.eval_shape(run(whole), *operands)
        assert jax.eval_shape(run(ROWS), *operands).shape == (256, 64)


def test_a_local_product_is_carried_by_a_scan(make_case):
    case = make_case(128, 64, 64, "float16", (2,))
    layer = lambda x, w: (small_matmul(x, w), None)
    run = jax.shard_map(
        lambda x, weights: lax.scan(layer, x, weights)[0],
        mesh=case.mesh,
        in_specs=(ROWS, P(None, None, None)),
        out_specs=ROWS,
    )
    weights = np.stack([np.eye(64), 2 * np.eye(64), np.eye(64)])
    with ci.simulate() as sim:
        out = sim.run(jax.jit(run), case.lhs, case.put(weights, "float16", P(None, None, None)))
    np.testing.assert_array_equal(np.asarray(out), 2 * np.asarray(case.lhs))


@pytest.mark.parametrize("function", [*KERNELS, "matmul"])
def test_64_bit_mode(function):
    if function == "matmul":
        run = lambda lhs, rhs: cmm.matmul(lhs, rhs)
    else:
        run = lambda lhs, rhs: cmm.all_gather_matmul(lhs, rhs, "x", method=function)
    with jax.enable_x64(True):
        assert _counts(_lower(run))["kernels"] == 1
        # Fewer tiles than multiprocessors, and a number of them that the multiprocessors do not share evenly.
        assert _counts(_lower(run, m_shard=512))["kernels"] == 1
        assert _counts(_lower(run, m_shard=1920, n_shard=7168))["kernels"] == 1


@each_kernel
def test_64_bit_mode_on_simulated_devices(make_case, kernel):
    with jax.enable_x64(True):
        case = make_case(128, 128, 64, "float16", (2,))
        gradient = lambda method: jax.jit(
            jax.grad(lambda *operands: jnp.sum(case.program(cmm.all_gather_matmul, method=method)(*operands)), (0, 1))
        )
        with ci.simulate(core_count=2, seed=0) as sim:
            ours = sim.run(gradient(kernel), case.lhs, case.rhs)
        plain = gradient("naive")(case.lhs, case.rhs)
    for mine, reference in zip(ours, plain, strict=True):
        assert mine.dtype == jnp.float16
        np.testing.assert_allclose(np.float32(mine), np.float32(reference), rtol=4e-3, atol=1e-2)


@each_kernel
def test_a_policy_that_saves_what_the_kernel_gives_runs_it_once(kernel):
    def kernels(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        gradient = jax.grad(jax.checkpoint(_loss(kernel), policy=policy), (0, 1))
        return _counts(_lower(gradient, out_specs=(ROWS, COLUMNS)))

    assert kernels("cmm_product", "cmm_gathered") == {"kernels": 1, "products": 2, "gathers": 0}
    assert kernels("cmm_product")["kernels"] == 2, "the gathered activations are needed as well"


def test_a_policy_that_saves_the_local_product_runs_it_once():
    def kernels(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        layer = jax.checkpoint(lambda *pair: jnp.sum(jax.nn.gelu(cmm.matmul(*pair)).astype(jnp.float32)), policy=policy)
        return _counts(_lower(jax.value_and_grad(layer, (0, 1)), out_specs=(P(), (ROWS, COLUMNS))))

    assert kernels("cmm_product") == {"kernels": 1, "products": 2, "gathers": 0}
    assert kernels()["kernels"] == 2


@each_kernel
@pytest.mark.parametrize("operand, gathers", [(0, 1), (1, 0)], ids=["lhs", "rhs"])
def test_forward_mode_in_one_operand_costs_one_product(kernel, operand, gathers):
    def tangent(*operands):
        along = lambda one: cmm.all_gather_matmul(
            *operands[:operand], one, *operands[operand + 1 :], "x", method=kernel
        )
        return jax.jvp(along, (operands[operand],), (operands[operand],))

    text = _lower(tangent, out_specs=(COLUMNS, COLUMNS))
    assert _counts(text) == {"kernels": 1, "products": 1, "gathers": gathers}


@each_kernel
def test_a_product_of_constants_inside_what_is_differentiated(kernel):
    value = lambda lhs, rhs: jax.jvp(lambda scale: scale * _loss(kernel)(lhs, rhs), (1.0,), (1.0,))
    assert _counts(_lower(value, out_specs=(P(), P()))) == {"kernels": 1, "products": 0, "gathers": 0}


def _along_an_axis_of_vmap(method):
    product = functools.partial(cmm.all_gather_matmul, axis_name="v", method=method)
    batch = lambda lhs, rhs: jax.vmap(product, axis_name="v")(jnp.stack([lhs, lhs]), jnp.stack([rhs, rhs]))
    return _lower(batch, axis_size=8, out_specs=P(None, None, "x"))


def test_auto_along_an_axis_of_vmap_takes_no_kernel():
    with pytest.raises(ValueError, match="the lowered program holds no Mosaic GPU kernel"):
        _along_an_axis_of_vmap("auto")


@each_kernel
def test_a_kernel_along_an_axis_of_vmap(kernel):
    with pytest.raises(ValueError, match="'v' is not an axis of the mesh, which has 'x'.*jax.vmap"):
        _along_an_axis_of_vmap(kernel)


@pytest.mark.parametrize("error", [OSError("libcuda.so.1: no such file"), RuntimeError("CUDA error 101")])
def test_auto_where_the_driver_does_not_answer(monkeypatch, error):
    def fail():
        raise error

    product = lambda lhs, rhs: cmm.all_gather_matmul(lhs, rhs, "x")
    assert _counts(_lower(product, axis_size=8))["kernels"] == 1
    monkeypatch.setattr(requirements, "pair_without_peer_access", fail)
    with pytest.raises(ValueError, match="the lowered program holds no Mosaic GPU kernel"):
        _lower(product, axis_size=8)
    with pytest.raises(NotImplementedError, match=f'{error}.*method="ring"'):
        requirements.check_peers()


def _local_operands(batch=()):
    rng = np.random.default_rng(0)
    lhs, rhs = rng.normal(size=(*batch, 128, 64)), rng.normal(size=(64, 128)) / 8
    return jnp.asarray(lhs, jnp.float16), jnp.asarray(rhs, jnp.float16)


def _assert_close(ours, plain):
    for mine, reference in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert mine.dtype == reference.dtype
        difference = np.linalg.norm(np.float32(mine) - np.float32(reference))
        assert difference < 2e-3 * np.linalg.norm(np.float32(reference))


def test_derivatives_of_the_local_product():
    loss = lambda product: lambda *pair: jnp.sum(product(*pair).astype(jnp.float32) ** 2) / 1e2
    derivatives = lambda product: jax.jit(
        lambda *pair: (jax.grad(loss(product), (0, 1))(*pair), jax.jvp(jax.grad(loss(product)), pair, pair))
    )
    operands = _local_operands()
    with ci.simulate(core_count=2, seed=0) as sim:
        ours = sim.run(derivatives(small_matmul), *operands)
    _assert_close(ours, derivatives(jnp.matmul)(*operands))


def test_a_batch_of_local_products_and_their_derivatives():
    loss = lambda product: lambda *pair: jnp.sum(product(*pair).astype(jnp.float32) ** 2) / 1e2
    batch = lambda product: jax.jit(
        lambda *pair: (
            jax.vmap(product, (0, None))(*pair),
            jax.vmap(jax.grad(loss(product), (0, 1)), (0, None))(*pair),
            jax.grad(lambda *pair: loss(jax.vmap(product, (0, None)))(*pair), (0, 1))(*pair),
        )
    )
    operands = _local_operands((2,))
    with ci.simulate(core_count=2, seed=0) as sim:
        ours = sim.run(batch(small_matmul), *operands)
    _assert_close(ours, batch(jnp.matmul)(*operands))


def test_the_local_product_outside_shard_map_where_a_mesh_is_set():
    # Values then have types with shardings (AxisType.Explicit), inside the kernel, too.
    device = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Explicit,), abstract_device=device)
    operand = jax.ShapeDtypeStruct((1024, 1024), jnp.float16, sharding=NamedSharding(mesh, P(None, None)))
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(lambda lhs, rhs: cmm.matmul(lhs, rhs)).trace(operand, operand)
        assert _counts(traced.lower(lowering_platforms=("cuda",)).as_text())["kernels"] == 1
