"""Which tile of the result does which CTA compute, in which order, from which parts of A and B?"""

import dataclasses

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cmm.hopper.config import TuningConfig


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

    def my_tiles(self):
        """Returns how many tiles of the result this CTA computes: tile `cta`, `cta + num_ctas`, and so on."""
        return lax.div(self.m_tiles * self.n_tiles - lax.axis_index("cta") + self.num_ctas - 1, self.num_ctas)

    def tile_at(self, index):
        """Returns row and column, in tiles, of this CTA's tile number `index`."""
        linear = lax.axis_index("cta") + index * self.num_ctas
        config = self.config
        shape = (self.m_tiles, self.n_tiles)
        return plgpu.planar_snake(linear, shape, config.grid_minor_dim, config.grid_tile_width)

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
