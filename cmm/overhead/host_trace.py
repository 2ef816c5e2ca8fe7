"""What does the host do while it starts a program?"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax

from cmm.recording import profiled

_WHOLE = "GpuExecutable::ExecuteThunks"
# Names of XLA's own spans, within `_WHOLE`, on the thread of each device; and what happens there.
_PARTS = {
    "Thunks::Prepare": "prepare: kernels ask for peers' addresses",
    "AcquireCollectiveCliques": "cliques: host threads meet",
    "AcquireCollectiveMemory": "memory: host threads meet, exchange addresses",
    "Thunks::Initialize": "initialize: addresses copied to the GPU",
    "RendezvousAfterInitialization": "rendezvous: host threads meet",
}
_REST = "launches, and the rest of the execution"


class HostSpan(NamedTuple):
    """A span on a thread of the host."""

    name: str
    duration_us: float


def host_parts_us(start: Callable, starts: int, devices: int) -> dict[str, float]:
    """Traces the host while it starts a program again and again.

    Args:
      start: starts it and returns its results.
      starts: how often.
      devices: number of GPUs, each of which has a thread that starts its part.

    Returns:
      What `split_host_us` does. The trace itself costs time.
    """
    run = lambda: jax.block_until_ready([start() for _ in range(starts)])
    spans = [
        HostSpan(event.name, event.duration_ns / 1e3)
        for plane in profiled(run, host_tracer_level=2).planes
        if plane.name.startswith("/host:")
        for line in plane.lines
        for event in line.events
    ]
    return split_host_us(spans, starts * devices)


def split_host_us(spans: Iterable[HostSpan], executions: int) -> dict[str, float]:
    """Returns the mean time of each part of an execution on one device's thread, by name, in the order of execution.

    Args:
      spans: spans of the host.
      executions: number of executions, each on each device's thread counted.

    Raises:
      ValueError: there are not that many executions among the spans.
    """
    spans = list(spans)
    whole = [span.duration_us for span in spans if _WHOLE in span.name]
    if len(whole) != executions:
        raise ValueError(f"{executions} spans {_WHOLE!r} were expected in the trace, found {len(whole)}.")
    parts = {
        title: sum(span.duration_us for span in spans if span.name == name) / executions
        for name, title in _PARTS.items()
    }
    return parts | {_REST: sum(whole) / executions - sum(parts.values())}
