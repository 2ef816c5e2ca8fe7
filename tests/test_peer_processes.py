"""Peers in processes of their own: what they report, how they end, and what is asked of XLA."""

import dataclasses
import functools
import importlib.util
import json
import os
import signal
import sys
import textwrap
import time

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from cmm.devices import random_operands
from cmm.hlo import compiled_lines
from cmm.peers import torch_symm_mem, torch_trace, workers, xla_rewrite
from cmm.peers.own_process import PeerResult, from_json, run_peer, to_json
from cmm.recording import GpuEvent
from cmm.results import Spread
from cmm.roofline import Problem

PROBLEM = Problem(4, 32, 64, 64, "float16")

RESULT = PeerResult(
    "peer",
    "a peer",
    "measured",
    error_over_bound=0.5,
    call_time_us=Spread(3.0, 2.0, 4.0),
    rewritten=True,
    options={"flag": 0, "other": True},
    protocol="in words",
    versions={"library": "1.2"},
)


@pytest.fixture
def make_module(tmp_path, monkeypatch):
    """Returns a function that makes a module of its source, found by subprocesses, and returns the module's name."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))

    def make(source):
        (tmp_path / "fake_peer.py").write_text(textwrap.dedent(source))
        return "fake_peer"

    return make


def test_results_survive_json():
    skipped = PeerResult("other", "another", "skipped", "no GPU")
    assert from_json(to_json([RESULT, skipped])) == [RESULT, skipped]
    assert "\n" not in to_json([RESULT])


@pytest.mark.parametrize("text", ["", "{", '{"name": 1}', "[3]", '[{"surprise": 1}]'])
def test_other_json_is_refused(text):
    with pytest.raises(ValueError):
        from_json(text)


def test_a_peer_gets_the_problem_and_is_read_back(make_module):
    module = make_module(
        f"""
        import pathlib, sys
        from cmm.peers.own_process import *
        parser = argparse.ArgumentParser()
        add_options(parser)
        options = parser.parse_args()
        print("noise")
        result = from_json({to_json([RESULT])!r})[0]
        report([dataclasses.replace(result, reason=f"{{problem_of(options)}} {{options.simulate}}")], options.json)
        """
    )
    (result,) = run_peer(module, PROBLEM, 60, simulate=True)
    assert result == dataclasses.replace(RESULT, reason=f"{PROBLEM} True")


def test_a_crash_is_a_result(make_module):
    (result,) = run_peer(make_module("raise SystemError('out of luck')"), PROBLEM, 60)
    assert (result.name, result.status) == ("fake_peer", "failed")
    assert "exit status 1" in result.reason and "out of luck" in result.reason


def test_a_peer_that_says_nothing_failed(make_module):
    (result,) = run_peer(make_module("pass"), PROBLEM, 60)
    assert (result.status, result.reason) == ("failed", "ended with exit status 0")


def test_a_hang_ends_with_all_that_the_peer_started(make_module, tmp_path):
    module = make_module(
        f"""
        import pathlib, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        pathlib.Path({str(tmp_path / "child")!r}).write_text(str(child.pid))
        print("about to hang", file=sys.stderr, flush=True)
        time.sleep(60)
        """
    )
    for timeout_s in (2, 8, 32):  # On a busy machine it may take long until it hangs.
        began = time.monotonic()
        (result,) = run_peer(module, PROBLEM, timeout_s)
        assert time.monotonic() - began < timeout_s + 15
        assert result.status == "failed" and result.reason.startswith(f"killed after {timeout_s} s")
        if result.reason.endswith(": about to hang"):
            break
    assert result.reason == f"killed after {timeout_s} s: about to hang"
    child = int((tmp_path / "child").read_text())
    until = time.monotonic() + 5  # A signal takes its time on a busy machine.
    while _runs(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid):
    """Whether the process runs; one that is dead but not yet collected does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_what_a_library_said_before_a_peer_failed_is_kept(make_module):
    module = make_module(
        f"""
        import sys
        from cmm.peers.own_process import *
        parser = argparse.ArgumentParser()
        add_options(parser)
        options = parser.parse_args()
        print("NCCL WARN no link", file=sys.stderr)
        good = from_json({to_json([RESULT])!r})[0]
        bad = dataclasses.replace(good, status="failed", reason=f"rounds {{options.rounds}}")
        report([good, bad], options.json)
        """
    )
    good, bad = run_peer(module, PROBLEM, 60, arguments=("--rounds", "3"))
    assert good == RESULT and bad.reason == "rounds 3; standard error: NCCL WARN no link"


def _worker(rank, problem, folder, meet):
    meet.wait(30)
    (folder / f"rank{rank}.json").write_text(json.dumps({"rank": rank, "k": problem.k}))


def _worker_that_breaks(rank, problem, folder, meet):
    try:
        if rank == 1:
            raise ValueError("no link")
        meet.wait(30)
    except Exception as error:
        (folder / f"rank{rank}.error").write_text(f"{type(error).__name__}: {error}")
        meet.abort()
        sys.exit(1)


def _worker_that_dies(rank, problem, folder, meet):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    meet.wait()


def _worker_that_hangs(rank, problem, folder, meet):
    workers.stage_file(folder, rank).write_text("importing PyTorch")
    if rank == 0:
        (folder / "rank0.json").write_text("{}")
    else:
        time.sleep(60)


TWO = dataclasses.replace(PROBLEM, axis_size=2)


def test_workers_report_in_order_of_rank():
    assert workers.run_workers(_worker, TWO, 60) == [{"rank": 0, "k": 64}, {"rank": 1, "k": 64}]


@pytest.mark.parametrize(
    "target, timeout_s, words",
    [
        (_worker_that_breaks, 60, "^rank1: ValueError: no link$"),
        (_worker_that_dies, 60, "^rank1 ended with exit code -9"),
        (
            _worker_that_hangs,
            3,
            "no answer from the workers of rank (0, )?1 within 3 s; all were killed(, at importing PyTorch)?$",
        ),
    ],
)
def test_a_worker_that_fails_ends_all(target, timeout_s, words):
    began = time.monotonic()
    with pytest.raises(workers.WorkerFailed, match=words):
        workers.run_workers(target, TWO, timeout_s)
    assert time.monotonic() - began < 40


def _report(call_us, error_over_bound=0.1):
    programs = {
        name: {
            "call_us": [factor * us for us in call_us],
            "kernel_us": [us / 2 for us in call_us],
            "wall_us": [us + 1 for us in call_us],
            "error_over_bound": error_over_bound if name == "torch_symm_mem" else 0.1,
            "relative_error": 2e-4,
        }
        for name, factor in (("torch_gemm_only", 1), ("torch_nccl", 3), ("torch_symm_mem", 2))
    }
    return {"programs": programs, "protocol": "words", "versions": {"torch": "2.11"}}


@pytest.fixture
def torch_environment(monkeypatch):
    for name, value in torch_symm_mem.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def _worker_of_programs(rank, problem, folder, meet, programs, faults):
    """Does with each program what `faults` says for it, on GPU 1, and otherwise reports times."""
    try:
        for number, name in enumerate(programs):
            meet.wait()
            (folder / f"rank{rank}.turn").write_text(f"{number} {name}")
            fault = faults.get(name) if rank == 1 else None
            if fault == "raises":
                raise ValueError("no link")
            if fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hangs":
                time.sleep(120)
        meet.wait()
        report = _report([1, 2])
        report["programs"] = {name: report["programs"][name] for name in programs}
        (folder / f"rank{rank}.json").write_text(json.dumps(report))
    except Exception as error:
        (folder / f"rank{rank}.error").write_text(f"{type(error).__name__}: {error}")
        meet.abort()
        sys.exit(1)


def _run_programs(faults, timeout_s=120):
    target = functools.partial(_worker_of_programs, faults=faults)
    return {result.name: result for result in torch_symm_mem.run_programs(target, TWO, timeout_s)}


@pytest.mark.parametrize(
    "fault, reason", [("raises", "rank1: ValueError: no link"), ("dies", "rank1 ended with exit code -9 and no report")]
)
def test_a_program_that_fails_leaves_the_others_their_times(torch_environment, fault, reason):
    results = _run_programs({"torch_symm_mem": fault})
    assert list(results) == list(torch_symm_mem.TITLES)
    fused = results.pop("torch_symm_mem")
    assert (fused.status, fused.reason, fused.call_time_us) == ("failed", reason, None)
    assert all(result.status == "measured" and result.ratio_to_gemm_only for result in results.values())


def test_a_program_that_hangs_leaves_the_others_their_times(torch_environment):
    for timeout_s in (10, 40, 160):  # On a busy machine it may take long until the workers have begun.
        results = _run_programs({"torch_symm_mem": "hangs"}, timeout_s)
        if results["torch_nccl"].status == "measured":
            break
    assert {name: result.status for name, result in results.items()} == {
        "torch_gemm_only": "measured",
        "torch_nccl": "measured",
        "torch_symm_mem": "failed",
    }
    assert results["torch_symm_mem"].reason.startswith("no answer from the workers of rank 0, 1")


def test_every_program_fails_for_its_own_reason(torch_environment):
    results = _run_programs({"torch_gemm_only": "dies", "torch_nccl": "raises"})
    assert results["torch_gemm_only"].reason == "rank1 ended with exit code -9 and no report"
    assert results["torch_nccl"].reason == "rank1: ValueError: no link"
    fused = results["torch_symm_mem"]
    assert fused.status == "measured" and fused.call_time_us and fused.ratio_to_gemm_only is None


def test_without_a_program_to_blame_all_fail(torch_environment):
    results = torch_symm_mem.run_programs(_worker_without_gpu, TWO, 60)
    assert {(result.status, result.reason) for result in results} == {("failed", "rank0: ValueError: no GPU")}


def _worker_without_gpu(rank, problem, folder, meet, programs):
    (folder / f"rank{rank}.error").write_text("ValueError: no GPU")
    sys.exit(1)


def test_the_slowest_rank_of_each_round_counts(torch_environment):
    results = {r.name: r for r in torch_symm_mem.summary(TWO, [_report([1, 5, 3]), _report([4, 2, 6])])}
    fused = results["torch_symm_mem"]
    assert fused.status == "measured" and fused.protocol == "words" and fused.options == torch_symm_mem.ENVIRONMENT
    assert fused.call_time_us.median == 10 and fused.wall_time_us.median == 6 and fused.kernel_time_us.median == 2.5
    assert fused.ratio_to_gemm_only == Spread(2.0, 2.0, 2.0)
    assert results["torch_nccl"].ratio_to_gemm_only.median == 3


@pytest.mark.parametrize("error", [1.5, np.inf, np.nan])
def test_a_wrong_result_has_no_times(torch_environment, error):
    fused = torch_symm_mem.summary(TWO, [_report([1]), _report([1], error)])[-1]
    assert (fused.name, fused.status, fused.call_time_us) == ("torch_symm_mem", "failed", None)


def test_torch_says_why_it_is_skipped(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for problem, simulate, reason in (
        (TWO, False, "not installed"),
        (TWO, True, "needs GPUs"),
        (dataclasses.replace(TWO, axis_size=1), False, "at least 2"),
    ):
        results = torch_symm_mem.measure(problem, 60, simulate=simulate)
        assert [r.name for r in results] == list(torch_symm_mem.TITLES)
        assert all(r.status == "skipped" and reason in r.reason for r in results)
    assert torch_symm_mem.ENVIRONMENT.items() <= os.environ.items()


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


def test_options_of_the_rewrite():
    for variant, streams in (("streams", True), ("one_stream", False)):
        plain, copies = xla_rewrite.options_by_name(variant).values()
        assert plain["xla_gpu_threshold_for_windowed_einsum_mib"] == 0
        assert plain["xla_gpu_multi_streamed_windowed_einsum"] is streams
        assert "xla_gpu_collective_permute_mode" not in plain
        assert copies == plain | {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}


def test_xla_knows_the_options_and_refuses_others():
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices("cpu")[:4], axis_types=(AxisType.Auto,))
    operands = [random_operands(PROBLEM, mesh, seed=0)]
    for variant in xla_rewrite.VARIANTS:
        for options in xla_rewrite.options_by_name(variant).values():
            # A fallback would hide an option that is not known.
            details = xla_rewrite.build(options, PROBLEM, mesh, operands).details
            assert details == "not rewritten: the compiled program holds 0 collective-permute, 1 all-gather, 0 while"
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_no_such_option"):
        xla_rewrite.build({"xla_gpu_no_such_option": 1}, PROBLEM, mesh, operands)


class Compiled:
    """A compiled program of which only the text is there."""

    def __init__(self, text):
        self.text = text

    def as_text(self):
        return self.text


# Shortened from what XLA's GPU compiler made of the product on four devices, many streams.
REWRITTEN = Compiled(
    """\
  %collective-permute.10.2 = f16[1024,4096]{1,0} collective-permute(%get-tuple-element.48), channel_id=4
  %collective-permute-start.2 = ((f16[8,8]{1,0}), f16[8,8]{1,0}) collective-permute-start(%collective-permute.11.2)
  %collective-permute-done.2 = f16[8,8]{1,0} collective-permute-done(%collective-permute-start.2)
  %while.2 = (f16[8,8]{1,0}, u32[]) while(%tuple.11), condition=%cond, body=%unrolled_windowed_dot_general_body_ag
"""
)


def test_the_rewrite_is_recognised():
    assert xla_rewrite.what_happened(REWRITTEN) == (
        "rewritten: the compiled program holds 2 collective-permute, 0 all-gather, 1 while"
    )
    gathers = Compiled("  %all-gather.3 = f16[4096,4096]{1,0} all-gather(%param), channel_id=1\n")
    assert compiled_lines(gathers, "all-gather")
    assert xla_rewrite.what_happened(gathers).startswith("not rewritten: ")
    assert xla_rewrite.what_happened(Compiled(REWRITTEN.text + gathers.text)).startswith("not rewritten: ")


def test_xla_on_simulated_devices():
    results = {r.name: r for r in run_peer("cmm.peers.xla_rewrite", PROBLEM, 90, simulate=True)}
    programs = [name for variant in xla_rewrite.VARIANTS for name in xla_rewrite.options_by_name(variant)]
    assert set(results) == {*programs, *(f"xla_{variant}_gemm_only" for variant in xla_rewrite.VARIANTS)}
    for result in results.values():
        assert result.status == "simulated" and result.error_over_bound <= 1 and result.wall_time_us.median > 0
    for name in programs:
        # The CPU compiler has no such rewrite.
        assert results[name].rewritten is False and results[name].reason.startswith("not rewritten: ")
        assert results[name].options["xla_gpu_threshold_for_windowed_einsum_mib"] == 0
