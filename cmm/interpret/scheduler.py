"""Which thread moves next: a discrete-event scheduler for coroutines.

Every simulated warpgroup (or warp) is a Python generator. It yields

- a number: "I am busy for so many seconds", or
- a `Wait`: "wake me when this condition may hold".

The scheduler resumes the task with the smallest virtual time. One thread of
Python does all the work, so a simulation is exactly reproducible: without a seed
every operation takes its nominal time; with a seed each duration is drawn from
an exponential distribution with that mean, which makes every runnable thread
able to overtake every other.

Virtual time orders events. It predicts no GPU's speed.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
import time
from collections.abc import Callable, Generator

from cmm.interpret import errors

# Polls that nothing answers. After so many the threads that poll are stuck,
# unless another thread is merely late.
_MAX_IDLE_POLLS = 2000
_MAX_POLL_SECONDS = 1e-4


class Wait:
    """A condition that a task sleeps on.

    Attributes:
      queue: list of sleeping tasks, kept by the object waited for.
      ready: tells whether the task may go on.
      what: name of the object waited for.
      awaited: the value needed, or None.
      value: returns the present value, or None.
      where: where in the kernel the wait stands.
    """

    __slots__ = ("queue", "ready", "what", "awaited", "value", "where")

    def __init__(self, queue, ready, what, awaited=None, value=lambda: None, where=None):
        self.queue = queue
        self.ready = ready
        self.what = what
        self.awaited = awaited
        self.value = value
        self.where = where


@dataclasses.dataclass(eq=False)
class Task:
    """One coroutine and where it stands.

    Attributes:
      name: how messages call it.
      body: the generator.
      time: virtual seconds at which it can run next.
      wait: what it sleeps on, None while it can run.
      where: place of its latest operation.
      on_done: queue of tasks that wait for its end.
    """

    name: str
    body: Generator
    time: float = 0.0
    wait: Wait | None = None
    done: bool = False
    where: object = None
    on_done: list | None = None
    poll_seconds: float = 0.0


class Scheduler:
    """Runs tasks and timed actions until all tasks are done.

    Args:
      seed: None for nominal durations, an int for random ones.
      timeout_s: wall seconds without progress after which threads count as stuck.
      source_line: turns places into text for error messages.
    """

    def __init__(self, seed: int | None, timeout_s: float, source_line: Callable[[object], str]):
        self._random = None if seed is None else random.Random(seed)
        self._timeout_s = timeout_s
        self._source_line = source_line
        self._heap: list = []
        self._count = 0
        self._asleep = 0  # Timed actions and sleepers that will still do something.
        self._idle_polls = 0
        self._last_progress = time.monotonic()
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.now = 0.0

    def duration(self, seconds: float) -> float:
        """The time that an operation of this nominal duration takes here."""
        if self._random is None:
            return seconds
        return self._random.expovariate(1.0) * seconds

    def spawn(self, task: Task) -> None:
        self.tasks.append(task)
        self._push(task.time, task)

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Calls `action` after so many virtual seconds: an asynchronous effect."""
        self._asleep += 1
        self._push(self.now + seconds, action)

    def sleep(self, seconds: float) -> Generator:
        """Sleeps exactly so long; others that poll meanwhile are not stuck."""
        self._asleep += 1
        yield seconds
        self._asleep -= 1
        self.progress()

    def wake(self, queue: list[Task]) -> None:
        """Something changed for the tasks that sleep in `queue`."""
        sleeping = [t for t in queue if not t.wait.ready()]
        if len(sleeping) < len(queue):  # A signal that helps nobody is no progress: threads could send them for ever.
            self.progress()
        for task in queue:
            if task.wait.ready():
                task.wait = None
                task.time = max(task.time, self.now)
                self._push(task.time, task)
        queue[:] = sleeping

    def progress(self) -> None:
        """A semaphore, a barrier or a thread's end changed what others can do."""
        self._idle_polls = 0
        self._last_progress = time.monotonic()

    def polled(self) -> float:
        """Counts a poll; returns how long the poller pauses before it goes on.

        A thread that polls in vain pauses longer each time, so that waiting for a
        late thread costs few polls.
        """
        self._idle_polls += 1
        task = self.current
        if self._idle_polls <= 1:
            task.poll_seconds = 0.0
        task.poll_seconds = min(max(2 * task.poll_seconds, 1e-7), _MAX_POLL_SECONDS)
        if self._idle_polls > _MAX_IDLE_POLLS and not self._asleep:
            raise self._stuck("Threads poll and nothing changes:")
        return task.poll_seconds

    def check_alive(self) -> None:
        """Called from loops that may never yield."""
        if time.monotonic() - self._last_progress > self._timeout_s:
            raise self._stuck(
                f"No semaphore, barrier or thread made progress for {self._timeout_s:g} s. If a thread is only slow, "
                "give simulate a longer deadlock_timeout_s. At work or waiting:"
            )

    def run(self) -> None:
        """Runs until every task is done.

        Raises:
          DeadlockError: nobody can move, or those who move change nothing.
        """
        self.progress()
        steps = 0
        while self._heap:
            self.now, _, item = heapq.heappop(self._heap)
            if not isinstance(item, Task):
                self._asleep -= 1
                item()
                continue
            self._step(item)
            steps += 1
            if steps % 256 == 0:
                self.check_alive()
        if any(not t.done for t in self.tasks):
            raise self._stuck("Deadlock: every thread that is left waits.")

    def _step(self, task: Task) -> None:
        self.current = task
        try:
            request = next(task.body)
        except StopIteration:
            task.done = True
            self.progress()
            if task.on_done is not None:
                self.wake(task.on_done)
            return
        if not isinstance(request, Wait):
            task.time = self.now + request
            self._push(task.time, task)
        elif request.ready():
            self._push(self.now, task)
        else:
            task.wait = request
            task.time = self.now
            request.queue.append(task)

    def _push(self, when: float, item) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, item))

    def _stuck(self, reason: str) -> errors.DeadlockError:
        waiting = []
        for task in self.tasks:
            if task.done:
                continue
            wait = task.wait
            if wait is None:
                waiting.append(errors.Waiting(task.name, "running", None, None, self._source_line(task.where)))
            else:
                waiting.append(
                    errors.Waiting(task.name, wait.what, wait.value(), wait.awaited, self._source_line(wait.where))
                )
        return errors.DeadlockError(reason, waiting)
