"""The front door: one function for every method, and the list of methods."""

import dataclasses
from collections.abc import Callable

import jax

from cmm.naive import all_gather_matmul_naive
from cmm.ring import all_gather_matmul_ring, all_gather_matmul_ring_bidirectional

# "auto" takes no kernel for a step of fewer FLOPs. Measured by `python -m cmm.bench --suite m-sweep` on 2 H200, with
# k = n_shard = 4096: on the GPUs the kernel's calls were shorter from 64 rows per device on, 2.1 GFLOP. By the host's
# clock, in a program, the two were not told apart up to 256 rows, and the kernel gained clearly from 1024 on.
_LEAST_STEP_FLOPS = 4e9


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to compute `AllGather(lhs) @ rhs`.

    Attributes:
      name: what `all_gather_matmul(method=...)` takes.
      title: what tables and figures print.
      function: `function(lhs, rhs, axis_name, *, dtype, precision)`.
      needs_hopper: whether it runs on Hopper GPUs only (and inside `cmm.interpret.simulate`).
    """

    name: str
    title: str
    function: Callable
    needs_hopper: bool = False


def _kernel(name: str) -> Callable:
    """Returns the kernel of this name as a function of a `Method`, which has an argument that kernels have not."""

    def function(lhs, rhs, axis_name, *, dtype=None, precision=None):
        if precision is not None:
            raise ValueError(
                f"method={name!r} takes no precision, got {precision!r}: products of float16 and bfloat16 are exact "
                "and are added up in float32. Leave precision out, or use method='naive'."
            )
        return _hopper().KERNELS[name](lhs, rhs, axis_name, dtype=dtype)

    return function


def _hopper():
    """Returns `cmm.hopper`, which imports Pallas: too slow for those who do not use it."""
    import cmm.hopper

    return cmm.hopper


# What "auto" takes where it pays.
AUTO_KERNEL = "pallas_fast"

METHODS = {
    method.name: method
    for method in (
        Method("naive", "all-gather + matmul", all_gather_matmul_naive),
        Method("ring", "ring", all_gather_matmul_ring),
        Method("ring_bidirectional", "ring, both ways", all_gather_matmul_ring_bidirectional),
        Method("pallas", "one kernel", _kernel("pallas"), needs_hopper=True),
        Method("pallas_fast", "one kernel, fast", _kernel("pallas_fast"), needs_hopper=True),
    )
}


def all_gather_matmul(lhs, rhs, axis_name, *, method="auto", dtype=None, precision=None):
    """Computes `AllGather(lhs) @ rhs` by the method of your choice. Call it inside `jax.shard_map`.

    Args:
      lhs: `[m_shard, k]`, this device's rows of the activations; float16, bfloat16 or float32.
      rhs: `[k, n_shard]`, this device's columns of the weights; same dtype.
      axis_name: mesh axis over which the rows of the activations are sharded.
      method: "auto", or a key of `cmm.METHODS`. "auto" takes "pallas_fast" on Hopper GPUs where operands and mesh are
        fit for it and a step has work enough, and "naive" otherwise. As XLA compiles it by default, the ring was
        slower than "naive" on every GPU measured so far, because NCCL's transfers wait for the matmul to free the
        multiprocessors: see `cmm.COPY_ENGINE_OPTIONS`. "pallas" and "pallas_fast" insist on a kernel and say why it
        cannot run.
      dtype: dtype of the result, by default that of `lhs`. Accumulation is in float32. Kernels give no float32.
      precision: as in `jax.lax.dot`. By default float32 operands are multiplied in full float32, whatever
        `jax.default_matmul_precision` says. Kernels take none.

    Returns:
      `[axis_size * m_shard, n_shard]`, this device's columns of the product. All methods agree up to rounding, and
      all can be differentiated in both operands.

      For policies of `jax.checkpoint`, what a kernel gives is named: the result "cmm_product", and the activations that
      it gathers on its way, which the backward pass takes, "cmm_gathered". Policies for dot products do not see into a
      kernel, so with them alone the backward pass runs it again. One that saves both names as well,
      `jax.checkpoint_policies.save_only_these_names("cmm_product", "cmm_gathered")`, runs it once. The other methods
      are dot products and collectives without names.

    Raises:
      ValueError: the method is unknown, or operands or axis are not fit for it; the message says why.
      NotImplementedError: a kernel on a machine or with a dtype that it does not run on. Never with "auto",
        except where the mesh holds all devices of the machine in another order than theirs: JAX finds that out while
        it compiles the kernel, and names the devices.

    Cost: `2 * axis_size * m_shard * k * n_shard` FLOPs; each device receives `(axis_size - 1) * m_shard * k` elements.
    """
    if not isinstance(method, str) or method not in ("auto", *METHODS):
        known = ", ".join(repr(name) for name in ("auto", *METHODS))
        raise ValueError(f"method={method!r} is unknown. Known methods: {known}.")
    name = method
    if method == "auto":
        name = AUTO_KERNEL if precision is None and _kernel_pays(lhs, rhs, axis_name, dtype) else "naive"
    return METHODS[name].function(lhs, rhs, axis_name, dtype=dtype, precision=precision)


def _kernel_pays(lhs, rhs, axis_name, dtype) -> bool:
    """Whether operands, mesh and GPUs are fit for the kernels, as far as is known before, and there is work enough."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.abstract_device is None or mesh.abstract_device.platform not in ("gpu", "cuda"):
        return False
    # The kernel needs devices 0, 1, 2, ... While it is traced nobody can see which devices a mesh holds, only how many.
    if mesh.size != jax.device_count():
        return False
    try:
        plan, _ = _hopper().plan_fast(lhs, rhs, axis_name, dtype=dtype)
    except (ValueError, NotImplementedError):
        return False
    return jax.lax.axis_size(axis_name) > 1 and 2 * plan.m * plan.n * plan.k >= _LEAST_STEP_FLOPS
