"""JAX's own example of a collective matmul on Hopper GPUs, its source untouched.

It lives in `jax.experimental.pallas.ops.gpu.collective_matmul_mgpu`. Nothing of it is imported before it is called.
"""

import contextlib
import dataclasses
import importlib
import itertools
import pathlib
from collections.abc import Iterator
from typing import Literal

import jax

from cmm import winners
from cmm.interpret import pretend_core_count
from cmm.roofline import Problem

_MODULE = "jax.experimental.pallas.ops.gpu.collective_matmul_mgpu"
_BEST = pathlib.Path(__file__).with_name("jax_example_best.json")


@dataclasses.dataclass(frozen=True)
class Config:
    """How the example cuts its work; the fields of its own `TuningConfig`, without importing it.

    Attributes:
      tile_m, tile_n, tile_k: tile of one compute warpgroup.
      max_concurrent_steps: stages of the pipeline through shared memory.
      grid_minor_dim: "M" or "N", the dimension along which neighbouring CTAs follow each other.
      grid_tile_width: so many tiles along the minor dimension before the other one moves on.
      wg_dimension: "M" or "N", the dimension along which the two compute warpgroups share the tile of a CTA.
      epi_tile_m, epi_tile_n: tile in which a result is written; `None` means all at once.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    max_concurrent_steps: int
    grid_minor_dim: Literal["M", "N"] = "N"
    grid_tile_width: int = 1
    wg_dimension: Literal["M", "N"] = "N"
    epi_tile_m: int | None = 64
    epi_tile_n: int | None = 64

    @property
    def cta_tile_m(self) -> int:
        """Rows of the tile of one CTA."""
        return self.tile_m * (2 if self.wg_dimension == "M" else 1)

    @property
    def cta_tile_n(self) -> int:
        """Columns of the tile of one CTA."""
        return self.tile_n * (2 if self.wg_dimension == "N" else 1)


# The choice for the published work, 1024 x 4096 x 4096 per device in float16.
PUBLISHED_CONFIG = Config(
    tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4, grid_minor_dim="M", grid_tile_width=8, wg_dimension="N"
)


def search_space() -> list[Config]:
    """Returns the settings that the example's own search tries, in its order. Some do not fit into shared memory."""
    return [
        Config(tile_m, tile_n, 64, 4, grid_minor_dim=minor, grid_tile_width=width, wg_dimension=wg)
        for tile_m, tile_n, minor, width, wg in itertools.product((128, 256), (64, 128), "MN", (4, 8, 16), "MN")
    ]


def best_config(problem: Problem) -> Config:
    """Returns the setting of the example's own search that should be the fastest for `problem` on these devices.

    `python -m cmm.tune --kernel jax_example` finds it; `jax_example_best.json` keeps it by kind of device, number of
    devices, shapes and dtype. Where nobody has searched (see `is_searched`) it is the choice for the published work,
    or the first setting whose tiles divide the shapes.

    Raises:
      ValueError: the tiles of no setting divide the shapes.
    """
    if found := _winner(problem):
        return Config(**found.config)
    p = problem
    for config in (PUBLISHED_CONFIG, *search_space()):
        if not (p.m_shard % config.cta_tile_m or p.n_shard % config.cta_tile_n or p.k % config.tile_k):
            return config
    rows, columns = (min(getattr(c, name) for c in search_space()) for name in ("cta_tile_m", "cta_tile_n"))
    raise ValueError(
        f"No setting of the search of JAX's example has tiles that divide M={p.m_shard}, K={p.k} and N={p.n_shard}: "
        f"they have at least {rows} rows and {columns} columns, and are 64 deep."
    )


def is_searched(problem: Problem) -> bool:
    """Says whether `best_config` was found by a search for this very problem on devices of this kind."""
    return _winner(problem) is not None


def _winner(problem):
    return winners.find(winners.read(_BEST), "jax_example", jax.devices()[0].device_kind, problem)


def load_example():
    """Returns the module of the example.

    Raises:
      ImportError: absl-py is missing, or this JAX has no such example.
    """
    try:
        return importlib.import_module(_MODULE)
    except ImportError as error:
        if (error.name or "").split(".")[0] == "absl":
            raise ImportError(
                "JAX's example kernel needs absl-py, which JAX does not install: pip install absl-py", name="absl"
            ) from error
        raise ImportError(
            f"JAX {jax.__version__} does not offer {_MODULE}, which JAX 0.11.2 and 0.12 do: {error}", name=error.name
        ) from error


def all_gather_matmul(lhs, rhs, axis_name, config: Config = PUBLISHED_CONFIG):
    """Computes `AllGather(lhs) @ rhs` with JAX's example. Call it inside `jax.shard_map` with `check_vma=False`.

    Args:
      lhs: `[m_shard, k]`, this device's rows of the activations; float16 or bfloat16.
      rhs: `[k, n_shard]`, this device's columns of the weights; same dtype.
      axis_name: the mesh axis; it must hold all devices that there are, driven by one process.
      config: how the work is cut. Tiles must divide the shapes.

    Returns:
      `[axis_size * m_shard, n_shard]`, this device's columns of the product, in the dtype of `lhs`. The result is not
      safe if a CTA may be late: see `cmm.peers.counting_fault`. Nor is it if a CTA has more than one tile.

    Raises:
      ImportError: absl-py is missing, or this JAX has no such example.
      NotImplementedError: the dtype is not float16 or bfloat16.
      ValueError: shapes do not fit the tiles, or the axis does not hold all devices.

    Cost: `2 * axis_size * m_shard * k * n_shard` FLOPs; each device receives `(axis_size - 1) * m_shard * k` elements,
    and keeps them in a scratch buffer of that size.

    It runs on Hopper GPUs, and on simulated devices under `cmm.interpret.simulate` and `pretend_machine`. Elsewhere JAX
    refuses it.
    """
    example = load_example()
    # JAX 0.11.2 and 0.12 differ only inside the example: 0.12 names the peer by {axis: index}.
    return example.all_gather_lhs_matmul(lhs, rhs, axis_name, config=_tuning_config(example, config), dtype=lhs.dtype)


def _tuning_config(example, config):
    fields = dataclasses.asdict(config)
    for name in ("grid_minor_dim", "wg_dimension"):
        fields[name] = example.MatmulDimension[fields[name]]
    return example.TuningConfig(**fields)


@contextlib.contextmanager
def pretend_machine(num_devices: int, core_count: int) -> Iterator[None]:
    """Lets the example see a machine with so many devices of so many SMs, for simulation and lowering without GPUs.

    The example asks JAX how many devices there are and refuses any other mesh, and it launches one CTA per SM. In this
    block its name `jax` gives these answers; its source and JAX itself stay as they are.
    """
    example = load_example()
    with pretend_core_count(example, core_count):
        # The stand-in for `jax` that pretend_core_count has put there, and takes away again.
        example.jax.device_count = example.jax.local_device_count = lambda: num_devices
        yield
