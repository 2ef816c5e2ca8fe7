"""How do products of a loop stay in flight? Each begins with a fence of its registers, or ptxas may wait after each.

A product (`wgmma`) runs asynchronously, and adds to registers. Whoever touches these registers in between has to wait
for it first, and to fence them (`wgmma.fence`) before the next one. Nobody does so here: from the first product of a
tile to its last they hold the accumulator, and products of one shape follow each other without a fence. So Pallas emits
one fence, in front of the loop.

But it is ptxas that allots the registers, and at the head of a loop it may want a fence of its own. Inside a branch
that it cannot prove to be the same for all threads, such as "this warpgroup multiplies", it gives up, and serializes:
it waits for each product before it starts the next. It says so where `MOSAIC_GPU_DUMP_PTXAS=1` is set:

    (C7520) Potential Performance Loss: wgmma.mma_async instructions are serialized due to program dependence on
    compiler-inserted WG.AR in divergent path

Whether it does depends on code anywhere in the kernel. It hit the fast kernel where a step has more than one tile for
each CTA, and not while the kernel noted what it does. A fence in the loop leaves ptxas nothing to insert. More fences
than are needed do no harm; CUTLASS has one in each step of its loop, too (`warpgroup_arrive`).

Source: PTX ISA 9.0, "wgmma.fence" and "wgmma.wait_group"; messages of ptxas 13.0;
`sm90_mma_tma_gmma_ss_warpspecialized.hpp` in github.com/NVIDIA/cutlass.
"""

from cmm.hopper.instruction import instruction

_fence = instruction("wgmma.fence.sync.aligned")


def fence_registers() -> None:
    """Orders what this warpgroup has done with its registers before the products that follow.

    Call it before each `plgpu.wgmma`, in all threads of the warpgroup.

    Cost: one instruction (`WARPGROUP.ARRIVE` on Hopper). Simulated products need no fence.
    """
    _fence()
