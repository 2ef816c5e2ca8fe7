"""Small kernels for tests of the simulator that pass blocks on; `fault` names one thing that is broken."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from cmm.devices import simulated_devices

M, K = 64, 64  # Shape of a block that the kernels move.
ALONG_X = P("x")


def mesh_of(num_devices, axis_name="x"):
    devices = simulated_devices(8)[:num_devices]
    return jax.sharding.Mesh(np.array(devices), (axis_name,))


def sharded(function, mesh, in_specs=ALONG_X, out_specs=ALONG_X):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def blocks(num_devices, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(num_devices * M, K)).astype(np.float16)


def kernel_like(x, body, **options):
    """Runs `body(x_ref, out_ref, ...)` as a kernel whose result has the shape and the type of `x`."""
    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), **options)(x)


def smem_of(shape=(M, K), dtype=jnp.float16):
    return plgpu.SMEM(shape, dtype)


RING_FAULTS = {  # fault -> (devices, the check that must catch it)
    "wait_removed": (3, "race"),
    "wait_one_too_few": (3, "race"),
    "signal_before_store": (3, "race"),
    "signal_after_reading_only": (3, "race"),
    "signal_to_wrong_device": (3, "race"),
    "wrong_neighbour": (3, "value"),
    "missing_signal": (3, "deadlock"),
    "wait_for_too_many": (3, "deadlock"),
    "slot_reused_too_early": (4, "race"),
    "missing_last_wait": (3, "race"),
    "staging_reused_too_early": (3, "race"),
}


def ring_all_gather(x, axis_name, num_devices, fault=None):
    """x: f16[M, K] per device -> f16[D, M, K], block s from device s.

    Step i copies the block of device (d + i) % D to the output and passes it on
    to the left. A slot may be written again once its owner says that it is free.
    """
    size = num_devices

    def body(x_ref, out_ref, mailbox_ref, smem, barrier):
        # One allocation: a second get_global in a kernel does not lower.
        semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR((2,)))
        received, free = semaphores.at[0], semaphores.at[1]
        me = lax.axis_index(axis_name)
        left = lax.rem(me + (size - 1), jnp.int32(size))
        right = lax.rem(me + 1, jnp.int32(size))
        target = right if fault == "wrong_neighbour" else left
        for i in range(size):
            source = x_ref if i == 0 else mailbox_ref.at[i % 2]
            awaited = {"wait_one_too_few": i - 1, "wait_for_too_many": i + 1}.get(fault, i)
            if awaited > 0 and i > 0 and fault != "wait_removed":
                pl.semaphore_wait(received, value=awaited, decrement=False)
            plgpu.copy_gmem_to_smem(source, smem, barrier)
            plgpu.barrier_wait(barrier)
            if 0 < i < size - 2:  # As many as the neighbour awaits: no signal may come after it has left.
                pl.semaphore_signal(free, device_id={axis_name: right})
            plgpu.copy_smem_to_gmem(smem, out_ref.at[lax.rem(me + i, jnp.int32(size))])
            if i < size - 1:
                if i >= 2 and fault != "slot_reused_too_early":
                    pl.semaphore_wait(free, value=i - 1, decrement=False)
                slot = plgpu.remote_ref(mailbox_ref, {axis_name: target}).at[(i + 1) % 2]
                plgpu.copy_smem_to_gmem(smem, slot)
                if fault == "signal_before_store":
                    pl.semaphore_signal(received, device_id={axis_name: left})
                if fault != "staging_reused_too_early":
                    plgpu.wait_smem_to_gmem(0, wait_read_only=fault == "signal_after_reading_only")
                to = right if fault == "signal_to_wrong_device" else target
                if fault == "missing_signal" and i == size - 2:
                    continue
                if fault != "signal_before_store":
                    pl.semaphore_signal(received, device_id={axis_name: to})
        if fault != "missing_last_wait":
            plgpu.wait_smem_to_gmem(0)

    out, _ = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((size, M, K), x.dtype), jax.ShapeDtypeStruct((2, M, K), x.dtype)],
        scratch_types=[smem_of(dtype=x.dtype), plgpu.Barrier()],
    )(x)
    return out


def run_ring(sim, num_devices, fault=None, repeats=1):
    """Returns (what the kernel gave, what it should give), both [D, D, M, K]."""
    x = blocks(num_devices)
    out = sim.run(ring_jitted(num_devices, fault, repeats), x)
    want = np.broadcast_to(x.reshape(1, num_devices, M, K), (num_devices, num_devices, M, K))
    return np.asarray(out), want


@functools.cache
def ring_jitted(num_devices, fault=None, repeats=1):
    def one(x):
        out = None
        for _ in range(repeats):
            out = ring_all_gather(x, "x", num_devices, fault)
            x = out[lax.axis_index("x")]
        return out[None]

    return sharded(one, mesh_of(num_devices))


def push_left(x, axis_name, num_devices, fault=None):
    """x: f16[M, K] -> the block of the device to the right."""

    def body(x_ref, out_ref):
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR)
        me = lax.axis_index(axis_name)
        left = {axis_name: lax.rem(me + num_devices - 1, jnp.int32(num_devices))}
        plgpu.remote_ref(out_ref, left)[...] = x_ref[...]
        pl.semaphore_signal(arrived, device_id=left)
        if fault == "poll":  # Not a fault: another way to wait.
            lax.while_loop(lambda _: pl.semaphore_read(arrived) < 1, lambda c: c, 0)
        elif fault == "endless_poll":
            lax.while_loop(lambda _: pl.semaphore_read(arrived) < 2, lambda c: c, 0)
        elif fault != "missing_last_wait":
            pl.semaphore_wait(arrived)
        if fault == "peer_out_of_range":
            pl.semaphore_signal(arrived, device_id={axis_name: jnp.int32(99)})

    return kernel_like(x, body)


def push(fault=None, num_devices=3):
    """Returns (`push_left` as a jitted function, its operand, what it should give)."""
    x = blocks(num_devices)
    f = sharded(lambda x: push_left(x, "x", num_devices, fault), mesh_of(num_devices))
    return f, x, np.roll(x, -M, 0)


def two_cta_ring(x, axis_name, num_devices, one_counter, delay_cta=None):
    """Three steps of passing blocks left; CTA c moves half c of each block.

    `one_counter`: both CTAs count on one semaphore over all steps, so that a fast
    CTA's signal for the next step can stand in for a slow one's for this step.
    """
    size, half = num_devices, M // 2

    def body(x_ref, out_ref, slots_ref, smem, barrier):
        semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR((size,)))
        count = semaphores.at[0]
        me, cta = lax.axis_index(axis_name), lax.axis_index("cta")
        left = {axis_name: lax.rem(me + size - 1, jnp.int32(size))}
        if delay_cta is not None:

            @pl.when((cta == delay_cta) & (me == 0))
            def _late():
                pl.delay(50_000)

        rows = pl.ds(cta * half, half)
        other = pl.ds((1 - cta) * half, half)
        for i in range(size):
            source = x_ref if i == 0 else slots_ref.at[i - 1]
            # A CTA reads what its sibling's peer sent as well as its own half.
            for part in (other, rows):
                plgpu.copy_gmem_to_smem(source.at[part], smem, barrier)
                plgpu.barrier_wait(barrier)
            plgpu.copy_smem_to_gmem(smem, out_ref.at[lax.rem(me + i, jnp.int32(size))].at[rows])
            if i < size - 1:
                plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(slots_ref, left).at[i].at[rows])
                plgpu.wait_smem_to_gmem(0)
                if one_counter:
                    pl.semaphore_signal(count, device_id=left)
                    pl.semaphore_wait(count, value=2 * (i + 1), decrement=False)
                else:
                    pl.semaphore_signal(semaphores.at[i], device_id=left)
                    pl.semaphore_wait(semaphores.at[i], value=2, decrement=False)
        plgpu.wait_smem_to_gmem(0)

    out, _ = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((size, M, K), x.dtype), jax.ShapeDtypeStruct((size - 1, M, K), x.dtype)],
        grid=(2,),
        grid_names=("cta",),
        scratch_types=[smem_of((half, K), x.dtype), plgpu.Barrier()],
    )(x)
    return out
