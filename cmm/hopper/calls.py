"""What every collective kernel of this package needs around it: checks, derivatives, batches, mesh axes."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap

from cmm.checks import check_call
from cmm.hopper.axes import forget_axes
from cmm.hopper.config import TuningConfig, default_config
from cmm.hopper.matmul import matmul
from cmm.hopper.plan import Plan
from cmm.hopper.requirements import check_all_axes_manual, check_kernel_operands, check_machine, check_peers
from cmm.hopper.tuned import tuned_config
from cmm.naive import all_gather_matmul_naive


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
    check_all_axes_manual(axis_name)
    (m_shard, k), n_shard = lhs.shape, rhs.shape[1]
    gpu = check_machine()
    sizes = (m_shard, n_shard, k, lhs.dtype)
    config = config or chosen_config(kernel, axis_size, *sizes, gpu.kind, gpu.core_count)
    config.check(m_shard, n_shard, k, lhs.dtype)
    plan = Plan(m_shard, n_shard, k, config, gpu.core_count)
    if axis_size > 1:
        check_peers()
    return plan, dtype


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
    return found or default_config(m_shard, n_shard, k, dtype, core_count)


def call_kernel(launch: Callable, lhs, rhs, axis_name, plan: Plan, dtype):
    """Computes `AllGather(lhs) @ rhs` with a kernel, or with the local matmul where the axis has one device.

    Args:
      launch: `launch(axis_name, plan, dtype, lhs, rhs)` starts the kernel and returns its result.
      lhs: `[m_shard, k]`.
      rhs: `[k, n_shard]`.
      axis_name, plan, dtype: see `plan_ring`.

    Returns:
      `[axis_size * m_shard, n_shard]`, with derivatives by `cmm.all_gather_matmul_naive`.
    """
    launch = _launch_local if lax.axis_size(axis_name) == 1 else launch
    return _call(launch, axis_name, plan, dtype, lhs, rhs)


def _launch_local(axis_name, plan, dtype, lhs, rhs):
    return matmul(lhs, rhs, config=plan.config, dtype=dtype)


def call_recorded(launch: Callable, lhs, rhs, axis_name, plan: Plan, dtype, recorder):
    """Computes what `call_kernel` does on two devices or more, and records the call.

    Args:
      launch: as there; it takes a recorder as well (`cmm.hopper.marks`) and returns what it recorded, too.
      lhs, rhs, axis_name, plan, dtype: as there.
      recorder: the recorder.

    Returns:
      The result, which cannot be differentiated, and the record.
    """
    results = launch(axis_name, plan, dtype, forget_axes(lhs), forget_axes(rhs), recorder)
    return tuple(_with_axes(result, lhs, rhs, axis_name) for result in results)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _call(launch, axis_name, plan, dtype, lhs, rhs):
    # One call after another for a batch. JAX would give the kernel one more grid axis, and the calls of a batch would
    # share their semaphores.
    out = sequential_vmap(functools.partial(launch, axis_name, plan, dtype))(forget_axes(lhs), forget_axes(rhs))
    return _with_axes(out, lhs, rhs, axis_name)


@_call.defjvp
def _call_jvp(launch, axis_name, plan, dtype, primals, tangents):
    naive = functools.partial(all_gather_matmul_naive, axis_name=axis_name, dtype=dtype)
    (lhs, rhs), (d_lhs, d_rhs) = primals, tangents
    # The kernel needs all multiprocessors of all devices: the gather of lhs for the derivative comes after it.
    out, lhs = lax.optimization_barrier((_call(launch, axis_name, plan, dtype, lhs, rhs), lhs))
    return out, naive(d_lhs, rhs) + naive(lhs, d_rhs)


def _with_axes(out, lhs, rhs, axis_name):
    """Tells JAX over which mesh axes `out` differs: the same ones as the plain method's result. A kernel says none."""
    plain = jax.eval_shape(functools.partial(all_gather_matmul_naive, axis_name=axis_name), lhs, rhs)
    missing = _varying(plain) - _varying(jax.typeof(out))
    return lax.pcast(out, tuple(missing), to="varying") if missing else out


def _varying(aval) -> frozenset:
    kind = aval.manual_axis_type  # None where jax.shard_map does not check (check_vma=False)
    return kind.varying if kind else frozenset()
