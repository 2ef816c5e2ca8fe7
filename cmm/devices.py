"""Which devices are there, and what stands in for them where there is no GPU?

Nothing here happens at import. The functions are for programs and notebooks; the methods of `cmm` never call them.
"""

import functools
import os

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from cmm.roofline import Problem

DEFAULT_SIMULATED_DEVICES = 8

# XLA runs the simulated devices on one thread pool, sized by the number of cores. A collective blocks one thread for
# each device, so on a small machine two programs in flight can each wait for threads that the other one holds.
_CPU_CLIENT_THREADS = 64


def find_devices(count: int | None = None, *, simulate: bool = False) -> list[jax.Device]:
    """Returns `count` GPUs, or simulated CPU devices where there is no GPU. Call it before anything else uses JAX.

    Args:
      count: how many devices; by default all GPUs, or 8 simulated devices.
      simulate: use simulated devices even where there are GPUs. JAX then leaves the GPUs alone.

    Returns:
      The devices, ordered by id.

    Raises:
      ValueError: there are fewer GPUs than `count`.
      RuntimeError: JAX started its backend before, with fewer simulated devices than are needed now.
    """
    if count is not None and count < 1:
        raise ValueError(f"The number of devices must be at least 1, got {count}.")
    if simulate:
        _configure("jax_platforms", "cpu")
    _prepare_simulated_devices(count or DEFAULT_SIMULATED_DEVICES)
    devices = jax.devices("cpu") if simulate else jax.devices()
    if is_simulated(devices):
        return simulated_devices(count) if count else devices
    if count is not None and count > len(devices):
        raise ValueError(
            f"{count} devices were asked for, {len(devices)} are there: {devices[0].device_kind}. "
            f"Ask for at most {len(devices)}, or for simulated devices."
        )
    return devices[:count]


def gpus_or_simulated(count: int | None, simulate: bool, who: str) -> list[jax.Device]:
    """Returns what `find_devices` does, but simulated devices only where they are asked for.

    Args:
      count, simulate: as there.
      who: begin of the message, such as "python -m cmm.bench measures GPUs".

    Raises:
      ValueError, RuntimeError: as there; also if there is no GPU and `simulate` is false.
    """
    found = find_devices(count, simulate=simulate)
    if is_simulated(found) and not simulate:
        raise ValueError(f"{who}, and JAX finds none here. --simulate tries it without.")
    return found


def simulated_devices(count: int) -> list[jax.Device]:
    """Returns `count` CPU devices, also on a machine with GPUs. Call it before anything else uses JAX.

    Raises:
      RuntimeError: JAX started its backend before, with fewer of them.
    """
    _prepare_simulated_devices(count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise RuntimeError(
            f"JAX started its backend with {len(devices)} simulated device(s), {count} are needed. Call "
            "cmm.devices.find_devices before anything else uses JAX. JAX_NUM_CPU_DEVICES and XLA_FLAGS, if they are "
            f"set, must not ask for fewer than {count}."
        )
    return devices[:count]


def is_simulated(devices) -> bool:
    """Says whether these devices are CPU devices that stand in for GPUs, so that times mean nothing about GPUs."""
    return devices[0].platform == "cpu"


def ring_mesh(devices, axis_name: str = "x") -> Mesh:
    """Returns a mesh of one axis over `devices`."""
    return jax.make_mesh((len(devices),), (axis_name,), devices=devices)


def random_operands(problem: Problem, mesh: Mesh, seed: int, axis_name: str = "x"):
    """Returns normal(0, 1) operands, drawn on the devices that hold them.

    Args:
      problem: shapes and dtype.
      mesh: the mesh; `axis_name` has `problem.axis_size` devices.
      seed: seeds differ, operands differ.

    Returns:
      `lhs [axis_size * m_shard, k]` sharded over rows, `rhs [k, axis_size * n_shard]` sharded over columns.
    """
    return _draw(problem, mesh, axis_name)(np.uint32(seed))


@functools.cache  # One program for all seeds.
def _draw(problem, mesh, axis_name):
    def draw(seed):
        lhs_key, rhs_key = jax.random.split(jax.random.key(seed))
        lhs_shape = (problem.axis_size * problem.m_shard, problem.k)
        rhs_shape = (problem.k, problem.axis_size * problem.n_shard)
        return (
            jax.random.normal(lhs_key, lhs_shape, problem.dtype),
            jax.random.normal(rhs_key, rhs_shape, problem.dtype),
        )

    rows, columns = NamedSharding(mesh, P(axis_name, None)), NamedSharding(mesh, P(None, axis_name))
    return jax.jit(draw, out_shardings=(rows, columns))


def _prepare_simulated_devices(count: int) -> None:
    os.environ.setdefault("PJRT_NPROC", str(_CPU_CLIENT_THREADS))
    # The flag of older habit says the same; JAX refuses to be told twice. What the user has set stays.
    told = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not told and jax.config.jax_num_cpu_devices < 0:
        _configure("jax_num_cpu_devices", count)


def _configure(name: str, value) -> None:
    try:
        jax.config.update(name, value)
    except RuntimeError:
        pass  # JAX has started; what counts is how many devices there are.
