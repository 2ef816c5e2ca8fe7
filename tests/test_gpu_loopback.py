"""The ring kernels on a single real GPU that is its own neighbour.

All that a ring kernel does runs on the hardware, but for the way over NVLink: each step sends the shard to the next
slot of the same device, signals, waits, and multiplies what has arrived. So each step gives the product of the one
shard. It shows what no simulator can: that the compiled kernel is right, fits its registers and does not hang.
"""

import functools
import types

import jax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

import cmm
from cmm import devices
from cmm.hopper import fast_kernel, ring_kernel
from cmm.hopper.calls import chosen_config
from cmm.hopper.plan import Plan, enough_ctas
from cmm.hopper.rounds import Rounds
from cmm.hopper.sends import with_short_chunks

pytestmark = pytest.mark.gpu

MODULES = {"pallas": ring_kernel, "pallas_fast": fast_kernel}
# With less than 1024 rows, and with 288 tiles in a step as in the last shape, the tiles of a step leave multiprocessors
# idle, and rounds of the fast kernel may span steps.
LONG_STEPS = (1024, 1024, 9216)
SHAPES = [(1024, 4096, 4096), (512, 4096, 2048), (512, 4096, 4096), (256, 4096, 4096), (128, 4096, 4096), LONG_STEPS]


@pytest.fixture(scope="module")
def hopper():
    """The first GPU; skips where it is not of the Hopper generation."""
    gpu = devices.find_devices()[0]
    if not getattr(gpu, "compute_capability", "").startswith("9."):
        pytest.skip(f"needs a Hopper GPU, found {gpu.device_kind}")
    return gpu


def loop_back(module, monkeypatch, steps):
    """Makes a kernel's device its own neighbour, on a ring of so many steps."""
    signal = lambda semaphore, device_id: pl.semaphore_signal(semaphore)
    mine = lambda ref, device_id: ref
    monkeypatch.setattr(module, "pl", types.SimpleNamespace(**(vars(pl) | {"semaphore_signal": signal})))
    monkeypatch.setattr(module, "plgpu", types.SimpleNamespace(**(vars(plgpu) | {"remote_ref": mine})))
    # The number of the device is 0. JAX asks NVSHMEM for it where there is only one.
    axes = {"axis_size": lambda axis: steps, "axis_index": lambda axis: 0 if axis == "x" else lax.axis_index(axis)}
    monkeypatch.setattr(module, "lax", types.SimpleNamespace(**(vars(lax) | axes)))


def looped_kernel(method, gpu, steps, m, k, n, dtype, config=None):
    """Returns the jitted kernel, and whether its rounds span steps; its module must be looped back."""
    config = config or chosen_config(method, steps, m, n, k, dtype, gpu.device_kind, gpu.core_count)
    plan = Plan(m, n, k, config, enough_ctas(m, n, config, gpu.core_count, steps if method == "pallas_fast" else 1))
    rounds, is_fast = Rounds(plan, steps), method == "pallas_fast"
    plan = with_short_chunks(plan) if is_fast and rounds.steps_overlap else plan
    launch = functools.partial(MODULES[method]._launch, "x", plan, dtype)
    mesh = devices.ring_mesh([gpu])
    kernel = jax.shard_map(launch, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    return jax.jit(kernel), is_fast and rounds.span_steps


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
@pytest.mark.parametrize("m, k, n", SHAPES)
@pytest.mark.parametrize("method", MODULES)
def test_each_step_gives_the_product(hopper, monkeypatch, method, m, k, n, steps):
    loop_back(MODULES[method], monkeypatch, steps)
    dtype = ("float16", "bfloat16")[steps == 4]
    kernel, spans = looped_kernel(method, hopper, steps, m, k, n, dtype)
    assert not spans or m < 1024 or (m, k, n) == LONG_STEPS
    for seed in range(10):
        pair = operands(hopper, m, k, n, dtype, seed)
        out, slots, *_ = kernel(*pair)
        in_out, in_slots = differences(out, slots, pair[0], jax.jit(cmm.matmul)(*pair))
        assert (in_out.tolist(), in_slots.tolist()) == ([0] * steps, [0] * (steps - 1))
