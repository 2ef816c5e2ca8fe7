"""The ring in plain JAX: multiply the shard at hand while it travels on to the neighbour."""

import jax
from jax import lax

from cmm.checks import check_call
from cmm.product import local_matmul
from cmm.schedule import send_pairs, shard_at

COPY_ENGINE_OPTIONS = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
"""Compiler options that let a GPU's copy engines carry the ring's transfers: `jax.jit(f, compiler_options=...)`.

By default XLA hands the transfers to NCCL, whose kernels need multiprocessors and wait until the matmul frees some:
product and transfer then take turns. Copy engines need none. The options hold for GPUs that one process drives and that
reach each other's memory; other backends ignore them.
"""


def all_gather_matmul_ring(lhs, rhs, axis_name, *, dtype=None, precision=None):
    """Computes `AllGather(lhs) @ rhs` in `axis_size` steps around a ring. Call it inside `jax.shard_map`.

    In step `i` device `d` multiplies shard `(d + i) % axis_size` by its `rhs`, and sends the same shard to device
    `(d - 1) % axis_size` meanwhile. Product and transfer do not depend on each other, so the compiler may overlap
    them. The loop is unrolled: the program holds `axis_size - 1` permutes. On GPUs pass `cmm.COPY_ENGINE_OPTIONS` to
    `jax.jit`: without them the overlap does not happen.

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

    Cost: `2 * axis_size * m_shard * k * n_shard` FLOPs; sends `m_shard * k` elements in each of `axis_size - 1` hops.
    Runs on every JAX backend.

    Source: Wang et al., "Overlap communication with dependent computation via decomposition", ASPLOS 2023.
    """
    dtype, axis_size = check_call(lhs, rhs, axis_name, dtype)
    return _ring(["down"], [lhs], [0], lhs, rhs, axis_name, axis_size, dtype, precision)


def all_gather_matmul_ring_bidirectional(lhs, rhs, axis_name, *, dtype=None, precision=None):
    """Computes `AllGather(lhs) @ rhs` with half of each shard travelling either way around the ring.

    The upper half of the rows (one row more if `m_shard` is odd) goes down the ring, to device `d - 1`; the lower
    half goes up, to `d + 1`. Each link carries half as many bytes per step in each direction. That pays on links that
    work both ways at once and connect neighbours only; through a switch, as between the GPUs of one host, a device
    sends all its bytes through the same port either way.

    Args, Returns, Raises: as `all_gather_matmul_ring`.

    Cost: the same FLOPs and bytes as `all_gather_matmul_ring`, in `2 * (axis_size - 1)` hops of half a shard.
    Runs on every JAX backend.

    Source: as `all_gather_matmul_ring`; the bidirectional form is its section on bidirectional transfer.
    """
    dtype, axis_size = check_call(lhs, rhs, axis_name, dtype)
    upper = (lhs.shape[0] + 1) // 2
    if upper == lhs.shape[0]:  # One row cannot be halved.
        return _ring(["down"], [lhs], [0], lhs, rhs, axis_name, axis_size, dtype, precision)
    halves = [lhs[:upper], lhs[upper:]]
    return _ring(["down", "up"], halves, [0, upper], lhs, rhs, axis_name, axis_size, dtype, precision)


def _ring(directions, blocks, first_rows, lhs, rhs, axis_name, axis_size, dtype, precision):
    """Sends each of `blocks` around the ring in its direction; multiplies and places them step by step.

    Args:
      directions: "down" or "up" for each block.
      blocks: parts of `lhs`, `[rows, k]` each.
      first_rows: the row of `lhs` at which each block starts.
    """
    m_shard, n_shard = lhs.shape[0], rhs.shape[1]
    device = lax.axis_index(axis_name)
    out = None
    for step in range(axis_size):
        products = [local_matmul(block, rhs, dtype, precision) for block in blocks]
        if step < axis_size - 1:
            arriving = [
                lax.ppermute(block, axis_name, send_pairs(axis_size, direction))
                for block, direction in zip(blocks, directions, strict=True)
            ]
            # Ties the next products to these. Without the barrier XLA sees products that share `rhs`, waits for all
            # shards to arrive, concatenates them and multiplies once: the overlap would be gone.
            blocks, products = lax.optimization_barrier((arriving, products))
        if out is None:
            # Every row is written exactly once below, so the result needs no initial value.
            sharding = jax.typeof(products[0]).sharding  # over axes of the mesh that jax.shard_map leaves alone
            out = lax.empty((axis_size * m_shard, n_shard), dtype, out_sharding=sharding)
        for product, direction, first_row in zip(products, directions, first_rows, strict=True):
            row = shard_at(device, step, axis_size, direction) * m_shard + first_row
            out = lax.dynamic_update_slice_in_dim(out, product, row, axis=0)
    return out
