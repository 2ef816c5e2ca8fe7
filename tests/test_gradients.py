"""Derivatives of every method, in both operands, against those of the plain product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cmm

METHODS = [name for name, method in cmm.METHODS.items() if not method.needs_hopper]


def _loss(case, method):
    run = case.program(cmm.all_gather_matmul, method=method)
    weights = np.random.default_rng(7).normal(size=(case.lhs64.shape[0], case.rhs64.shape[1]))
    on_devices = case.put(weights, "float32", case.columns)
    return lambda lhs, rhs: jnp.sum(run(lhs, rhs).astype(jnp.float32) * on_devices), weights


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float16", 4e-3), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("axis_size", [1, 3, 4])
@pytest.mark.parametrize("method", METHODS)
def test_grad_in_both_operands(make_case, method, axis_size, dtype, tolerance):
    case = make_case(5, 16, 3, dtype, (axis_size,))
    loss, weights = _loss(case, method)
    d_lhs, d_rhs = jax.jit(jax.grad(loss, (0, 1)))(case.lhs, case.rhs)
    assert d_lhs.dtype == d_rhs.dtype == dtype
    for ours, reference in ((d_lhs, weights @ case.rhs64.T), (d_rhs, case.lhs64.T @ weights)):
        error = np.linalg.norm(np.asarray(ours, np.float64) - reference) / np.linalg.norm(reference)
        assert error < tolerance


@pytest.mark.parametrize("axis", ["x", "y"])
@pytest.mark.parametrize("method", METHODS)
def test_grad_where_only_the_weights_vary_over_the_other_axis(make_case, method, axis):
    # The gradient of the activations must sum over the axis that they are replicated on.
    case = make_case(4, 8, 3, "float32", (2, 4), axis)
    other = "y" if axis == "x" else "x"
    columns = P(None, (axis, other))
    rhs64 = np.random.default_rng(3).normal(size=(8, 24))
    rhs = case.put(rhs64, "float32", columns)
    run = jax.shard_map(
        lambda lhs, rhs: cmm.all_gather_matmul(lhs, rhs, axis, method=method),
        mesh=case.mesh,
        in_specs=(case.rows, columns),
        out_specs=columns,
    )
    d_lhs, d_rhs = jax.jit(jax.grad(lambda lhs, rhs: jnp.sum(run(lhs, rhs) ** 2), (0, 1)))(case.lhs, rhs)
    product = case.lhs64 @ rhs64
    np.testing.assert_allclose(d_lhs, 2 * product @ rhs64.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(d_rhs, 2 * case.lhs64.T @ product, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_forward_mode_agrees_with_reverse_mode(make_case, method):
    case = make_case(5, 16, 3, "float32")
    loss, _ = _loss(case, method)
    operands = (case.lhs, case.rhs)
    _, forward = jax.jit(lambda *args: jax.jvp(loss, args, jax.tree.map(jnp.ones_like, args)))(*operands)
    gradients = jax.jit(jax.grad(loss, (0, 1)))(*operands)
    np.testing.assert_allclose(forward, sum(np.sum(np.asarray(gradient)) for gradient in gradients), rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_backward_products_stay_in_half_precision(make_case, method):
    # A backward pass in float32 would be right, and several times slower on GPUs.
    case = make_case(4, 8, 4, "float16")
    loss, _ = _loss(case, method)
    text = jax.jit(jax.grad(loss, (0, 1))).lower(case.lhs, case.rhs).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) >= 2
    assert all("f32" not in line for line in products), products


@pytest.mark.parametrize("method", METHODS)
def test_full_precision_is_for_float32_operands(make_case, method):
    # A float32 result of half-precision operands: TF32 holds the operands exactly, and full precision is far slower.
    def precisions(dtype, **options):
        case = make_case(4, 8, 4, dtype)
        run = case.program(cmm.all_gather_matmul, method=method, dtype="float32", **options)
        with jax.default_matmul_precision("bfloat16" if dtype == "float32" else "float32"):  # It has no say.
            text = jax.jit(jax.grad(lambda *pair: jnp.sum(run(*pair) ** 2), (0, 1))).lower(case.lhs, case.rhs).as_text()
        return {"HIGHEST" in line for line in text.splitlines() if "stablehlo.dot_general" in line}

    assert precisions("float32") == {True}
    assert precisions("float16") == {False}
    assert precisions("float16", precision="highest") == {True}
