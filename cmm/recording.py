"""What ran when on every GPU: kernels and copies, as JAX's profiler records them."""

import dataclasses
import pathlib
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from cmm.completeness import IncompleteRecording
from cmm.timeline import Kind, Span

# Parts of the names of kernels that multiply: those of cuBLAS, CUTLASS, cuDNN, and XLA's and Pallas' own.
_MATMUL = re.compile("gemm|gemv|xmma|nvjet|cutlass|cublas|cudnn_generated|splitK|dot_general|fusion_dot|mosaic")
# XLA names the kernel of a mark after its operation, which no method of this package has.
_MARK = "cosine"


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
        return "matmul" if _MATMUL.search(self.name) else "memory"


def record(run: Callable[[], object], wait: Callable = jax.block_until_ready) -> list[GpuEvent]:
    """Runs `run` under JAX's profiler and returns every kernel and copy that it caused, in order of their start.

    Args:
      run: starts work on the GPUs and returns the results to wait for.
      wait: waits for them.

    Returns:
      The events of all GPUs; empty where there is no GPU.
    """
    profile = profiled(lambda: wait(run()))
    events = [event for plane in profile.planes for event in _gpu_events(plane)]
    return sorted(events, key=lambda event: event.start_us)


def profiled(run: Callable[[], object], host_tracer_level: int = 0) -> jax.profiler.ProfileData:
    """Runs `run` under JAX's profiler, and returns what that has seen: the GPUs, and of the host what the level says.

    `run` waits for what it has started.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = host_tracer_level
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        return jax.profiler.ProfileData.from_file(str(file))


def make_mark(mesh: Mesh) -> Callable[[], None]:
    """Returns a function that runs a tiny kernel of a known name on every device of the mesh, and waits for it."""
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    zeros = jax.device_put(np.zeros(mesh.size, np.float32), sharding)
    program = jax.jit(jnp.cos, out_shardings=sharding).lower(zeros).compile()
    return lambda: jax.block_until_ready(program(zeros))


def record_in_turn(
    runs: Sequence[tuple[Callable[[], object], Callable]], mark: Callable[[], None], gpus: int
) -> list[list[GpuEvent]]:
    """Records several pieces of work in one session, which costs far more than most of what it records.

    Args:
      runs: pairs of what starts work and what waits for it, as `record` takes them. Each ends before the next begins.
      mark: runs between them (see `make_mark`).
      gpus: number of GPUs on which marks run.

    Returns:
      The events of each piece of work.

    Raises:
      IncompleteRecording: the marks are not all in it, so that nobody can tell what belongs to which.
    """

    def run_all():
        for run, wait in runs:
            mark()
            wait(run())
        mark()

    return split_at_marks(record(run_all, wait=lambda _: None), len(runs), gpus)


def split_at_marks(events: Sequence[GpuEvent], parts: int, gpus: int) -> list[list[GpuEvent]]:
    """Splits events, in order of their start, into those between one mark and the next on the same GPU.

    Raises:
      IncompleteRecording: not all of so many GPUs have one mark more than there are parts, or events are between no
        two marks.
    """
    split: list[list[GpuEvent]] = [[] for _ in range(parts)]
    marks: Counter[int] = Counter()
    outside = 0
    for event in events:
        part = marks[event.device] - 1
        if _MARK in event.name:
            marks[event.device] += 1
        elif 0 <= part < parts:
            split[part].append(event)
        else:
            outside += 1
    if outside or len(marks) != gpus or set(marks.values()) != {parts + 1}:
        raise IncompleteRecording(
            f"A recording of {parts} programs should hold {parts + 1} marks on each GPU of {gpus}, it holds "
            f"{dict(marks)} by GPU and {outside} events outside of them."
        )
    return split


def by_gpu(events: Sequence[GpuEvent]) -> dict[int, list[GpuEvent]]:
    """Returns the events of each GPU that has some, in the order of `events`."""
    found: dict[int, list[GpuEvent]] = {}
    for event in events:
        found.setdefault(event.device, []).append(event)
    return found


def split_calls(events: list[GpuEvent], calls: int) -> list[list[GpuEvent]]:
    """Splits the events of one GPU into those of each of `calls` equal calls.

    Calls follow each other in order, so of `n * calls` events with the same name the first `n` belong to the first
    call. A compiler may choose another kernel for the same work in some calls: names whose events do not divide so are
    taken together by their role, and divided if they do so together. What is left belongs to no call in particular
    and is left out.
    """
    by_name = _grouped(events, lambda event: event.name)
    uneven = [event for same in by_name.values() if len(same) % calls for event in same]
    by_role = _grouped(sorted(uneven, key=lambda event: event.start_us), lambda event: event.role)
    split: list[list[GpuEvent]] = [[] for _ in range(calls)]
    for same in (*by_name.values(), *by_role.values()):
        if len(same) % calls == 0:
            for index, event in enumerate(same):
                split[index * calls // len(same)].append(event)
    return [sorted(call, key=lambda event: event.start_us) for call in split]


def _grouped(events, key):
    groups: dict[str, list[GpuEvent]] = {}
    for event in events:
        groups.setdefault(key(event), []).append(event)
    return groups


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


def others_us(events: list[GpuEvent]) -> dict[str, float]:
    """Returns the added durations of all events that neither multiply, send nor wait, by their names, longest first.

    If a product is missing in a recording, its kernel may be among them, under a name that nobody knew.
    """
    total_us: Counter[str] = Counter()
    for event in events:
        if event.role == "memory":
            total_us[event.name] += event.end_us - event.start_us
    return dict(total_us.most_common())


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
