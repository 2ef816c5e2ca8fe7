"""The front door: one function for every method, and the list of methods."""

import dataclasses
from collections.abc import Callable

from cmm.naive import all_gather_matmul_naive
from cmm.ring import all_gather_matmul_ring, all_gather_matmul_ring_bidirectional


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to compute `AllGather(lhs) @ rhs`.

    Attributes:
      name: what `all_gather_matmul(method=...)` takes.
      title: what tables and figures print.
      function: `function(lhs, rhs, axis_name, *, dtype, precision)`.
    """

    name: str
    title: str
    function: Callable


METHODS = {
    method.name: method
    for method in (
        Method("naive", "all-gather + matmul", all_gather_matmul_naive),
        Method("ring", "ring", all_gather_matmul_ring),
        Method("ring_bidirectional", "ring, both ways", all_gather_matmul_ring_bidirectional),
    )
}


def all_gather_matmul(lhs, rhs, axis_name, *, method="auto", dtype=None, precision=None):
    """Computes `AllGather(lhs) @ rhs` by the method of your choice. Call it inside `jax.shard_map`.

    Args:
      lhs: `[m_shard, k]`, this device's rows of the activations; float16, bfloat16 or float32.
      rhs: `[k, n_shard]`, this device's columns of the weights; same dtype.
      axis_name: mesh axis over which the rows of the activations are sharded.
      method: "auto", or a key of `cmm.METHODS`. "auto" takes "naive": as XLA compiles it by default, the ring was
        slower on every GPU measured so far, because NCCL's transfers wait for the matmul to free the multiprocessors.
        See `cmm.COPY_ENGINE_OPTIONS` for the compiler option that changes this.
      dtype: dtype of the result, by default that of `lhs`. Accumulation is in float32.
      precision: as in `jax.lax.dot`. By default float32 operands are multiplied in full float32.

    Returns:
      `[axis_size * m_shard, n_shard]`, this device's columns of the product. All methods agree up to rounding, and
      all can be differentiated in both operands.

    Raises:
      ValueError: the method is unknown, or operands or axis are not fit for it; the message says why.

    Cost: `2 * axis_size * m_shard * k * n_shard` FLOPs; each device receives `(axis_size - 1) * m_shard * k` elements.
    """
    if method != "auto" and method not in METHODS:
        known = ", ".join(repr(name) for name in ("auto", *METHODS))
        raise ValueError(f"method={method!r} is unknown. Known methods: {known}.")
    name = "naive" if method == "auto" else method
    return METHODS[name].function(lhs, rhs, axis_name, dtype=dtype, precision=precision)
