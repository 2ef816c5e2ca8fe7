"""May TMA load at once what a peer has sent and signalled? PTX does not promise it: a proxy fence goes in between.

TMA accesses memory through the *async proxy*; loads, stores, semaphores and ordinary fences use the *generic proxy*. A
tile takes this way: TMA of a peer stores it; the peer awaits completion and signals; a thread here waits for the
signal, and TMA loads the tile. Read step by step, the memory model says:

1. The completion of a bulk copy "is followed by an implicit generic-async proxy fence", so the peer's `red.release.sys`
   passes the tile on like a plain store.
2. That, `ld.relaxed.sys` and `fence.acquire.sys` of the waiting thread, and the barrier of its warp or warpgroup put
   the store before the load in *base causality order*.
3. This order counts only where both accesses use the generic proxy, or "the same proxy, and by the same thread block".
   Store and load both use the async proxy, but in thread blocks of two GPUs. So nothing is promised yet.
4. "A proxy fence is required" across proxies, `fence.proxy.async` between these two. It "take[s] effect within a single
   thread", and in the CTA of the TMA access. So the place is after the acquire, in the thread that issues the load.

What was there when the kernel started needs no fence, nor what TMA of the same CTA has stored and somebody has awaited.
The model's causality order has no clause for `fence.proxy.async`; step 4 follows the text about proxies and fences.
Practice is divided: JAX's wait, its example and CUTLASS's distributed all-gather + GEMM do without; the authors of
DeepEP call that outside of the model but sound by experiment; other projects fence as it is done here.

Source: PTX ISA 9.4, "Proxies", "Causality Order", "Async Proxy", "membar / fence"; Lustig, Cooksey and Giroux,
"Mixed-Proxy Extensions for the NVIDIA PTX Memory Consistency Model", section 5.4; `SemaphoreRef.wait` in
jax/experimental/mosaic/gpu/utils.py; `distributed_all_gather_gemm_blackwell.py` in github.com/NVIDIA/cutlass;
github.com/deepseek-ai/DeepEP, pull requests 632 and 642.
"""

from cmm.hopper.instruction import instruction

# It touches memory, so that no copy or wait of the kernel is moved across it.
_fence = instruction("fence.proxy.async.global", clobbers="~{memory}")


def acquire_for_tma() -> None:
    """Lets the TMA loads that follow see what the calling threads have acquired in global memory.

    Call it right after `pl.semaphore_wait`, in a warpgroup or inside `plgpu.warp_map`. All threads of the caller
    execute it, so it does not matter which of them issues the loads. `cmm.interpret.simulate(check_proxy_fences=True)`
    reports loads without it.

    Cost: one instruction (`FENCE.VIEW.ASYNC.G` on Hopper).
    """
    _fence()
