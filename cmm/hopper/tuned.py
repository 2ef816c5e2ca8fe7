"""Which configuration was found to be fastest for this problem on this GPU?

Two places know: the table that ships with the package, and the user's cache, which `python -m cmm.tune` fills.
"""

import importlib.resources
import os
import pathlib
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from cmm import winners
from cmm.hopper.config import MatmulDimension, TuningConfig
from cmm.hopper.plan import Plan
from cmm.hopper.sends import plan_sends
from cmm.roofline import ITEMSIZE_BYTES, Problem
from cmm.winners import Winner


def tuned_config(
    kernel: str, axis_size: int, m_shard: int, n_shard: int, k: int, dtype, device_kind: str
) -> TuningConfig | None:
    """Returns the configuration that won for exactly this problem, or `None` if nobody has searched.

    Args:
      kernel: name of the kernel, as `python -m cmm.tune --kernel` takes it.
      axis_size: number of devices on the ring.
      m_shard: rows of the activations on one device.
      n_shard: columns of the weights on one device.
      k: contraction size.
      dtype: dtype of the operands.
      device_kind: the GPU's name, as JAX gives it.

    The shipped table comes first. The user's cache is looked at only where one process drives all GPUs: processes on
    several hosts may have different caches, and kernels that talk must be the same. A cache that is broken or cannot be
    read counts as empty, with a warning.
    """
    name = jnp.dtype(dtype).name
    if name not in ITEMSIZE_BYTES:
        return None
    problem = Problem(axis_size, m_shard, k, n_shard, name)
    config = _config(winners.read_or_warn(_shipped_table()), kernel, device_kind, problem)
    if config is None and jax.process_count() == 1 and (path := cache_path()):
        config = _config(winners.read_or_warn(path), kernel, device_kind, problem)
    return config


def cache_path() -> pathlib.Path | None:
    """Returns where the user's cache is: `$XDG_CACHE_HOME/cmm/tuned.json`, by default in `~/.cache`.

    `None` if the user has no home. Source: XDG Base Directory Specification, which tells to ignore relative paths.
    """
    root = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():
        try:
            root = pathlib.Path.home() / ".cache"
        except RuntimeError:
            return None
    return root / "cmm" / "tuned.json"


def remember(new: Sequence[Winner]) -> pathlib.Path | None:
    """Adds winners to the user's cache; returns its path, or `None` and warns if it cannot be written.

    A broken cache is replaced. Of two searches that end at the same moment, one may lose its winners.
    """
    path = cache_path()
    if path is None:
        warnings.warn("Tuned configurations are not kept: the user has no home folder.", stacklevel=2)
        return None
    try:
        winners.write(winners.merge(winners.read_or_warn(path), new), path)
    except OSError as error:
        warnings.warn(f"Tuned configurations are not kept: {error}", stacklevel=2)
        return None
    return path


def _shipped_table():
    return importlib.resources.files("cmm.hopper") / "tuned.json"


def _config(found, kernel, device_kind, problem) -> TuningConfig | None:
    winner = winners.find(found, kernel, device_kind, problem)
    if winner is None or not winner.right:
        return None
    fields = dict(winner.config)
    try:
        for name in ("grid_minor_dim", "wg_dimension"):
            fields[name] = MatmulDimension[fields[name]]
        if any(isinstance(value, float) for value in fields.values()):
            raise TypeError("tiles and stages are whole numbers")
        config = TuningConfig(**fields)
        config.check(problem.m_shard, problem.n_shard, problem.k, problem.dtype)
        plan_sends(Plan(problem.m_shard, problem.n_shard, problem.k, config, num_ctas=1))  # Chunks and lag fit, too.
    except (KeyError, TypeError, ValueError):
        return None  # Written for another version of the kernel: its time says nothing about this one.
    return config
