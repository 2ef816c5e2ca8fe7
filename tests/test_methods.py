"""Every method computes the product: dtypes, device counts, shapes, meshes, and what jax.vmap makes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cmm

METHODS = [name for name, method in cmm.METHODS.items() if not method.needs_hopper]
DTYPES = ["float16", "bfloat16", "float32"]
SHAPES = [(1, 1, 1), (5, 7, 3), (16, 33, 8)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("method", METHODS)
def test_product(make_case, method, axis_size, dtype):
    for seed, shape in enumerate(SHAPES):
        case = make_case(*shape, dtype, (axis_size,), seed=seed)
        out = case.program(cmm.all_gather_matmul, method=method)(case.lhs, case.rhs)
        assert out.dtype == dtype
        case.assert_right(out)


@pytest.mark.parametrize("axis", ["x", "y"])
@pytest.mark.parametrize("mesh_shape", [(2, 4), (4, 2)])
@pytest.mark.parametrize("method", METHODS)
def test_one_axis_of_a_mesh_of_two(make_case, method, mesh_shape, axis):
    case = make_case(5, 7, 3, "float16", mesh_shape, axis)
    case.assert_right(case.program(cmm.all_gather_matmul, method=method)(case.lhs, case.rhs))


@pytest.mark.parametrize("method", METHODS)
def test_rings_of_one_axis_are_independent(make_case, method):
    # Rows of A over x and also over y: two rings along x, each with activations of its own.
    case = make_case(5, 7, 3, "float32", (4, 2))
    lhs = np.random.default_rng(1).normal(size=(2, 20, 7))
    run = jax.shard_map(
        lambda lhs, rhs: cmm.all_gather_matmul(lhs[0], rhs, "x", method=method)[None],
        mesh=case.mesh,
        in_specs=(P("y", "x", None), P(None, "x")),
        out_specs=P("y", None, "x"),
    )
    out = jax.jit(run)(case.put(lhs, "float32", P("y", "x", None)), case.rhs)
    np.testing.assert_allclose(out, lhs @ case.rhs64, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", [P(None, "x"), P(None, ("x", "y"))], ids=["replicated over y", "sharded over y"])
@pytest.mark.parametrize("method", METHODS)
def test_inside_a_shard_map_that_leaves_another_axis_alone(make_case, method, weights):
    case = make_case(5, 7, 6, "float32", (4, 2))
    run = jax.shard_map(
        lambda lhs, rhs: cmm.all_gather_matmul(lhs, rhs, "x", method=method),
        mesh=case.mesh,
        in_specs=(case.rows, case.columns),
        out_specs=case.columns,
        axis_names={"x"},
    )
    case.assert_right(jax.jit(run)(case.lhs, case.put(case.rhs64, "float32", weights)))


@pytest.mark.parametrize("method", METHODS)
def test_result_dtype(make_case, method):
    case = make_case(5, 64, 3, "float16")
    out = case.program(cmm.all_gather_matmul, method=method, dtype="float32")(case.lhs, case.rhs)
    assert out.dtype == jnp.float32
    # Rounded to float32 only: the bound of a float32 result is far below float16's rounding.
    case.assert_right(out)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_accumulates_in_float32(make_case, method, dtype):
    # 1 followed by 4095 terms of 1/4096: each is lost when added to 1 in half precision, together they make almost 1.
    k = 4096
    case = make_case(2, k, 2, dtype)
    terms = np.full(case.rhs64.shape, 1.0 / k)
    terms[0] = 1.0
    lhs, rhs = case.put(np.ones(case.lhs64.shape), dtype, case.rows), case.put(terms, dtype, case.columns)
    out = case.program(cmm.all_gather_matmul, method=method)(lhs, rhs)
    np.testing.assert_allclose(np.asarray(out, np.float32), 2.0, rtol=2 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("batched", [(0, 0), (0, None), (None, 0)])
@pytest.mark.parametrize("method", METHODS)
def test_vmap(make_case, method, batched):
    case = make_case(5, 7, 3, "float32")
    lhs, rhs = (
        np.stack([x, 2 * x]) if axis == 0 else x for x, axis in zip((case.lhs64, case.rhs64), batched, strict=True)
    )
    lhs_spec, rhs_spec = (
        P(None, *s) if axis == 0 else s for s, axis in zip((case.rows, case.columns), batched, strict=True)
    )
    run = jax.shard_map(
        jax.vmap(lambda lhs, rhs: cmm.all_gather_matmul(lhs, rhs, "x", method=method), batched),
        mesh=case.mesh,
        in_specs=(lhs_spec, rhs_spec),
        out_specs=P(None, None, "x"),
    )
    out = jax.jit(run)(case.put(lhs, "float32", lhs_spec), case.put(rhs, "float32", rhs_spec))
    np.testing.assert_allclose(out, lhs @ rhs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_repeated_calls_give_the_same_bits(make_case, method):
    case = make_case(16, 33, 8, "bfloat16")
    run = case.program(cmm.all_gather_matmul, method=method)
    first = np.asarray(run(case.lhs, case.rhs).astype(jnp.float32))
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(run(case.lhs, case.rhs).astype(jnp.float32)), first)


def test_auto_is_right(make_case):
    for axis_size in (1, 4):
        case = make_case(5, 7, 3, "float16", (axis_size,))
        case.assert_right(case.program(cmm.all_gather_matmul)(case.lhs, case.rhs))
