"""What is made of recorded events, on events made by hand."""

import pytest

from cmm import measure, recording
from cmm.recording import GpuEvent


def _event(name, start_us, end_us, device=0):
    return GpuEvent(device, "Stream #1", name, start_us, end_us)


def test_overlap_counts_once_and_gaps_do_not_count():
    events = [_event("a", 0, 10), _event("b", 5, 12), _event("c", 6, 8), _event("d", 20, 25)]
    assert recording.busy_us(events) == 12 + 5


def test_calls_are_split_by_order_of_each_name():
    # Two calls, each: one transfer, two products. The transfer of the second starts before the first call's end.
    events = [
        _event("send", 0, 5), _event("gemm", 0, 4), _event("gemm", 5, 9),
        _event("send", 8, 13), _event("gemm", 9, 13), _event("gemm", 13, 17),
    ]  # fmt: skip
    first, second = recording.split_calls(events, 2)
    assert [(e.name, e.start_us) for e in first] == [("send", 0), ("gemm", 0), ("gemm", 5)]
    assert [(e.name, e.start_us) for e in second] == [("send", 8), ("gemm", 9), ("gemm", 13)]


def test_what_does_not_divide_belongs_to_no_call():
    calls = recording.split_calls([_event("gemm", 0, 1), _event("gemm", 2, 3), _event("once", 4, 5)], 2)
    assert [[e.name for e in call] for call in calls] == [["gemm"], ["gemm"]]


def test_call_time_is_the_slowest_gpus_median_and_the_events_are_of_a_typical_call(monkeypatch):
    # GPU 0 works 10 us per call, GPU 1 works 20, 30 and 90: the median of the slower one is 30, in its second call.
    lengths = {0: (10, 10, 10), 1: (20, 30, 90)}
    events = [
        _event("gemm", 100 * call, 100 * call + length, device)
        for device, of_device in lengths.items()
        for call, length in enumerate(of_device)
    ]
    monkeypatch.setattr(measure, "record", lambda run: events)
    time_us, typical = measure.recorded_call(None, [()], calls=3)
    assert time_us == 30
    assert {device: [e.start_us for e in found] for device, found in typical.items()} == {0: [100], 1: [100]}


@pytest.mark.parametrize(
    "name, lane, label",
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "link", "all-gather"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "link", "send, receive"),
        ("MemcpyP2P", "link", "copy to peer"),
        ("nvjet_sm90_hsh_128x256_64x4_2x1_v_bz_coopA_NNN", "compute", "matmul"),
        ("gemm_fusion_dot_general_3", "compute", "matmul"),
        ("loop_dynamic_update_slice_fusion_1", "memory", "write result"),
        ("Memset 3", "memory", "Memset 3"),
    ],
)
def test_spans(name, lane, label):
    spans = recording.to_spans({1: [_event(name, 12, 15, 1)], 0: [_event("gemm", 10, 11)]})
    assert [span.device for span in spans] == [0, 1]
    assert (spans[1].lane, spans[1].label, spans[1].start_us, spans[1].end_us) == (lane, label, 2, 5)
