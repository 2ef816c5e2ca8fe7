"""Lowers kernels for CUDA on a machine without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import jax
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec as P


def lower_for_cuda(
    function,
    *shapes,
    mesh_axes: Mapping[str, int],
    in_specs,
    out_specs,
    device_kind="NVIDIA H100 80GB HBM3",
    num_cores: int = 132,
) -> str:
    """Lowers `jit(shard_map(function))` for GPUs that are not here.

    It finds primitives that Mosaic GPU does not lower, shared memory that does not
    fit, and layouts that do not work. It does not reach PTX, so it finds nothing
    that ptxas would.

    Args:
      function: takes and returns one device's shards.
      *shapes: `jax.ShapeDtypeStruct`s of the global operands.
      mesh_axes: axis name -> number of devices, major axis first.
      in_specs: one `PartitionSpec` per operand.
      out_specs: as for `jax.shard_map`.
      device_kind: the name that the driver gives to the GPU.
      num_cores: its number of SMs.

    Returns:
      The StableHLO text, in which each kernel is a `mosaic_gpu_v2` custom call.

    Raises:
      ValueError: numbers of operands and specs differ, or no kernel was lowered.
      Exception: whatever the lowering of the kernel raises.

    Source: JAX documentation, "Ahead-of-time lowering and compilation".
    """
    in_specs = (in_specs,) if isinstance(in_specs, P) else tuple(in_specs)
    if len(in_specs) != len(shapes):
        raise ValueError(f"{len(shapes)} operands but {len(in_specs)} in_specs")
    device = AbstractDevice(device_kind, num_cores=num_cores, platform="gpu")
    mesh = AbstractMesh(tuple(mesh_axes.values()), tuple(mesh_axes), abstract_device=device)
    operands = [
        jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, spec))
        for s, spec in zip(shapes, in_specs, strict=True)
    ]
    sharded = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        traced = jax.jit(sharded).trace(*operands)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    if "mosaic_gpu" not in text:
        raise ValueError("the lowered program holds no Mosaic GPU kernel")
    return text
