"""What communication does a program hold? Read from the program itself, before and after XLA compiles it."""

import dataclasses
import math
import re

from jaxlib.mlir import ir

from cmm.roofline import ITEMSIZE_BYTES

_COLLECTIVES = tuple(
    f"stablehlo.{name}" for name in ("all_gather", "collective_permute", "all_reduce", "all_to_all", "reduce_scatter")
)
_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a lowered program, as one device sees it.

    Attributes:
      op: name of the operation, "all_gather" or "collective_permute" for instance.
      operand_shape: shape of what the device gives.
      result_shape: shape of what it gets.
      dtype: dtype of the elements.
    """

    op: str
    operand_shape: tuple[int, ...]
    result_shape: tuple[int, ...]
    dtype: str

    @property
    def bytes_received(self) -> int:
        """Bytes that reach the device from others. A gathered result holds the device's own part, which stays."""
        elements = math.prod(self.result_shape)
        if self.op == "all_gather":
            elements -= math.prod(self.operand_shape)
        return elements * ITEMSIZE_BYTES[self.dtype]


def collectives(lowered) -> list[Collective]:
    """Lists the collectives of a lowered program in program order.

    Reads StableHLO, the program as JAX hands it to XLA. In the compiled program dtypes may differ: XLA's CPU backend
    moves bfloat16 as float32.

    Args:
      lowered: what `jax.jit(f).lower(...)` returns.
    """
    found = []

    def visit(op):
        if op.name in _COLLECTIVES:
            operand, result = op.operands[0].type, op.results[0].type
            found.append(
                Collective(
                    op=op.name.removeprefix("stablehlo."),
                    operand_shape=tuple(operand.shape),
                    result_shape=tuple(result.shape),
                    dtype=_DTYPES[str(operand.element_type)],
                )
            )
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    return found


def independent_products(lowered) -> tuple[int, int]:
    """Counts the matrix products of a lowered program, and the pairs of which neither needs the other's result.

    XLA's GPU backend merges independent products that share an operand into one. In a ring that one product would have
    to wait for the last shard, and nothing would overlap.

    Args:
      lowered: what `jax.jit(f).lower(...)` returns.

    Returns:
      The number of products, and the number of independent pairs.
    """
    needs: dict = {}  # value -> indices of the products that it depends on
    products: list[set[int]] = []

    def visit(op):
        mine = set().union(*(needs.get(value, set()) for value in op.operands))
        if op.name == "stablehlo.dot_general":
            products.append(mine)
            mine = mine | {len(products) - 1}
        needs.update((value, mine) for value in op.results)
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    pairs = sum(a not in products[b] for b in range(len(products)) for a in range(b))
    return len(products), pairs


def compiled_lines(compiled, *operations: str) -> list[str]:
    """Returns the instructions of a compiled program that name one of `operations`, without their annotations.

    An asynchronous collective is two instructions, "-start" and "-done".

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns.
      operations: names as HLO spells them, "all-gather" or "dot" for instance.
    """
    pattern = re.compile(rf"= \S.* ({'|'.join(map(re.escape, operations))})(-start|-done)?\(")
    lines = (line.strip() for line in compiled.as_text().splitlines())
    annotations = r", (metadata|backend_config|frontend_attributes)=.*"
    return [re.sub(annotations, "", line) for line in lines if pattern.search(line)]
