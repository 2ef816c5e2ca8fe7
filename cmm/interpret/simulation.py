"""`simulate`: the context in which GPU kernels run on simulated devices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import threading
from collections.abc import Iterator, Sequence

import jax

from cmm.interpret import _jax_private as jax_private, errors, launch, record
from cmm.interpret.machine import Machine


@dataclasses.dataclass(frozen=True)
class Late:
    """Threads that start late.

    Args:
      seconds: virtual seconds of sleep at the start of the kernel. An operation
        takes about 1e-7, a copy to a peer 2e-6.
      device, cta, thread: which threads; None means all.
    """

    seconds: float
    device: int | None = None
    cta: int | None = None
    thread: int | None = None

    def applies(self, thread) -> bool:
        return (
            self.device in (None, thread.device)
            and self.cta in (None, thread.cta.number)
            and self.thread in (None, thread.warpgroup)
        )


@dataclasses.dataclass(frozen=True)
class Options:
    """See `simulate`."""

    detect_races: bool
    on_race: str
    seed: int | None
    late: tuple[Late, ...]
    ctas_per_device: int | None
    core_count: int
    deadlock_timeout_s: float
    check_proxy_fences: bool

    def call_seed(self, call: int) -> int | None:
        return None if self.seed is None else self.seed * 1_000_003 + call


class Simulation:
    """What `simulate` yields: results of the kernel calls in its block.

    Attributes:
      events: `Event`s of all calls so far, in causal order.
      races: `Race`s found so far.
    """

    def __init__(self, options: Options):
        self._options = options
        self._recorder = record.Recorder()
        self._meetings: dict = {}  # (plan, number of the call) -> meeting
        self._visits: dict = {}  # plan -> device -> number of its latest call
        self._lock = threading.Lock()
        self.races: list = []
        self._failure: BaseException | None = None

    @property
    def events(self) -> list[record.Event]:
        return self._recorder.events

    def bytes_sent(self, *, device: int | None = None, peer: int | None = None) -> int:
        """Bytes written to other devices' memory, by `device`, to `peer`."""
        return record.bytes_sent(self.events, device=device, peer=peer)

    def run(self, function, *args, **kwargs):
        """Calls a function of kernels and waits for it.

        Args:
          function: usually a jitted `shard_map`.
          *args, **kwargs: its arguments.

        Returns:
          What the function returns, ready.

        Raises:
          RaceError, DeadlockError, BarrierError, LaunchError: what went wrong in a
            kernel; or the exception that the kernel itself raised.
        """
        try:
            result = jax.block_until_ready(function(*args, **kwargs))
        finally:
            self.check()
        return result

    def check(self) -> None:
        """Raises what went wrong in a kernel so far, once.

        Raises:
          RaceError, DeadlockError, BarrierError, LaunchError: or the exception that
            a kernel raised.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def attend(self, plan, device: int, inputs):
        """Called by each device that reaches a kernel; None if kernels failed."""
        with self._lock:
            visits = self._visits.setdefault(plan, {})
            visits[device] = visits.get(device, -1) + 1
            key = plan, visits[device]
            meeting = self._meetings.setdefault(key, launch.Meeting(plan.num_devices))
        try:
            return meeting.attend(device, inputs, functools.partial(self._call, plan))
        except errors.LaunchError as e:
            self._failure = self._failure or e
            return None
        finally:
            with self._lock:
                if meeting.leave():
                    del self._meetings[key]

    def _call(self, plan, inputs):
        nothing = [None] * plan.num_devices
        if self._failure is not None:
            return nothing
        machine = None
        try:
            machine = Machine(plan, self._options, self._recorder, inputs)
            outputs = machine.run()
            if machine.races and self._options.on_race == "raise":
                raise errors.RaceError(machine.races)
            return outputs
        except Exception as e:
            self._failure = e
            return nothing
        finally:
            if machine is not None:
                self.races += machine.races


_active: list[Simulation] = []


def is_active() -> bool:
    """Says whether this code runs inside a `simulate` block."""
    return bool(_active)


def simulated_core_count() -> int:
    """Returns how many SMs a simulated GPU has: the option `core_count` of the innermost `simulate` block."""
    return _current()._options.core_count


def _current() -> Simulation:
    if not _active:
        raise errors.LaunchError("this function was traced under cmm.interpret.simulate; call it inside such a block")
    return _active[-1]


@contextlib.contextmanager
def simulate(
    *,
    detect_races: bool = True,
    on_race: str = "raise",
    seed: int | None = None,
    late: Late | Sequence[Late] = (),
    ctas_per_device: int | None = None,
    core_count: int = 1,
    deadlock_timeout_s: float = 10.0,
    check_proxy_fences: bool = False,
) -> Iterator[Simulation]:
    """Runs Mosaic GPU kernels of this block on simulated devices.

    Derivatives work, but not within `jax.checkpoint`: JAX refuses host callbacks
    there. Functions are traced anew inside the block, so jitted ones may be shared with
    code that runs on GPUs. All CTAs of all devices run concurrently, each warpgroup
    a coroutine; copies and tile products complete some time after they are issued.

    Args:
      detect_races: whether to look for races.
      on_race: "raise" raises a `RaceError` at the end of the kernel call that has
        races; "record" only keeps them in `Simulation.races`.
      seed: None gives every operation its nominal time; an int draws random times,
        so that each seed is another, reproducible, order of threads.
      late: threads that start late.
      ctas_per_device: how many CTAs a device runs at a time; the others start as
        these end, as on a GPU with so many places. None: all at once.
      core_count: how many SMs a device has, for kernels that ask
        `simulated_core_count`.
      deadlock_timeout_s: wall seconds without progress after which spinning
        threads count as stuck. Threads that all wait are found at once.
      check_proxy_fences: whether a TMA load of global memory that a thread, or another
        CTA's TMA, has written in this kernel is a race unless `fence.proxy.async.global`
        comes between what orders the two and the load. PTX promises nothing without it
        (`cmm.hopper.fences` has the argument). What is missing is a promise, not a
        fault that was seen, and kernels of JAX do without: so it is not checked by
        default.

    Yields:
      A `Simulation`.

    Raises:
      UnsupportedJaxError: on entry, if this JAX lacks what the simulator needs.
      ValueError: on entry, an option has no meaning.
      RaceError, DeadlockError, BarrierError, LaunchError: at the end of the block,
        what went wrong in a kernel and has not been raised by `Simulation.run`.

    Source: the memory model of the PTX ISA (proxies, release and acquire), and JAX's
    documentation of Pallas:Mosaic GPU.
    """
    if on_race not in ("raise", "record"):
        raise ValueError(f'on_race must be "raise" or "record", got {on_race!r}')
    if ctas_per_device is not None and ctas_per_device < 1:
        raise ValueError(f"{ctas_per_device=} must be at least 1")
    if core_count < 1:
        raise ValueError(f"{core_count=} must be at least 1")
    if check_proxy_fences and not detect_races:
        raise ValueError(f"{check_proxy_fences=} finds races, so it needs detect_races=True")
    if not deadlock_timeout_s > 0:
        raise ValueError(f"{deadlock_timeout_s=} must be positive")
    seed = None if seed is None else operator.index(seed)
    late = (late,) if isinstance(late, Late) else tuple(late)
    if any(not one.seconds >= 0 for one in late):
        raise ValueError(f"{late=} must be late by 0 seconds or more")
    jax.effects_barrier()  # Kernels of an outer block that nobody has waited for belong to it.
    options = Options(
        detect_races, on_race, seed, late, ctas_per_device, core_count, deadlock_timeout_s, check_proxy_fences
    )
    sim = Simulation(options)
    interpret = functools.partial(launch.interpret, _current)
    with jax_private.hooked(interpret, core_count):
        _active.append(sim)
        try:
            try:
                yield sim
            finally:
                # Calls that nobody has waited for still belong to the block.
                jax.effects_barrier()
                sim.check()
        finally:
            _active.remove(sim)
