"""What did a GPU do in the calls of a CUDA graph, by PyTorch's profiler? Needs no PyTorch."""

import collections
from collections.abc import Sequence

import numpy as np

from cmm.recording import GpuEvent, busy_us, matmul_us, split_calls

GRAPH_CALLS = 24
_NEARLY_ALL = 0.97  # What a replay does once, at its start, belongs to no call.
_NAME_CHARACTERS = 60
_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


def gpu_events(trace: dict, rank: int) -> list[GpuEvent]:
    """Returns the kernels, copies and fills of a trace in Chrome's format, in order of their start.

    Args:
      trace: what `torch.profiler` exports for the process of one GPU.
      rank: the GPU that an event is counted to where it names none.

    Source: libkineto, `output_json.cpp` and `CuptiActivity.cpp`. Processes of the trace are GPUs and its threads are
    streams; arguments differ by category. A copy between GPUs has "fromDevice", "inDevice" and "toDevice".
    """
    events = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X" or event.get("cat") not in _GPU_CATEGORIES:
            continue
        arguments = event.get("args", {})
        device = arguments.get("device", arguments.get("inDevice", event.get("pid", rank)))
        stream = arguments.get("stream", event.get("tid"))
        end_us = event["ts"] + event.get("dur", 0)
        events.append(GpuEvent(device, f"Stream #{stream}", event["name"], event["ts"], end_us))
    return sorted(events, key=lambda event: event.start_us)


def is_complete(events: Sequence[GpuEvent]) -> bool:
    """Whether the events hold equally many products for each of `GRAPH_CALLS` calls."""
    counts = collections.Counter(event.role for event in events)
    return counts["matmul"] > 0 and counts["matmul"] % GRAPH_CALLS == 0


def call_times_us(events: Sequence[GpuEvent], rank: int) -> tuple[float, float]:
    """Returns the busy time and the kernel time of one of `GRAPH_CALLS` calls on one GPU.

    Args:
      events: what the GPU did in one replay, in order.
      rank: the GPU, for the message.

    Raises:
      RuntimeError: the events are not those of so many equal calls.
    """
    calls = split_calls(list(events), GRAPH_CALLS)
    held_us, all_us = sum(map(busy_us, calls)), busy_us(list(events))
    if not is_complete(events) or held_us < _NEARLY_ALL * all_us:
        counts = dict(collections.Counter(event.name[:_NAME_CHARACTERS] for event in events).most_common(8))
        raise RuntimeError(
            f"{len(events)} recorded events of GPU {rank} are not {GRAPH_CALLS} equal calls, which hold {held_us:.0f} "
            f"of {all_us:.0f} us: {counts}."
        )
    steady = calls[1:]
    return float(np.median([busy_us(call) for call in steady])), float(np.median([matmul_us(call) for call in steady]))
