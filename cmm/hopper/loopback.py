"""How does a ring kernel run on a single GPU that is its own neighbour?

All that the kernel does runs on the hardware, but for the way over NVLink: in each step it sends the shard to the next
slot of its own device, signals, waits, and multiplies what has arrived. So every step gives the product of the one
shard. It shows that the compiled kernel is right and does not hang, and how long its products, sends and signals take
where the way is short. It says nothing about NVLink, nor about what other devices do meanwhile.
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

from cmm import devices
from cmm.hopper import fast_kernel, ring_kernel, slots
from cmm.hopper.calls import plan_step
from cmm.hopper.config import TuningConfig
from cmm.hopper.plan import Plan
from cmm.hopper.requirements import check_kernel_operands

_LAUNCH = {"pallas": ring_kernel._launch, "pallas_fast": fast_kernel._launch}


def plan_loop(
    kernel: str, steps: int, m: int, k: int, n: int, dtype, gpu, core_count: int, config: TuningConfig | None = None
) -> Plan:
    """Returns the tiles of a step, as a ring of `steps` devices would cut it.

    Args:
      kernel: its name in `cmm.METHODS`.
      steps: number of steps, at least 2: the devices of the ring that this stands for.
      m, k, n: `A` is `[m, k]`, `B` is `[k, n]`.
      dtype: of the operands.
      gpu: the device.
      core_count: number of its multiprocessors.
      config: by default what the kernel takes by itself on such a ring.

    Raises:
      ValueError: the configuration does not fit, or none does; the kernel is unknown, or there are fewer than 2 steps.
      NotImplementedError: a dtype that the kernels do not multiply.
    """
    if kernel not in _LAUNCH:
        raise ValueError(f"kernel={kernel!r} is unknown. Known kernels: {', '.join(map(repr, _LAUNCH))}.")
    if steps < 2:
        raise ValueError(f"A loop needs 2 steps or more, got {steps}: with one there is nothing to send.")
    operands = jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((k, n), dtype)
    check_kernel_operands(*operands, dtype, "No other kernel runs in a loop")
    plan = plan_step(kernel, steps, m, n, k, dtype, gpu.device_kind, core_count, config)
    return fast_kernel.with_sends(plan, steps) if kernel == "pallas_fast" else plan


def looped_back(kernel: str, plan: Plan, steps: int, dtype, gpu) -> Callable:
    """Returns a jitted function `f(lhs, rhs)` that runs the kernel on one device that is its own neighbour.

    Args:
      kernel, steps, gpu: as for `plan_loop`.
      plan: the tiles of a step.
      dtype: of the result.

    Returns:
      A function of `lhs [m, k]` and `rhs [k, n]`. It returns the result, `[steps * m, n]`, `steps` times the product,
      and what the slots have received, `[steps - 1, m, k]`: `lhs` each.
    """

    def loop(lhs, rhs):
        out, received = _LAUNCH[kernel](None, plan, dtype, lhs, rhs, loops_back=steps)
        return out, slots.as_rows(received, plan)

    mesh = devices.ring_mesh([gpu])
    return jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=(P(), P()), out_specs=(P(), P()), check_vma=False))
