"""Tiles of A in slots: where they are, how they lie, and that no copy to a peer needs a TMA descriptor."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import launch_context
from jax.sharding import PartitionSpec as P

import cmm
from cmm import interpret as ci, primitives
from cmm.hopper import TuningConfig, slots
from cmm.hopper.plan import plan_tiles
from cmm.peers import stale_addresses


def _address(row, column):
    """Where shared memory has a float16 of a block of 8 rows of 128 bytes, counted from the begin of the block.

    As PTX describes it ("Swizzling Modes"): bits 4, 5 and 6 of an address are exclusive-or'd with bits 7, 8 and 9.
    """
    plain = 128 * row + 2 * column
    return plain ^ ((plain >> 3) & 0x70)


@pytest.mark.parametrize("tile_k, count", [(64, 2), (128, 2), (64, 0)])
def test_rows_from_images(tile_k, count):
    m, k = 256, 2 * tile_k
    plan = plan_tiles(m, 256, k, TuningConfig(64, 64, tile_k), 132)
    rows = np.random.default_rng(0).integers(0, 2**16, (count, m, k), np.uint16).view(np.float16)
    height, width = plan.config.cta_tile_m, 64
    images = np.zeros((count, m // height, k // tile_k, height * tile_k), np.float16)
    for row in range(m):
        for column in range(k):
            (tile, in_tile), (k_step, in_step) = divmod(row, height), divmod(column, tile_k)
            block = in_tile // 8 * (tile_k // width) + in_step // width
            place = block * 8 * width + _address(in_tile % 8, in_step % width) // 2
            images[:, tile, k_step, place] = rows[:, row, column]
    kind = slots.type_of(plan, count, jnp.float16)
    found = slots.as_rows(jnp.asarray(images.reshape(kind.shape)), plan)
    np.testing.assert_array_equal(np.asarray(found).view(np.uint16), rows.view(np.uint16))


def test_simulated_images_are_tiles():
    plan = plan_tiles(256, 256, 192, TuningConfig(64, 64, 64), 4)
    rows = jnp.arange(3 * 256 * 192).reshape(3, 256, 192)
    with ci.simulate():
        kind = slots.type_of(plan, 3, rows.dtype)
        assert kind.shape == (3, 2, 3, 128, 64)
        tiles = rows.reshape(3, 2, 128, 3, 64).swapaxes(2, 3)
        np.testing.assert_array_equal(slots.as_rows(tiles, plan), rows)


@pytest.fixture
def descriptors_of_peers(monkeypatch):
    """The TMA descriptors with addresses on other GPUs that kernels need, which are lowered from now on."""
    found = []
    get_tma_desc = launch_context.LaunchContext._get_tma_desc

    def noted(self, gmem_ref, gmem_transform, gmem_peer_id, *args):
        if gmem_peer_id is not None:
            found.append(gmem_peer_id)
        return get_tma_desc(self, gmem_ref, gmem_transform, gmem_peer_id, *args)

    monkeypatch.setattr(launch_context.LaunchContext, "_get_tma_desc", noted)
    return found


def _lower(function, *shapes, specs, out_specs, count=4):
    return ci.lower_for_cuda(function, *shapes, mesh_axes={"x": count}, in_specs=specs, out_specs=out_specs)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("method", ["pallas", "pallas_fast"])
def test_gradients_lower_for_gpus(method, count):
    # On one device there are no slots, but their type.
    def total(lhs, rhs):
        return cmm.all_gather_matmul(lhs, rhs, "x", method=method).astype(jnp.float32).sum()

    shapes = (
        jax.ShapeDtypeStruct((count * 256, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((256, count * 256), "bfloat16"),
    )
    specs = P("x", None), P(None, "x")
    _lower(jax.grad(total, (0, 1)), *shapes, specs=specs, out_specs=specs, count=count)


@pytest.mark.parametrize("m_shard, n_shard", [(1024, 4096), (256, 4096), (512, 3584)])
@pytest.mark.parametrize("method", ["pallas", "pallas_fast"])
def test_no_descriptor_holds_an_address_of_a_peer(descriptors_of_peers, method, m_shard, n_shard):
    # Else a launch in a command buffer writes to where the peer's memory was: see cmm.hopper.slots.
    shapes = jax.ShapeDtypeStruct((4 * m_shard, 4096), jnp.float16), jax.ShapeDtypeStruct((4096, 4 * n_shard), "f2")
    function = functools.partial(cmm.all_gather_matmul, axis_name="x", method=method)
    _lower(function, *shapes, specs=(P("x", None), P(None, "x")), out_specs=P(None, "x"))
    assert not descriptors_of_peers


@pytest.mark.parametrize("name, options", [("ring_shift", {}), ("neighbour_exchange", {}), ("ring_walk", {"hops": 3})])
def test_nor_does_one_of_the_small_kernels(descriptors_of_peers, name, options):
    function = functools.partial(getattr(primitives, name), axis_name="x", **options)
    _lower(function, jax.ShapeDtypeStruct((4 * 64, 128), jnp.float32), specs=P("x", None), out_specs=P("x", None))
    assert not descriptors_of_peers


@pytest.mark.parametrize("copies, expected", [("by TMA descriptors", 1), ("contiguous", 0)])
def test_the_reproduction_has_one(descriptors_of_peers, copies, expected):
    function = functools.partial(stale_addresses.kernel, transforms=stale_addresses.COPIES[copies])
    _lower(function, jax.ShapeDtypeStruct((4 * 64, 64), jnp.float32), specs=P("x"), out_specs=P("x"))
    assert len(descriptors_of_peers) == expected
