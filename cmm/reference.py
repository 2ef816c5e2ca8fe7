"""Is a result right? A float32 reference, and a bound on the error of every element."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

# Timing candidates for large float32 products would take far longer than the products. Other backends ignore it.
_WITHOUT_AUTOTUNING = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def error_bound(reference, magnitude, k, dtype):
    """Returns the largest error that an element of a right result may have.

    The bound is `eps_out * |ref| + 4 * k * eps_f32 * (|A| @ |B|)`: one rounding to the dtype of the result, and an
    accumulation in float32 in the worst order. A shard that is lost or in the wrong place exceeds it. For large `k` it
    is too generous to tell precisions apart: `relative_limit` does that.

    Args:
      reference: `A @ B` in float32 or float64.
      magnitude: `|A| @ |B|`.
      k: contraction size.
      dtype: dtype of the result that is judged.
    """
    eps_out, eps_f32 = float(jnp.finfo(dtype).eps), float(jnp.finfo(jnp.float32).eps)
    return eps_out * abs(reference) + 4 * k * eps_f32 * magnitude


def relative_limit(k, dtype) -> float:
    """Returns the largest `|out - ref| / |ref|`, in the Frobenius norm, that a right result may have.

    It is `eps_out + sqrt(k) * eps_f32`. One rounding to the dtype of the result costs about a fifth of `eps_out`, and
    rounding errors of a sum in float32 grow like `sqrt(k)`, not like `k`. A product that was accumulated in half
    precision, or a float32 product on TF32 tensor cores, exceeds it.

    Args:
      k: contraction size.
      dtype: dtype of the result that is judged.
    """
    return float(jnp.finfo(dtype).eps) + k**0.5 * float(jnp.finfo(jnp.float32).eps)


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """How far a result is from the reference.

    Attributes:
      error_over_bound: largest ratio of an element's error to its bound (see `error_bound`); infinity if an element is
        not finite.
      relative_error: `|out - ref| / |ref|` in the Frobenius norm: about 1e-6 for float32, 2e-4 for float16, 2e-3 for
        bfloat16.
      limit: the largest relative error of a right result (see `relative_limit`).
    """

    error_over_bound: float
    relative_error: float
    limit: float

    @property
    def right(self) -> bool:
        """Whether every element is within its bound, and all of them together within the limit."""
        return self.error_over_bound <= 1 and self.relative_error <= self.limit


class Reference(NamedTuple):
    """What results of one pair of operands are compared with.

    Attributes:
      product: `f32[M, N]`, sharded like the results.
      bound: `f32[M, N]`, the largest error that each element of a right result may have (see `error_bound`).
      k: contraction size.
    """

    product: jax.Array
    bound: jax.Array
    k: int


def make_reference(lhs, rhs, mesh, axis_name, dtype=None) -> Reference:
    """Computes in float32, on the devices that hold the operands, what results are compared with.

    Args:
      lhs: `[M, K]`, sharded `P(axis_name, None)`.
      rhs: `[K, N]`, sharded `P(None, axis_name)`.
      mesh: the mesh.
      axis_name: the axis.
      dtype: dtype of the results, by default that of `lhs`.

    Cost: `4 * M * K * N` FLOPs in float32; keeps `8 * M * N` bytes.
    """
    return Reference(*_references(mesh, axis_name, jnp.dtype(dtype or lhs.dtype))(lhs, rhs), lhs.shape[1])


def compare(out, reference: Reference, mesh, axis_name) -> Accuracy:
    """Compares a global result with its reference, element by element, on the devices that hold it.

    Args:
      out: `[M, N]`, the result to check, sharded `P(None, axis_name)`.
      reference: that of its operands and its dtype.
      mesh: the mesh.
      axis_name: the axis.
    """
    found = _comparison(mesh, axis_name)(out, reference.product, reference.bound)
    per_device = np.asarray(found, np.float64)  # [axis_size, 3]
    error2, reference2 = per_device[:, 1].sum(), per_device[:, 2].sum()
    relative_error = float(np.sqrt(error2 / reference2)) if reference2 else 0.0
    return Accuracy(float(per_device[:, 0].max()), relative_error, relative_limit(reference.k, out.dtype))


def accuracy(out, lhs, rhs, mesh, axis_name) -> Accuracy:
    """Compares one result with a reference that is made for it alone; arguments as above."""
    return compare(out, make_reference(lhs, rhs, mesh, axis_name, out.dtype), mesh, axis_name)


@functools.cache  # One program per mesh: the main job compares dozens of results.
def _references(mesh, axis_name, dtype):
    def body(lhs, rhs):
        return reference_and_bound(lhs, rhs, axis_name, dtype)

    rows, columns = P(axis_name, None), P(None, axis_name)
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(rows, columns), out_specs=(columns, columns)),
        compiler_options=_WITHOUT_AUTOTUNING,
    )


@functools.cache
def _comparison(mesh, axis_name):
    columns = P(None, axis_name)
    return jax.jit(jax.shard_map(_compare, mesh=mesh, in_specs=(columns,) * 3, out_specs=P(axis_name, None)))


def reference_and_bound(lhs, rhs, axis_name, dtype):
    """Returns the product in float32 and the bound of each element's error. Call it inside `jax.shard_map`.

    Args:
      lhs: `[m_shard, k]`, this device's rows.
      rhs: `[k, n_shard]`, this device's columns.
      axis_name: mesh axis over which the rows are sharded.
      dtype: dtype of the result that is judged.

    Returns:
      Two arrays `f32[axis_size * m_shard, n_shard]`.
    """
    # Gathers what was never multiplied, so a method that shares this all-gather is still judged by its product.
    return product_and_bound(lax.all_gather(lhs, axis_name, axis=0, tiled=True), rhs, dtype)


def product_and_bound(lhs, rhs, dtype):
    """Returns what `reference_and_bound` does, of one device: of `lhs [m, k]` and `rhs [k, n]`, both `f32[m, n]`."""
    lhs32, rhs32 = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    dot = functools.partial(lax.dot, precision=lax.Precision.HIGHEST)
    reference = dot(lhs32, rhs32)
    return reference, error_bound(reference, dot(jnp.abs(lhs32), jnp.abs(rhs32)), lhs.shape[1], dtype)


def _compare(out, reference, bound):
    error = jnp.abs(out.astype(jnp.float32) - reference)
    # An element of zeros times zeros has bound 0: its error must be 0 too, and 0 / 0 must not become NaN.
    ratio = jnp.where(error == 0, 0.0, error / bound)
    worst = jnp.max(jnp.where(jnp.isfinite(ratio), ratio, jnp.inf))
    return jnp.stack([worst, jnp.sum(error**2), jnp.sum(reference**2)])[None]
