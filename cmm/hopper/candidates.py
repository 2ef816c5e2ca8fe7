"""Which configurations of the Hopper kernels are worth a try for a problem, the most promising first?"""

import itertools

from cmm.hopper.config import MatmulDimension, TuningConfig, relative_cost

M, N = MatmulDimension.M, MatmulDimension.N

# Tile of one compute warpgroup. Its accumulator is in float32 in the registers of 128 threads: 128 each, of 232 that a
# multiplier has. 128 x 256 would need 256 and does not fit.
_TILES = ((64, 256), (128, 128), (64, 128), (128, 64), (64, 64))
_TILE_KS = (64, 128)
_EPILOGUES = ((64, 64), (64, None))
_STAGES = range(7, 1, -1)
_DEPTHS = 2  # The deepest pipelines that fit; shallower ones only hide less.
_GRIDS = ((M, 8), (N, 8), (M, 4), (N, 4), (M, 16), (N, 16), (M, 1), (N, 1))

# How much a choice that is seldom best moves a candidate back, in places of the orders of tiles and of grids.
_DEPTH_PENALTY, _EPILOGUE_PENALTY, _SHALLOW_PENALTY = 3, 3, 4
_SMALL_TILE = 64 * 64  # Of so few elements, or fewer, products gain from tiles twice as deep.


def candidates(m: int, n: int, k: int, dtype, num_ctas: int, steps: int = 1, halves: bool = True) -> list[TuningConfig]:
    """Returns configurations that fit a local matmul `[m, k] @ [k, n]`, the most promising first.

    Of configurations that make the same kernel do the same in the same order only one is listed.

    Args:
      m, n, k: sizes of the local matmul.
      dtype: dtype of the operands.
      num_ctas: number of multiprocessors of a GPU.
      steps, halves: as for `cmm.hopper.config.default_config`.
    """
    ranked = []
    cost = lambda fields: relative_cost(TuningConfig(**fields), m, n, num_ctas, k, steps, halves)
    structures = sorted(_structures(m, n), key=cost)
    for place, structure in enumerate(structures):
        usual_depth = 128 if structure["tile_m"] * structure["tile_n"] <= _SMALL_TILE and k % 128 == 0 else 64
        for tile_k, epilogue in itertools.product(_TILE_KS, _EPILOGUES):
            penalty = place + _DEPTH_PENALTY * (tile_k != usual_depth) + _EPILOGUE_PENALTY * (epilogue != (64, 64))
            for depth, stages in enumerate(_deepest(structure | _fields(tile_k, epilogue), m, n, k, dtype)):
                for grid_place, (minor, width) in enumerate(_GRIDS):
                    config = TuningConfig(
                        **structure,
                        **_fields(tile_k, epilogue),
                        max_concurrent_steps=stages,
                        grid_minor_dim=minor,
                        grid_tile_width=width,
                    )
                    ranked.append((penalty + _SHALLOW_PENALTY * depth + grid_place, config))
    ranked.sort(key=lambda pair: pair[0])  # Stable: of equal ones the better structure stays first.
    unique = {}
    for _, config in ranked:
        unique.setdefault(_what_it_does(config, m, n), config)
    return list(unique.values())


def _structures(m, n):
    """Returns shapes of tiles that divide the result."""
    found = []
    for (tile_m, tile_n), wg_dimension in itertools.product(_TILES, (M, N)):
        config = TuningConfig(tile_m=tile_m, tile_n=tile_n, wg_dimension=wg_dimension)
        if m % config.cta_tile_m == 0 and n % config.cta_tile_n == 0:
            found.append({"tile_m": tile_m, "tile_n": tile_n, "wg_dimension": wg_dimension})
    return found


def _fields(tile_k, epilogue):
    return {"tile_k": tile_k, "epi_tile_m": epilogue[0], "epi_tile_n": epilogue[1]}


def _deepest(fields, m, n, k, dtype):
    """Returns the largest numbers of stages that fit, largest first."""
    found = []
    for stages in _STAGES:
        try:
            TuningConfig(**fields, max_concurrent_steps=stages).check(m, n, k, dtype)
            found.append(stages)
        except ValueError:
            continue
    return found[:_DEPTHS]


def _what_it_does(config, m, n):
    """Returns what tells kernels apart: a snake that is wider than the grid is as good as one of the grid's width."""
    tiles = (m // config.cta_tile_m, n // config.cta_tile_n)
    minor = config.grid_minor_dim
    order = (minor, min(config.grid_tile_width, tiles[minor])) if min(tiles) > 1 else None
    shape = (config.tile_m, config.tile_n, config.tile_k, config.wg_dimension, config.epi_m, config.epi_n)
    return shape, config.max_concurrent_steps, order
