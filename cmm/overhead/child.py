"""`python -m cmm.overhead.child PLAN`: how long do some variants take in this process?

The plan is JSON (see `Plan`). Each result is an event on standard output (`cmm.bench.children`), so that nothing is
lost when a later variant hangs. `cmm.overhead.__main__` starts it and follows its events.
"""

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence

import jax

from cmm import devices
from cmm.bench.children import say
from cmm.measure import blocked_time_us, spread, wall_time_us
from cmm.overhead import programs
from cmm.overhead.host_trace import host_parts_us
from cmm.overhead.terms import gpu_parts_us
from cmm.provenance import machine, versions
from cmm.recording import record
from cmm.results import Spread
from cmm.roofline import Problem

# All variants are measured in one pass, then in the next: what the machine does meanwhile hits all of them.
_PASSES, _ROUNDS = 4, 5
_STARTS_IDLE = 10
_REASON_CHARACTERS = 400
_RECORDED_STARTS = 12
# Variants of which the GPUs are recorded, and those of which the host is traced: both slow the host down.
_RECORDED = ("kernel_1", "kernel_8")
_TRACED = ("kernel_1", "kernel_8", "gather_1", "stand_in_1")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
      axis_size: number of devices, `None` for all.
      m_shard, k, n_shard, dtype: the problem (see `cmm.roofline.Problem`).
      kernel: name of the method in `cmm.METHODS`.
      done: names of variants that are left out (see `cmm.overhead.programs.variants`).
      until: time of `time.time()` after which no further variant is built, and no further pass begins.
      simulate: use simulated devices.
    """

    axis_size: int | None
    m_shard: int
    k: int
    n_shard: int
    dtype: str
    kernel: str = "pallas_fast"
    done: Sequence[str] = ()
    until: float = float("inf")
    simulate: bool = False


@dataclasses.dataclass(frozen=True)
class Measured:
    """Times of one variant in microseconds.

    Attributes:
      wall_us: per call, on the host's clock, in a long chain of starts.
      returns_us: per start, until it returns, in that chain.
      idle_returns_us: per start, until it returns, when GPUs have nothing else to do. They are waited for each time.
      idle_us: per start, until GPUs are done, likewise.
      calls: calls in one program.
    """

    wall_us: Spread
    returns_us: Spread
    idle_returns_us: Spread
    idle_us: Spread
    calls: int

    @classmethod
    def of(cls, samples: Sequence[dict[str, list[float]]], calls: int) -> "Measured":
        """Returns the spreads over all rounds of all samples (see `sample`)."""
        spreads = {name: spread([time_us for one in samples for time_us in one[name]]) for name in samples[0]}
        return cls(**spreads, calls=calls)


def main(arguments=None) -> int:
    """Measures what a plan says; returns the exit status."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    with open(path) as file:
        plan = Plan(**json.load(file))
    found = devices.find_devices(plan.axis_size, simulate=plan.simulate)
    mesh = devices.ring_mesh(found)
    simulated = devices.is_simulated(found)
    say("machine", devices=mesh.size, machine=machine(mesh), versions=versions(), simulated=simulated)
    problem = Problem(mesh.size, plan.m_shard, plan.k, plan.n_shard, plan.dtype)
    built = _built(plan, problem, mesh)
    passes = 1 if simulated else _PASSES
    samples = {name: [] for name in built}
    for number in range(passes):
        for name, (variant, started) in built.items():
            if number and time.time() >= plan.until:
                break
            say("begin", name=name, title=variant.title)
            samples[name].append(sample(started.start, variant.calls, short=simulated))
    for name, (variant, _) in built.items():
        times = dataclasses.asdict(Measured.of(samples[name], variant.calls))
        say("measured", name=name, title=variant.title, times=times)
    for name, (variant, started) in built.items():
        if not simulated and name in _RECORDED:
            _say_parts("gpu_parts", name, _gpu_parts, started.start, variant.calls)
        if not simulated and name in _TRACED:
            _say_parts("host_parts", name, host_parts_us, started.start, _RECORDED_STARTS, mesh.size)
    say("end")
    return 0


def _built(plan, problem, mesh) -> dict:
    """Returns variants with their programs, compiled, run once and checked; says which are left out, and why."""
    built = {}
    for name, variant in programs.variants(mesh.size, plan.kernel).items():
        if name in plan.done:
            continue
        told = {"name": name, "title": variant.title}
        if time.time() >= plan.until:
            say("skipped", reason="time is up", **told)
            continue
        say("begin", **told)
        try:
            started = programs.build(variant, problem, mesh)
            jax.block_until_ready(started.start())
            started.check()
        except programs.WrongResult as error:
            say("failed", reason=str(error), **told)
            continue
        except (ValueError, NotImplementedError) as error:
            say("skipped", reason=f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS], **told)
            continue
        built[name] = variant, started
    return built


def sample(start, calls: int, short: bool = False) -> dict[str, list[float]]:
    """Times a program on the host's clock, a few rounds in a row.

    Args:
      start: starts it and returns its results.
      calls: number of calls in it.
      short: a single round, for simulated devices.

    Returns:
      A list for each spread of `Measured`.
    """
    few, many = (1, 2) if short else (max(2, 16 // calls), max(10, 144 // calls))
    # A difference of two short chains may come out below nothing.
    wall_us = lambda: blocked_time_us(start, [()]) if short else wall_time_us(start, [()], few, many)
    rounds = range(1 if short else _ROUNDS)
    idle = [_idle_us(start) for _ in range(1 if short else _STARTS_IDLE)]
    return {
        "wall_us": [wall_us() / calls for _ in rounds],
        "returns_us": [_returns_us(start, many) for _ in rounds],
        "idle_returns_us": [returned for returned, _ in idle],
        "idle_us": [ended for _, ended in idle],
    }


def _returns_us(start, starts) -> float:
    began = time.perf_counter()
    for _ in range(starts):
        results = start()
    returned = time.perf_counter()
    jax.block_until_ready(results)
    return (returned - began) * 1e6 / starts


def _idle_us(start) -> tuple[float, float]:
    began = time.perf_counter()
    results = start()
    returned = time.perf_counter()
    jax.block_until_ready(results)
    return (returned - began) * 1e6, (time.perf_counter() - began) * 1e6


def _gpu_parts(start, calls) -> dict[str, float]:
    events = record(lambda: [start() for _ in range(_RECORDED_STARTS)])
    by_device = {event.device: [] for event in events}
    for event in events:
        by_device[event.device].append(event)
    parts = [gpu_parts_us(of_device, _RECORDED_STARTS, calls) for of_device in by_device.values()]
    # The mean over GPUs: what one of them waits for another one in a barrier, the other one computes.
    return {name: statistics.mean(part[name] for part in parts) for name in parts[0]}


def _say_parts(event, name, parts, *arguments) -> None:
    """Says what was recorded, or why that failed: times on the host's clock stand without it."""
    try:
        say(event, name=name, parts=parts(*arguments))
    except (ValueError, RuntimeError, IndexError) as error:
        say(f"no_{event}", name=name, reason=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
