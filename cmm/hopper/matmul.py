"""The local matmul on Hopper: persistent, warp-specialized, one continuous pipeline of TMA loads and wgmma."""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cmm.hopper import roles
from cmm.hopper.config import TuningConfig, default_config
from cmm.hopper.plan import Plan, enough_ctas
from cmm.hopper.requirements import check_kernel_operands, check_machine

# A loader only issues copies; what it gives away lets a multiplier hold a tile of 64 x 256 in registers.
_LOADER_REGISTERS, _MULTIPLIER_REGISTERS = 40, 232


def matmul(lhs, rhs, *, config: TuningConfig | None = None, dtype=None):
    """Computes `lhs @ rhs` on one Hopper GPU.

    Args:
      lhs: `[m, k]`, float16 or bfloat16.
      rhs: `[k, n]`, same dtype.
      config: tiles and schedule; by default what should be fastest (`cmm.hopper.config.default_config`).
      dtype: dtype of the result, by default that of `lhs`. Accumulation is in float32.

    Returns:
      `[m, n]`.

    Raises:
      ValueError: operands do not fit together, a tile does not divide its dimension, or shared memory does not do.
      NotImplementedError: no Hopper GPU, or another dtype.

    Cost: `2 * m * k * n` FLOPs. Runs on Hopper GPUs, and inside `cmm.interpret.simulate` on any machine.
    Source: the persistent, warp-specialized matmul as in the CUTLASS documentation, "Efficient GEMM in CUDA".
    """
    dtype = check_kernel_operands(lhs, rhs, dtype)
    (m, k), n = lhs.shape, rhs.shape[1]
    core_count = check_machine().core_count
    config = config or default_config(m, n, k, lhs.dtype, core_count)
    config.check(m, n, k, lhs.dtype)
    plan = Plan(m, n, k, config, enough_ctas(m, n, config, core_count))

    def body(lhs_gmem, rhs_gmem, out_gmem):
        launch_roles(
            plan,
            lhs.dtype,
            dtype,
            load=lambda memory: roles.load_tiles(plan, 0, lhs_gmem, rhs_gmem, **memory),
            multiply=lambda memory: roles.multiply_tiles(plan, 0, out_gmem, **memory),
        )

    return persistent_kernel(plan, body, jax.ShapeDtypeStruct((m, n), dtype))(lhs, rhs)


def persistent_kernel(plan: Plan, body, out_type):
    """Returns the kernel that runs `body` in CTAs of three warpgroups, of which a multiprocessor holds one."""
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(plan.num_ctas,),
        grid_names=("cta",),
        num_threads=roles.NUM_WARPGROUPS,
        thread_name="wg",
    )


def launch_roles(plan: Plan, dtype, out_dtype, load, multiply, readers: int = 2) -> None:
    """Gives every warpgroup of a CTA its role: `load(memory)` for one of them, `multiply(memory)` for two."""

    def cta(**memory):
        wg = lax.axis_index("wg")

        @pl.when(wg == roles.LOADER)
        def _():
            plgpu.set_max_registers(_LOADER_REGISTERS, action="decrease")
            load(memory)

        @pl.when(wg < roles.LOADER)
        def _():
            plgpu.set_max_registers(_MULTIPLIER_REGISTERS, action="increase")
            multiply(memory)
            plgpu.wait_smem_to_gmem(0)  # The result has left shared memory before the CTA does.

    pl.run_scoped(cta, collective_axes="wg", **roles.memory(plan, dtype, out_dtype, readers))
