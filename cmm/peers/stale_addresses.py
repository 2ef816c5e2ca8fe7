"""Do kernels in a command buffer write to where other GPUs' memory is, or to where it was?

Run `python stale_addresses.py` on two GPUs or more; it needs JAX alone. A program of six calls is started again and
again. Each call is a Pallas:Mosaic GPU kernel that copies its block to the next GPU, so the result is known. Between
the starts arrays come and go on one GPU, as those of a data loader or of a sampler do. The script counts starts with a
wrong result, and arrays that somebody has written over. It ends with status 1 if there are any.

With `XLA_FLAGS=--xla_gpu_enable_command_buffer=-CUSTOM_CALL` there are none.

What happens (JAX 0.11.2, read from sources of XLA and jaxlib of 2026): the six launches become a command buffer, a CUDA
graph. `CommandBufferThunk` records a launch again only if buffers of its own GPU have moved, and even then it may take
an earlier recording from a cache if they were once where they are now. A copy from tiled and swizzled shared memory
needs a TMA descriptor, and the host makes it, with the address on the other GPU in it, when the launch is recorded.
Contiguous copies, and semaphores, take addresses from a table on the GPU that is new in each execution: they are right,
and so the kernel does not hang.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec as P

BLOCK, CALLS, STARTS, SEED = (64, 64), 6, 100, 0
COPIES = {
    "by TMA descriptors": (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),
    "contiguous": (),
}


def kernel(x, transforms):
    """Returns the block of the GPU before this one: each GPU copies its own to the next one."""

    def body(x_ref, out_ref, block, loaded, arrived):
        plgpu.copy_gmem_to_smem(x_ref, block, loaded)
        plgpu.barrier_wait(loaded)
        to = {"x": lax.rem(lax.axis_index("x") + 1, lax.axis_size("x"))}
        plgpu.copy_smem_to_gmem(block, plgpu.remote_ref(out_ref, to))
        plgpu.wait_smem_to_gmem(0)
        pl.semaphore_signal(arrived, device_id=to)
        pl.semaphore_wait(arrived)

    scratch = (plgpu.SMEM(x.shape, x.dtype, transforms=transforms), plgpu.Barrier(), plgpu.SemaphoreType.REGULAR)
    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), scratch_types=scratch)(x)


def program(mesh, transforms):
    """Returns a jitted program of six calls, each on an array of its own."""

    def calls(arrays):
        found = []
        for x in arrays:
            x, found[-1:] = lax.optimization_barrier((x, found[-1:]))
            found.append(kernel(x, transforms))
        return found

    specs = [P("x")] * CALLS
    return jax.jit(jax.shard_map(calls, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False))


def count_faults(run, mesh):
    """Starts a program again and again; returns how many starts were wrong, and how many other arrays were changed."""
    rng = np.random.default_rng(SEED)
    blocks = rng.normal(size=(2 * CALLS, mesh.size * BLOCK[0], BLOCK[1])).astype(np.float32)
    arrays = [jax.device_put(jnp.asarray(x), NamedSharding(mesh, P("x"))) for x in blocks]
    wrong, written_over, others = 0, 0, []
    for _ in range(STARTS):
        device = rng.choice(jax.devices())
        others = [*others[-3:], jax.device_put(np.full(2 ** rng.integers(10, 18), np.nan, np.float32), device)]
        chosen = rng.permutation(len(arrays))[:CALLS]
        found = run([arrays[number] for number in chosen])
        expected = np.roll(blocks[chosen], BLOCK[0], axis=1)
        wrong += not all(np.array_equal(x, y) for x, y in zip(found, expected))
        del found  # So that its memory is used again.
        written_over += sum(not np.isnan(other).all() for other in others)
        others = [other for other in others if np.isnan(other).all()]
    return wrong, written_over


def main():
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    print(f"{mesh.size} x {jax.devices()[0].device_kind}, JAX {jax.__version__}, {STARTS} starts of {CALLS} calls")
    print(f"{'copies':20}{'starts with a wrong result':>30}{'other arrays written over':>30}")
    faults = {name: count_faults(program(mesh, transforms), mesh) for name, transforms in COPIES.items()}
    for name, (wrong, written_over) in faults.items():
        print(f"{name:20}{wrong:30}{written_over:30}")
    return int(any(map(any, faults.values())))


if __name__ == "__main__":
    sys.exit(main())
