"""Calls one after another in one program, as the layers of a model are.

Started one by one, calls of a short kernel that crosses devices leave GPUs idle between them: for each start, XLA's
host threads meet and exchange addresses. Within one program they meet once.
"""

from collections.abc import Callable

import jax
from jax import lax


def chained(function: Callable) -> Callable:
    """Returns a function of many operand pairs that calls `function` on each, one after the other.

    Args:
      function: `function(lhs, rhs)`. It is traced and lowered once.

    Returns:
      `chain(pairs)`, which returns the list of results. No call begins before the one before it has ended.
    """
    one = jax.jit(function)

    def chain(pairs):
        results = []
        for lhs, rhs in pairs:
            # Before the first call, too: compilers would choose other kernels for it than for those that follow.
            lhs, rhs, results[-1:] = lax.optimization_barrier((lhs, rhs, results[-1:]))
            results.append(one(lhs, rhs))
        return results

    return chain
