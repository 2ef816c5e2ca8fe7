"""Control flow, scopes and warps."""

from __future__ import annotations

import numpy as np

from cmm.interpret import _jax_private as jax_private, memory, scheduler
from cmm.interpret.evaluate import evaluate, handles, source_line
from cmm.interpret.threads import TIMING

_WARPS = 4


@handles("cond")
def _cond(thread, op, values):
    branches = op.params["branches"]
    chosen = min(max(int(values[0]), 0), len(branches) - 1)
    return (yield from evaluate(thread, branches[chosen], values[1:], op.where))


@handles("while")
def _while(thread, op, values):
    params = op.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts = values[:n_cond]
    body_consts = values[n_cond : n_cond + n_body]
    carry = values[n_cond + n_body :]
    while True:
        (go_on,) = yield from evaluate(thread, params["cond_jaxpr"], [*cond_consts, *carry], op.where)
        if not go_on:
            return carry
        carry = yield from evaluate(thread, params["body_jaxpr"], [*body_consts, *carry], op.where)
        thread.machine.scheduler.check_alive()


@handles("scan")
def _scan(thread, op, values):
    params = op.params
    consts, carry, xs = map(list, params["ft_in"].update(values).unpack())
    num_carry = len(carry)
    order = range(params["length"])
    rows = {}
    for i in reversed(order) if params["reverse"] else order:
        outs = yield from evaluate(thread, params["jaxpr"], [*consts, *carry, *[x[i] for x in xs]], op.where)
        carry, rows[i] = outs[:num_carry], outs[num_carry:]
        thread.machine.scheduler.check_alive()
    stacked = []
    for position, var in enumerate(op.outvars[num_carry:]):
        column = [rows[i][position] for i in order]
        stacked.append(np.stack(column) if column else np.zeros(var.aval.shape, var.aval.dtype))
    return [*carry, *stacked]


@handles("axis_index")
def _axis_index(thread, op, values):
    del values
    return [np.int32(thread.coords[op.params["axis_name"]])]
    yield  # A handler is a generator even if it never pauses.


@handles("program_id")
def _program_id(thread, op, values):
    del values
    return [np.int32(thread.machine.plan.program_id(thread, op.params["axis"]))]
    yield


@handles("run_scoped")
def _run_scoped(thread, op, values):
    jaxpr = op.params["jaxpr"]
    collective = bool(op.params["collective_axes"])
    transforms = op.params.get("ref_transforms") or ((),) * len(jaxpr.invars)
    if collective:
        # On a GPU entering a collective scope synchronizes the CTA's threads, so
        # that memory of earlier scopes can be given out again.
        yield from synchronize(thread, op.where)
        key = thread.scopes
        thread.scopes += 1
        scope = thread.cta.enter_scope(key, op, transforms)
    else:
        scope = [_private(thread, v.aval, t) for v, t in zip(jaxpr.invars, transforms, strict=True)]
        if any(ref is None for ref in scope):
            if thread.machine.plan.num_threads > 1:
                raise NotImplementedError(
                    "a scope with shared memory or barriers needs collective_axes in a"
                    " kernel of several threads, at"
                    f" {source_line(op.where)}"
                )
            key = thread.scopes
            thread.scopes += 1
            collective = True
            shared = thread.cta.enter_scope(key, op, transforms)
            scope = [p if p is not None else s for p, s in zip(scope, shared)]
    results = yield from evaluate(thread, jaxpr, [*values, *scope], op.where)
    if collective:
        thread.cta.leave_scope(key)
    return results


def _private(thread, aval, transforms):
    """An accumulator in registers, or None for what the CTA shares."""
    inner = jax_private.logical_aval(aval, transforms)
    if str(getattr(aval, "memory_space", "")).lower().endswith("regs"):
        return memory.Buffer(f"registers of {thread.name}", "regs", thread.device, np.zeros(inner.shape, inner.dtype))
    return None


def synchronize(thread, where):
    """Meets all other threads of the CTA."""
    meeting = thread.cta.meeting
    if thread.machine.plan.num_threads == 1:
        return
    yield thread.busy()
    number, complete = meeting.arrive(thread.clock.publish(thread.position))
    sched = thread.machine.scheduler
    if complete:
        sched.wake(meeting.waiters)
    while len(meeting.known) <= number:
        yield scheduler.Wait(
            meeting.waiters,
            lambda: len(meeting.known) > number,
            "all threads of the CTA to enter a collective scope",
            where=where,
        )
    thread.clock.join(meeting.known[number])


@handles("mpmd_map")
def _warp_map(thread, op, values):
    """Runs the body once per warp, all four at the same time."""
    (mesh,) = op.params["meshes"]
    (jaxpr,) = op.params["jaxprs"]
    if thread.warp is not None or type(mesh).__name__ != "WarpMesh":
        raise NotImplementedError("only warp_map can stand inside a kernel, once")
    yield thread.busy()
    sched = thread.machine.scheduler
    finished: list = []
    children = []
    start = thread.clock.publish(thread.position)
    for warp in range(_WARPS):
        child = thread.machine.warp_of(thread, warp)
        child.coords[mesh.axis_name] = warp
        child.clock.join(start)
        task = scheduler.Task(
            child.name, evaluate(child, jaxpr, list(values), op.where), time=sched.now + child.busy(), on_done=finished
        )
        child.task = task
        children.append(child)
        sched.spawn(task)
    while not all(c.task.done for c in children):
        yield scheduler.Wait(
            finished, lambda: all(c.task.done for c in children), "its warps to finish", where=op.where
        )
    for child in children:
        thread.clock.join(child.clock.publish(child.position))
    return []


@handles("delay")
def _delay(thread, op, values):
    sched = thread.machine.scheduler
    start = sched.now
    yield from sched.sleep(float(values[0]) * 1e-9)
    thread.record("delay", start, op.where)
    return []


@handles("run_state")
def _run_state(thread, op, values):
    """State threaded through registers, such as an accumulator with a start."""
    jaxpr = op.params["jaxpr"]
    refs = [memory.Buffer(f"registers of {thread.name}", "regs", thread.device, np.array(v)) for v in values]
    yield thread.busy(TIMING.operation_s)
    yield from evaluate(thread, jaxpr, refs, op.where)
    return [r.content.copy() for r in refs]
