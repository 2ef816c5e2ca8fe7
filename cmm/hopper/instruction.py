"""How does a kernel execute a PTX instruction that Pallas has no function for, and that takes no operands?"""

from collections.abc import Callable

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from cmm import interpret


def instruction(name: str, clobbers: str = "") -> Callable[[], None]:
    """Returns a function that executes an instruction, in a warpgroup or inside `plgpu.warp_map`.

    Args:
      name: the instruction, which the simulator knows by the same name (`cmm.interpret.simulated_as`).
      clobbers: what it touches besides, in LLVM's notation.
    """

    @plgpu.inline_mgpu()
    @interpret.simulated_as(name)
    def execute(context):
        del context
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], f"{name};", clobbers, has_side_effects=True)

    return execute
