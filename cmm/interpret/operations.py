"""Reads and writes by threads, and the fences before TMA or wgmma."""

from __future__ import annotations

import numpy as np

from cmm.interpret import memory
from cmm.interpret.evaluate import handles


def view(thread, buffer, views) -> memory.View:
    return memory.view_of(buffer, views, thread.machine.logical_device(thread))


def peer_of(thread, seen: memory.View) -> int | None:
    owner = seen.buffer.device
    return None if owner == thread.device else owner


def _record_if_remote(kind: str, thread, op, seen: memory.View) -> None:
    if (peer := peer_of(thread, seen)) is not None:
        thread.record_move(kind, thread.machine.scheduler.now, op.where, peer, seen)


@handles("get", "load")
def _get(thread, op, values):
    yield thread.busy()
    seen = view(thread, values[0], op.params["tree"].unflatten(values[1:]))
    thread.access(seen, False, op.where)
    _record_if_remote("fetch", thread, op, seen)
    result = seen.read()
    return [result[()] if result.ndim == 0 else result]


@handles("swap", "store")
def _swap(thread, op, values):
    yield thread.busy()
    seen = view(thread, values[0], op.params["tree"].unflatten(values[2:]))
    thread.access(seen, True, op.where)
    _record_if_remote("send", thread, op, seen)
    before = seen.read()
    seen.write(np.asarray(values[1]))
    return [before[()] if before.ndim == 0 else before] if op.outvars else []


@handles("addupdate")
def _addupdate(thread, op, values):
    yield thread.busy()
    seen = view(thread, values[0], op.params["tree"].unflatten(values[2:]))
    thread.access(seen, True, op.where)
    seen.write(seen.read() + values[1])
    return []


@handles("commit_smem")
def _commit_smem(thread, op, values):
    del op, values
    yield thread.busy()
    thread.clock.fence(thread.position)
    return []


@handles("fence.proxy.async.global")
def _fence_global(thread, op, values):
    del op, values
    yield thread.busy()
    if thread.machine.options.check_proxy_fences:
        thread.clock.fence_global(thread.position)
    return []
