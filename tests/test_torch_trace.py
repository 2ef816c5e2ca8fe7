"""Times of PyTorch's programs come from the GPU events of its trace, split into equal calls."""

import pytest

from cmm.peers import torch_trace
from cmm.recording import GpuEvent


def _traced(cat, name, ts, dur, pid=1, tid=7, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


# What libkineto writes for each category. A copy between GPUs says "inDevice"; arguments may be missing altogether.
TRACE = [
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0.0, "args": {"name": "python"}},
    _traced("cpu_op", "aten::mm", 1, 2, 4711, 4711),
    _traced("cuda_runtime", "cudaGraphLaunch", 1, 1, 4711, 4711, cbid=311, correlation=3),
    _traced("gpu_user_annotation", "fused", 2, 90),
    _traced("cuda_sync", "Stream Wait Event", 3, 1, device=1, stream=7),
    _traced("overhead", "Buffer Flush", 99, 1, pid=-1, tid=0),
    _traced("Trace", "PyTorch Profiler (0)", 0, 99, "Spans", "PyTorch Profiler"),
    {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 5, "pid": 4711, "tid": 4711, "ts": 1},
    {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 4711, "tid": 4711, "ts": 4, "args": {}},
    {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 100},
    {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "pid": 1, "tid": 9, "ts": 40, "dur": 1.25},
    _traced("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 30.5, 2, tid=13, fromDevice=0, inDevice=1, toDevice=1),
    _traced("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 20, 1, device=1, stream=7, bytes=8),
    _traced("kernel", "nvjet", 10, 5.5, device=1, context=1, stream=7, grid=[132, 1, 1]),
    {"ph": "X", "cat": "kernel", "name": "barrier_kernel", "ts": 50, "dur": 1},
]


def test_a_trace_of_torch_holds_events_of_the_gpu():
    found = [
        (event.name, event.device, event.stream, event.start_us, event.end_us)
        for event in torch_trace.gpu_events({"traceEvents": TRACE}, rank=1)
    ]
    assert found == [
        ("nvjet", 1, "Stream #7", 10, 15.5),
        ("Memcpy DtoD (Device -> Device)", 1, "Stream #7", 20, 21),
        ("Memcpy PtoP (Device -> Device)", 1, "Stream #13", 30.5, 32.5),
        ("Memset (Device)", 1, "Stream #9", 40, 41.25),
        ("barrier_kernel", 1, "Stream #None", 50, 51),
    ]


def _replay(calls, kernel="nvjet"):
    """Events of a replay: in each call a copy of 1 us and a product of 10 us, in the first one of 15 us."""
    events, now_us = [], 0
    for call in range(calls):
        for name, length in (("Memcpy PtoP", 1), (kernel, 10 if call else 15)):
            events.append(GpuEvent(0, "Stream #7", name, now_us, now_us + length))
            now_us += length
    return events


def test_times_of_the_calls_of_a_graph():
    calls = torch_trace.GRAPH_CALLS
    assert torch_trace.call_times_us(_replay(calls), 0) == (11, 10)
    # A fill at the start of the graph is no call's.
    assert torch_trace.call_times_us([GpuEvent(0, "", "fill", -1, 0), *_replay(calls)], 0) == (11, 10)
    for events in (_replay(calls - 1), [], _replay(calls, "unknown")):
        assert not torch_trace.is_complete(events)
        with pytest.raises(RuntimeError, match=f"recorded events of GPU 0 are not {calls} equal calls"):
            torch_trace.call_times_us(events, 0)
    with pytest.raises(RuntimeError, match="hold 269 of 369 us"):
        torch_trace.call_times_us([GpuEvent(0, "", "unknown", -100, 0), *_replay(calls)], 0)
