"""Which tile of the result does which CTA compute, in which order, from which parts of A and B?"""

import dataclasses

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cmm.hopper.config import TuningConfig


def plan_tiles(
    m: int, n: int, k: int, config: TuningConfig, core_count: int, steps: int = 1, halves: bool = True
) -> "Plan":
    """Cuts the local matmul `[m, k] @ [k, n]` into tiles, for the fewest CTAs that need no more rounds than all would.

    Args:
      m, n, k: its sizes.
      config: the tiles.
      core_count: number of multiprocessors.
      steps, halves: as for `cmm.hopper.config.default_config`.
    """
    return Plan(m, n, k, config, config.deal(m, n, core_count, steps, halves).with_fewest_ctas().num_ctas)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The local matmul `[m, k] @ [k, n]` cut into tiles. Sizes are static; the CTA's own share is not."""

    m: int
    n: int
    k: int
    config: TuningConfig
    num_ctas: int

    @property
    def m_tiles(self) -> int:
        return self.m // self.config.cta_tile_m

    @property
    def n_tiles(self) -> int:
        return self.n // self.config.cta_tile_n

    @property
    def k_steps(self) -> int:
        return self.k // self.config.tile_k

    @property
    def tiles(self) -> int:
        """Tiles of the result."""
        return self.m_tiles * self.n_tiles

    def cta(self):
        """Returns the number of this CTA, by which tiles are dealt out."""
        return lax.axis_index("cta")

    def my_tiles(self):
        """Returns how many tiles of the result this CTA computes: tile `cta`, `cta + num_ctas`, and so on."""
        if self.tiles % self.num_ctas == 0:  # Known to the compiler, as it is equal for all.
            return self.tiles // self.num_ctas
        return lax.div(self.tiles - self.cta() + self.num_ctas - 1, self.num_ctas)

    def tile_at(self, index):
        """Returns row and column, in tiles, of this CTA's tile number `index`."""
        return self.place(self.cta() + index * self.num_ctas)

    def place(self, linear):
        """Returns row and column, in tiles, of tile number `linear` of the result."""
        config = self.config
        shape = (self.m_tiles, self.n_tiles)
        return plgpu.planar_snake(linear, shape, config.grid_minor_dim, config.grid_tile_width)

    def row(self, m_tile):
        """Returns the row of whole tiles in which a tile lies."""
        return m_tile

    def rows_in_tile(self, m_tile, rows: int):
        """Returns which rows of a whole tile a tile has, in units of which a tile of this plan has `rows`."""
        del m_tile, rows
        return slice(None)

    def a_slice(self, m_tile, k_step):
        """Returns the slices of A that a use needs."""
        config = self.config
        return pl.ds(m_tile * config.cta_tile_m, config.cta_tile_m), pl.ds(k_step * config.tile_k, config.tile_k)

    def b_slice(self, k_step, n_tile):
        """Returns the slices of B that a use needs."""
        config = self.config
        return pl.ds(k_step * config.tile_k, config.tile_k), pl.ds(n_tile * config.cta_tile_n, config.cta_tile_n)

    def out_slice(self, m_tile, n_tile):
        """Returns the slices of the result that a tile covers."""
        config = self.config
        return (
            pl.ds(m_tile * config.cta_tile_m, config.cta_tile_m),
            pl.ds(n_tile * config.cta_tile_n, config.cta_tile_n),
        )
