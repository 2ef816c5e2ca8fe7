"""What can the devices at hand do? Measured, in the form in which `cmm.roofline` describes machines."""

import dataclasses

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from cmm.devices import is_simulated, random_operands
from cmm.measure import blocked_time_us, recorded_call
from cmm.product import local_matmul
from cmm.roofline import Machine, Problem
from cmm.schedule import send_pairs

_ROUNDS, _CALLS = 5, 16
# Large enough that starting a kernel or a transfer takes little of the time.
_GPU_WORK = Problem(1, m_shard=8192, k=8192, n_shard=8192)
_SIMULATED_WORK = Problem(1, m_shard=256, k=256, n_shard=256)


def this_machine(mesh: Mesh, axis_name: str = "x", dtype: str = "float16") -> Machine:
    """Measures one product on each device at once, and one hop of the ring, and returns the rates that were reached.

    Args:
      mesh: the devices, along `axis_name`.
      axis_name: the axis.
      dtype: dtype of the product whose rate is measured.

    Returns:
      A `Machine` with one peak, that of `dtype`: the rate of the product, which on a GPU is that of a large matmul, not
      that of the data sheet. Its link rate is that of `lax.ppermute` as XLA compiles it by default; with one device
      there is no link, and the rate is infinite. On simulated devices the numbers describe the host's CPU.
    """
    devices = list(mesh.devices.flat)
    work = _SIMULATED_WORK if is_simulated(devices) else _GPU_WORK
    work = dataclasses.replace(work, axis_size=mesh.shape[axis_name], dtype=dtype)
    operands = [random_operands(work, mesh, seed, axis_name) for seed in range(2)]
    rows, columns = P(axis_name, None), P(None, axis_name)

    def product(lhs, rhs):
        return local_matmul(lhs, rhs, lhs.dtype)

    def hop(lhs, rhs):
        del rhs
        return lax.ppermute(lhs, axis_name, send_pairs(work.axis_size))

    product_us = _time_us(jax.shard_map(product, mesh=mesh, in_specs=(rows, columns), out_specs=rows), operands)
    link_bytes_per_s = float("inf")
    if work.axis_size > 1:
        hop_us = _time_us(jax.shard_map(hop, mesh=mesh, in_specs=(rows, columns), out_specs=rows), operands)
        link_bytes_per_s = work.bytes_per_hop / hop_us * 1e6
    one_product = work.flops_per_device / work.axis_size
    return Machine(
        name=f"this machine: {work.axis_size} x {devices[0].device_kind}",
        peak_flops_per_s={dtype: one_product / product_us * 1e6},
        link_bytes_per_s=link_bytes_per_s,
        source=f"measured: [{work.m_shard}, {work.k}] @ [{work.k}, {work.n_shard}] in {dtype}, JAX {jax.__version__}",
    )


def _time_us(function, operands) -> float:
    """Returns the median time of one call: by the GPUs' record, or by the host's clock where there are none."""
    program = jax.jit(function)
    jax.block_until_ready(program(*operands[0]))
    if is_simulated(list(operands[0][0].devices())):
        return float(np.median([blocked_time_us(program, operands) for _ in range(_ROUNDS)]))
    return float(np.median([recorded_call(program, operands, _CALLS)[0] for _ in range(_ROUNDS)]))
