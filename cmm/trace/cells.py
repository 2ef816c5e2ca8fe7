"""Which marks does a call of a ring kernel make, and what do they belong to?"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from cmm.hopper.config import MatmulDimension
from cmm.hopper.marks import LOADER, MULTIPLIERS, NUMBERS, PER_CELL, SENDER, SPANS, Layout
from cmm.hopper.rounds import Rounds
from cmm.hopper.sends import plan_sends
from cmm.trace.times import Times


@dataclasses.dataclass(frozen=True)
class Cells:
    """What belongs to each cell of each CTA; all arrays are `[CTA, cell]`.

    Attributes:
      exists: a CTA with few tiles has few cells.
      step: of the ring.
      index: number of the tile of the result among those of the CTA in this step; in all steps where these share
        rounds.
      k_step: number of the cell's first product within its tile.
      m_tile, n_tile: the tile of the result.
      half: 0 for a whole tile; 1 for the upper half of one that two CTAs share, 2 for the lower half.
    """

    exists: np.ndarray
    step: np.ndarray
    index: np.ndarray
    k_step: np.ndarray
    m_tile: np.ndarray
    n_tile: np.ndarray
    half: np.ndarray

    @property
    def opens_tile(self) -> np.ndarray:
        """Whether a tile begins with this cell."""
        return self.exists & (self.k_step == 0)


@functools.cache
def cells_of(layout: Layout) -> Cells:
    """Returns what the cells of a kernel stand for."""
    plan = layout.plan
    cta = np.arange(plan.num_ctas)[:, None]
    use = np.arange(layout.cells)[None, :] * layout.every
    tiles, half = plan.tiles, np.zeros((plan.num_ctas, layout.cells), int)
    index, k_step = np.broadcast_arrays(use // plan.k_steps + 0 * cta, use % plan.k_steps)
    if layout.shared_rounds:
        # As `cmm.hopper.rounds.Rounds` deals out the tiles of all steps, in numpy.
        halved = Rounds(plan, layout.axis_size).deal.halved
        linear, whole = cta + index * plan.num_ctas, layout.axis_size * tiles - halved
        exists = linear < whole + 2 * halved
        half = np.where(exists & (linear >= whole), 1 + (linear - whole) % 2, 0)
        step, linear = np.divmod(np.where(half, whole + (linear - whole) // 2, linear), tiles)
    else:
        mine = (tiles - cta + plan.num_ctas - 1) // plan.num_ctas
        step, index = np.divmod(index, np.maximum(mine, 1))
        linear = cta + index * plan.num_ctas
        exists = use < layout.axis_size * mine * plan.k_steps
    places = np.stack(jax.vmap(plan.place)(jnp.arange(tiles)))
    return Cells(exists, step, index, k_step, *places[:, np.minimum(linear, tiles - 1)], half)


def sends_of(layout: Layout, cells: Cells) -> np.ndarray:
    """Returns which uses of each CTA send their tile of A, `[CTA, cell, use in the cell]`."""
    sending = cells.exists & (cells.step < layout.sending_steps)
    if layout.num_roles <= SENDER:
        return np.repeat((sending & (cells.n_tile == 0))[..., None], layout.every, axis=-1)
    config = layout.plan.config
    # As `cmm.hopper.sends.SendPlan` shares the sends, in numpy.
    backwards = (cells.m_tile // config.grid_tile_width) % 2 == 1
    backwards &= config.grid_minor_dim == MatmulDimension.M
    position = np.where(backwards, layout.plan.n_tiles - 1 - cells.n_tile, cells.n_tile)
    return sending[..., None] & (_k_steps(layout, cells) % plan_sends(layout.plan).columns == position[..., None])


def expected_marks(layout: Layout, cells: Cells) -> np.ndarray:
    """Returns which marks a call makes that mean something, `[CTA, role, cell, mark]`.

    In the readable kernel all multipliers note spans in which only those of column 0 have something to do.
    """
    expected = np.zeros((*cells.exists.shape, layout.num_roles, PER_CELL), bool)

    def expect(role, name, where):
        first = NUMBERS[name]
        expected[..., role, first : first + (2 if name in SPANS else 1)] |= where[..., None]

    mine = sends_of(layout, cells)
    if layout.num_roles > SENDER:
        sends = plan_sends(layout.plan)
        begins_chunk = cells.k_step % sends.chunk_steps == 0
        last = mine & (_k_steps(layout, cells) % sends.chunk_steps + sends.columns >= sends.chunk_steps)
        sent_before = np.roll(mine.reshape(len(mine), -1), 1, axis=1).reshape(mine.shape)
        expect(SENDER, "full", cells.exists)
        expect(SENDER, "issue", mine.any(-1))
        expect(SENDER, "read", cells.exists & sent_before.any(-1))
        for name in ("complete", "signal"):
            expect(SENDER, name, last.any(-1))
    else:
        begins_chunk = cells.opens_tile & (cells.index == 0)
        expect(MULTIPLIERS, "send", mine.any(-1))
        for name in ("read", "complete"):
            expect(MULTIPLIERS, name, mine.any(-1) & cells.opens_tile)
    expect(LOADER, "empty", cells.exists)
    expect(LOADER, "ready", cells.exists & (cells.step > 0) & begins_chunk & layout.communicates)
    for role in (0, 1):
        expect(role, "full", cells.exists)
        for name in ("done", "store"):
            expect(role, name, cells.opens_tile)
    return np.moveaxis(expected, 2, 1)


def _k_steps(layout, cells) -> np.ndarray:
    return cells.k_step[..., None] + np.arange(layout.every)


def meaningful(times: Times, layout: Layout) -> Times:
    """Returns `times` without the marks that mean nothing (see `expected_marks`)."""
    expected = expected_marks(layout, cells_of(layout))
    return dataclasses.replace(times, marks=np.where(expected, times.marks, np.nan))
