"""A CTA: its threads, the scopes they are in, and its shared memory."""

from __future__ import annotations

import dataclasses
import math

from cmm.interpret import _jax_private as jax_private, clocks, errors, memory, sync
from cmm.interpret.evaluate import source_line
from cmm.interpret.threads import Thread

_SMEM_ALIGNMENT = 1024  # Bytes; how Mosaic GPU places shared memory.


@dataclasses.dataclass
class _Scope:
    op: object
    refs: list
    base: int  # Bytes of shared memory in use below it.
    left: int = 0  # Threads that have left it.


class Cta:
    """A CTA: its shared memory, and the scopes its threads are in."""

    def __init__(self, machine, device: int, number: int):
        self.machine = machine
        self.device = device
        self.number = number
        self.meeting = sync.Rendezvous(machine.plan.num_threads)
        self.threads: list[Thread] = []
        self.finished = 0  # Threads that have ended.
        self._scopes: dict[int, _Scope] = {}
        self._top = 0  # Bytes of shared memory in use.
        self._freed: list = []  # (start, stop, buffer) of freed shared memory.
        self.buffers: list[memory.Buffer] = []

    def enter_scope(self, key: int, op, transforms) -> list:
        """The shared references of a scope; the first thread makes them."""
        scope = self._scopes.get(key)
        if scope is None:
            base = self._top
            invars = op.params["jaxpr"].invars
            refs = [self._allocate(v.aval, t, op, i) for i, (v, t) in enumerate(zip(invars, transforms, strict=True))]
            scope = self._scopes[key] = _Scope(op, refs, base)
        elif scope.op is not op:
            raise errors.SimulationError(
                "threads of one CTA entered different collective scopes, at"
                f" {source_line(scope.op.where)} and"
                f" {source_line(op.where)}"
            )
        return scope.refs

    def leave_scope(self, key: int) -> None:
        scope = self._scopes[key]
        scope.left += 1
        if scope.left == self.machine.plan.num_threads:
            self._top = scope.base

    def _allocate(self, aval, transforms, op, index):
        inner = jax_private.logical_aval(aval, transforms)
        where = f"device {self.device}, CTA {self.number}"
        line = source_line(op.where)
        kind = type(inner.dtype).__name__
        if type(aval).__name__ == "AbstractRefUnion":
            raise NotImplementedError("RefUnion is not simulated")
        if kind == "BarrierType":
            return memory.BarrierArray(
                inner.shape,
                [
                    sync.Barrier(f"barrier {i} of {where}, allocated at {line}", int(inner.dtype.num_arrivals))
                    for i in range(math.prod(inner.shape))
                ],
            )
        if kind == "ClusterBarrierType":
            raise NotImplementedError("ClusterBarrier is not simulated")
        space = str(aval.memory_space).lower()
        if "semaphore" in str(inner.dtype):
            return self.machine.scoped_semaphores(self, inner.shape, op, index)
        if space.endswith("regs"):
            return None
        if not space.endswith("smem"):
            raise NotImplementedError(f"scoped memory in {aval.memory_space}")
        content = memory.uninitialized(inner.shape, inner.dtype)
        start = self._top
        stop = start + -(-content.nbytes // _SMEM_ALIGNMENT) * _SMEM_ALIGNMENT
        self._top = stop
        name = f"shared memory {inner.dtype}{list(inner.shape)} of {where}, allocated at {line}"
        buffer = memory.Buffer(name, "smem", self.device, content, self.number)
        self.buffers.append(buffer)
        self._inherit(buffer, start, stop)
        self._freed.append((start, stop, buffer))
        return buffer

    def _inherit(self, buffer, start: int, stop: int) -> None:
        """Operations on earlier buffers at these bytes still overlap the new one.

        Whoever enters the scope has met all threads, so only asynchronous
        operations that nobody has waited for are left.
        """
        known = self.known()
        kept = []
        for a, b, old in self._freed:
            if a < stop and start < b:
                buffer.history.inherited += [
                    x
                    for x in old.history.unfinished(known) + old.history.inherited
                    if x.operation is not None and not x.happened_before(known, False)
                ]
            if not (start <= a and b <= stop):
                kept.append((a, b, old))
        self._freed = kept

    def known(self) -> clocks.Clock:
        """What the threads of this CTA know together."""
        known = self.threads[0].clock.copy()
        for thread in self.threads:
            for each in (thread, *thread.warps.values()):
                known.join(each.clock)
        return known
