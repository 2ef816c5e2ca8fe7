"""The matmul of one device: what precision does it have, in both passes, and what is its derivative?"""

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero

PRODUCT_NAME = "cmm_product"  # A result of this package, for policies of jax.checkpoint.


def local_matmul(lhs, rhs, dtype, precision=None):
    """Returns `lhs @ rhs`, accumulated in float32 and rounded once, to `dtype`.

    Half-precision operands ask for a half-precision result directly. XLA's backends accumulate such products in
    float32 all the same, and the transposed products of the backward pass stay in half precision, where the tensor
    cores are. With a float32 result of half-precision operands the backward pass multiplies a float32 cotangent by a
    half-precision operand. It does so in default precision: on GPUs both become TF32, which holds float16 and bfloat16
    exactly and rounds the cotangent to 10 bits of mantissa, no fewer than the gradient has in the end.

    Args:
      lhs: `[m, k]`.
      rhs: `[k, n]`, same dtype as `lhs`.
      dtype: dtype of the result.
      precision: as in `jax.lax.dot`. `None` means full precision for float32 operands: on GPUs, their products would
        run on TF32 tensor cores (10 bits of mantissa) unless told otherwise. `jax.default_matmul_precision` has no say.

    Returns:
      `dtype[m, n]`.

    Cost: `2 * m * k * n` FLOPs.
    """
    if precision is None:
        precision = lax.Precision.HIGHEST if lhs.dtype == "float32" else lax.Precision.DEFAULT
    return lax.dot(lhs, rhs, precision=precision, preferred_element_type=dtype)


def product_tangent(lhs, rhs, d_lhs, d_rhs, out):
    """Returns the tangent of `out = lhs @ rhs` for a rule of `jax.custom_jvp` with `symbolic_zeros=True`.

    Args:
      lhs: `[m, k]`.
      rhs: `[k, n]`, same dtype.
      d_lhs, d_rhs: their tangents, or a `SymbolicZero` for an operand that is not differentiated, which costs nothing.
      out: `[m, n]`, the product.

    Cost: `2 * m * k * n` FLOPs for each operand that is differentiated.
    """
    terms = []
    if not isinstance(d_lhs, SymbolicZero):
        terms.append(local_matmul(d_lhs, rhs, out.dtype))
    if not isinstance(d_rhs, SymbolicZero):
        terms.append(local_matmul(lhs, d_rhs, out.dtype))
    return sum(terms[1:], terms[0]) if terms else SymbolicZero(jax.typeof(out).to_tangent_aval())
