"""Can a Hopper kernel run here, with these operands? If not, say before anything is launched what would work."""

import dataclasses

import jax
import jax.numpy as jnp

from cmm import interpret
from cmm.checks import check_dtype, check_operands
from cmm.hopper.config import TuningConfig
from cmm.hopper.peer_access import pair_without_peer_access

# Names of GPUs with compute capability 9.0, as drivers spell them.
_HOPPER_NAMES = ("H100", "H200", "H800", "H20", "GH200")
_DTYPES = ("float16", "bfloat16")
_ELSEWHERE = 'method="ring" and method="naive" of cmm.all_gather_matmul run everywhere'


def check_kernel_operands(lhs, rhs, dtype, elsewhere: str = _ELSEWHERE) -> jnp.dtype:
    """Checks what `cmm.checks.check_operands` checks, and that the tensor cores multiply operands of this dtype.

    Args:
      lhs, rhs, dtype: as for `cmm.matmul`.
      elsewhere: what the message names that runs where the kernel does not.

    Returns:
      The dtype of the result, by default that of `lhs`.

    Raises:
      ValueError: ranks, contraction sizes or dtypes do not fit together.
      NotImplementedError: the operands, or the result, are neither float16 nor bfloat16.
    """
    check_operands(lhs, rhs)
    dtype = lhs.dtype if dtype is None else dtype
    check_dtype(dtype, "the result")
    for what, found in (("operands", lhs.dtype), ("a result", jnp.dtype(dtype))):
        if found.name not in _DTYPES:
            raise NotImplementedError(
                f"The kernel takes {what} in {' or '.join(_DTYPES)}, got {found.name}. {elsewhere}."
            )
    return jnp.dtype(dtype)


def check_config(config) -> None:
    """Raises a `ValueError` unless `config` is a `TuningConfig` or `None`."""
    if not (config is None or isinstance(config, TuningConfig)):
        raise ValueError(
            f"config must be a cmm.TuningConfig or None, got {config!r}. Write config=cmm.TuningConfig(tile_m=64, ...)."
        )


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What a kernel needs to know of the GPU it is traced for.

    Attributes:
      kind: its name, as JAX gives it.
      core_count: number of multiprocessors, which is the number of CTAs of a persistent kernel.
    """

    kind: str
    core_count: int


def check_machine(elsewhere: str = _ELSEWHERE) -> Gpu:
    """Checks that the kernel is being traced for Hopper GPUs, or for simulated ones.

    Args:
      elsewhere: what the message names that runs where the kernel does not.

    Raises:
      NotImplementedError: there are other devices.
    """
    if interpret.is_active():
        return Gpu("simulated", interpret.simulated_core_count())
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:  # Outside shard_map, where the kernel goes to the default device.
        device = jax.devices()[0]
    name = device.device_kind
    if device.platform not in ("gpu", "cuda") or not any(part in name for part in _HOPPER_NAMES):
        raise NotImplementedError(
            f"The kernel needs Hopper GPUs (such as H100 or H200), found {name} ({device.platform}). {elsewhere}; "
            "inside cmm.interpret.simulate this kernel does, too."
        )
    return Gpu(name, device.num_cores if hasattr(device, "num_cores") else device.core_count)


def check_all_axes_manual(axis_name) -> None:
    """Checks that `axis_name` is an axis of devices, and that `jax.shard_map` handles every axis of the mesh manually.

    A kernel cannot be partitioned further, and sends from device to device.

    Raises:
      ValueError: the axis is one of `jax.vmap`, or `jax.shard_map` leaves some axes to the compiler.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axis_name not in mesh.axis_names:
        axes = ", ".join(map(repr, mesh.axis_names)) or "none"
        raise ValueError(
            f"The kernel sends from device to device, but {axis_name!r} is not an axis of the mesh, which has {axes}: "
            f"it may be one of jax.vmap. {_ELSEWHERE}, along such axes, too."
        )
    rest = [name for name in mesh.axis_names if name not in mesh.manual_axes]
    if rest:
        raise ValueError(
            f"The kernel runs along {axis_name!r}, but jax.shard_map leaves the axes {', '.join(map(repr, rest))} to "
            "the compiler, which cannot partition a kernel. Let axis_names of jax.shard_map hold every axis."
        )


def check_peers() -> None:
    """Checks that a kernel may write to the memory of other GPUs: one process, and peer access between its GPUs.

    Raises:
      NotImplementedError: several processes, or two GPUs without peer access, as far as the driver tells.
    """
    if interpret.is_active():
        return
    if jax.process_count() > 1:
        raise NotImplementedError(
            f"The kernel needs all GPUs in one process, here are {jax.process_count()} processes: JAX does not tell it "
            f"where the memory of other processes lies. {_ELSEWHERE}."
        )
    try:
        pair = pair_without_peer_access()
    except (OSError, RuntimeError) as error:
        raise NotImplementedError(
            f"The kernel writes to the memory of other GPUs, but whether it can is not known: {error} {_ELSEWHERE}."
        ) from error
    if pair:
        raise NotImplementedError(
            f"The kernel writes to the memory of other GPUs, but GPU {pair[0]} has no peer access to GPU {pair[1]}. "
            f"Leave one of them out with CUDA_VISIBLE_DEVICES. {_ELSEWHERE}."
        )
