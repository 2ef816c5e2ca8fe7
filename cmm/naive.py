"""Gather first, then multiply: the baseline that leaves the tensor cores idle while the activations travel."""

from jax import lax

from cmm.checks import check_call
from cmm.product import local_matmul


def all_gather_matmul_naive(lhs, rhs, axis_name, *, dtype=None, precision=None):
    """Computes `AllGather(lhs) @ rhs` as one all-gather followed by one matmul. Call it inside `jax.shard_map`.

    Args:
      lhs: `[m_shard, k]`, this device's rows of the activations; float16, bfloat16 or float32.
      rhs: `[k, n_shard]`, this device's columns of the weights; same dtype.
      axis_name: mesh axis over which the rows of the activations are sharded.
      dtype: dtype of the result, by default that of `lhs`. Accumulation is in float32.
      precision: as in `jax.lax.dot`. By default float32 operands are multiplied in full float32.

    Returns:
      `[axis_size * m_shard, n_shard]`, this device's columns of the product.

    Raises:
      ValueError: operands or axis are not fit for it; the message says why (see `cmm.checks`).

    Cost: `2 * axis_size * m_shard * k * n_shard` FLOPs; receives `(axis_size - 1) * m_shard * k` elements, and no
    FLOP starts before the last of them has arrived. Runs on every JAX backend.

    Source: "Collective matrix multiplication" in the JAX documentation (Pallas:Mosaic GPU), its reference case.
    """
    dtype, _ = check_call(lhs, rhs, axis_name, dtype)
    gathered = lax.all_gather(lhs, axis_name, axis=0, tiled=True)  # [axis_size * m_shard, k]
    return local_matmul(gathered, rhs, dtype, precision)
