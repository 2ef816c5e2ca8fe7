"""TMA copies.

A copy reads some virtual time after it is issued and writes some time after that,
so a kernel that does not wait can see old values. For the race detector it is done
only for a thread that has waited for it, however long ago it was.
"""

from __future__ import annotations

from cmm.interpret import memory, scheduler
from cmm.interpret.evaluate import handles
from cmm.interpret.operations import peer_of, view
from cmm.interpret.threads import TIMING, CopyGroup


def _refuse(op, *names):
    for name in names:
        if op.params.get(name):
            raise NotImplementedError(f"{name}= of {op.name} is not simulated")


@handles("copy_gmem_to_smem")
def _load(thread, op, values):
    params, machine = op.params, thread.machine
    if not params["has_barrier"]:
        raise NotImplementedError("copy_gmem_to_smem without a barrier")
    if machine.plan.ctas_per_cluster > 1:
        _refuse(op, "collective_axes", "leader_tracked")
    if params.get("has_user_predicate"):
        *values, predicate = values
        if not predicate:
            return []
    yield thread.busy()
    (source, target, barriers), rest = values[:3], values[3:]
    n_src = params["src_transforms_treedef"].num_leaves
    n_dst = params["dst_transforms_treedef"].num_leaves
    src = view(thread, source, params["src_transforms_treedef"].unflatten(rest[:n_src]))
    dst = view(thread, target, params["dst_transforms_treedef"].unflatten(rest[n_src : n_src + n_dst]))
    barrier = memory.pick(barriers, params["barrier_transforms_treedef"].unflatten(rest[n_src + n_dst :]))

    operation = machine.new_operation()
    known = thread.clock.publish(thread.position)
    thread.access(src, False, op.where, operation, "TMA", known)
    thread.access(dst, True, op.where, operation, "TMA", known)
    peer = peer_of(thread, src)
    sched, start = machine.scheduler, machine.scheduler.now

    def finish(values):
        dst.write(values.reshape(dst.shape))
        known.complete(operation)
        thread.record_move("load" if peer is None else "fetch", start, op.where, peer, src)
        if barrier.arrive(known):
            sched.wake(barrier.waiters)

    latency = TIMING.local_copy_s if peer is None else TIMING.remote_copy_s

    def read():
        values = src.read(pad=True)
        sched.at(thread.busy(latency / 2), lambda: finish(values))

    sched.at(thread.busy(latency / 2), read)
    return []


@handles("copy_smem_to_gmem")
def _store(thread, op, values):
    params, machine = op.params, thread.machine
    _refuse(op, "reduction_op")
    source, target, *rest = values
    if params["has_user_predicate"]:
        *rest, predicate = rest
        if not predicate:
            return []
    yield thread.busy()
    n_src = params["src_transforms_treedef"].num_leaves
    src = view(thread, source, params["src_transforms_treedef"].unflatten(rest[:n_src]))
    dst = view(thread, target, params["dst_transforms_treedef"].unflatten(rest[n_src:]))
    group = thread.open_group
    reading, writing = machine.new_operation(), machine.new_operation()
    thread.access(src, False, op.where, reading, "TMA")
    thread.access(dst, True, op.where, writing, "TMA")
    group.reads.append(reading)
    group.writes.append(writing)
    group.reads_left += 1
    group.writes_left += 1
    if params["commit_group"]:
        _commit(thread)
    peer = peer_of(thread, dst)
    sched, start = machine.scheduler, machine.scheduler.now

    def finish(values):
        dst.write(values.reshape(dst.shape), clip=True)
        group.writes_left -= 1
        thread.record_move("store" if peer is None else "send", start, op.where, peer, dst)
        sched.wake(thread.copy_waiters)

    latency = TIMING.local_copy_s if peer is None else TIMING.remote_copy_s

    def read():
        values = src.read()
        group.reads_left -= 1
        sched.at(thread.busy(latency), lambda: finish(values))
        sched.wake(thread.copy_waiters)

    sched.at(thread.busy(latency / 2), read)
    return []


def _commit(thread) -> None:
    thread.groups.append(thread.open_group)
    thread.open_group = CopyGroup()


@handles("commit_group")
def _commit_group(thread, op, values):
    del op, values
    yield thread.busy()
    _commit(thread)
    return []


@handles("wait_smem_to_gmem")
def _wait_store(thread, op, values):
    del values
    n, read_only = int(op.params["n"]), op.params["wait_read_only"]
    yield thread.busy()
    old = thread.groups[: max(0, len(thread.groups) - n)]

    def ready():
        return all((g.reads_left if read_only else g.writes_left) == 0 for g in old)

    while not ready():
        yield scheduler.Wait(thread.copy_waiters, ready, f"copies out of shared memory, all but {n}", where=op.where)
    for group in old:
        for operation in group.reads + ([] if read_only else group.writes):
            thread.clock.complete(operation)
    if not read_only:
        thread.groups = thread.groups[len(old) :]
    return []
