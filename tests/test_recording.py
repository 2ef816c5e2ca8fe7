"""What is made of recorded events, on events made by hand."""

import jax
import pytest

from cmm import devices, measure, recording, rounds
from cmm.completeness import IncompleteRecording
from cmm.protocol import Protocol
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
    monkeypatch.setattr(measure, "record", lambda run, wait: events)
    found = measure.recorded_call(None, [()], calls=3)
    assert found.time_us == 30
    assert {device: [e.start_us for e in events] for device, events in found.events.items()} == {0: [100], 1: [100]}


def test_kernel_time_is_that_of_the_matmul_kernels_alone(monkeypatch):
    # By device and call: the kernels of one call, each at its start. The slower GPU's median call has 20 + 12.
    def call(start_us, device, kernels):
        names = ("stream_executor::gpu::MultiGpuBarrierWithNcclKernelImpl", *kernels, "MemcpyD2D")
        lengths = (6, *kernels.values(), 3)
        return [
            _event(name, start_us + 100 * i, start_us + 100 * i + n, device)
            for i, (name, n) in enumerate(zip(names, lengths))
        ]

    ours, theirs = "anonymous_mosaic_gpu_kernel", "nvjet_sm90_hsh_128x256_64x4_2x1_v_bz_coopA_NNN"
    events = [
        event
        for device, of_device in {0: ((9, 5), (8, 5), (7, 5)), 1: ((30, 10), (20, 12), (10, 11))}.items()
        for index, (first, second) in enumerate(of_device)
        for event in call(1000 * index, device, {ours: first, theirs: second})
    ]
    monkeypatch.setattr(measure, "record", lambda run, wait: events)
    found = measure.recorded_call(None, [()], calls=3)
    assert found.kernel_us == 32
    # The call is busy in its barrier and its copy as well.
    assert found.time_us == 6 + 20 + 12 + 3
    assert recording.matmul_us([_event("ncclDevKernel_AllGather", 0, 5), _event("Memset 3", 5, 6)]) == 0


def test_what_a_program_does_at_its_start_is_not_drawn_with_a_later_call(monkeypatch):
    # A copy for each of three kernels, all at the start of the program.
    copies = [_event("MemcpyH2D", i, i + 1, 0) for i in range(3)]
    kernels = [_event("mosaic_gpu_kernel", 100 * i + 50, 100 * i + 140 + i, 0) for i in range(3)]
    monkeypatch.setattr(measure, "record", lambda run, wait: [*copies, *kernels])
    found = measure.recorded_call(None, [()], calls=3)
    assert found.time_us == 91 + 1 and found.events == {0: [kernels[1]]}


def test_calls_that_differ_in_the_names_of_their_kernels_are_split_by_what_kernels_do(monkeypatch):
    # Two products in each of three calls, the first of which has other kernels: no name occurs a multiple of 3 times.
    names = ["nvjet_b", "nvjet_a", "nvjet_a", "nvjet_a", "nvjet_a", "nvjet_a"]
    lengths = [1, 2, 10, 12, 20, 22]
    events = [_event(*both, 0) for both in zip(names, range(0, 600, 100), map(sum, zip(range(0, 600, 100), lengths)))]
    monkeypatch.setattr(measure, "record", lambda run, wait: events)
    found = measure.recorded_call(None, [()], calls=3)
    assert found.time_us == found.kernel_us == 22 and found.events == {0: events[2:4]}


def test_calls_that_differ_in_their_fills_and_copies_are_counted_whole(monkeypatch):
    # Six products of two names in three calls, and what else takes time.
    names = ["nvjet_b", *["nvjet_a"] * 5]
    events = [_event(name, 100 * i, 100 * i + 10 + i, 0) for i, name in enumerate(names)]
    monkeypatch.setattr(measure, "record", lambda run, wait: [*events, _event("odd_one", 900, 906, 0)])
    found = measure.recorded_call(None, [()], calls=3)
    assert found.kernel_us == 12 + 13 and found.time_us == pytest.approx((sum(range(10, 16)) + 6) / 3)
    assert found.others_us == {"odd_one": 2}


def _two_gpus(lost=lambda gpu, call, name: False, calls=16):
    """Events of calls of a transfer of 50 us and a product of 100 us, without those that are lost."""
    rows = [
        (call, gpu, name, 160 * call + start, length)
        for call in range(calls)
        for gpu in (0, 1)
        for name, start, length in (("nccl_AllGather", 0, 50), ("gemm", 51, 100))
    ]
    return [_event(name, at, at + n, gpu) for call, gpu, name, at, n in rows if not lost(gpu, call, name)]


LOST = {
    "two products on each GPU": lambda gpu, call, name: name == "gemm" and call in (3, 4),
    "one product on one GPU": lambda gpu, call, name: (gpu, call, name) == (1, 5, "gemm"),
    "all products of one GPU": lambda gpu, call, name: gpu == 1 and name == "gemm",
    "two transfers on each GPU": lambda gpu, call, name: name != "gemm" and call in (3, 4),
    "the second start": lambda gpu, call, name: call >= 8,
    "one GPU": lambda gpu, call, name: gpu == 1,
}


@pytest.mark.parametrize("lost", LOST)
def test_lost_events_make_no_number(monkeypatch, lost):
    program = measure.Program(None, [()] * 8)
    recordings = [_two_gpus(LOST[lost]), _two_gpus()]
    monkeypatch.setattr(measure, "record", lambda run, wait: recordings.pop(0))
    with pytest.raises(IncompleteRecording):
        measure.recorded_chain(program, 2, gpus=2)
    found = measure.recorded_chain(program, 2, gpus=2)
    assert (found.time_us, found.kernel_us) == (150, 100)


def test_a_single_call_is_recorded_three_times_at_most(monkeypatch):
    operand = jax.device_put(1.0, devices.simulated_devices(1)[0])
    lossy, recordings = _two_gpus(LOST["one product on one GPU"]), []
    monkeypatch.setattr(measure, "record", lambda run, wait: recordings.pop(0))
    recordings += [lossy, lossy, _two_gpus()]
    assert measure.recorded_call(None, [(operand, operand)], calls=16).kernel_us == 100
    recordings += [lossy, lossy, lossy, _two_gpus()]
    with pytest.raises(IncompleteRecording):
        measure.recorded_call(None, [(operand, operand)], calls=16)
    assert len(recordings) == 1


def test_operands_say_how_many_gpus_a_recording_must_hold(monkeypatch):
    mesh = devices.ring_mesh(jax.devices("cpu")[:2])
    operand = jax.device_put(jax.numpy.zeros(2), jax.NamedSharding(mesh, jax.P("x")))
    monkeypatch.setattr(measure, "record", lambda run, wait: _two_gpus(LOST["one GPU"]))
    with pytest.raises(IncompleteRecording, match="Of 2 GPUs only 1"):
        measure.recorded_call(None, [(operand, operand)], calls=16)


def test_a_program_of_which_no_recording_is_complete_has_no_times_and_the_others_keep_theirs(monkeypatch):
    mesh, asked = devices.ring_mesh(jax.devices("cpu")[:2]), []
    bad_rounds = {"lossy": [1], "unlucky": []}

    def recorded_chains(programs, starts, mark, gpus):
        assert gpus == 2
        asked.append([program.details for program in programs])
        lost = lambda program: round_index in bad_rounds[program.details] or asked.count(["unlucky"]) < 1 == len(asked)
        error = IncompleteRecording("7 of 8")
        return [error if lost(program) else measure.RecordedCall(150, 100, {}) for program in programs]

    monkeypatch.setattr(rounds, "recorded_chains", recorded_chains)
    monkeypatch.setattr(rounds, "wall_time_us", lambda *args: 160)
    monkeypatch.setattr(rounds, "wall_time_in_program_us", lambda *args: 155)
    timed = [(measure.Program(None, [()], details=name), rounds.Times()) for name in bad_rounds]
    for round_index in range(3):
        rounds.time_on_gpus(timed, round_index, Protocol(3, 1, 1, 1, 2, 1, 2), mesh)
    (_, lossy), (_, unlucky) = timed
    assert (lossy.call_us, lossy.kernel_us, lossy.incomplete) == ([], [], "7 of 8") and lossy.wall_us == [160] * 3
    assert (unlucky.call_us, unlucky.kernel_us, unlucky.incomplete) == ([150] * 3, [100] * 3, "")
    # All are lost once in the first round. In the second one only what is lost is recorded again, three times in all,
    # and not in the third.
    assert [sorted(names) for names in asked] == [
        ["lossy", "unlucky"], ["lossy", "unlucky"], ["lossy", "unlucky"], ["lossy"], ["lossy"], ["unlucky"],
    ]  # fmt: skip


def _recording(*programs):
    """What two GPUs record of programs with marks between them: products of so many us each."""
    now_us, events = 0, []
    for lengths in (*programs, None):
        events += [_event("wrapped_cosine", now_us, now_us + 1, device) for device in (0, 1)]
        for length in lengths or ():
            now_us += 1000
            events += [_event("gemm", now_us, now_us + length + device, device) for device in (0, 1)]
        now_us += 1000
    return events


def test_programs_of_one_session_are_told_apart_by_marks(monkeypatch):
    # Two starts of three calls; the first of each start does not count.
    events = _recording((90, 10, 12, 80, 14, 16), (5, 5, 5, 5, 5, 5), ())
    ran = []

    def record(run, wait):
        wait(run())
        return events

    monkeypatch.setattr(recording, "record", record)
    chain = lambda name: lambda operands: ran.append(name)
    programs = [measure.Program(None, [()] * 3, lambda results: None, start_chain=chain(name)) for name in "abc"]
    found = measure.recorded_chains(programs, 2, lambda: ran.append("mark"), gpus=2)
    assert ran == ["mark", "a", "a", "mark", "b", "b", "mark", "c", "c", "mark"]
    assert [call.time_us for call in found[:2]] == [13 + 1, 5 + 1]
    assert "no GPU events" in str(found[2])


@pytest.mark.parametrize("lost", [lambda e: "cosine" in e.name and e.start_us == 0, lambda e: "cosine" in e.name])
def test_lost_marks_are_noticed(lost):
    events = _recording((10, 10), (5, 5))
    assert [len(part) for part in recording.split_at_marks(events, 2, gpus=2)] == [4, 4]
    with pytest.raises(IncompleteRecording, match="should hold 3 marks on each GPU of 2"):
        recording.split_at_marks([event for event in events if not lost(event)], 2, gpus=2)
    with pytest.raises(IncompleteRecording, match="should hold 3 marks"):
        on_one = [event for event in events if event.device == 0 or not lost(event)]
        recording.split_at_marks(on_one, 2, gpus=2)
    for left in ([], [event for event in events if event.device == 0]):
        with pytest.raises(IncompleteRecording, match="should hold 3 marks"):
            recording.split_at_marks(left, 2, gpus=2)


def test_marks_run_on_every_device():
    mesh = devices.ring_mesh(jax.devices("cpu")[:4])
    assert recording.make_mark(mesh)().sharding.device_set == set(mesh.devices.flat)


def test_a_program_brings_its_own_way_to_wait(monkeypatch):
    monkeypatch.setattr(measure, "record", lambda run, wait: wait(run()))
    waited = []
    with pytest.raises(RuntimeError, match="no GPU events"):
        measure.recorded_call(lambda x: x, [(1,), (2,)], 3, lambda results: waited.extend(results) or [])
    assert waited == [1, 2, 1]
    # On the host's clock only the last result of a chain is waited for.
    waited.clear()
    measure.wall_time_us(lambda x: x, [(1,), (2,)], 1, 4, waited.append)
    assert sorted(waited) == [1, 2]


@pytest.mark.parametrize(
    "name, lane, label",
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "link", "all-gather"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "link", "send, receive"),
        ("MemcpyP2P", "link", "copy to peer"),
        ("nvjet_sm90_hsh_128x256_64x4_2x1_v_bz_coopA_NNN", "compute", "matmul"),
        ("gemm_fusion_dot_general_3", "compute", "matmul"),
        ("sm90_xmma_gemm_f16f16_f16f32_f32_nn_n_tilesize128x128x64", "compute", "matmul"),
        ("void gemv2T_kernel_val<int, int, __half>", "compute", "matmul"),
        ("loop_dynamic_update_slice_fusion_1", "memory", "write result"),
        ("Memset 3", "memory", "Memset 3"),
        ("anonymous_mosaic_gpu_kernel", "compute", "matmul"),
        ("kernel_body_mosaic_gpu_kernel", "compute", "matmul"),
        ("stream_executor::gpu::MultiGpuBarrierWithNcclKernelImpl", "barrier", "barrier"),
    ],
)
def test_spans(name, lane, label):
    spans = recording.to_spans({1: [_event(name, 12, 15, 1)], 0: [_event("gemm", 10, 11)]})
    assert [span.device for span in spans] == [0, 1]
    assert (spans[1].lane, spans[1].label, spans[1].start_us, spans[1].end_us) == (lane, label, 2, 5)
