"""How do two GPUs talk inside a kernel? Four small kernels, each built on one way of sending, signalling and waiting.

Call them inside `jax.shard_map(..., check_vma=False)`. They run on Hopper GPUs that one process drives, and inside
`cmm.interpret.simulate` on any machine. No other backend has these primitives.

Three rules make a kernel safe. The docstring of each says how it keeps them.

1. A sender signals after its store is complete, never before.
2. A receiver waits for the signal before it reads what was sent.
3. A device leaves the kernel after it has waited for everything that others send to it, blocks and signals. Its memory
   may be used for something else afterwards, and its semaphores by the next kernel.

Nobody needs to ask whether a peer has begun: XLA lets all devices meet before such a kernel starts, so the buffers of
peers exist and their semaphores are zero.

`broken=` leaves out one of these rules on purpose, so that one can see what happens. Broken kernels run on simulated
devices only. On GPUs they could hang, or write into memory that belongs to somebody else.
"""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cmm import interpret
from cmm.checks import check_axis, check_dtype
from cmm.schedule import neighbour


def ring_shift(x, axis_name, *, broken=None):
    """Sends this device's block down the ring, to device `d - 1`, by an asynchronous copy (TMA).

    Why it is safe: `wait_smem_to_gmem(0)` returns when the whole block is in the neighbour's memory, and only then the
    neighbour gets its signal. Each device receives from one other device, once, and waits for that before it leaves.
    Nobody reads another device's memory.

    Args:
      x: `[rows, columns]`, this device's block; float16, bfloat16 or float32, rows and columns multiples of 16 and at
        most 128.
      axis_name: the mesh axis that is the ring.
      broken: None, or one of these, on simulated devices only. "early_signal" signals before the copy is complete.
        "no_wait" leaves without waiting. "no_signal" leaves out the signal of device 0.

    Returns:
      `[rows, columns]`, the block of device `d + 1`.

    Raises:
      ValueError: the axis has fewer than two devices, or is none (see `cmm.checks.check_axis`); the block is not as
        above; `broken` is unknown, or given outside `cmm.interpret.simulate`.

    Cost: sends `rows * columns` elements. Source: JAX documentation, "Collective matrix multiplication".
    """
    size = _check(x, axis_name)
    _check_broken(broken, ("early_signal", "no_wait", "no_signal"))

    def body(x_ref, out_ref, smem, loaded):
        received = pl.get_global(plgpu.SemaphoreType.REGULAR)
        me = lax.axis_index(axis_name)
        down = {axis_name: neighbour(me, size)}
        plgpu.copy_gmem_to_smem(x_ref, smem, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(out_ref, down))
        if broken != "early_signal":
            plgpu.wait_smem_to_gmem(0)  # The block is in the memory of device d - 1.

        if broken == "no_signal":
            pl.when(me != 0)(lambda: pl.semaphore_signal(received, device_id=down))
        else:
            pl.semaphore_signal(received, device_id=down)
        if broken != "no_wait":
            pl.semaphore_wait(received)  # Device d + 1 has filled out_ref, and will not write to it again.
        if broken == "early_signal":
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()],
    )(x)


def ping_pong(x, axis_name, *, rounds=3):
    """Plays a block back and forth between devices 0 and 1, 2 and 3, and so on, by plain stores.

    The even device serves its `x`. Whoever receives the ball adds its own `x` and plays it back.

    Why it is safe: plain stores are not asynchronous, a signal comes after all stores that stand before it. Only the
    device that holds the ball writes, and it writes to the partner's `box_ref`, which the partner has read before it
    played the ball. Each signal stands for one hit, and each hit is awaited: nobody writes to a device that has left.

    Args:
      x: `[rows, columns]`, as in `ring_shift`.
      axis_name: a mesh axis with an even number of devices.
      rounds: how often the ball comes back to the even device, at least 1.

    Returns:
      `[rows, columns]`, the ball as this device last held it. With `a` and `b` for the blocks of the even and the odd
      device that is `a + rounds * (b + a)` on the even device, and one `a` less on the odd one.

    Raises:
      ValueError: as in `ring_shift`; the number of devices is odd; `rounds` is below 1.

    Cost: each device sends `rounds * rows * columns` elements. Source: the docstrings of `pl` and `plgpu`.
    """
    size = _check(x, axis_name)
    if size % 2:
        raise ValueError(f"ping_pong needs an even number of devices along {axis_name!r}, got {size}.")
    if rounds < 1:
        raise ValueError(f"{rounds=} must be at least 1.")

    def body(x_ref, out_ref, box_ref):
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR)
        me = lax.axis_index(axis_name)
        is_odd = lax.rem(me, 2)
        partner = {axis_name: me + 1 - 2 * is_odd}

        def play(ball):
            plgpu.remote_ref(box_ref, partner)[...] = ball
            pl.semaphore_signal(arrived, device_id=partner)

        @pl.when(is_odd == 0)
        def _serve():
            play(x_ref[...])

        @pl.loop(0, rounds)
        def _round(i):
            pl.semaphore_wait(arrived)  # Takes the 1 away, so that the next wait needs a new signal.
            ball = box_ref[...] + x_ref[...]
            out_ref[...] = ball

            @pl.when((is_odd == 1) | (i < rounds - 1))  # The even device keeps the last ball.
            def _return():
                play(ball)

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    out, _ = plgpu.kernel(body, out_type=[like, like])(x)
    return out


def neighbour_exchange(x, axis_name):
    """Sends this device's block to both neighbours on the ring at once, and receives theirs.

    Why it is safe: both copies read the same shared memory and write to different devices (to different buffers, if
    there are only two devices). One wait covers both copies, and both signals come after it. Each side has a semaphore
    of its own, so a signal says who has sent. A device leaves after both neighbours have signalled.

    Args, Raises, Source: as `ring_shift`.

    Returns:
      Two blocks `[rows, columns]`: those of device `d - 1` and of device `d + 1`.

    Cost: sends `2 * rows * columns` elements.
    """
    size = _check(x, axis_name)

    def body(x_ref, from_below_ref, from_above_ref, smem, loaded):
        semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR((2,)))
        below_sent, above_sent = semaphores.at[0], semaphores.at[1]
        me = lax.axis_index(axis_name)
        down, up = {axis_name: neighbour(me, size)}, {axis_name: neighbour(me, size, "up")}
        plgpu.copy_gmem_to_smem(x_ref, smem, loaded)
        plgpu.barrier_wait(loaded)
        # Seen from the device below, this device is the one above.
        plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(from_above_ref, down))
        plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(from_below_ref, up))
        plgpu.wait_smem_to_gmem(0)
        pl.semaphore_signal(above_sent, device_id=down)
        pl.semaphore_signal(below_sent, device_id=up)
        pl.semaphore_wait(below_sent)
        pl.semaphore_wait(above_sent)

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    from_below, from_above = plgpu.kernel(
        body,
        out_type=[like, like],
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()],
    )(x)
    return from_below, from_above


def ring_walk(x, axis_name, *, hops, decrement=False, broken=None):
    """Moves all blocks `hops` devices down the ring, one hop at a time, and counts arrivals on one semaphore.

    `decrement=True` takes from the semaphore what it waited for, so each wait is for 1. `decrement=False` leaves it, so
    it counts all arrivals so far, and hop `i` waits for `i + 1`.

    Why it is safe: each hop has a slot of its own, so a fast neighbour never overwrites a block that is still needed.
    All signals come from one device, in the order of its stores, so a count of `i + 1` means that slots 0 to `i` are
    full. A device waits for the last slot before it leaves, and nothing is sent to it after that.

    Args:
      x: `[rows, columns]`, as in `ring_shift`.
      axis_name: the mesh axis that is the ring.
      hops: number of hops, at least 1; may exceed the number of devices.
      decrement: which way to wait.
      broken: None, or one of these, on simulated devices only; each sets `decrement` itself. "always_one" waits for 1
        in every hop, without `decrement`. "scaled" waits for `i + 1` in hop `i`, with `decrement`.

    Returns:
      `[rows, columns]`, the block of device `d + hops`.

    Raises:
      ValueError: as in `ring_shift`; `hops` is below 1.

    Cost: sends `hops * rows * columns` elements; needs memory for `hops` blocks. Source: as `ping_pong`.
    """
    size = _check(x, axis_name)
    _check_broken(broken, ("always_one", "scaled"))
    if hops < 1:
        raise ValueError(f"{hops=} must be at least 1.")
    decrement = {None: decrement, "always_one": False, "scaled": True}[broken]
    scaled = broken == "scaled" or (broken is None and not decrement)

    def body(x_ref, out_ref, slots_ref):
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR)
        down = {axis_name: neighbour(lax.axis_index(axis_name), size)}
        block = x_ref[...]
        for i in range(hops):
            plgpu.remote_ref(slots_ref, down).at[i][...] = block
            pl.semaphore_signal(arrived, device_id=down)
            pl.semaphore_wait(arrived, value=i + 1 if scaled else 1, decrement=decrement)
            block = slots_ref[i]
        out_ref[...] = block

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    slots = jax.ShapeDtypeStruct((hops, *x.shape), x.dtype)
    out, _ = plgpu.kernel(body, out_type=[like, slots])(x)
    return out


def _check(x, axis_name) -> int:
    """Checks block and axis; returns the number of devices."""
    size = check_axis(axis_name)
    if size < 2:
        raise ValueError(f"At least 2 devices are needed along {axis_name!r}, got {size}: one has nobody to talk to.")
    shape = tuple(getattr(x, "shape", ()))
    if len(shape) != 2 or any(n % 16 or not 16 <= n <= 128 for n in shape):
        raise ValueError(f"x must be a block [rows, columns], both multiples of 16 and at most 128, got shape {shape}.")
    check_dtype(x.dtype, "x")
    return size


def _check_broken(broken, choices) -> None:
    """Lets a broken kernel through only where it can do no harm."""
    if broken is None:
        return
    if broken not in choices:
        raise ValueError(f"broken must be None or one of {', '.join(choices)}, got {broken!r}.")
    if not interpret.is_active():
        raise ValueError(f"{broken=} could hang a GPU or overwrite its memory. Use it inside cmm.interpret.simulate.")
