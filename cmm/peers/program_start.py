"""What does it cost the host to start a program that holds a collective Pallas:Mosaic GPU kernel?

Run `python program_start.py` on two GPUs or more; it needs JAX alone. Five programs do next to nothing on a block of
16 KiB: x + 1; a kernel that copies it; the same kernel after one signal to the next GPU and one wait (the collective
one); a sum over GPUs; and an all-gather. "alone" is the time per call where each call is a program of its own, "until
it returns" the part in which the starting thread is busy or held up, and "in a program" the time per call among 32 in
one `jax.jit`: what GPUs need for it. What "alone" has beyond that is the start of a program, on the host.

Where that time goes (sources of XLA and jaxlib of 2026, held against the calls in JAX 0.11.2's CUDA plugin): in each
execution and on each device's thread, `GpuExecutable::ExecuteThunksImpl` (xla/service/gpu) runs

1. `ThunkExecutor::Prepare`. `MosaicGpuPrepare` (jaxlib/mosaic/gpu/custom_call.cc) asks for the clique and, operand by
   operand and result by result, for the addresses on all peers (`RequestPeerAddress`).
2. `AcquireCollectiveCliques`: all threads meet once for each clique (`AcquireGpuClique`). Also for NCCL.
3. `AcquireCollectiveMemory`: all threads meet again, in `AcquirePeerMemory`, to exchange addresses. Not for NCCL.
4. `ThunkExecutor::Initialize`. `MosaicGpuInitialize` looks up each address and copies the table to the device from
   pageable memory, once for each kernel of the program, whether or not it differs from the last one. Not for NCCL.
5. `RendezvousAfterInitialization`: all threads meet once more. Also for NCCL.
6. The launches. `MosaicGpuExecute` launches a barrier kernel between devices, then the kernel.

No step asks to wait for the device, so the host runs ahead of the GPUs, unless they are done before the next start is.
What would mend it: exchange addresses in the meeting of step 2; leave out the copy of step 4 where the table is what
was copied last; leave out step 5 where no clique is new, as its comment says.
"""

import statistics
import time

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec as P

BLOCK, IN_PROGRAM, STARTS, ROUNDS = (64, 64), 32, (20, 220), 9


def kernel(x, collective):
    """Returns a copy of `x`; a collective kernel lets GPU `d` wait for a signal of GPU `d - 1` before it copies."""

    def body(x_ref, out_ref):
        if collective:
            arrived = pl.get_global(plgpu.SemaphoreType.REGULAR)
            pl.semaphore_signal(arrived, device_id={"x": lax.rem(lax.axis_index("x") + 1, lax.axis_size("x"))})
            pl.semaphore_wait(arrived)
        out_ref[...] = x_ref[...]

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


PROGRAMS = {
    "x + 1": lambda x: x + 1,
    "kernel": lambda x: kernel(x, collective=False),
    "collective kernel": lambda x: kernel(x, collective=True),
    "psum": lambda x: lax.psum(x, "x"),
    "all_gather": lambda x: lax.all_gather(x, "x").max(0),
}


def compiled(function, mesh, calls=1):
    """Returns a program of so many calls, each on the result of the one before it."""

    def program(x):
        for _ in range(calls):
            x = lax.optimization_barrier(function(x))
        return x

    return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))


def per_start_us(program, x):
    """Returns the times per start of a long chain of starts: in all, and until the last start returned."""
    ended = {}
    for starts in STARTS:
        began = time.perf_counter()
        for _ in range(starts):
            out = program(x)
        returned = time.perf_counter()
        out.block_until_ready()
        ended[starts] = (time.perf_counter() - began, returned - began)
    return [1e6 * (b - a) / (STARTS[1] - STARTS[0]) for a, b in zip(*(ended[starts] for starts in STARTS))]


def main():
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    print(f"{mesh.size} x {jax.devices()[0].device_kind}, JAX {jax.__version__}; medians of {ROUNDS} rounds, µs")
    print(f"{'program':20}{'alone':>10}{'until it returns':>20}{'in a program':>15}{'start of a program':>20}")
    x = jax.device_put(jnp.zeros((mesh.size * BLOCK[0], BLOCK[1])), NamedSharding(mesh, P("x")))
    for name, function in PROGRAMS.items():
        one, many = compiled(function, mesh), compiled(function, mesh, IN_PROGRAM)
        jax.block_until_ready((one(x), many(x)))
        rounds = [(*per_start_us(one, x), per_start_us(many, x)[0] / IN_PROGRAM) for _ in range(ROUNDS)]
        alone, returns, inside = map(statistics.median, zip(*rounds))
        print(f"{name:20}{alone:10.1f}{returns:20.1f}{inside:15.1f}{alone - inside:20.1f}", flush=True)


if __name__ == "__main__":
    main()
