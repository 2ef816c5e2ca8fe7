"""The kernels that talk: right in every order of events, and each broken one is caught by the check that it names."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import cmm.interpret as ci
from cmm import devices, primitives

SEEDS = (None, 0, 1, 2)
SHAPE = (32, 48)

# name -> (function of one device's block, number of results, what they must be, from the blocks of all devices)
KERNELS = {
    "ring_shift": (lambda x: primitives.ring_shift(x, "x"), 1, lambda b: np.roll(b, -1, 0)),
    "ping_pong": (lambda x: primitives.ping_pong(x, "x", rounds=3), 1, lambda b: rally(b, 3)),
    "neighbour_exchange": (
        lambda x: primitives.neighbour_exchange(x, "x"),
        2,
        lambda b: (np.roll(b, 1, 0), np.roll(b, -1, 0)),
    ),
    "ring_walk": (lambda x: primitives.ring_walk(x, "x", hops=5), 1, lambda b: np.roll(b, -5, 0)),
    "ring_walk_decrement": (
        lambda x: primitives.ring_walk(x, "x", hops=5, decrement=True),
        1,
        lambda b: np.roll(b, -5, 0),
    ),
}

# name -> (function of one device's block, its twin in KERNELS, number of hops, the check that must catch it)
BROKEN = {
    "early_signal": (lambda x: primitives.ring_shift(x, "x", broken="early_signal"), "ring_shift", 1, "race"),
    "no_wait": (lambda x: primitives.ring_shift(x, "x", broken="no_wait"), "ring_shift", 1, "race"),
    "no_signal": (lambda x: primitives.ring_shift(x, "x", broken="no_signal"), "ring_shift", 1, "deadlock"),
    "always_one": (lambda x: primitives.ring_walk(x, "x", hops=5, broken="always_one"), "ring_walk", 5, "race"),
    "scaled": (
        lambda x: primitives.ring_walk(x, "x", hops=5, broken="scaled"),
        "ring_walk_decrement",
        5,
        "deadlock",
    ),
}


def rally(blocks, rounds):
    """Plays ping-pong in NumPy, hit by hit, in the precision of the blocks."""
    out = np.empty_like(blocks)
    for even in range(0, len(blocks), 2):
        ball = blocks[even]
        for _ in range(rounds):
            for device in (even + 1, even):
                ball = out[device] = ball + blocks[device]
    return out


def random_blocks(num_devices, shape=SHAPE, dtype=np.float16, seed=0):
    """Small integers, which every dtype adds exactly; all blocks differ."""
    return np.random.default_rng(seed).integers(-9, 10, (num_devices, *shape)).astype(dtype)


@functools.cache
def program(function, num_results, num_devices, found=None):
    mesh = devices.ring_mesh((found or devices.simulated_devices(8))[:num_devices])
    out_specs = P("x") if num_results == 1 else (P("x"),) * num_results
    jitted = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=out_specs, check_vma=False))
    return jitted, NamedSharding(mesh, P("x"))


def run(function, num_results, blocks, call=lambda f, x: f(x), found=None):
    """Returns the result of `function`, or a tuple of results, as blocks `[device, rows, columns]`."""
    jitted, sharding = program(function, num_results, len(blocks), found)
    out = call(jitted, jax.device_put(jnp.asarray(blocks.reshape(-1, blocks.shape[-1])), sharding))
    return jax.tree.map(lambda one: np.asarray(one).reshape(blocks.shape), out)


def verdict(function, num_results, blocks, expected, **options):
    """What a simulated run ends in: "right", "value", "race" or "deadlock"."""
    try:
        with ci.simulate(**options) as sim:
            out = run(function, num_results, blocks, sim.run)
    except ci.RaceError:
        return "race"
    except ci.DeadlockError:
        return "deadlock"
    return "right" if jax.tree.all(jax.tree.map(np.array_equal, out, expected)) else "value"


def sizes(name):
    return (2, 4, 8) if name == "ping_pong" else (2, 3, 4, 8)


@pytest.mark.parametrize("name", KERNELS)
def test_right_and_quiet_in_any_order(name):
    function, num_results, oracle = KERNELS[name]
    for num_devices in sizes(name):
        blocks = random_blocks(num_devices)
        for seed in SEEDS:
            assert verdict(function, num_results, blocks, oracle(blocks), seed=seed) == "right"


@pytest.mark.parametrize("name", KERNELS)
def test_right_and_quiet_with_late_devices(name):
    function, num_results, oracle = KERNELS[name]
    for num_devices in (2, 4):
        blocks = random_blocks(num_devices, seed=1)
        for device in range(num_devices):
            for seed in (None, 0):
                late = ci.Late(1e-4, device=device)
                assert verdict(function, num_results, blocks, oracle(blocks), late=late, seed=seed) == "right"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(16, 16), (128, 128), (48, 112)])
@pytest.mark.parametrize("name", KERNELS)
def test_dtypes_and_shapes(name, shape, dtype):
    function, num_results, oracle = KERNELS[name]
    blocks = random_blocks(2, shape, jnp.dtype(dtype))
    assert verdict(function, num_results, blocks, oracle(blocks)) == "right"


def test_rounds_and_hops():
    blocks = random_blocks(4)
    for n in (1, 2, 7):
        ping_pong = lambda x, n=n: primitives.ping_pong(x, "x", rounds=n)
        assert verdict(ping_pong, 1, blocks, rally(blocks, n)) == "right"
        ring_walk = lambda x, n=n: primitives.ring_walk(x, "x", hops=n)
        assert verdict(ring_walk, 1, blocks, np.roll(blocks, -n, 0)) == "right"


def test_docstring_of_ping_pong_says_what_it_returns():
    a, b = blocks = random_blocks(2)
    np.testing.assert_array_equal(rally(blocks, 3), [a + 3 * (b + a), 3 * (b + a)])


def test_kernels_one_after_the_other():
    # A signal that one kernel leaves over, or a store that comes late, would hurt the next one.
    def chain(x):
        below, above = primitives.neighbour_exchange(primitives.ring_shift(x, "x"), "x")
        return primitives.ring_walk(below, "x", hops=2) + primitives.ring_shift(above, "x")

    blocks = random_blocks(3)
    expected = np.roll(blocks, -2, 0) + np.roll(blocks, -3, 0)
    for seed in SEEDS:
        assert verdict(chain, 1, blocks, expected, seed=seed, late=ci.Late(1e-4, device=1)) == "right"


def test_along_one_axis_of_a_mesh_of_two():
    mesh = jax.make_mesh((2, 4), ("x", "y"), devices=devices.simulated_devices(8))
    both = P(("x", "y"))
    shift = lambda x: primitives.ring_shift(x, "y")
    jitted = jax.jit(jax.shard_map(shift, mesh=mesh, in_specs=both, out_specs=both, check_vma=False))
    blocks = random_blocks(8)
    with ci.simulate() as sim:
        out = sim.run(jitted, jax.device_put(blocks.reshape(-1, SHAPE[1]), NamedSharding(mesh, both)))
    expected = np.roll(blocks.reshape(2, 4, *SHAPE), -1, axis=1)
    np.testing.assert_array_equal(np.asarray(out).reshape(2, 4, *SHAPE), expected)


def test_bytes_are_those_of_the_docstrings():
    block_bytes = SHAPE[0] * SHAPE[1] * 2
    blocks_sent = {
        "ring_shift": 1,
        "ping_pong": 3,
        "neighbour_exchange": 2,
        "ring_walk": 5,
        "ring_walk_decrement": 5,
    }
    for name, (function, num_results, _) in KERNELS.items():
        with ci.simulate() as sim:
            run(function, num_results, random_blocks(4), sim.run)
        for device in range(4):
            assert sim.bytes_sent(device=device) == blocks_sent[name] * block_bytes


@pytest.mark.parametrize("decrement", [False, True])
def test_values_of_the_semaphore_scale_with_the_hop_unless_waits_take_them_away(decrement):
    function = KERNELS["ring_walk_decrement" if decrement else "ring_walk"][0]
    with ci.simulate() as sim:
        run(function, 1, random_blocks(3), sim.run)
    for device in range(3):
        waits = [e for e in sim.events if e.kind == "wait" and e.device == device]
        assert [e.awaited for e in waits] == ([1] * 5 if decrement else [1, 2, 3, 4, 5])
        assert [e.value for e in waits] == ([0] * 5 if decrement else [1, 2, 3, 4, 5])


@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernel_is_caught_and_its_twin_is_quiet(name):
    broken, twin, hops, check = BROKEN[name]
    for num_devices in (2, 3, 4):
        blocks = random_blocks(num_devices)
        expected = np.roll(blocks, -hops, 0)
        for seed in SEEDS:
            assert verdict(broken, 1, blocks, expected, seed=seed) == check
            assert verdict(KERNELS[twin][0], 1, blocks, expected, seed=seed) == "right"


def test_leaving_without_the_wait_is_reported_for_the_block_and_for_the_signal():
    with ci.simulate(on_race="record", seed=0) as sim:
        run(BROKEN["no_wait"][0], 1, random_blocks(3), sim.run)
    found = sorted((race.first.action, race.first.device, race.buffer) for race in sim.races)
    outputs = [("write", (d + 1) % 3, f"output 0 of device {d}") for d in range(3)]
    semaphores = [("signal", (d + 1) % 3, f"semaphore global 0 of device {d}") for d in range(3)]
    assert found == sorted(outputs + semaphores)


@pytest.mark.parametrize("name", ["early_signal", "no_wait"])
def test_values_alone_do_not_see_it(name):
    blocks = random_blocks(4)
    for seed in range(10):
        assert verdict(BROKEN[name][0], 1, blocks, np.roll(blocks, -1, 0), seed=seed, detect_races=False) == "right"


def test_waiting_for_one_always_is_right_by_luck():
    blocks = random_blocks(4)
    seen = [
        verdict(BROKEN["always_one"][0], 1, blocks, np.roll(blocks, -5, 0), seed=seed, detect_races=False)
        for seed in SEEDS
    ]
    assert seen[0] == "right" and "value" in seen


def test_deadlock_names_who_waits_for_what():
    with pytest.raises(ci.DeadlockError) as e, ci.simulate() as sim:
        run(BROKEN["no_signal"][0], 1, random_blocks(3), sim.run)
    (waiting,) = e.value.waiting
    assert "device 2" in waiting.thread and "device 2" in waiting.what
    assert (waiting.value, waiting.awaited) == (0, 1)
    assert "primitives.py" in waiting.source


@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_stay_in_the_simulator(name):
    function = BROKEN[name][0]
    match = "could hang a GPU or overwrite its memory. Use it inside cmm.interpret.simulate"
    with pytest.raises(ValueError, match=match):
        run(function, 1, random_blocks(2))
    with pytest.raises(ValueError, match=match):
        lower(function, 1, 2)
    fresh = lambda x: function(x)
    with pytest.raises(ci.SimulationError), ci.simulate() as sim:
        run(fresh, 1, random_blocks(2), sim.run)
    # The jitted function has been traced in the simulator. That must not let it out.
    with pytest.raises(ValueError, match=match):
        run(fresh, 1, random_blocks(2))


def lower(function, num_results, num_devices, shape=SHAPE, dtype=jnp.float16):
    return ci.lower_for_cuda(
        function,
        jax.ShapeDtypeStruct((num_devices * shape[0], shape[1]), dtype),
        mesh_axes={"x": num_devices},
        in_specs=P("x"),
        out_specs=P("x") if num_results == 1 else (P("x"),) * num_results,
    )


@pytest.mark.parametrize("name", KERNELS)
def test_lowers_for_cuda(name):
    function, num_results, _ = KERNELS[name]
    for num_devices in sizes(name):
        assert lower(function, num_results, num_devices).count("mosaic_gpu_v2") == 1
    for shape, dtype in (((16, 16), jnp.bfloat16), ((128, 128), jnp.float32), ((48, 112), jnp.float16)):
        assert lower(function, num_results, 2, shape, dtype).count("mosaic_gpu_v2") == 1


def test_one_axis_of_two_lowers_for_cuda():
    text = ci.lower_for_cuda(
        lambda x: primitives.ring_shift(x, "y"),
        jax.ShapeDtypeStruct((8 * 64, 64), jnp.float16),
        mesh_axes={"x": 2, "y": 4},
        in_specs=P(("x", "y")),
        out_specs=P(("x", "y")),
    )
    assert text.count("mosaic_gpu_v2") == 1


ALL = [
    primitives.ring_shift,
    primitives.ping_pong,
    primitives.neighbour_exchange,
    functools.partial(primitives.ring_walk, hops=2),
]


@pytest.mark.parametrize("function", ALL)
def test_arguments_that_cannot_work(function):
    def refused(match, shape=SHAPE, dtype=np.float16, num_devices=2, axis_name="x"):
        with pytest.raises(ValueError, match=match):
            lower(lambda x: function(x, axis_name), 1, num_devices, shape, dtype)

    refused("At least 2 devices are needed along 'x', got 1", num_devices=1)
    refused("multiples of 16 and at most 128, got shape \\(32, 40\\)", shape=(32, 40))
    refused("multiples of 16 and at most 128, got shape \\(144, 16\\)", shape=(144, 16))
    refused("one of the dtypes float16, bfloat16, float32, got int32", dtype=np.int32)
    refused("'z' is not an axis of the mesh", axis_name="z")
    with pytest.raises(ValueError, match="outside jax.shard_map"):
        function(jnp.zeros(SHAPE, jnp.float16), "x")
    with pytest.raises(ValueError, match="got shape \\(64,\\)"):
        lower(lambda x: function(x.reshape(-1)[:64], "x"), 1, 2)


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda x: primitives.ping_pong(x, "x"), "even number of devices along 'x', got 3"),
        (lambda x: primitives.ring_walk(x, "x", hops=0), "hops=0 must be at least 1"),
        (lambda x: primitives.ring_shift(x, "x", broken="always"), "one of early_signal, no_wait, no_signal, got 'al"),
        (lambda x: primitives.ring_walk(x, "x", hops=1, broken="no_wait"), "one of always_one, scaled, got 'no_wait'"),
    ],
)
def test_options_that_cannot_work(function, match):
    with pytest.raises(ValueError, match=match):
        lower(function, 1, 3)


def test_no_rounds():
    with pytest.raises(ValueError, match="rounds=0 must be at least 1"):
        lower(lambda x: primitives.ping_pong(x, "x", rounds=0), 1, 2)
