"""TMA loads of what others have written: quiet with a proxy fence, reported without, if the simulation checks it."""

import functools

import interpret_kernels as kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

import cmm.interpret as ci
from cmm.hopper import TuningConfig, all_gather_lhs_matmul, all_gather_lhs_matmul_fast, fast_kernel, ring_kernel
from cmm.hopper.fences import acquire_for_tma

M, K = kernels.M, kernels.K
UNFENCED = "acquired in the generic proxy; a TMA load needs fence.proxy.async.global"


def ring(x, fence=None, plain=False, in_warp=False):
    """Sends a block down the ring by TMA (`plain`: by stores of threads), and passes it on to the output by TMA.

    `fence` says where: "after" or "before" the wait, or "commit", which is a fence for shared memory.
    """

    def body(x_ref, out_ref, mailbox_ref, smem, barrier):
        received = pl.get_global(plgpu.SemaphoreType.REGULAR)
        down = {"x": lax.rem(lax.axis_index("x") + 1, jnp.int32(2))}
        mailbox = plgpu.remote_ref(mailbox_ref, down)
        if plain:
            mailbox[...] = x_ref[...]
        else:
            plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
            plgpu.barrier_wait(barrier)
            plgpu.copy_smem_to_gmem(smem, mailbox)
            plgpu.wait_smem_to_gmem(0)
        pl.semaphore_signal(received, device_id=down)

        def wait_and_load():
            if fence == "before":
                acquire_for_tma()
            pl.semaphore_wait(received)
            if fence == "after":
                acquire_for_tma()
            if fence == "commit":
                plgpu.commit_smem()
            plgpu.copy_gmem_to_smem(mailbox_ref, smem, barrier)

        if in_warp:
            plgpu.warp_map(lambda warp: pl.when(warp == 0)(wait_and_load))
        else:
            wait_and_load()
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(smem, out_ref)
        plgpu.wait_smem_to_gmem(0)

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    scratch = [plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()]
    return plgpu.kernel(body, out_type=[like, like], scratch_types=scratch)(x)[0]


def run(shard, check=True, **options):
    x = kernels.blocks(2)
    with ci.simulate(check_proxy_fences=check, **options) as sim:
        out = sim.run(kernels.sharded(shard, kernels.mesh_of(2), P("x"), P("x")), x)
    return np.asarray(out), x


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("in_warp", [False, True])
def test_a_fence_after_the_wait_is_quiet(in_warp, plain, seed):
    out, x = run(functools.partial(ring, fence="after", plain=plain, in_warp=in_warp), seed=seed)
    np.testing.assert_array_equal(out, np.roll(x, M, axis=0))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("fence", [None, "before", "commit"])
def test_no_fence_after_the_wait_is_reported_on_demand(fence, plain):
    shard = functools.partial(ring, fence=fence, plain=plain)
    out, x = run(shard, check=False)
    np.testing.assert_array_equal(out, np.roll(x, M, axis=0))
    with pytest.raises(ci.RaceError, match=UNFENCED) as caught:
        run(shard)
    for race in caught.value.races:
        assert race.first.device == 1 - race.second.device
        assert (race.first.by, race.second.by) == ("thread" if plain else "TMA", "TMA")
        assert "test_interpret_fences" in race.first.source and "wait_and_load" in race.second.source


def test_a_missing_wait_is_still_the_race_that_it_was():
    def shard(x):
        def body(x_ref, out_ref, smem, barrier):
            peer = {"x": 1 - lax.axis_index("x")}
            plgpu.remote_ref(out_ref, peer)[...] = x_ref[...]
            plgpu.copy_gmem_to_smem(out_ref, smem, barrier)
            plgpu.barrier_wait(barrier)

        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return plgpu.kernel(body, out_type=like, scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()])(x)

    with pytest.raises(ci.RaceError, match="nothing orders") as caught:
        run(shard)
    assert UNFENCED not in str(caught.value)


def own(x, by, fence=False):
    """Writes a block to global memory and loads it again by TMA, all in one thread."""

    def body(x_ref, out_ref, box_ref, smem, barrier):
        if by == "thread":
            box_ref[...] = x_ref[...]
        else:
            plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
            plgpu.barrier_wait(barrier)
            plgpu.copy_smem_to_gmem(smem, box_ref)
            plgpu.wait_smem_to_gmem(0)
        if fence:
            acquire_for_tma()
        plgpu.copy_gmem_to_smem(box_ref, smem, barrier)
        plgpu.barrier_wait(barrier)
        out_ref[...] = smem[...]

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    scratch = [plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()]
    return plgpu.kernel(body, out_type=[like, like], scratch_types=scratch)(x)[0]


@pytest.mark.parametrize("by, fence", [("TMA", False), ("thread", True)])
def test_what_needs_no_peer(by, fence):
    out, x = run(functools.partial(own, by=by, fence=fence))
    np.testing.assert_array_equal(out, x)


def test_a_threads_own_store_needs_a_fence():
    with pytest.raises(ci.RaceError, match=UNFENCED):
        run(functools.partial(own, by="thread"))


def relay(x, how):
    """The first of two threads writes and fences, the second loads by TMA when the first lets it.

    `how`: they are warpgroups of one CTA with a "barrier", or in two CTAs with a "semaphore".
    """
    ctas = how == "semaphore"

    def body(x_ref, out_ref, box_ref, smem, loaded, handed_over):
        semaphore = pl.get_global(plgpu.SemaphoreType.REGULAR)
        role = lax.axis_index("cta" if ctas else "wg")

        @pl.when(role == 0)
        def _write():
            box_ref[...] = x_ref[...]
            acquire_for_tma()
            if how == "barrier":
                plgpu.barrier_arrive(handed_over)
            else:
                pl.semaphore_signal(semaphore)

        @pl.when(role == 1)
        def _load():
            if how == "barrier":
                plgpu.barrier_wait(handed_over)
            else:
                pl.semaphore_wait(semaphore)
            plgpu.copy_gmem_to_smem(box_ref, smem, loaded)
            plgpu.barrier_wait(loaded)
            out_ref[...] = smem[...]

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(
        body,
        out_type=[like, like],
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier(), plgpu.Barrier()],
        **(dict(grid=(2,), grid_names=("cta",)) if ctas else dict(num_threads=2, thread_name="wg")),
    )(x)[0]


def test_a_fence_counts_for_the_threads_of_its_cta():
    out, x = run(functools.partial(relay, how="barrier"))
    np.testing.assert_array_equal(out, x)


def test_a_fence_in_another_cta_does_not_count():
    with pytest.raises(ci.RaceError, match=UNFENCED):
        run(functools.partial(relay, how="semaphore"))


def test_the_check_needs_race_detection():
    with pytest.raises(ValueError, match="detect_races"):
        with ci.simulate(check_proxy_fences=True, detect_races=False):
            pass


def test_inline_assembly_that_does_not_say_what_it_is_is_refused():
    def shard(x):
        def body(x_ref, out_ref):
            plgpu.inline_mgpu()(lambda context: None)()
            out_ref[...] = x_ref[...]

        return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    with pytest.raises(NotImplementedError, match="inline_mgpu.* is not simulated"):
        run(shard)


# --- The ring kernels of cmm.hopper -------------------------------------------

SMALL = TuningConfig(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2)
each_kernel = pytest.mark.parametrize("kernel", [all_gather_lhs_matmul, all_gather_lhs_matmul_fast])


def multiply(kernel, case, **options):
    with ci.simulate(core_count=2, check_proxy_fences=True, **options) as sim:
        case.assert_right(sim.run(case.program(functools.partial(kernel, config=SMALL)), case.lhs, case.rhs))


@each_kernel
@pytest.mark.parametrize("axis_size, seed", [(2, None), (3, 1)])
def test_ring_kernels_with_fences_are_quiet(make_case, kernel, axis_size, seed):
    multiply(kernel, make_case(256, 256, 128, "float16", (axis_size,)), seed=seed)


@each_kernel
def test_ring_kernels_without_fences_are_reported(make_case, monkeypatch, kernel):
    for module in (ring_kernel, fast_kernel):
        monkeypatch.setattr(module, "acquire_for_tma", lambda: None)
    with pytest.raises(ci.RaceError, match=UNFENCED):
        multiply(kernel, make_case(256, 256, 128, "float16", (2,)))


def lower(shard, *shapes, in_specs, out_specs):
    operands = [jax.ShapeDtypeStruct(shape, jnp.float16) for shape in shapes]
    return ci.lower_for_cuda(shard, *operands, mesh_axes={"x": 2}, in_specs=in_specs, out_specs=out_specs)


# The module of a kernel is serialized, but its strings stand in the text as they are.
@each_kernel
def test_the_fence_is_in_the_lowered_ring_kernels(kernel):
    shard = lambda lhs, rhs: kernel(lhs, rhs, "x", config=SMALL)
    specs = dict(in_specs=(P("x", None), P(None, "x")), out_specs=P(None, "x"))
    assert "fence.proxy.async.global;" in lower(shard, (256, 128), (128, 128), **specs)


@pytest.mark.parametrize("in_warp", [False, True])
def test_the_fence_lowers_in_a_warpgroup_and_in_a_warp(in_warp):
    text = {
        fence: lower(
            functools.partial(ring, fence=fence, in_warp=in_warp), (2 * M, K), in_specs=P("x"), out_specs=P("x")
        )
        for fence in (None, "after")
    }
    assert "fence.proxy.async.global;" in text["after"]
    assert "fence.proxy.async.global" not in text[None]
