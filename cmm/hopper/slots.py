"""How do tiles of A lie in a slot, where the neighbour sends them, and why not as rows?

As they lie in shared memory: each tile is one piece of the slot, an *image* of a stage, in blocks of 8 rows whose
16-byte parts are swizzled. So a tile is sent, and loaded again, by a copy of contiguous bytes.

That matters in programs of several calls. XLA puts their launches into a command buffer, a CUDA graph. Copies between
rows of a matrix and swizzled shared memory go by TMA descriptors. The host makes them for a launch, with the addresses
on other GPUs in them, and XLA takes a launch over from an earlier execution if the kernel's buffers are where they were
on its own GPU. Where they have moved on another GPU, such a copy goes to where they once were: the result is wrong, and
what lies there now is written over. `cmm/peers/stale_addresses.py` shows it with JAX alone. A contiguous copy takes the
address from a table on the GPU, which is new in each execution.

Simulated devices know no layouts: there an image is a tile, row by row.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from cmm import interpret
from cmm.hopper.plan import Plan

_BLOCK_ROWS, _BLOCK_COLUMNS = 8, 64  # 128 bytes, the widest swizzle: `tile_k` is a multiple of it.
_PARTS = 8  # Of a row, of 16 bytes each. Part `p` of row `r` of a block lies where part `p ^ r` would lie unswizzled.


def type_of(plan: Plan, count: int, dtype) -> jax.ShapeDtypeStruct:
    """Returns the type of `count` slots: slot, row and column of a tile of A, and its image."""
    return jax.ShapeDtypeStruct((count, plan.m_tiles, plan.k_steps, *_image_shape(plan)), dtype)


def with_images(stages, plan: Plan, dtype):
    """Returns the type of memory for the stages of A, `stages`, that can be seen as images, too."""
    if interpret.is_active():
        return stages
    return plgpu.RefUnion(stages, plgpu.SMEM((plan.config.max_concurrent_steps, *_image_shape(plan)), dtype))


def views(memory) -> tuple:
    """Returns memory of the type that `with_images` returns as stages and as images. Both are the same bytes.

    JAX advises against reading through one view what was written through another: there may be padding between the
    references of one view. Here each has a single one.
    """
    return (memory, memory) if interpret.is_active() else memory


def first_half(images, plan: Plan):
    """Returns the part of all stages, as images, that the tiles of a plan of halves take."""
    return images.at[:, : _image_rows(plan)]


def place(plan: Plan, m_tile, k_step) -> tuple:
    """Returns where in a slot a tile of A is; of a plan of halves, where half of a tile is."""
    return plan.row(m_tile), k_step, plan.rows_in_tile(m_tile, _image_rows(plan))


def as_rows(slots, plan: Plan):
    """Returns the shards that lie in slots, `[count, m, k]`.

    Args:
      slots: as `type_of` says, of a kernel that has ended.
      plan: the tiles.
    """
    config = plan.config
    if not interpret.is_active():
        slots = _unswizzled(slots)
        # From (..., row block, column block, row, column) to (..., row, column) of a tile.
        slots = jnp.swapaxes(slots, -3, -2)
    tiles = slots.reshape(*slots.shape[:3], config.cta_tile_m, config.tile_k)
    return jnp.swapaxes(tiles, 2, 3).reshape(slots.shape[0], plan.m, plan.k)


def _image_shape(plan) -> tuple[int, ...]:
    rows, columns = plan.config.cta_tile_m, plan.config.tile_k
    if interpret.is_active():
        return rows, columns
    return rows // _BLOCK_ROWS, columns // _BLOCK_COLUMNS, _BLOCK_ROWS, _BLOCK_COLUMNS


def _image_rows(plan) -> int:
    """Returns how many elements the first axis of an image has."""
    return plan.config.cta_tile_m // (1 if interpret.is_active() else _BLOCK_ROWS)


def _unswizzled(blocks):
    """Puts the parts of the rows of blocks, `[..., 8, 64]`, in order."""
    rows = np.arange(_BLOCK_ROWS)[:, None]
    parts = blocks.reshape(*blocks.shape[:-1], _PARTS, _BLOCK_COLUMNS // _PARTS)
    return parts[..., rows, np.arange(_PARTS) ^ rows, :].reshape(blocks.shape)
