"""What does recording cost? The kernel's time with and without it, by the GPUs' own record."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from cmm import devices
from cmm.dispatch import all_gather_matmul
from cmm.measure import recorded_call
from cmm.roofline import Problem
from cmm.trace.record import recorded_program


def kernel_times_us(
    problem: Problem, mesh, kernel: str, recorded: Mapping[str, int | None], rounds: int = 5, calls: int = 16
) -> dict[str, float]:
    """Times a kernel as it is, and with recorders that note one of so many products.

    Args:
      problem: shapes and dtype.
      mesh: a mesh of one axis, GPUs.
      kernel: `"pallas"` or `"pallas_fast"`.
      recorded: `every` of `cmm.trace.record.record_events`, by a name of your choice.
      rounds: how often each is timed; they take turns. The median counts.
      calls: length of a chain.

    Returns:
      Kernel time of the slowest GPU in µs, by name; `"nothing"` is the kernel as it is.
    """
    (axis,) = mesh.axis_names
    rows, columns = P(axis, None), P(None, axis)
    plain = lambda lhs, rhs: all_gather_matmul(lhs, rhs, axis, method=kernel)
    programs = {"nothing": jax.jit(jax.shard_map(plain, mesh=mesh, in_specs=(rows, columns), out_specs=columns))}
    for name, every in recorded.items():
        programs[name] = recorded_program(problem, mesh, kernel, every=every)[0]
    operands = [devices.random_operands(problem, mesh, seed, axis) for seed in range(2)]
    for program in programs.values():
        jax.block_until_ready(program(*operands[0]))
    times = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            times[name].append(recorded_call(program, operands, calls).kernel_us)
    return {name: round(float(np.median(values)), 2) for name, values in times.items()}
