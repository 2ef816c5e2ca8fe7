"""What ran when on every GPU: kernels and copies, as JAX's profiler records them."""

import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Callable

import jax

from cmm.timeline import Kind, Span


@dataclasses.dataclass(frozen=True)
class GpuEvent:
    """One kernel or copy on one GPU. Times are in microseconds on a clock that all GPUs of the recording share.

    Attributes:
      device: hardware index of the GPU on its host.
      stream: the CUDA stream, as text.
      name: name of the kernel, or "MemcpyD2D" and the like.
      start_us: start.
      end_us: end.
    """

    device: int
    stream: str
    name: str
    start_us: float
    end_us: float

    @property
    def role(self) -> str:
        """What it does for the call.

        "matmul"; "transfer" between GPUs; "barrier", in which GPUs wait for each other; or "memory" for all that only
        fills or moves a GPU's own memory. A kernel that multiplies and sends is a "matmul".
        """
        if self.name.startswith(("nccl", "MemcpyP2P")):
            return "transfer"
        if "MultiGpuBarrier" in self.name:  # XLA's, before kernels that reach into their peers' memory.
            return "barrier"
        return "matmul" if re.search("gemm|nvjet|cutlass|splitK|dot_general|mosaic", self.name) else "memory"


def record(run: Callable[[], object], wait: Callable = jax.block_until_ready) -> list[GpuEvent]:
    """Runs `run` under JAX's profiler and returns every kernel and copy that it caused, in order of their start.

    Args:
      run: starts work on the GPUs and returns the results to wait for.
      wait: waits for them.

    Returns:
      The events of all GPUs; empty where there is no GPU.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            wait(run())
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
    events = [event for plane in profile.planes for event in _gpu_events(plane)]
    return sorted(events, key=lambda event: event.start_us)


def split_calls(events: list[GpuEvent], calls: int) -> list[list[GpuEvent]]:
    """Splits the events of one GPU into those of each of `calls` equal calls.

    Calls follow each other in order, so of `n * calls` events with the same name the first `n` belong to the first
    call. Events whose number is not a multiple of `calls` belong to no call in particular and are left out.
    """
    by_name: dict[str, list[GpuEvent]] = {}
    for event in events:
        by_name.setdefault(event.name, []).append(event)
    split: list[list[GpuEvent]] = [[] for _ in range(calls)]
    for same in by_name.values():
        if len(same) % calls == 0:
            for index, event in enumerate(same):
                split[index * calls // len(same)].append(event)
    return [sorted(call, key=lambda event: event.start_us) for call in split]


def busy_us(events: list[GpuEvent]) -> float:
    """Returns the time in which at least one of the events runs. Time in which two overlap counts once."""
    total, covered_until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start_us):
        total += max(0.0, event.end_us - max(event.start_us, covered_until))
        covered_until = max(covered_until, event.end_us)
    return total


def matmul_us(events: list[GpuEvent]) -> float:
    """Returns the kernel time of one call on one GPU: the durations of its matmul kernels, added up.

    A method that is one kernel has one of them. A ring in plain JAX has one for each product; transfers, writes of
    partial results and gaps between kernels count in the call time only.
    """
    return sum(event.end_us - event.start_us for event in events if event.role == "matmul")


# By role: the lane and kind of its spans. A lane "compute" of matmuls alone shows when the tensor cores idle.
_LANES: dict[str, tuple[str, Kind]] = {
    "matmul": ("compute", "compute"),
    "transfer": ("link", "send"),
    "barrier": ("barrier", "wait"),
    "memory": ("memory", "compute"),
}
_LABELS = {"AllGather": "all-gather", "SendRecv": "send, receive", "MemcpyP2P": "copy to peer"}


def to_spans(call: dict[int, list[GpuEvent]]) -> list[Span]:
    """Turns the events of one call on every GPU into spans that `cmm.plots.draw_timeline` draws.

    Args:
      call: for each device its events in this call.
    """
    start_us = min(event.start_us for events in call.values() for event in events)
    return [
        Span(
            device=device,
            lane=_LANES[event.role][0],
            kind=_LANES[event.role][1],
            start_us=round(event.start_us - start_us, 2),
            end_us=round(event.end_us - start_us, 2),
            label=_label(event),
        )
        for device, events in sorted(call.items())
        for event in events
    ]


def _label(event: GpuEvent) -> str:
    if event.role == "transfer":
        return next((label for part, label in _LABELS.items() if part in event.name), event.name)
    if event.role in ("matmul", "barrier"):
        return event.role
    return "write result" if "dynamic_update_slice" in event.name else event.name.partition("(")[0]


def _gpu_events(plane):
    match = re.fullmatch(r"/device:GPU:(\d+)", plane.name)
    if not match:
        return
    for line in plane.lines:
        if not line.name.startswith("Stream"):  # Other lines repeat the same events, grouped by module and op.
            continue
        for event in line.events:
            start_us = event.start_ns / 1e3
            yield GpuEvent(int(match[1]), line.name, event.name, start_us, start_us + event.duration_ns / 1e3)
