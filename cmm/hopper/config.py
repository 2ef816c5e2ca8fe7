"""How do the Hopper kernels cut a problem into tiles, and does that fit a shape and a GPU?"""

import dataclasses
import enum

import jax.numpy as jnp

from cmm.hopper.deal import Deal

# What one CTA may use on Hopper (compute capability 9.0): 228 KB per multiprocessor, 1 KB of it reserved.
MAX_SMEM_BYTES = 227 * 1024

_WIDEST = 256  # Columns of one wgmma.
_BARRIER_BYTES = 8
_ALIGNMENT_BYTES = 1024  # Swizzled TMA destinations start at multiples of it.


class MatmulDimension(enum.IntEnum):
    """A dimension of the result."""

    M = 0
    N = 1


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """Tile sizes and schedule of a kernel. A CTA has two compute warpgroups, so its tile is two of theirs.

    Attributes:
      tile_m: rows of the result that one compute warpgroup holds in registers; a multiple of 64.
      tile_n: columns of the same; a multiple of 64, at most 256. `tile_m * tile_n` is at most 128 * 192. (Multiples of
        32 need narrower swizzled rows of A and B. With 224 columns kernels took 20 % longer, whatever the shape.)
      tile_k: depth of one product, and width of the tiles of A that travel; a multiple of 64.
      max_concurrent_steps: pipeline stages, at least 2: how many tiles of A and B are in shared memory at a time.
      epi_tile_m: rows that the epilogue stores at a time, a multiple of 64; `None` for all of `tile_m`.
      epi_tile_n: columns of the same, a multiple of 16; `None` for all of `tile_n`.
      grid_minor_dim: the dimension along which neighbouring CTAs differ first (see `plgpu.planar_snake`).
      grid_tile_width: how many tiles wide the snake is.
      wg_dimension: whether the two warpgroups of a CTA lie above each other (M) or side by side (N).
      chunks: fast kernel only: into how many parts of k a row of tiles is cut that are announced one by one; `None` for
        a choice by the shape (see `cmm.hopper.sends`).
      signal_lag: fast kernel only: so many products after a send its completion is awaited; `None` likewise.
    """

    tile_m: int = 64
    tile_n: int = 256
    tile_k: int = 64
    max_concurrent_steps: int = 4
    epi_tile_m: int | None = 64
    epi_tile_n: int | None = 64
    grid_minor_dim: MatmulDimension = MatmulDimension.M
    grid_tile_width: int = 8
    wg_dimension: MatmulDimension = MatmulDimension.M
    chunks: int | None = None
    signal_lag: int | None = None

    def __post_init__(self):
        for name in ("tile_m", "tile_n", "tile_k", "max_concurrent_steps", "grid_tile_width"):
            if not self._is_int(name, 1):
                raise ValueError(f"{name} must be a Python int of at least 1, got {getattr(self, name)!r}.")
        for name, least in (("epi_tile_m", 1), ("epi_tile_n", 1), ("chunks", 1), ("signal_lag", 0)):
            if not (getattr(self, name) is None or self._is_int(name, least)):
                raise ValueError(
                    f"{name} must be a Python int of at least {least} or None, got {getattr(self, name)!r}."
                )
        for name in ("grid_minor_dim", "wg_dimension"):
            if not isinstance(getattr(self, name), MatmulDimension):
                raise ValueError(f"{name} must be MatmulDimension.M or MatmulDimension.N, got {getattr(self, name)!r}.")
        if self.tile_k % 64:
            raise ValueError(f"tile_k must be a multiple of 64, the width of a swizzled row, got {self.tile_k}.")
        if self.tile_m % 64:
            raise ValueError(f"tile_m must be a multiple of 64, what one wgmma computes, got {self.tile_m}.")
        if self.tile_n % 64 or self.tile_n > 256:
            raise ValueError(
                f"tile_n must be a multiple of 64, the width of a swizzled row, and at most 256, what one wgmma "
                f"computes, got {self.tile_n}."
            )
        # Each of 128 threads holds tile_m * tile_n / 128 float32, of 232 registers. With 192 the kernels leave room for
        # all else; with 224 ptxas 13.0 spills, and waits for each product before the next.
        if self.tile_m * self.tile_n > 128 * 192:
            raise ValueError(
                f"tile_m * tile_n must be at most 128 * 192, what the registers of a warpgroup hold, "
                f"got {self.tile_m} * {self.tile_n}."
            )
        if self.max_concurrent_steps < 2:
            raise ValueError(
                f"max_concurrent_steps must be at least 2, got {self.max_concurrent_steps}: with one stage nothing "
                "can be loaded while another is multiplied."
            )
        for tile, part in (("tile_m", self.epi_m), ("tile_n", self.epi_n)):
            if getattr(self, tile) % part:
                raise ValueError(f"{tile}={getattr(self, tile)} must be divisible by epi_{tile}={part}.")
        if self.epi_m % 64:
            raise ValueError(
                f"epi_tile_m must be a multiple of 64, the rows of a wgmma, or None, got {self.epi_tile_m}."
            )
        if self.epi_n % 16:
            raise ValueError(
                f"epi_tile_n must be a multiple of 16, which TMA can swizzle, or None, got {self.epi_tile_n}."
            )

    def _is_int(self, name: str, least: int) -> bool:
        value = getattr(self, name)
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    @property
    def epi_m(self) -> int:
        """Rows that the epilogue stores at a time."""
        return self.epi_tile_m or self.tile_m

    @property
    def epi_n(self) -> int:
        """Columns that the epilogue stores at a time."""
        return self.epi_tile_n or self.tile_n

    @property
    def epi_slots(self) -> int:
        """Buffers of each warpgroup for the epilogue: two, so that one fills while the other is stored."""
        return min(2, (self.tile_m // self.epi_m) * (self.tile_n // self.epi_n))

    @property
    def cta_tile_m(self) -> int:
        """Rows of the result that one CTA computes at a time."""
        return self.tile_m * (2 if self.wg_dimension == MatmulDimension.M else 1)

    @property
    def cta_tile_n(self) -> int:
        """Columns of the result that one CTA computes at a time."""
        return self.tile_n * (2 if self.wg_dimension == MatmulDimension.N else 1)

    @property
    def can_be_halved(self) -> bool:
        """Whether either half of a tile can be loaded, multiplied and stored like a whole one (see `half`)."""
        return self.wg_dimension == MatmulDimension.M and self.tile_n % 128 == 0 and self.tile_n // 2 % self.epi_n == 0

    def half(self) -> "TuningConfig":
        """Returns the configuration of halves of tiles: the warpgroups share the rows of one of them, side by side."""
        return dataclasses.replace(self, tile_n=self.tile_n // 2, wg_dimension=MatmulDimension.N)

    def deal(self, m: int, n: int, num_ctas: int, steps: int = 1, halves: bool = True) -> Deal:
        """Returns how the tiles of `steps` products `[m, n]` are dealt out to CTAs; arguments as `default_config`."""
        tiles = (m // self.cta_tile_m) * (n // self.cta_tile_n)
        # In a ring, rounds of narrower tiles are too short compared with the way between neighbours: as in the comment
        # on `_HOP_COST`, eight steps of 512 x 4096 x 1792 took 103 µs in place of 99.
        pays_off = steps == 1 or self.cta_tile_n == _WIDEST
        return Deal(tiles, num_ctas, steps, halves and pays_off and self.can_be_halved)

    def smem_bytes(self, dtype) -> int:
        """Returns the shared memory that a kernel with this configuration needs for operands of `dtype`."""
        itemsize = jnp.dtype(dtype).itemsize
        stage = (self.cta_tile_m + self.cta_tile_n) * self.tile_k * itemsize
        epilogue = 2 * self.epi_slots * self.epi_m * self.epi_n * itemsize
        barriers = 2 * self.max_concurrent_steps * _BARRIER_BYTES
        return self.max_concurrent_steps * stage + epilogue + barriers + _ALIGNMENT_BYTES

    def check(self, m: int, n: int, k: int, dtype) -> None:
        """Checks that the configuration fits a local matmul `[m, k] @ [k, n]`.

        Raises:
          ValueError: a tile does not divide its dimension, or the stages need too much shared memory.
        """
        for size, name, tile in ((m, "m", self.cta_tile_m), (n, "n", self.cta_tile_n), (k, "k", self.tile_k)):
            if size % tile:
                raise ValueError(
                    f"{name}={size} must be divisible by {tile}, the CTA's tile of this configuration ({self}). "
                    f"Pad {name} to {-(-size // tile) * tile}, choose smaller tiles, or do without a kernel: "
                    "method='ring', or jnp.matmul in place of cmm.matmul."
                )
        need = self.smem_bytes(dtype)
        if need > MAX_SMEM_BYTES:
            raise ValueError(
                f"This configuration needs {need} bytes of shared memory, a Hopper CTA has {MAX_SMEM_BYTES}: lower "
                f"max_concurrent_steps={self.max_concurrent_steps}, tile_k={self.tile_k} or the other tiles ({self})."
            )


# From large tiles, which need the fewest loads per product, to small ones, which fit more shapes; each as deep as fits.
# Small tiles twice as deep, where k allows it: half as many loads and waits. With 64 to 256 rows and k = 4096, kernels
# of two H200 took 1 to 8 µs less so, of 28 to 36.
_DEFAULTS = (
    TuningConfig(),
    TuningConfig(tile_n=128, max_concurrent_steps=6),
    TuningConfig(tile_n=64, tile_k=128, max_concurrent_steps=4),
    TuningConfig(tile_n=64, max_concurrent_steps=7),
    TuningConfig(tile_n=128, max_concurrent_steps=4, wg_dimension=MatmulDimension.N),
    TuningConfig(tile_n=64, tile_k=128, max_concurrent_steps=4, wg_dimension=MatmulDimension.N),
    TuningConfig(tile_n=64, max_concurrent_steps=7, wg_dimension=MatmulDimension.N),
)
H100_MULTIPROCESSORS = 132
# So many elements of the result a multiprocessor computes in the time that one row or column of a tile takes to load:
# one part for its bytes, one for each load, of which deep tiles need fewer.
_BYTES_COST, _COST_PER_LOAD = 52, 1024
# So many, times the depth of the product, it computes until what a neighbour begins to send can be used: 5 µs. All of
# these were fitted to times of the fast kernel on one H200 that is its own neighbour (`cmm.hopper.loopback`), with 64
# to 768 rows per step. The way over NVLink is not in them.
_HOP_COST = 15 << 20
# Of the time of a round of whole tiles with `_FULL_ROUND` CTAs, one in which many CTAs have no tile, and presumably
# leave their power to the others, takes `_COOL_ROUND`. A round of halves takes `_HALF_ROUND` of one of whole tiles.
# Fitted likewise, with 600 to 1300 rows per step, and with products of a single device.
_COOL_ROUND, _FULL_ROUND, _HALF_ROUND = 0.925, 128, 0.6


def default_config(
    m: int, n: int, k: int, dtype, num_ctas: int = H100_MULTIPROCESSORS, steps: int = 1, halves: bool = True
) -> TuningConfig:
    """Returns the configuration that should be fastest for a local matmul `[m, k] @ [k, n]` where nobody has searched.

    Args:
      m, n, k: sizes of the local matmul.
      dtype: dtype of the operands.
      num_ctas: number of multiprocessors of the GPU.
      steps: how many such products one kernel computes, each with what arrives from the neighbour during the one
        before. Only the fast kernel begins with one before all CTAs are through with the other (`cmm.hopper.rounds`).
      halves: whether the kernel computes halves of tiles (`cmm.hopper.deal`).

    Raises:
      ValueError: none of the configurations that are tried fits; the message is that of the last, which asks for least.
    """
    fitting = []
    for config in _DEFAULTS:
        try:
            config.check(m, n, k, dtype)
            fitting.append(config)
        except ValueError as error:
            reason = error
    if not fitting:
        raise reason
    return min(fitting, key=lambda config: relative_cost(config, m, n, num_ctas, k, steps, halves))


def relative_cost(
    config: TuningConfig, m: int, n: int, num_ctas: int, k: int = 1, steps: int = 1, halves: bool = True
) -> float:
    """Estimates the time of a product `[m, k] @ [k, n]`, up to a factor that is the same for all configurations.

    All CTAs work in rounds of one tile each (`cmm.hopper.deal`). A round takes the time of a tile's products or loads,
    whichever is longer; all rounds together no less than power allows for so many tiles. Where steps follow each other
    closely, whoever begins with a later one waits until its data has come to it from neighbour to neighbour. `k` says
    how long that is compared with a product, and is not needed for one step. Other arguments are those of
    `default_config`.
    """
    deal = config.deal(m, n, num_ctas, steps, halves)
    rounds = deal.whole_rounds + _HALF_ROUND * bool(deal.halved)
    cost = _tile_cost(config) * max(rounds * _COOL_ROUND, steps * deal.tiles / _FULL_ROUND)
    if deal.steps_overlap:
        cost += max(1, min(steps, num_ctas // deal.tiles) - 1) * _HOP_COST / k
    return cost


def _tile_cost(config) -> float:
    loads = (_BYTES_COST + _COST_PER_LOAD / config.tile_k) * (config.cta_tile_m + config.cta_tile_n)
    return max(config.cta_tile_m * config.cta_tile_n, loads)
