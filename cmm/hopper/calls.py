"""What every collective kernel of this package needs around it: checks, derivatives, batches, mesh axes."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap
from jax.custom_derivatives import SymbolicZero

from cmm.checks import check_call
from cmm.hopper import slots
from cmm.hopper.axes import forget_axes, with_axes
from cmm.hopper.config import TuningConfig, default_config
from cmm.hopper.matmul import launch_product
from cmm.hopper.plan import Plan, plan_tiles
from cmm.hopper.requirements import (
    check_all_axes_manual,
    check_config,
    check_kernel_operands,
    check_machine,
    check_peers,
)
from cmm.hopper.tuned import tuned_config
from cmm.naive import all_gather_matmul_naive
from cmm.product import PRODUCT_NAME, product_tangent

GATHERED_NAME = "cmm_gathered"  # The activations that a kernel has gathered, for policies of jax.checkpoint.


def plan_ring(
    kernel: str, lhs, rhs, axis_name, *, config: TuningConfig | None = None, dtype=None
) -> tuple[Plan, jnp.dtype]:
    """Checks a call of a collective kernel; returns how a step is cut into tiles, and the dtype of the result.

    Args:
      kernel: its name in `cmm.METHODS`.
      lhs, rhs, axis_name, dtype: as for `cmm.all_gather_lhs_matmul`.
      config: by default the fastest that is known for this problem (`cmm.hopper.tuned`), or one that fits.

    Raises:
      ValueError, NotImplementedError: as `cmm.all_gather_lhs_matmul` does.
    """
    dtype, axis_size = check_call(lhs, rhs, axis_name, dtype)
    check_kernel_operands(lhs, rhs, dtype)
    check_config(config)
    check_all_axes_manual(axis_name)
    (m_shard, k), n_shard = lhs.shape, rhs.shape[1]
    gpu = check_machine()
    plan = plan_step(kernel, axis_size, m_shard, n_shard, k, lhs.dtype, gpu.kind, gpu.core_count, config)
    if axis_size > 1:
        check_peers()
    return plan, dtype


def plan_step(
    kernel: str,
    axis_size: int,
    m_shard: int,
    n_shard: int,
    k: int,
    dtype,
    device_kind: str,
    core_count: int,
    config: TuningConfig | None = None,
) -> Plan:
    """Returns how a step of a kernel is cut into tiles.

    Args:
      kernel, axis_size, m_shard, n_shard, k, dtype, device_kind, core_count: as for `chosen_config`.
      config: as for `plan_ring`.

    Raises:
      ValueError: it does not fit, or none does.
    """
    config = config or chosen_config(kernel, axis_size, m_shard, n_shard, k, dtype, device_kind, core_count)
    config.check(m_shard, n_shard, k, dtype)
    return plan_tiles(m_shard, n_shard, k, config, core_count, **rounds_of(kernel, axis_size))


def chosen_config(
    kernel: str, axis_size: int, m_shard: int, n_shard: int, k: int, dtype, device_kind: str, core_count: int
) -> TuningConfig:
    """Returns the configuration of a call that brings none: the fastest that is known, or one that fits.

    Args:
      kernel, axis_size, m_shard, n_shard, k, dtype, device_kind: as for `cmm.hopper.tuned.tuned_config`.
      core_count: number of multiprocessors of the GPU.

    Raises:
      ValueError: none fits.
    """
    found = tuned_config(kernel, axis_size, m_shard, n_shard, k, dtype, device_kind)
    return found or default_config(m_shard, n_shard, k, dtype, core_count, **rounds_of(kernel, axis_size))


def rounds_of(kernel: str, axis_size: int) -> dict:
    """Returns how many steps a round of CTAs may span, and whether the last one may consist of halves of tiles.

    Only the fast kernel begins a step before all are through with the one before. On one device both kernels are the
    local matmul.
    """
    if kernel == "pallas_fast" or axis_size == 1:
        return {"steps": axis_size, "halves": True}
    return {"steps": 1, "halves": False}


def call_kernel(launch: Callable, lhs, rhs, axis_name, plan: Plan, dtype):
    """Computes `AllGather(lhs) @ rhs` with a kernel, or with the local matmul where the axis has one device.

    Args:
      launch: `launch(axis_name, plan, dtype, lhs, rhs)` starts the kernel and returns its result and the slots in which
        it has received the shards of the others, in the order of steps (`cmm.hopper.slots`).
      lhs: `[m_shard, k]`.
      rhs: `[k, n_shard]`.
      axis_name, plan, dtype: see `plan_ring`.

    Returns:
      `[axis_size * m_shard, n_shard]`, with derivatives in plain JAX. They take the activations that the kernel has
      gathered on its way: nothing is gathered twice. Both are named for policies of `jax.checkpoint`, "cmm_product"
      and "cmm_gathered".
    """
    launch = _launch_local if lax.axis_size(axis_name) == 1 else launch
    return _call(launch, axis_name, plan, dtype, lhs, rhs)


def _launch_local(axis_name, plan, dtype, lhs, rhs):
    no_slots = slots.type_of(plan, 0, lhs.dtype)
    return launch_product(plan, dtype, lhs, rhs), jnp.zeros(no_slots.shape, no_slots.dtype)


def call_recorded(launch: Callable, lhs, rhs, axis_name, plan: Plan, dtype, recorder):
    """Computes what `call_kernel` does on two devices or more, and records the call.

    Args:
      launch: as there; it takes a recorder as well (`cmm.hopper.marks`) and returns what it recorded, too.
      lhs, rhs, axis_name, plan, dtype: as there.
      recorder: the recorder.

    Returns:
      The result, which cannot be differentiated, and the record.
    """
    out, *_, record = launch(axis_name, plan, dtype, forget_axes(lhs), forget_axes(rhs), recorder)
    like = _product_type(lhs, rhs, axis_name)
    return with_axes(out, like), with_axes(record, like)


_differentiable = functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))


@_differentiable
def _call(launch, axis_name, plan, dtype, lhs, rhs):
    return _launched(launch, axis_name, plan, dtype, lhs, rhs)[0]


@_differentiable
def _call_and_gather(launch, axis_name, plan, dtype, lhs, rhs):
    """Returns the product, and the activations of all devices in their order, `[axis_size * m_shard, k]`."""
    out, received = _launched(launch, axis_name, plan, dtype, lhs, rhs)
    gathered_type = jax.eval_shape(functools.partial(_gather, axis_name=axis_name), lhs)
    shards = with_axes(slots.as_rows(received, plan), jax.typeof(lhs), gathered_type)
    # Slot i holds the shard of the device i + 1 places on (`cmm.schedule.shard_at`).
    from_here_on = jnp.concatenate([lhs[None], shards])
    in_order = jnp.roll(from_here_on, lax.axis_index(axis_name), axis=0)
    return out, in_order.reshape(-1, lhs.shape[1])


@functools.partial(_call.defjvp, symbolic_zeros=True)
def _call_jvp(launch, axis_name, plan, dtype, primals, tangents):
    results, derivatives = _call_and_gather_jvp(launch, axis_name, plan, dtype, primals, tangents)
    return results[0], derivatives[0]


@functools.partial(_call_and_gather.defjvp, symbolic_zeros=True)
def _call_and_gather_jvp(launch, axis_name, plan, dtype, primals, tangents):
    (lhs, rhs), (d_lhs, d_rhs) = primals, tangents
    out, gathered = _call_and_gather(launch, axis_name, plan, dtype, lhs, rhs)
    # Named here, where derivatives take them: a policy that saves both names runs the kernel once.
    out, gathered = checkpoint_name(out, PRODUCT_NAME), checkpoint_name(gathered, GATHERED_NAME)
    # The kernel needs all multiprocessors of all devices: nothing else goes around before it is done, neither the
    # gather of forward mode nor what it becomes in the backward pass. A factor that is known then only ties them to it.
    out, one = lax.optimization_barrier((out, jnp.ones((), lhs.dtype)))
    if isinstance(d_lhs, SymbolicZero):
        d_gathered = SymbolicZero(jax.typeof(gathered).to_tangent_aval())
    else:
        d_gathered = _gather(d_lhs * one, axis_name) * one
    return (out, gathered), (product_tangent(gathered, rhs, d_gathered, d_rhs, out), d_gathered)


def _gather(shard, axis_name):
    return lax.all_gather(shard, axis_name, axis=0, tiled=True)


def _launched(launch, axis_name, plan, dtype, lhs, rhs):
    # One call after another for a batch. JAX would give the kernel one more grid axis, and the calls of a batch would
    # share their semaphores.
    run = sequential_vmap(functools.partial(launch, axis_name, plan, dtype))
    out, received = run(forget_axes(lhs), forget_axes(rhs))
    return with_axes(out, _product_type(lhs, rhs, axis_name)), received


def _product_type(lhs, rhs, axis_name):
    """Returns the type of the plain method's result, which says over which mesh axes it differs."""
    return jax.eval_shape(functools.partial(all_gather_matmul_naive, axis_name=axis_name), lhs, rhs)
