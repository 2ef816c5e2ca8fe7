"""The Hopper kernels on real GPUs: right for new operands, poisoned memory and whoever is late, and bitwise repeatable.

`CMM_STRESS_CALLS` sets how many calls the long test at the end makes, 500 by default. Who is late is an operand of the
program, so few kernels are compiled; that takes most of the time.
"""

import dataclasses
import functools
import os
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding, PartitionSpec as P
from late_kernels import SENDER, Calls, Late, addresses, assert_right

import cmm
from cmm import devices
from cmm.chain import chained
from cmm.hopper import (
    MatmulDimension,
    TuningConfig,
    all_gather_lhs_matmul,
    all_gather_lhs_matmul_fast,
    default_config,
    fast_kernel,
    matmul,
    ring_kernel,
    roles,
)
from cmm.hopper.plan import plan_tiles
from cmm.hopper.rounds import Rounds
from cmm.hopper.tuned import tuned_config
from cmm.roofline import Problem

pytestmark = pytest.mark.gpu

SHAPE = (1024, 4096, 4096)
ROWS, COLUMNS = P("x", None), P(None, "x")
CALLS_IN_LINE = 6  # In one program.
SIDE_BY_SIDE = TuningConfig(128, 128, wg_dimension=MatmulDimension.N)
# 512 tiles of the result for each shard: several for each CTA.
SMALL_TILES = TuningConfig(64, 64, max_concurrent_steps=2)

KERNELS = {"pallas": all_gather_lhs_matmul, "pallas_fast": all_gather_lhs_matmul_fast}
each_method = pytest.mark.parametrize("method", KERNELS)


@pytest.fixture
def hoppers(gpus):
    """All GPUs; skips the test where they are not of the Hopper generation."""
    if not gpus[0].compute_capability.startswith("9."):
        pytest.skip(f"needs Hopper GPUs, found {gpus[0].device_kind}")
    return gpus


def _door(method, axis="x"):
    return functools.partial(cmm.all_gather_matmul, axis_name=axis, method=method)


@functools.cache  # Several tests share its programs.
def _door_calls(mesh, dtype, method):
    gpu, (m, k, n) = mesh.devices.flat[0], SHAPE
    config = tuned_config(method, mesh.size, m, n, k, dtype, gpu.device_kind)
    return _calls(_door(method), mesh, Problem(mesh.size, *SHAPE, dtype), method, config=config, as_it_is=True)


def _calls(function, mesh, problem, method, axis="x", as_it_is=False, **options):
    core_count, has_sender = mesh.devices.flat[0].core_count, method == "pallas_fast"
    options |= {"num_ctas": core_count, "has_sender": has_sender, "as_it_is": as_it_is}
    return Calls(function, mesh, problem, axis, **options)


def _ring_calls(hoppers, method, dtype, config):
    mesh = devices.ring_mesh(hoppers)
    function = functools.partial(KERNELS[method], axis_name="x", config=config)
    return _calls(function, mesh, Problem(mesh.size, *SHAPE, dtype), method, config=config)


@pytest.fixture(params=KERNELS)
def calls(hoppers, request):
    """Calls of a ring kernel in float16."""
    return _door_calls(devices.ring_mesh(hoppers), "float16", request.param)


def _program(mesh, function):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(ROWS, COLUMNS), out_specs=COLUMNS))


def _seconds(function, repeats=5):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def test_the_result_takes_poisoned_memory(calls):
    operands = calls.operands(0)
    found = []
    for _ in range(5):
        poisoned = calls.poison()
        out = jax.block_until_ready(calls.call(operands))
        inside = [any(d == device and a <= start < b for d, a, b in poisoned) for device, start, _ in addresses(out)]
        found.append(sum(inside))
    # That the scratch buffer takes some, too, shows in the results of the faulty kernel below.
    assert max(found) == calls.mesh.size, f"results in poisoned memory, of {calls.mesh.size} in each call: {found}"


@pytest.mark.parametrize(
    "late",
    [
        Late(1, 0, 0, 1),
        Late(0, 3, roles.LOADER, 1, use=20),
        Late(1, 5, SENDER, 0, use=30),
        Late(0, before_the_kernel=True),
    ],
)
def test_the_late_one_is_late(calls, late):
    if late.role == SENDER and not calls.has_sender:
        pytest.skip("the readable kernel sends from a multiplier")
    operands = calls.operands(0)
    late = dataclasses.replace(late, naps=2000)  # 20 ms nominal; a tenth of it is far more than a call takes.
    usual_s = _seconds(lambda: calls.call(operands))
    assert _seconds(lambda: calls.call(operands, late)) > usual_s + 2e-3


@pytest.mark.parametrize(
    "method, module, sender", [("pallas", ring_kernel, 0), ("pallas_fast", fast_kernel, SENDER)], ids=KERNELS
)
def test_a_fault_shows(hoppers, monkeypatch, method, module, sender):
    # The neighbour waits for one signal too few, and its sender is late: it reads what is not there.
    def wait(semaphore, value, **options):
        pl.semaphore_wait(semaphore, value=value - 1, **options)

    monkeypatch.setattr(module, "pl", types.SimpleNamespace(**(vars(pl) | {"semaphore_wait": wait})))
    calls = _ring_calls(hoppers, method, "float16", TuningConfig())
    worst = []
    for seed in range(5):
        operands = calls.operands(seed)
        calls.poison()
        # Wait for all devices: the late rows come when their receiver has ended, and must meet nothing else there.
        out = jax.block_until_ready(calls.call(operands, Late(device=0, cta=0, role=sender, step=0, naps=100)))
        worst.append(float(np.max(np.asarray(calls.measure(out, out, *operands))[:, 0])))
    assert min(worst) > 1, f"error over bound: {worst}"
    assert max(worst) == np.inf, f"no NaN of the poison among the rows that were read too early: {worst}"


CONFIGS = {"side by side": (SIDE_BY_SIDE, "float16"), "small tiles, two stages": (SMALL_TILES, "bfloat16")}
FAST_CONFIGS = CONFIGS | {
    "one chunk": (TuningConfig(chunks=1), "float16"),
    "two chunks, the latest signals": (TuningConfig(chunks=2, signal_lag=32), "bfloat16"),
}
OF_EACH_KERNEL = [
    pytest.param(method, *case, id=f"{method}, {name}")
    for method, cases in (("pallas", CONFIGS), ("pallas_fast", FAST_CONFIGS))
    for name, case in cases.items()
]


@pytest.mark.parametrize("config, dtype", CONFIGS.values(), ids=CONFIGS)
def test_local_matmul(hopper, config, dtype):
    function = functools.partial(matmul, config=config)
    mesh = devices.ring_mesh([hopper])
    _calls(function, mesh, Problem(1, *SHAPE, dtype), "local", config=config).check(40)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_local_matmul_whose_last_tiles_are_halved(hopper, dtype):
    calls = _calls(matmul, devices.ring_mesh([hopper]), Problem(1, 768, 1024, 4096, dtype), "local")
    assert Rounds(calls.plan, 1).deal.halved, "choose a shape whose last round is half empty"
    calls.check(40)


@pytest.mark.parametrize("method, config, dtype", OF_EACH_KERNEL)
def test_configurations(hoppers, method, config, dtype):
    _ring_calls(hoppers, method, dtype, config).check(40)


def test_auto_is_the_fast_kernel(hoppers):
    calls = _door_calls(devices.ring_mesh(hoppers), "float16", "pallas_fast")
    auto = _program(calls.mesh, _door("auto"))
    for seed in range(3):
        operands = calls.operands(seed)
        measured = calls.measure(auto(*operands), calls.call(operands), *operands)
        assert_right(measured, calls.problem, f"seed {seed}, auto and pallas_fast")
    assert "mosaic_gpu" in auto.lower(*operands).as_text()


@each_method
def test_vmap(hoppers, method):
    calls = _door_calls(devices.ring_mesh(hoppers), "float16", method)
    operands = [calls.operands(seed) for seed in range(4)]
    run = _program(calls.mesh, lambda *lists: tuple(jax.vmap(_door(method))(*map(jnp.stack, lists))))
    outs = run(*map(list, zip(*operands)))
    for seed, (pair, out) in enumerate(zip(operands, outs)):
        assert_right(calls.measure(out, calls.call(pair), *pair), calls.problem, f"element {seed}, batch and alone")


@each_method
def test_gradients(hoppers, method):
    mesh = devices.ring_mesh(hoppers)
    operands = devices.random_operands(Problem(mesh.size, 256, 512, 256), mesh, 0)
    run = _program(mesh, _door(method))
    d_lhs, d_rhs = jax.jit(jax.grad(lambda *o: jnp.sum(run(*o).astype(jnp.float32) ** 2), (0, 1)))(*operands)
    lhs, rhs = (np.asarray(x, np.float64) for x in operands)
    for ours, exact in ((d_lhs, 2 * lhs @ rhs @ rhs.T), (d_rhs, 2 * lhs.T @ (lhs @ rhs))):
        assert np.linalg.norm(np.asarray(ours, np.float64) - exact) < 3e-3 * np.linalg.norm(exact)


# The default configurations take tiles of 128 x 256 x 64 or narrower ones.
TILES, OFFSETS = (128, 64, 256), (-64, -8, -1, 0, 0, 0, 1, 8, 64)
# Each draws tiles above each other and side by side. The fast kernel sends rows in one, three and four chunks.
SEEDS = {"pallas": 4, "pallas_fast": 14}


def _refusal(mesh, problem, method):
    """Returns why a kernel refuses a problem, or `None`. Nothing is compiled or launched."""
    shapes = (mesh.size * problem.m_shard, problem.k), (problem.k, mesh.size * problem.n_shard)
    operands = [
        jax.ShapeDtypeStruct(shape, problem.dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, (ROWS, COLUMNS))
    ]
    try:
        jax.eval_shape(_program(mesh, _door(method)), *operands)
    except ValueError as error:
        return str(error)
    return None


@each_method
def test_shapes_near_multiples_of_tiles(hoppers, method):
    mesh = devices.ring_mesh(hoppers)
    rng = np.random.default_rng(SEEDS[method])
    right, refused = [], []
    while len(right) < 3 or len(refused) < 8:
        shape = m, k, n = tuple(int(tile * rng.integers(1, 5) + rng.choice(OFFSETS)) for tile in TILES)
        problem = Problem(mesh.size, m, max(k, 64), n, ("float16", "bfloat16")[len(right) % 2])
        if refusal := _refusal(mesh, problem, method):
            assert "must be divisible by" in refusal
            refused.append(shape)
            assert m % 128 or problem.k % 64 or n % 64, f"{problem} fits, but: {refusal}"
        elif len(right) < 3:
            _calls(_door(method), mesh, problem, method).check(10)
            right.append(shape)


def test_rounds_that_span_long_steps(hoppers):
    mesh, (m, k, n) = devices.ring_mesh(hoppers), (1024, 1024, 9216)  # 288 tiles in a step, on 132 multiprocessors.
    core_count = hoppers[0].core_count
    config = default_config(m, n, k, "float16", core_count, mesh.size)
    plan = plan_tiles(m, n, k, config, core_count, mesh.size)
    assert Rounds(plan, mesh.size).span_steps, "choose a shape whose last round is half empty"
    _calls(_door("pallas_fast"), mesh, Problem(mesh.size, m, k, n, "float16"), "pallas_fast").check(100)


@each_method
@pytest.mark.parametrize("axis", ["x", "y"])
def test_several_rings_along_one_axis_of_a_mesh_at_once(hoppers, axis, method):
    if len(hoppers) < 4 or len(hoppers) % 2:
        pytest.skip(f"needs 4, 6, 8, ... GPUs, found {len(hoppers)}")
    mesh = jax.make_mesh((2, len(hoppers) // 2), ("x", "y"), devices=hoppers)
    function = functools.partial(KERNELS[method], axis_name=axis, config=TuningConfig())
    _calls(function, mesh, Problem(mesh.shape[axis], *SHAPE), method, axis).check(40)


def test_many_calls_without_a_wait_between(calls):
    # A device is done with a call before its neighbours are. What it does next must not harm them.
    operands = [calls.operands(seed) for seed in range(16)]
    alone = [jax.block_until_ready(calls.call(pair)) for pair in operands]
    for device in range(calls.mesh.size):
        who = [0, 1, roles.LOADER, *[SENDER] * calls.has_sender]
        late = [
            Late(device, role=who[seed % len(who)], use=3 * seed, naps=20, before_the_kernel=seed % 5 == 0)
            for seed in range(16)
        ]
        outs = [calls.call(pair, one) for pair, one in zip(operands, late)]
        for seed, (pair, out) in enumerate(zip(operands, outs)):
            name = f"seed {seed}, {late[seed]}, in a row and alone"
            assert_right(calls.measure(out, alone[seed], *pair), calls.problem, name)


@each_method
@pytest.mark.parametrize("keep", [True, False], ids=["results are kept", "memory is used again"])
@pytest.mark.parametrize("shape", [(256, 1024, 512), SHAPE], ids=["small", "large"])
def test_programs_in_line_while_memory_moves_on_one_device(hoppers, shape, keep, method):
    # The host runs ahead, as in a training loop. Arrays come and go on one device alone, so from start to start results
    # and slots may lie elsewhere there, and its peers have to know: XLA does not make their launches anew. Collectives
    # of NCCL are not needed, so that it runs where one GPU poses as several.
    mesh = devices.ring_mesh(hoppers)
    operands = [devices.random_operands(Problem(mesh.size, *shape, "float16"), mesh, seed) for seed in range(8)]
    call = _program(mesh, _door(method))
    alone = [jax.block_until_ready(call(*pair)) for pair in operands]
    on_mesh = functools.partial(jax.shard_map, mesh=mesh)
    lists = ([(ROWS, COLUMNS)] * CALLS_IN_LINE,), [COLUMNS] * CALLS_IN_LINE
    chain = jax.jit(on_mesh(chained(_door(method)), in_specs=lists[0], out_specs=lists[1]))
    equal = lambda outs, others: jnp.array([[jnp.array_equal(a, b)] for a, b in zip(outs, others)])
    are_equal = jax.jit(on_mesh(equal, in_specs=COLUMNS, out_specs=COLUMNS))
    rng, found, kept, others, written_over = np.random.default_rng(0), [], [], [], 0
    for _ in range(40):
        chosen = rng.permutation(len(operands))[:CALLS_IN_LINE]
        # From an eighth of a result to twice its size.
        size = int(shape[0] * shape[2] * mesh.size * 2.0 ** rng.integers(-4, 1))
        others = [*others[-3:], jnp.full(size, jnp.nan, device=rng.choice(hoppers))]
        outs = chain([operands[seed] for seed in chosen])
        found.append(are_equal(outs, [alone[seed] for seed in chosen]))
        kept += [outs] * keep
        del outs
        written_over += sum(not np.isnan(other).all() for other in others)
    wrong = {start: np.asarray(equal).tolist() for start, equal in enumerate(found) if not np.asarray(equal).all()}
    assert not wrong, f"of {len(found)} starts, by number, call and device: is it what the call gives alone? {wrong}"
    assert not written_over


@each_method
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_many_calls_with_somebody_late(hoppers, dtype, method):
    count = int(os.environ.get("CMM_STRESS_CALLS", "500"))
    _door_calls(devices.ring_mesh(hoppers), dtype, method).check(max(1, count // 2))
