"""The ring kernels on a single real GPU that is its own neighbour (`cmm.hopper.loopback`).

It shows what no simulator can: that the compiled kernel is right, fits its registers and does not hang.
"""

import jax
import pytest

import cmm
from cmm.hopper.loopback import looped_back, plan_loop
from cmm.hopper.rounds import Rounds

pytestmark = pytest.mark.gpu

KERNELS = ("pallas", "pallas_fast")
# With 288 tiles in a step, as in the last but one, and with 224, rounds of the fast kernel span steps to save one.
LONG_STEPS = {(1024, 1024, 9216), (2048, 1024, 3584)}
# With so many steps the last tiles are halved.
HALVED = {(1280, 4096, 4096): 2, (1024, 4096, 3584): 4}
SHAPES = [(1024, 4096, 4096), (512, 4096, 2048), (512, 4096, 4096), (256, 4096, 4096), (128, 4096, 4096)]


def operands(gpu, m, k, n, dtype, seed):
    """Returns normally distributed operands."""
    keys = jax.random.split(jax.device_put(jax.random.key(seed), gpu))
    return jax.random.normal(keys[0], (m, k), dtype), jax.random.normal(keys[1], (k, n), dtype)


@jax.jit
def differences(out, slots, shard, product):
    """Returns how many elements are wrong, in the result of each step and in each slot; counted on the GPU."""
    count = lambda found, expected: (found.reshape(-1, *expected.shape) != expected).sum((1, 2))
    return count(out, product), count(slots, shard)


@pytest.mark.parametrize("steps", [2, 4, 8])
@pytest.mark.parametrize("m, k, n", [*SHAPES, *LONG_STEPS, *HALVED])
@pytest.mark.parametrize("kernel", KERNELS)
def test_each_step_gives_the_product(hopper, kernel, m, k, n, steps):
    dtype = ("float16", "bfloat16")[steps == 4]
    plan = plan_loop(kernel, steps, m, k, n, dtype, hopper, hopper.core_count)
    if (m, k, n) in LONG_STEPS and kernel == "pallas_fast" and steps > 2:
        assert Rounds(plan, steps).span_steps
    if HALVED.get((m, k, n)) == steps and kernel == "pallas_fast":
        assert Rounds(plan, steps).deal.halved
    program = looped_back(kernel, plan, steps, dtype, hopper)
    for seed in range(10):
        pair = operands(hopper, m, k, n, dtype, seed)
        in_out, in_slots = differences(*program(*pair), pair[0], jax.jit(cmm.matmul)(*pair))
        assert (in_out.tolist(), in_slots.tolist()) == ([0] * steps, [0] * (steps - 1))
