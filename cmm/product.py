"""The matmul of one device, and what precision it has."""

import jax.numpy as jnp
from jax import lax


def local_matmul(lhs, rhs, dtype, precision=None):
    """Returns `lhs @ rhs`, accumulated in float32 and rounded once, to `dtype`.

    Half-precision operands ask for a half-precision result directly. XLA's backends accumulate such products in
    float32 all the same, and the transposed products of the backward pass stay in half precision, where the tensor
    cores are. Asking for a float32 result and casting it would make the backward pass multiply float32 by float16.

    Args:
      lhs: `[m, k]`.
      rhs: `[k, n]`, same dtype as `lhs`.
      dtype: dtype of the result.
      precision: as in `jax.lax.dot`. `None` means full precision: on GPUs, float32 products would run on TF32 tensor
        cores (10 bits of mantissa) unless told otherwise.

    Returns:
      `dtype[m, n]`.

    Cost: `2 * m * k * n` FLOPs.
    """
    if precision is None and jnp.promote_types(lhs.dtype, dtype) == jnp.float32:
        precision = lax.Precision.HIGHEST
    return lax.dot(lhs, rhs, precision=precision, preferred_element_type=dtype)
