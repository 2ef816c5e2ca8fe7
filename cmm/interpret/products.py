"""Tensor-core products (wgmma).

A product reads its tiles from shared memory some time after it is issued. It is
done for the race detector once its warpgroup has waited for it.
"""

from __future__ import annotations

import numpy as np

from cmm.interpret import memory, scheduler
from cmm.interpret.evaluate import handles
from cmm.interpret.operations import view
from cmm.interpret.threads import TIMING

# OpenBLAS, NumPy's BLAS, splits products of more multiplications than this among threads that spin while they wait for
# each other. On a busy machine a tile then takes milliseconds in place of microseconds, now and then.
_ONE_THREAD = 2**18


def multiply(lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """Returns `lhs @ rhs`, block of rows by block of rows, each small enough that BLAS starts no threads for it."""
    (m, k), n = lhs.shape, rhs.shape[1]
    rows = max(1, _ONE_THREAD // (k * n))
    out = np.empty((m, n), np.result_type(lhs, rhs))
    for first in range(0, m, rows):
        np.matmul(lhs[first : first + rows], rhs, out=out[first : first + rows])
    return out


@handles("wgmma_ref")
def _wgmma(thread, op, values):
    params, machine = op.params, thread.machine
    yield thread.busy()
    acc, a, b, *rest = values
    trees = [params[f"{x}_transforms_tree"] for x in ("acc", "a", "b")]
    views = []
    for tree in trees:
        n = 0 if tree is None else tree.num_leaves
        views.append(() if tree is None else tree.unflatten(rest[:n]))
        rest = rest[n:]
    acc_view = view(thread, acc, views[0])
    operation = machine.new_operation()

    def operand(x, x_views):
        if not isinstance(x, memory.Buffer):
            return lambda: x  # A lhs tile held in registers.
        seen = view(thread, x, x_views)
        thread.access(seen, False, op.where, operation, "wgmma")
        return seen.read

    read_a, read_b = operand(a, views[1]), operand(b, views[2])
    sched, start = machine.scheduler, machine.scheduler.now
    product = [operation, False]
    thread.products.append(product)

    def finish():
        lhs, rhs = read_a(), read_b()
        total = acc_view.read()
        wide = np.float32 if total.dtype.kind == "f" else total.dtype
        acc_view.write(total + multiply(lhs.astype(wide), rhs.astype(wide)).astype(total.dtype))
        product[1] = True
        thread.record("tile_product", start, op.where, flops=2 * lhs.shape[0] * lhs.shape[1] * rhs.shape[1])
        sched.wake(thread.product_waiters)

    # Tensor cores finish the products of a warpgroup in order.
    end = max(start, thread.last_product_end) + thread.busy(TIMING.tile_product_s)
    thread.last_product_end = end
    sched.at(end - start, finish)
    return []


def _await_products(thread, n: int, where):
    old = thread.products[: max(0, len(thread.products) - n)]
    while not all(done for _, done in old):
        yield scheduler.Wait(
            thread.product_waiters, lambda: all(done for _, done in old), f"tile products, all but {n}", where=where
        )
    for operation, _ in old:
        thread.clock.complete(operation)
    thread.products = thread.products[len(old) :]


@handles("wgmma.fence.sync.aligned")
def _wgmma_fence(thread, op, values):
    del thread, op, values
    yield from ()  # Registers hold what was written last: nothing to do, and no time to take.
    return []


@handles("wgmma_wait")
def _wgmma_wait(thread, op, values):
    del values
    yield thread.busy()
    yield from _await_products(thread, int(op.params["n"]), op.where)
    return []


@handles("wgmma_accumulator_deref_p", "wgmma_accumulator_deref")
def _deref(thread, op, values):
    if (n := op.params["wait_n"]) is not None:
        yield from _await_products(thread, int(n), op.where)
    return [values[0].content.copy()]


@handles("wgmma_accumulator_store_p", "wgmma_accumulator_store")
def _accumulator_store(thread, op, values):
    yield from _await_products(thread, 0, op.where)
    values[0].content[...] = values[1]
    return [values[0].content.copy()] if op.outvars else []
