"""Which CTA of the fast kernel sends which tile of A, and when does it say so?

Every CTA of a row of tiles loads the same tiles of A. Each of them could send them; the work is shared: of the columns
that compute a row first, column number `c` sends every `columns`-th tile, beginning with `c`. A row is announced in
chunks of k, and each column that has sent a part of a chunk signals it once.
"""

import dataclasses

from jax import lax

from cmm.hopper.config import MatmulDimension
from cmm.hopper.plan import Plan

_CHUNKS = (8, 4, 3, 2)  # By preference. More are more signals, fewer are a longer wait for the first.
_LAG = 4
_DEPTHS_OF_A_SHORT_CHUNK = (256, 192, 128)  # By preference, in elements of k.
_LAG_IN_SHORT_CHUNKS = 1


@dataclasses.dataclass(frozen=True)
class SendPlan:
    """The sends of one step of the ring.

    Attributes:
      plan: the tiles.
      columns: how many columns of tiles share the sends of a row.
      chunks: into how many chunks of k a row is cut.
      lag: so many products after a send its CTA waits for its completion and signals. With the usual one there is
        hardly anything left to wait for by then; where others wait for the signal it is short. With steps that share
        rounds no later than the tile of the result ends.
    """

    plan: Plan
    columns: int
    chunks: int
    lag: int

    @property
    def chunk_steps(self) -> int:
        """Products, and tiles of A, in one chunk."""
        return self.plan.k_steps // self.chunks

    @property
    def signals(self) -> int:
        """How many signals make a chunk complete: one from each column that sends a part of it."""
        return min(self.columns, self.chunk_steps)

    def is_turn(self, position, k_step):
        """Whether the column at this position (see `position`) sends this tile of A."""
        return lax.rem(k_step, self.columns) == position

    def is_last_of_chunk(self, k_step):
        """Whether a column that sends this tile of A sends no later one of the same chunk."""
        return lax.rem(k_step, self.chunk_steps) + self.columns >= self.chunk_steps

    def is_first_of_chunk(self, k_step):
        """Whether a chunk begins with this tile of A."""
        return lax.rem(k_step, self.chunk_steps) == 0

    def chunk(self, step, m_tile, k_step):
        """Returns the number of the chunk in which this tile of A lies, counted over all steps and rows."""
        return (step * self.plan.m_tiles + m_tile) * self.chunks + lax.div(k_step, self.chunk_steps)

    def position(self, m_tile, n_tile):
        """Returns when a row visits a column: 0 for the column that it visits first."""
        config, last = self.plan.config, self.plan.n_tiles - 1
        if config.grid_minor_dim == MatmulDimension.N:
            return n_tile
        # The snake goes through every other band of rows backwards.
        backwards = lax.rem(lax.div(m_tile, config.grid_tile_width), 2) == 1
        return lax.select(backwards, last - n_tile, n_tile)


def with_short_chunks(plan: Plan) -> Plan:
    """Returns a plan with chunks of a few products, unless its configuration says something about chunks or lag.

    Where steps overlap (`cmm.hopper.rounds`), CTAs wait for the first chunk from the start of the kernel, so it should
    come soon, and so should its signal. Elsewhere the first chunks have long been there.
    """
    config = plan.config
    if config.chunks is not None or config.signal_lag is not None:
        return plan
    depth = next((d for d in _DEPTHS_OF_A_SHORT_CHUNK if d % config.tile_k == 0 and plan.k % d == 0), config.tile_k)
    chunks = plan.k // depth
    lag = _LAG_IN_SHORT_CHUNKS if chunks > 1 else 0
    return dataclasses.replace(plan, config=dataclasses.replace(config, chunks=chunks, signal_lag=lag))


def plan_sends(plan: Plan) -> SendPlan:
    """Shares the sends of a step among CTAs, and cuts the rows into chunks.

    Raises:
      ValueError: chunks or lag of the configuration do not fit the shape.
    """
    config, k_steps = plan.config, plan.k_steps
    chunks = config.chunks or next((count for count in _CHUNKS if k_steps % count == 0), 1)
    if k_steps % chunks:
        raise ValueError(
            f"k={plan.k} in tiles of tile_k={config.tile_k} gives {k_steps} products, which chunks={chunks} does not "
            "divide. Choose a divisor, or None."
        )
    # See point 5 of cmm.hopper.fast_kernel: longer lags could wait in a circle.
    longest = k_steps // chunks if chunks > 1 else 0
    lag = min(_LAG, longest) if config.signal_lag is None else config.signal_lag
    if lag > longest:
        raise ValueError(
            f"signal_lag={lag} must be at most {longest}, the products of one of chunks={chunks} (0 with one chunk): a "
            "longer one could wait in a circle around the ring."
        )
    return SendPlan(plan, _columns_in_flight(plan), chunks, lag)


def _columns_in_flight(plan: Plan) -> int:
    """Returns how many columns of a row of tiles are computed at the same time."""
    width = plan.config.grid_tile_width
    if plan.config.grid_minor_dim == MatmulDimension.M:
        columns = plan.num_ctas // min(width, plan.m_tiles)
    else:
        columns = max(width, plan.num_ctas // plan.m_tiles)
    return max(1, min(columns, plan.n_tiles))
