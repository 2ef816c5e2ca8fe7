"""JAX's own collective matmul, its source untouched, on simulated devices.

What the simulator finds in it:

1. More than one tile per CTA and step. At the end of a pipeline nobody waits for
   the `delay_release` last slots, so the prologue of the next tile loads into a
   slot that a send, or the last wgmma, may still read. Smallest input: one
   device with two tiles (wgmma), two devices with two tiles (send).
2. From three devices and two CTAs per device on, one semaphore counts the signals
   of all steps. A CTA that has already finished the next step can stand in for a
   sibling that has not finished this one, and the receiver reads too early.
"""

import functools
import time

import interpret_kernels as kernels
import jax
import numpy as np
import pytest
from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu
from jax.sharding import PartitionSpec as P

import cmm.interpret as ci
from cmm.devices import simulated_devices

SEEDS = (None, 0, 1, 2)


def operands(num_devices, m_shard, k, n_shard):
    rng = np.random.default_rng(0)
    lhs = rng.normal(size=(num_devices * m_shard, k)).astype(np.float16)
    rhs = rng.normal(size=(k, num_devices * n_shard)).astype(np.float16)
    return lhs, rhs


@functools.cache
def example(num_devices, core_count, stages=2):
    config = collective_matmul_mgpu.TuningConfig(
        tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=stages, epi_tile_n=None, epi_tile_m=None
    )
    # The example insists that the mesh holds every device there is.
    devices = simulated_devices(8)

    def shard(lhs, rhs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "device_count", lambda: num_devices)
            patch.setattr(jax, "local_device_count", lambda: num_devices)
            with ci.pretend_core_count(collective_matmul_mgpu, core_count):
                return collective_matmul_mgpu.all_gather_lhs_matmul(lhs, rhs, "x", config=config)

    mesh = jax.sharding.Mesh(np.array(devices[:num_devices]), ("x",))
    return kernels.sharded(shard, mesh, (P("x", None), P(None, "x")), P(None, "x"))


def run(num_devices, shapes, core_count=1, stages=2, **options):
    lhs, rhs = operands(num_devices, *shapes)
    with ci.simulate(**options) as sim:
        out = sim.run(example(num_devices, core_count, stages), lhs, rhs)
    want = lhs.astype(np.float32) @ rhs.astype(np.float32)
    return np.asarray(out, np.float32), want, sim


def assert_right(out, want):
    # One rounding to f16 of a sum that is exact to f32.
    np.testing.assert_allclose(out, want, rtol=2.0**-10, atol=1e-2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8])
def test_agrees_with_the_reference_and_is_quiet(num_devices, seed):
    out, want, sim = run(num_devices, (64, 256, 128), seed=seed)
    assert_right(out, want)
    assert not sim.races
    shard_bytes = 64 * 256 * 2
    assert sim.bytes_sent() == num_devices * (num_devices - 1) * shard_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_two_tiles_per_cta_overwrite_what_the_last_wgmma_reads(seed):
    shapes = (64, 128, 256)
    _, _, sim = run(1, shapes, seed=seed, on_race="record")
    assert sim.races
    for race in sim.races:
        by = {race.first.by: race.first, race.second.by: race.second}
        assert by["wgmma"].action == "read" and by["TMA"].action == "write"
        assert by["TMA"].thread == "warpgroup 2"
    _, _, sim = run(1, (64, 128, 128), seed=seed)  # One tile: quiet.
    assert not sim.races


@pytest.mark.parametrize("seed", SEEDS)
def test_two_tiles_per_cta_overwrite_what_is_being_sent(seed):
    _, _, sim = run(2, (64, 128, 256), seed=seed, on_race="record")
    sends = [
        r
        for r in sim.races
        if "collective_matmul_mgpu.py" in r.first.source + r.second.source
        and {r.first.action, r.second.action} == {"read", "write"}
        and r.first.by == r.second.by == "TMA"
    ]
    assert sends and all("shared memory" in r.buffer for r in sends)


def test_two_tiles_per_cta_can_send_wrong_values():
    wrong = 0
    for seed in range(8):
        out, want, _ = run(2, (64, 128, 256), seed=seed, detect_races=False)
        wrong += not np.allclose(out, want, rtol=2.0**-10, atol=1e-2)
    assert wrong


LATE = ci.Late(1e-4, device=0, cta=0)


def test_one_counter_is_fooled_by_a_late_cta_from_three_devices_on():
    shapes = (64, 128, 128)
    out, want, sim = run(3, shapes, core_count=2, late=LATE, on_race="record")
    assert sim.races
    for race in sim.races:
        assert race.buffer.startswith("output 1 ")  # The scratch of the ring.
        assert {race.first.by, race.second.by} == {"TMA"}
    assert not np.allclose(out, want, rtol=2.0**-10, atol=1e-2)


@pytest.mark.parametrize("num_devices, core_count", [(2, 2), (3, 1), (8, 1)])
def test_one_counter_holds_for_two_devices_or_one_cta(num_devices, core_count):
    out, want, sim = run(num_devices, (64, 128, 128), core_count=core_count, late=LATE)
    assert_right(out, want)
    assert not sim.races


def test_one_counter_is_found_by_shuffling_too():
    found = 0
    for seed in range(8):
        _, _, sim = run(3, (64, 128, 128), core_count=2, seed=seed, on_race="record")
        found += bool(sim.races)
    assert found


def test_a_call_at_the_size_of_a_notebook_takes_seconds():
    run(4, (64, 256, 128))
    start = time.monotonic()
    run(4, (64, 256, 128))
    assert time.monotonic() - start < 5


@pytest.mark.slow
@pytest.mark.parametrize("num_devices, core_count", [(4, 1), (2, 2)])
def test_no_false_alarm_in_200_shuffled_runs(num_devices, core_count):
    for seed in range(200):
        out, want, sim = run(num_devices, (64, 128, 128), core_count, seed=seed)
        assert_right(out, want)
        assert not sim.races
