"""The local matmul on Hopper: persistent, warp-specialized, one continuous pipeline of TMA loads and wgmma."""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cmm.hopper import roles, slots
from cmm.hopper.axes import forget_axes, with_axes
from cmm.hopper.config import TuningConfig, default_config
from cmm.hopper.plan import Plan, plan_tiles
from cmm.hopper.requirements import check_config, check_kernel_operands, check_machine
from cmm.hopper.rounds import Rounds
from cmm.product import PRODUCT_NAME, product_tangent

_ELSEWHERE = "jnp.matmul runs everywhere"

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
      `[m, n]`. It can be differentiated in both operands, in plain JAX, and batched with `jax.vmap`. For policies of
      `jax.checkpoint` it is named "cmm_product" (see `cmm.all_gather_matmul`).

    Raises:
      ValueError: operands do not fit together, a tile does not divide its dimension, or shared memory does not do.
      NotImplementedError: no Hopper GPU, or another dtype.

    Where the last round of tiles has some for at most half of the multiprocessors, two CTAs share each of them
    (`cmm.hopper.deal`).

    Cost: `2 * m * k * n` FLOPs. Runs on Hopper GPUs, and inside `cmm.interpret.simulate` on any machine.
    Source: the persistent, warp-specialized matmul as in the CUTLASS documentation, "Efficient GEMM in CUDA".
    """
    dtype = check_kernel_operands(lhs, rhs, dtype, _ELSEWHERE)
    check_config(config)
    (m, k), n = lhs.shape, rhs.shape[1]
    core_count = check_machine(_ELSEWHERE).core_count
    config = config or default_config(m, n, k, lhs.dtype, core_count)
    config.check(m, n, k, lhs.dtype)
    plan = plan_tiles(m, n, k, config, core_count)
    return _product(plan, dtype, lhs, rhs)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _product(plan, dtype, lhs, rhs):
    out = launch_product(plan, dtype, forget_axes(lhs), forget_axes(rhs))
    return with_axes(out, jax.typeof(lhs), jax.typeof(rhs))


@functools.partial(_product.defjvp, symbolic_zeros=True)
def _product_jvp(plan, dtype, primals, tangents):
    (lhs, rhs), (d_lhs, d_rhs) = primals, tangents
    out = checkpoint_name(_product(plan, dtype, lhs, rhs), PRODUCT_NAME)
    return out, product_tangent(lhs, rhs, d_lhs, d_rhs, out)


def launch_product(plan: Plan, dtype, lhs, rhs):
    """Starts the kernel.

    Args:
      plan: the tiles.
      dtype: of the result.
      lhs: `[plan.m, plan.k]`, which does not say over which mesh axes it differs (`cmm.hopper.axes`).
      rhs: `[plan.k, plan.n]`, likewise.

    Returns:
      `[plan.m, plan.n]`, which does not say so either, and has no derivatives.
    """

    def body(lhs_gmem, rhs_gmem, out_gmem):
        rounds = Rounds(plan, 1).in_kernel()

        def load(step, tiles, first_use, memory):
            roles.load_tiles(tiles, first_use, lhs_gmem, rhs_gmem, **memory)

        def multiply(step, tiles, first_use, memory):
            roles.multiply_tiles(tiles, first_use, out_gmem, **memory)

        launch_roles(
            plan,
            lhs.dtype,
            dtype,
            load=functools.partial(rounds.for_each_step, load),
            multiply=functools.partial(rounds.for_each_step, multiply),
        )

    return persistent_kernel(plan, body, jax.ShapeDtypeStruct((plan.m, plan.n), dtype))(lhs, rhs)


def persistent_kernel(plan: Plan, body, out_type):
    """Returns the kernel that runs `body` in CTAs of three warpgroups, of which a multiprocessor holds one."""
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(plan.num_ctas,),
        grid_names=("cta",),
        num_threads=roles.NUM_WARPGROUPS,
        thread_name="wg",
    )

    def launch(*operands):
        # A GPU counts tiles and stages in 32 bits. With jax_enable_x64 some numbers in `body` would have 64.
        with jax.enable_x64(False):
            return kernel(*operands)

    return launch


def launch_roles(plan: Plan, dtype, out_dtype, load, multiply, readers: int = 2) -> None:
    """Gives every warpgroup of a CTA its role: `load(memory)` for one of them, `multiply(memory)` for two."""

    def cta(**memory):
        memory["a_smem"], memory["a_images"] = slots.views(memory["a_smem"])
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
