"""The parts of the simulator by themselves: clocks, semaphores, barriers, products."""

import itertools
import time

import numpy as np
import pytest
from jax import lax

import cmm.interpret as ci
from cmm.interpret import arithmetic, clocks, products, races, scheduler, sync


def clock_of(position, num_threads=4):
    clock = clocks.Clock(num_threads)
    clock.seen[position] = 1
    return clock


def test_publishing_covers_what_was_before_and_not_what_is_after():
    sender, receiver = clock_of(0), clock_of(1)
    before = int(sender.seen[0])
    receiver.join(sender.publish(0))
    after = int(sender.seen[0])
    assert receiver.seen[0] >= before
    assert receiver.seen[0] < after


def test_fence_is_needed_by_the_asynchronous_proxy_only():
    clock = clock_of(0)
    write = races.Access(True, 0, 1, None, ((0, 1),), (0, 0, "t"), "thread", None)
    read = races.Access(False, 0, 1, None, ((0, 1),), (0, 0, "t"), "thread", None)
    assert write.happened_before(clock, fenced=False)
    assert not write.happened_before(clock, fenced=True)
    assert read.happened_before(clock, fenced=True)
    clock.fence(0)
    assert write.happened_before(clock, fenced=True)


def test_asynchronous_operations_never_share_a_position():
    clock = clocks.Clock(1)
    clock.complete(7)
    clock.complete(1000)
    assert clock.knows_done(7) and clock.knows_done(1000)
    assert not clock.knows_done(8) and not clock.knows_done(999)


def test_wait_learns_the_shortest_prefix_only():
    semaphore = sync.Semaphore("s")
    first, second = clock_of(0), clock_of(1)
    semaphore.signal(1, first)
    semaphore.signal(1, second)
    known = semaphore.acquire(1, decrement=False)
    assert known.seen[0] == 1 and known.seen[1] == 0
    known = semaphore.acquire(2, decrement=False)
    assert known.seen[0] == 1 and known.seen[1] == 1


def test_decrement_moves_the_prefix_on():
    semaphore = sync.Semaphore("s")
    for position in range(3):
        semaphore.signal(1, clock_of(position))
    assert semaphore.acquire(1, decrement=True).seen.tolist() == [1, 0, 0, 0]
    assert semaphore.value == 2
    assert semaphore.acquire(1, decrement=True).seen.tolist() == [1, 1, 0, 0]
    assert not semaphore.reached(2)


def test_one_large_signal_satisfies_a_wait_alone():
    semaphore = sync.Semaphore("s")
    semaphore.signal(3, clock_of(0))
    semaphore.signal(1, clock_of(1))
    assert semaphore.acquire(3, decrement=False).seen[1] == 0
    assert semaphore.acquire(4, decrement=False).seen[1] == 1


def test_semaphore_tells_which_remote_signals_nobody_has_heard_of():
    semaphore, owner = sync.Semaphore("s"), clocks.Clock(4)
    remote = [races.Signal(clock_of(position), position, (position, 0, "t"), None) for position in range(2)]
    semaphore.signal(1, clock_of(0), remote[0])
    semaphore.signal(1, clock_of(1), remote[1])
    semaphore.signal(1, clock_of(2))  # By its own device.
    assert semaphore.unheard(owner) == remote
    owner.join(semaphore.acquire(1, decrement=True))
    assert semaphore.unheard(owner) == remote[1:]
    owner.join(semaphore.acquire(1, decrement=True))
    assert semaphore.unheard(owner) == []


def test_barrier_phase_and_late_waiter():
    barrier = sync.Barrier("b", 2)
    assert not barrier.arrive(clock_of(0))
    assert barrier.arrive(clock_of(1))
    assert barrier.observe(0, None, barrier.next_phase(0, None)).seen[1] == 1
    for _ in range(2):
        barrier.arrive(clock_of(0))
        barrier.arrive(clock_of(1))
    with pytest.raises(ci.BarrierError, match="phase 2 before"):
        barrier.observe(0, None, barrier.next_phase(0, None))


def test_warps_go_on_from_where_their_warpgroup_is():
    barrier = sync.Barrier("b", 1)
    barrier.arrive(clock_of(0))
    barrier.observe(0, None, 0)
    assert barrier.next_phase(0, 2) == 1
    barrier.arrive(clock_of(0))
    barrier.observe(0, 2, 1)
    assert barrier.next_phase(0, 2) == 2
    assert barrier.next_phase(0, 1) == 1


def found(accesses):
    """Adds (write, position, operation, region, clock) and returns reasons."""
    history, reasons = races.History("b", proxies=True), []
    for write, position, operation, region, clock in accesses:
        history.add(
            races.Access(write, position, int(clock.seen[position]), operation, region, (0, 0, "t"), "thread", None),
            clock,
            lambda name, reason, first, second: reasons.append(reason),
        )
    return reasons, history


def test_disjoint_regions_and_two_reads_do_not_race():
    a, b = clock_of(0), clock_of(1)
    low, high = ((0, 8), (0, 4)), ((0, 8), (4, 8))
    assert not found([(True, 0, None, low, a), (True, 1, None, high, b)])[0]
    assert not found([(False, 0, None, low, a), (False, 1, None, low, b)])[0]
    assert found([(True, 0, None, low, a), (False, 1, None, low, b)])[0]
    assert found([(False, 0, None, low, a), (True, 1, None, low, b)])[0]


def test_a_later_write_stands_for_what_it_covers_and_nothing_else():
    a = clock_of(0)
    whole, part = ((0, 8),), ((0, 4),)
    _, history = found([(True, 0, None, part, a), (False, 0, None, part, a), (True, 0, None, whole, a)])
    assert len(history.accesses) == 1
    _, history = found([(True, 0, None, whole, a), (True, 0, None, part, a)])
    assert len(history.accesses) == 2
    _, history = found([(True, 0, None, part, a), (False, 0, None, part, a)])
    assert len(history.accesses) == 2  # A read does not stand for a write.


def test_scheduler_runs_in_order_of_time():
    order = []
    sched = scheduler.Scheduler(None, 1.0, str)

    def body(name, seconds):
        yield seconds
        order.append(name)

    for name, seconds in (("slow", 2e-6), ("fast", 1e-6)):
        sched.spawn(scheduler.Task(name, body(name, seconds)))
    sched.at(1.5e-6, lambda: order.append("copy"))
    sched.run()
    assert order == ["fast", "copy", "slow"]


def test_scheduler_names_who_waits():
    sched = scheduler.Scheduler(None, 1.0, lambda where: f"line {where}")
    queue = []

    def body():
        yield scheduler.Wait(queue, lambda: False, "a flag", 3, lambda: 1, 17)

    sched.spawn(scheduler.Task("thread", body()))
    with pytest.raises(ci.DeadlockError) as e:
        sched.run()
    assert str(e.value.waiting[0]) == ("thread: a flag: value 1, awaits 3 at line 17")


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("m, k, n", [(1, 1, 1), (64, 64, 64), (37, 64, 256), (128, 64, 200), (3, 1024, 512)])
def test_product_in_blocks_is_the_product(m, k, n, dtype):
    rng = np.random.default_rng(0)
    lhs, rhs = (rng.integers(-3, 4, shape).astype(dtype) for shape in ((m, k), (k, n)))
    out = products.multiply(lhs, rhs)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, lhs.astype(np.int64) @ rhs.astype(np.int64))


@pytest.mark.parametrize("m, k, n", [(64, 64, 256), (128, 128, 128), (128, 64, 256)])
def test_product_keeps_to_its_thread(m, k, n):
    lhs, rhs = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
    time.sleep(0.1)  # Threads of earlier products spin for a while before they sleep.
    process_s, thread_s = time.process_time(), time.thread_time()
    for _ in range(300):
        products.multiply(lhs, rhs)
    process_s, thread_s = time.process_time() - process_s, time.thread_time() - thread_s
    assert process_s < 1.3 * thread_s


def test_division_of_scalars_rounds_to_zero():
    for a, b in itertools.product(map(np.int32, (-7, -6, 0, 6, 7)), map(np.int32, (-3, 2, 3))):
        quotient = arithmetic._div(a, b)
        assert (quotient, quotient.dtype) == (lax.div(a, b), np.int32)
