"""All-gather and matmul in one kernel: each shard is sent on from the shared memory that it is multiplied from.

In step `i` of the ring device `d` multiplies shard `(d + i) % D`. It reads the shard from its own operand (step 0) or
from slot `i - 1` of its scratch buffer, and writes it into slot `i` of the scratch buffer of device `d - 1`, which
reads it in step `i + 1`. Nothing is copied for the sake of sending: a tile of A that TMA has brought into shared memory
for a product is stored to the neighbour from there, as it lies there (`cmm.hopper.slots`). Every tile of A is used once
for each column of tiles of the result; it is sent on the first of these visits, by the CTA that has column 0.

Why it is sound, for any number of devices, of tiles per CTA and of stages, and however late a CTA is:

1. *A shard is complete before it is read.* There is one semaphore for each step, `received[i]`. The CTA that has
   finished tile `(m, 0)` of step `i` waits until its stores have completed in the neighbour's memory, and then adds 1
   to the neighbour's `received[i]`. The neighbour's loaders wait until it is `m_tiles`, and fence, so that TMA sees
   what they have been told of (`cmm.hopper.fences`). Each of the `m_tiles` signals stands for one block of rows, and no
   signal of another step counts there: a fast CTA cannot stand in for a slow one.
2. *A slot is never overwritten while it is read.* Each step has a slot of its own, and each tile of it is written once.
3. *Shared memory is not reused while it is sent.* A stage goes back to the loader one use later, and by then the sender
   has waited until all stores but the latest have read their stage. Before the last stage of a tile goes back it waits
   for all of them.
4. *No device leaves early.* The loaders of the last step wait for all signals of the last slot; those of the steps
   before have been awaited in their steps. So nothing is sent or signalled to a device whose kernel has ended. Senders
   wait for the completion of their stores before they signal, so none is in flight when a sender ends either.
5. *No cycle of waits.* Step `i` of a device needs nothing but step `i - 1` of the device above, and step 0 needs
   nothing. All CTAs are resident at once, at most one on each multiprocessor. That is assumed: a kernel of another
   library that holds multiprocessors of one device while it waits for another device, as NCCL's do, must not run beside
   this one.

Semaphores are zero when the kernel starts, and waits leave their value (`decrement=False`): many CTAs wait for one.
"""

import dataclasses
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cmm.hopper import roles, slots
from cmm.hopper.calls import call_kernel, plan_ring
from cmm.hopper.config import TuningConfig
from cmm.hopper.fences import acquire_for_tma
from cmm.hopper.marks import LOADER, MULTIPLIERS, NO_RECORDER
from cmm.hopper.matmul import launch_roles, persistent_kernel
from cmm.hopper.plan import Plan
from cmm.schedule import neighbour, shard_at

_SENDER = 0  # The multiplier that sends.


def all_gather_lhs_matmul(lhs, rhs, axis_name, *, config: TuningConfig | None = None, dtype=None):
    """Computes `AllGather(lhs) @ rhs` in one kernel per device. Call it inside `jax.shard_map`.

    Args:
      lhs: `[m_shard, k]`, this device's rows of the activations; float16 or bfloat16.
      rhs: `[k, n_shard]`, this device's columns of the weights; same dtype.
      axis_name: mesh axis over which the rows of the activations are sharded.
      config: tiles and schedule; by default the fastest that is known for this problem (see `python -m cmm.tune`), or
        one that fits.
      dtype: dtype of the result, by default that of `lhs`. Accumulation is in float32.

    Returns:
      `[axis_size * m_shard, n_shard]`, this device's columns of the product. It can be differentiated in both
      operands. Derivatives are computed in plain JAX, from the activations that the kernel has gathered on its way.

    Raises:
      ValueError: operands or axis do not fit, a tile does not divide its dimension, shared memory does not do, or
        `jax.shard_map` leaves an axis of the mesh to the compiler.
      NotImplementedError: no Hopper GPUs, GPUs that do not reach each other's memory, several processes, or a dtype
        other than float16 and bfloat16. While it is compiled, JAX raises it if the devices of the mesh are not 0, 1,
        2, ... in this order.

    Cost: `2 * axis_size * m_shard * k * n_shard` FLOPs; sends `(axis_size - 1) * m_shard * k` elements, and needs a
    scratch buffer of as many. Runs on Hopper GPUs that one process drives and that reach each other's memory, and
    inside `cmm.interpret.simulate` on any machine.

    Source: "Collective matrix multiplication" in the JAX documentation (Pallas:Mosaic GPU).
    """
    plan, dtype = plan_ring("pallas", lhs, rhs, axis_name, config=config, dtype=dtype)
    return call_kernel(_launch, lhs, rhs, axis_name, plan, dtype)


def _launch(axis_name, plan, dtype, lhs, rhs, recorder=NO_RECORDER, send_type=None, loops_back=None):
    """Starts the kernel. With `loops_back` steps in place of an axis, a device is its own neighbour."""
    axis_size = loops_back or lax.axis_size(axis_name)
    body = functools.partial(_body, plan, axis_name, axis_size, recorder, send_type or Send)
    return persistent_kernel(
        plan,
        body,
        out_type=(
            jax.ShapeDtypeStruct((axis_size * plan.m, plan.n), dtype),
            slots.type_of(plan, axis_size - 1, lhs.dtype),  # One for each shard that arrives.
            *recorder.out_type(),
        ),
    )(lhs, rhs)


def _body(plan, axis_name, axis_size, recorder, send_type, lhs_gmem, rhs_gmem, out_gmem, scratch_gmem, *marks_gmem):
    recorder = recorder.into(*marks_gmem)
    received = pl.get_global(plgpu.SemaphoreType.REGULAR((axis_size - 1,)))
    if axis_name is None:
        device, send_dev_id, peer_scratch = 0, None, scratch_gmem
    else:
        device = lax.axis_index(axis_name)
        send_dev_id = {axis_name: neighbour(device, axis_size)}
        peer_scratch = plgpu.remote_ref(scratch_gmem, send_dev_id)

    def first_use(step):
        return step * plan.my_tiles() * plan.k_steps

    @recorder.role(LOADER)
    def load(marks, memory):
        for step in range(axis_size):
            shard = lhs_gmem
            if step > 0:
                with marks.span("ready", first_use(step)):
                    pl.semaphore_wait(received.at[step - 1], value=send_type.signals(plan), decrement=False)
                    acquire_for_tma()
                shard = scratch_gmem.at[step - 1]
            roles.load_tiles(plan, first_use(step), shard, rhs_gmem, is_slot=step > 0, marks=marks, **memory)

    @recorder.role(MULTIPLIERS)
    def multiply(marks, memory):
        for step in range(axis_size):
            send = None
            if step < axis_size - 1:
                send = send_type(plan, peer_scratch.at[step], received.at[step], send_dev_id)
            rows = pl.ds(shard_at(device, step, axis_size) * plan.m, plan.m)
            roles.multiply_tiles(plan, first_use(step), out_gmem.at[rows], send, marks=marks, **memory)

    launch_roles(plan, lhs_gmem.dtype, out_gmem.dtype, load, multiply)


@dataclasses.dataclass(frozen=True)
class Send:
    """Sends the tiles of A of one step to the neighbour, as the multipliers use them.

    Attributes:
      plan: the tiles.
      slot: the neighbour's slot for this step (`cmm.hopper.slots`).
      received: the semaphore of this step; the neighbour's is signalled.
      send_dev_id: the neighbour; `None` for this device itself.
    """

    plan: Plan
    slot: object
    received: object
    send_dev_id: dict | None

    @staticmethod
    def signals(plan: Plan) -> int:
        """Returns how many signals say that a shard is complete: one from each tile of column 0."""
        return plan.m_tiles

    def use(self, image, m_tile, n_tile, k_step) -> None:
        """Sends a stage of A as it is, and waits until all stages that were sent before have been read."""

        @pl.when(self._is_mine(n_tile))
        def _():
            plgpu.copy_smem_to_gmem(image, self.slot.at[*slots.place(self.plan, m_tile, k_step)])
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)

    def finish(self, n_tile) -> None:
        """Waits until the last stage of a tile has been read, too."""

        @pl.when(self._is_mine(n_tile))
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def announce(self, n_tile) -> None:
        """Waits until all rows of this tile are in the neighbour's memory, and tells the neighbour."""

        @pl.when(self._is_mine(n_tile))
        def _():
            plgpu.wait_smem_to_gmem(0)
            pl.semaphore_signal(self.received, device_id=self.send_dev_id)

    def _is_mine(self, n_tile):
        return (lax.axis_index("wg") == _SENDER) & (n_tile == 0)
