"""Bad input gets a ValueError that names the values and what would work."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import cmm

FUNCTIONS = [cmm.all_gather_matmul] + [method.function for method in cmm.METHODS.values()]


def _trace(make_case, function, lhs, rhs, axis_name="x", **options):
    """Traces `function` on one device's operands, inside jax.shard_map over x."""
    mesh = make_case(1, 1, 1, "float32", (4,)).mesh
    jax.eval_shape(
        jax.shard_map(
            lambda: function(lhs, rhs, axis_name, **options), mesh=mesh, in_specs=(), out_specs=P(), check_vma=False
        )
    )


BAD_OPERANDS = {
    "contraction": (jnp.ones((4, 8)), jnp.ones((9, 4)), ["k=8", "k=9", "(4, 8)", "(9, 4)"]),
    "dtypes": (jnp.ones((4, 8), jnp.float16), jnp.ones((8, 4), jnp.bfloat16), ["float16", "bfloat16", "Cast"]),
    "integers": (jnp.ones((4, 8), jnp.int32), jnp.ones((8, 4), jnp.int32), ["int32", "float16, bfloat16, float32"]),
    "float8": (jnp.ones((4, 8), jnp.float8_e4m3fn), jnp.ones((8, 4), jnp.float8_e4m3fn), ["float8_e4m3fn"]),
    "complex": (jnp.ones((4, 8), jnp.complex64), jnp.ones((8, 4), jnp.complex64), ["complex64"]),
    "rank 3": (jnp.ones((2, 4, 8)), jnp.ones((8, 4)), ["lhs", "rank 2", "(2, 4, 8)", "vmap"]),
    "rank 1": (jnp.ones((4, 8)), jnp.ones(8), ["rhs", "rank 2", "(8,)"]),
    "no array": ([[1.0]], jnp.ones((1, 1)), ["lhs", "list"]),
    "no rows": (jnp.ones((0, 8)), jnp.ones((8, 4)), ["lhs", "empty", "(0, 8)"]),
    "nothing to contract": (jnp.ones((4, 0)), jnp.ones((0, 4)), ["lhs", "empty", "(4, 0)"]),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("case", BAD_OPERANDS)
def test_bad_operands(make_case, function, case):
    lhs, rhs, named = BAD_OPERANDS[case]
    with pytest.raises(ValueError) as error:
        _trace(make_case, function, lhs, rhs)
    for value in named:
        assert value in str(error.value)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_axis_that_the_mesh_does_not_have(make_case, function):
    with pytest.raises(ValueError, match=r"axis_name='z' is not an axis of the mesh, which has 'x'"):
        _trace(make_case, function, jnp.ones((4, 8)), jnp.ones((8, 4)), "z")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_several_axes(make_case, function):
    with pytest.raises(ValueError, match=re.escape("one mesh axis, got ('x', 'y')")):
        _trace(make_case, function, jnp.ones((4, 8)), jnp.ones((8, 4)), ("x", "y"))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_outside_shard_map(function, wrap):
    with pytest.raises(ValueError, match=r"outside jax.shard_map.*mesh=mesh, in_specs"):
        wrap(lambda lhs, rhs: function(lhs, rhs, "x"))(jnp.ones((4, 8)), jnp.ones((8, 4)))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_outside_shard_map_with_a_mesh_set(make_case, function):
    with jax.set_mesh(make_case(1, 1, 1, "float32").mesh):
        with pytest.raises(ValueError, match="outside jax.shard_map"):
            function(jnp.ones((4, 8)), jnp.ones((8, 4)), "x")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_axis_that_shard_map_leaves_to_the_compiler(make_case, function):
    case = make_case(4, 8, 4, "float32", (4, 2))
    run = jax.shard_map(
        lambda lhs, rhs: function(lhs, rhs, "y"),
        mesh=case.mesh,
        in_specs=(case.rows, case.columns),
        out_specs=case.columns,
        axis_names={"x"},
    )
    with pytest.raises(ValueError, match=r"axis_name='y' is an axis of the mesh.*handles only 'x'.*axis_names"):
        jax.jit(run)(case.lhs, case.rhs)


@pytest.mark.parametrize("method", ["magic", ["naive"], None])
def test_unknown_method_lists_the_known_ones(make_case, method):
    with pytest.raises(ValueError) as error:
        _trace(make_case, cmm.all_gather_matmul, jnp.ones((4, 8)), jnp.ones((8, 4)), method=method)
    for value in (repr(method), "'auto'", *map(repr, cmm.METHODS)):
        assert value in str(error.value)


@pytest.mark.parametrize("dtype, named", [("int8", "int8"), ("foo", "'foo'"), (3, "3")])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_bad_result_dtype(make_case, function, dtype, named):
    with pytest.raises(ValueError, match=f"the result must have one of the dtypes .* got {named}"):
        _trace(make_case, function, jnp.ones((4, 8)), jnp.ones((8, 4)), dtype=dtype)
