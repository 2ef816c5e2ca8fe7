"""Small kernels for the tests of the simulator, right ones and broken ones.

Every kernel takes `fault=`: None is the right kernel, a name breaks one thing.
"""

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


def mesh_of(num_devices, axis_name="x"):
    devices = simulated_devices(8)[:num_devices]
    return jax.sharding.Mesh(np.array(devices), (axis_name,))


def sharded(function, mesh, in_specs, out_specs):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def blocks(num_devices, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(num_devices * M, K)).astype(np.float16)


def _smem(shape=(M, K), dtype=jnp.float16):
    return plgpu.SMEM(shape, dtype)


# --- A ring all-gather through a mailbox of two slots on every device ---------

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
        scratch_types=[_smem(dtype=x.dtype), plgpu.Barrier()],
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

    return sharded(one, mesh_of(num_devices), P("x"), P("x"))


# --- Everybody pushes its block to the left and leaves ------------------------


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

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


# --- Two CTAs per device share the work of passing a block on -----------------


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
        scratch_types=[_smem((half, K), x.dtype), plgpu.Barrier()],
    )(x)
    return out


# --- Local kernels ------------------------------------------------------------


def scale_local(x, fault=None):
    """x: f16[M, K] -> 2 x, through shared memory, with a store by TMA."""

    def body(x_ref, out_ref, smem, barrier):
        plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
        if fault != "missing_barrier_wait":
            plgpu.barrier_wait(barrier)
        smem[...] = smem[...] * 2
        if fault != "missing_commit":
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out_ref)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), scratch_types=[_smem(dtype=x.dtype), plgpu.Barrier()]
    )(x)


_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def specialized_matmul(a, b, axis_name=None, num_devices=1, fault=None):
    """a: f16[64, k], b: f16[k, 64] -> f32 a @ b, and a sent to the left.

    Thread 0 computes. In thread 1, warp 0 loads and warp 1 sends each tile of `a`
    to the left neighbour straight from shared memory, as one more consumer.
    """
    k = a.shape[1]
    steps, stages = k // 64, 2

    def body(a_ref, b_ref, out_ref, a_left_ref, a_smem, b_smem, o_smem, full, empty):
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR)
        wg = lax.axis_index("wg")
        me = lax.axis_index(axis_name)
        left = {axis_name: lax.rem(me + num_devices - 1, jnp.int32(num_devices))}
        peer = plgpu.remote_ref(a_left_ref, left)

        @pl.when(wg == 1)
        def _memory():
            @plgpu.warp_map
            def _warps(warp):
                @pl.when(warp == 0)
                def _load():
                    @pl.loop(0, steps)
                    def _step(i):
                        slot = lax.rem(i, stages)
                        if fault != "missing_empty_wait":

                            @pl.when(i >= stages)
                            def _wait():
                                plgpu.barrier_wait(empty.at[slot])

                        where = pl.ds(i * 64, 64)
                        plgpu.copy_gmem_to_smem(a_ref.at[:, where], a_smem.at[slot], full.at[slot])
                        plgpu.copy_gmem_to_smem(b_ref.at[where], b_smem.at[slot], full.at[slot])

                @pl.when(warp == 1)
                def _send():
                    @pl.loop(0, steps)
                    def _step(i):
                        slot = lax.rem(i, stages)
                        plgpu.barrier_wait(full.at[slot])
                        plgpu.copy_smem_to_gmem(a_smem.at[slot], peer.at[:, pl.ds(i * 64, 64)])
                        if fault != "missing_read_wait":
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        plgpu.barrier_arrive(empty.at[slot])

                    plgpu.wait_smem_to_gmem(0)
                    pl.semaphore_signal(arrived, device_id=left)

        @pl.when(wg == 0)
        def _compute():
            def product(acc):
                @pl.loop(0, steps)
                def _step(i):
                    slot = lax.rem(i, stages)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, a_smem.at[slot], b_smem.at[slot])
                    if fault != "missing_wgmma_wait":
                        plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[slot])

                return acc[...]

            o_smem[...] = pl.run_scoped(product, plgpu.ACC((64, 64), jnp.float32))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, out_ref)
            plgpu.wait_smem_to_gmem(0)
            pl.semaphore_wait(arrived)

    tile = plgpu.SMEM((stages, 64, 64), a.dtype, transforms=_TRANSFORMS)
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((64, k), a.dtype)],
        scratch_types=[
            tile,
            tile,
            plgpu.SMEM((64, 64), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ],
        num_threads=2,
        thread_name="wg",
    )(a, b)


def reuse_of_shared_memory(x, fault=None):
    """Two scopes in turn at the same bytes of shared memory; x: f16[M, K] -> x."""

    def body(x_ref, out_ref, other_ref, barrier):
        def first(smem):
            plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
            plgpu.barrier_wait(barrier)
            plgpu.copy_smem_to_gmem(smem, out_ref)
            if fault != "scope_left_too_early":
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def second(smem):
            smem[...] = jnp.zeros((K, M), x.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, other_ref)
            plgpu.wait_smem_to_gmem(0)

        for function, shape in ((first, (M, K)), (second, (K, M))):
            pl.run_scoped(function, _smem(shape, x.dtype), collective_axes="wg")

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(body, out_type=[like, like], num_threads=1, thread_name="wg", scratch_types=[plgpu.Barrier()])(
        x
    )[0]


def product_of_written_tile(x, fault=None):
    """x: f16[64, 64] -> f32 x @ x, the tile written to shared memory by a thread."""

    def body(x_ref, out_ref, smem):
        smem[...] = x_ref[...]
        if fault != "missing_commit_before_wgmma":
            plgpu.commit_smem()

        def product(acc):
            plgpu.wgmma(acc, smem, smem)
            return acc[...]

        out_ref[...] = pl.run_scoped(product, plgpu.ACC((64, 64), jnp.float32))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[plgpu.SMEM((64, 64), x.dtype, transforms=_TRANSFORMS)],
    )(x)


def write_after_commit(x, fault=None):
    """x: f16[M, K] -> 3 x; the tile is written twice before TMA stores it."""

    def body(x_ref, out_ref, smem):
        smem[...] = x_ref[...] * 2
        plgpu.commit_smem()
        smem[...] = x_ref[...] * 3
        if fault != "missing_second_commit":
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out_ref)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), scratch_types=[_smem(dtype=x.dtype)])(x)


def hand_over_by_scope(x):
    """x: f16[M, K] -> 2 x; thread 0 writes, thread 1 reads, entering a scope syncs."""

    def body(x_ref, out_ref, smem):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _write():
            smem[...] = x_ref[...] * 2

        def scope(_):
            @pl.when(wg == 1)
            def _read():
                out_ref[...] = smem[...]

        pl.run_scoped(scope, _smem((8, K), x.dtype), collective_axes="wg")

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        num_threads=2,
        thread_name="wg",
        scratch_types=[_smem(dtype=x.dtype)],
    )(x)


def warps_load(x, fault=None):
    """x: f16[M, K] -> x; one warp loads and waits, its warpgroup reads."""

    def body(x_ref, out_ref, smem, barrier):
        @plgpu.warp_map
        def _warps(warp):
            @pl.when(warp == 0)
            def _load():
                plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
                if fault != "warp_does_not_wait":
                    plgpu.barrier_wait(barrier)

        out_ref[...] = smem[...]

    return plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), scratch_types=[_smem(dtype=x.dtype), plgpu.Barrier()]
    )(x)
