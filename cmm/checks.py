"""Are these operands and this axis something that a collective matmul can run on? If not, say what would work."""

import collections.abc

import jax
import jax.numpy as jnp
from jax import lax

SUPPORTED_DTYPES = ("float16", "bfloat16", "float32")


def check_call(lhs, rhs, axis_name, dtype) -> tuple[jnp.dtype, int]:
    """Checks operands, axis and dtype of the result; returns that dtype, by default that of `lhs`, and the axis size.

    Raises:
      ValueError: see `check_operands`, `check_axis` and `check_dtype`.
    """
    check_operands(lhs, rhs)
    axis_size = check_axis(axis_name)
    dtype = lhs.dtype if dtype is None else dtype
    check_dtype(dtype, "the result")
    return jnp.dtype(dtype), axis_size


def check_operands(lhs, rhs) -> None:
    """Checks rank, contraction size and dtypes of one device's operands.

    Args:
      lhs: `[m_shard, k]`, the local block of activations.
      rhs: `[k, n_shard]`, the local block of weights.

    Raises:
      ValueError: rank other than 2, a size of 0, unequal contraction sizes, unequal dtypes, or a dtype that is not
        supported.
    """
    for name, operand, shape in (("lhs", lhs, "[m_shard, k]"), ("rhs", rhs, "[k, n_shard]")):
        if not hasattr(operand, "ndim") or not hasattr(operand, "dtype"):
            raise ValueError(f"{name} must be an array of shape {shape}, got {type(operand).__name__}.")
        if operand.ndim != 2:
            raise ValueError(
                f"{name} must have rank 2, {shape}, got shape {tuple(operand.shape)}. "
                "For a batch, use jax.vmap inside jax.shard_map or reshape the batch into the rows of lhs."
            )
        if 0 in operand.shape:
            raise ValueError(f"{name} must not be empty, got shape {tuple(operand.shape)}.")
    if lhs.shape[1] != rhs.shape[0]:
        raise ValueError(
            "lhs [m_shard, k] and rhs [k, n_shard] must have the same contraction size, "
            f"got k={lhs.shape[1]} from lhs {tuple(lhs.shape)} and k={rhs.shape[0]} from rhs {tuple(rhs.shape)}."
        )
    if lhs.dtype != rhs.dtype:
        raise ValueError(
            f"lhs and rhs must have the same dtype, got {lhs.dtype} and {rhs.dtype}. Cast one of them first."
        )
    check_dtype(lhs.dtype, "lhs and rhs")


def check_dtype(dtype, what: str) -> None:
    """Raises a `ValueError` that says `what` has the wrong dtype unless `dtype` is supported."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in SUPPORTED_DTYPES:
        raise ValueError(f"{what} must have one of the dtypes {', '.join(SUPPORTED_DTYPES)}, got {name}.")


def check_axis(axis_name) -> int:
    """Checks that `axis_name` is one manual axis here, that is: that we are inside `jax.shard_map` over it.

    Args:
      axis_name: name of one mesh axis.

    Returns:
      The number of devices along the axis.

    Raises:
      ValueError: several axes were given, the call stands outside `jax.shard_map`, the mesh has no such axis, or
        `jax.shard_map` leaves this axis to the compiler.
    """
    if isinstance(axis_name, (tuple, list, set, frozenset)) or not isinstance(axis_name, collections.abc.Hashable):
        raise ValueError(
            f"axis_name must be the name of one mesh axis, got {axis_name!r}. "
            "A ring over several axes needs a mesh in which they are one axis."
        )
    try:
        return lax.axis_size(axis_name)
    except (NameError, TypeError, ValueError):
        # JAX's own error does not say which of three mistakes was made. We do.
        pass
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        raise ValueError(
            f"axis_name={axis_name!r}: this call is outside jax.shard_map. A collective matmul works on the blocks of "
            'one device: wrap it, for instance jax.shard_map(lambda a, b: cmm.all_gather_matmul(a, b, "x"), '
            'mesh=mesh, in_specs=(P("x", None), P(None, "x")), out_specs=P(None, "x")).'
        )
    axes = ", ".join(map(repr, mesh.axis_names))
    if axis_name not in mesh.axis_names:
        raise ValueError(f"axis_name={axis_name!r} is not an axis of the mesh, which has {axes}.")
    manual = ", ".join(map(repr, mesh.manual_axes))
    raise ValueError(
        f"axis_name={axis_name!r} is an axis of the mesh ({axes}), but jax.shard_map handles only {manual} manually. "
        f"Add it to axis_names of jax.shard_map."
    )
