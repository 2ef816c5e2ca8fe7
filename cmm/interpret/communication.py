"""Semaphores across devices, and barriers inside a CTA."""

from __future__ import annotations

import numpy as np

from cmm.interpret import memory, races, scheduler
from cmm.interpret.evaluate import handles


@handles("get_global")
def _get_global(thread, op, values):
    del values
    return [thread.machine.global_semaphores(thread.device, op)]
    yield  # A handler is a generator even if it never pauses.


def _signal(thread, array, views, amount, device_id, device_id_type, where):
    machine = thread.machine
    device = thread.device
    if device_id is not None:
        device = machine.logical_device(thread)(device_id, device_id_type)
    semaphore = memory.pick(array.peers[device], views)
    sched = machine.scheduler
    known = thread.clock.publish(thread.position)
    known.fenced_global = None  # A proxy fence counts in its own CTA; whoever acquires this needs one of its own.
    is_remote = device != thread.device
    remote = races.Signal(known, thread.position, thread.identity, where) if is_remote else None
    semaphore.signal(int(amount), known, remote)
    thread.record(
        "signal",
        sched.now,
        where,
        name=semaphore.name,
        peer=device if is_remote else None,
        value=int(amount),
    )
    sched.wake(semaphore.waiters)


@handles("semaphore_signal")
def _semaphore_signal(thread, op, values):
    yield thread.busy()
    array, views, amount, device_id, core = op.params["args_tree"].unflatten(values)
    if core is not None:
        raise NotImplementedError("core_index= has no meaning on GPUs")
    _signal(thread, array, views, amount, device_id, op.params["device_id_type"], op.where)
    return []


@handles("semaphore_signal_parallel")
def _semaphore_signal_parallel(thread, op, values):
    yield thread.busy()
    for args in zip(*op.params["args_tree"].unflatten(values)):
        array, views, amount, device_id = args
        _signal(thread, array, views, amount, device_id, None, op.where)
        yield thread.busy()
    return []


@handles("semaphore_wait")
def _semaphore_wait(thread, op, values):
    yield thread.busy()
    array, views, value, decrement = op.params["args_tree"].unflatten(values)
    semaphore = memory.pick(array, views)
    value = int(value)
    sched = thread.machine.scheduler
    start = sched.now
    while not semaphore.reached(value):
        yield scheduler.Wait(
            semaphore.waiters,
            lambda: semaphore.reached(value),
            f"semaphore {semaphore.name}",
            value,
            lambda: semaphore.value,
            op.where,
        )
    known = semaphore.acquire(value, bool(decrement))
    if known is not None:
        thread.clock.join(known)
    thread.record("wait", start, op.where, name=semaphore.name, value=semaphore.value, awaited=value)
    return []


@handles("semaphore_read")
def _semaphore_read(thread, op, values):
    yield thread.busy()
    array, views = op.params["args_tree"].unflatten(values)
    semaphore = memory.pick(array, views)
    yield thread.machine.scheduler.polled()
    known = semaphore.acquire(semaphore.value, False)
    if known is not None:
        thread.clock.join(known)
    return [np.int32(semaphore.value)]


def _barrier(op, values):
    tree = op.params["transforms_treedef"]
    views = () if tree is None else tree.unflatten(values[1:])
    return memory.pick(values[0], views)


def _arrive(thread, barrier) -> None:
    if barrier.arrive(thread.clock.publish(thread.position)):
        thread.machine.scheduler.wake(barrier.waiters)


@handles("barrier_arrive")
def _barrier_arrive(thread, op, values):
    if op.params.get("has_user_predicate"):
        *values, predicate = values
        if not predicate:
            return []
    yield thread.busy()
    _arrive(thread, _barrier(op, values))
    return []


@handles("barrier_wait")
def _barrier_wait(thread, op, values):
    yield thread.busy()
    barrier = _barrier(op, values)
    sched = thread.machine.scheduler
    start = sched.now
    phase = barrier.next_phase(thread.warpgroup, thread.warp)
    while barrier.phase <= phase:
        yield scheduler.Wait(
            barrier.waiters,
            lambda: barrier.phase > phase,
            f"{barrier.name}, phase {phase}",
            barrier.num_arrivals,
            lambda: barrier.arrived,
            op.where,
        )
    thread.clock.join(barrier.observe(thread.warpgroup, thread.warp, phase))
    thread.record("barrier_wait", start, op.where, name=barrier.name, value=phase)
    return []


@handles("barrier_arrive_and_wait")
def _barrier_arrive_and_wait(thread, op, values):
    yield thread.busy()
    _arrive(thread, _barrier(op, values))
    return (yield from _barrier_wait(thread, op, values))
