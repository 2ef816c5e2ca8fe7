"""Records of several processes are merged into one, and the best record of a problem is read."""

import dataclasses

import numpy as np
import pytest
from bench_runs import ONE, PROBLEM, make_method, make_run

from cmm import results
from cmm.bench import suites_report
from cmm.bench.merge import merge, ratio, with_peers
from cmm.peers.own_process import PeerResult
from cmm.protocol import ON_GPUS, order_in_words
from cmm.results import Rounds


def test_medians_are_over_all_rounds_and_ratios_within_a_round():
    first = make_run({"gemm_only": ([10.0, 20.0], [8.0, 16.0]), "naive": ([20.0, 20.0], [8.0, 8.0])})
    second = make_run(
        {"gemm_only": ([40.0, 10.0], [40.0, 10.0]), "naive": ([40.0, 50.0], [20.0, 10.0])}, date="2026-01-03"
    )
    merged = merge([first, second], "python -m cmm.bench")
    naive = merged.method("naive")
    assert naive.call_time_us.median == 30 and naive.wall_time_us.median == 31 and naive.kernel_time_us.median == 9
    assert naive.call_time_us.p90 == pytest.approx(np.percentile([20, 20, 40, 50], 90))
    # 20/10, 20/20, 40/40, 50/10; not 30 over the median of GEMM only, which is 15.
    assert naive.ratio_to_gemm_only.median == 1.5 and naive.ratio_to_gemm_only.p10 == 1
    # 8/8, 8/16, 20/40, 10/10.
    assert naive.kernel_ratio_to_gemm_only.median == 0.75
    assert merged.rounds["naive"] == [first.rounds["naive"][0], second.rounds["naive"][0]]
    assert (merged.processes, merged.quick, merged.command) == (2, False, "python -m cmm.bench")
    assert merged.protocol.startswith("2 processes of 20 rounds, ")
    assert merged.protocol.endswith("medians over rounds of all processes")
    assert merge([first], "x", quick=True).protocol == f"quick look: {first.protocol}"


def test_a_method_that_ran_in_one_process_only_is_compared_with_the_rounds_of_that_one():
    first = make_run({"gemm_only": ([10.0], [10.0])}, skipped={"pallas": "XlaRuntimeError: bad luck"})
    second = make_run({"gemm_only": ([20.0], [20.0]), "pallas": ([40.0], [30.0])})
    for runs in ([first, second], [second, first]):
        pallas = merge(runs, "").method("pallas")
        assert (pallas.status, pallas.ratio_to_gemm_only.median) == ("measured", 2)
        assert pallas.reason == "ran in 1 of 2 processes: XlaRuntimeError: bad luck"
    never = merge([first, first], "").method("pallas")
    assert (never.status, never.reason, never.call_time_us) == ("skipped", "XlaRuntimeError: bad luck", None)


def test_the_roof_is_the_faster_one_over_all_rounds_that_is_right_and_ran_everywhere():
    fast_at_first = {"gemm_only": ([10.0], [10.0]), "gemm_only_torch": ([9.0], [9.0]), "naive": ([20.0], [5.0])}
    slow_then = fast_at_first | {"gemm_only_torch": ([12.0], [12.0])}
    fast = make_run(fast_at_first, gemm_only="gemm_only_torch")
    assert merge([fast, fast], "").gemm_only == "gemm_only_torch"
    merged = merge([fast, make_run(slow_then)], "")
    assert merged.gemm_only == "gemm_only" and merged.method("naive").ratio_to_gemm_only.median == 2
    without = {name: times for name, times in fast_at_first.items() if name != "gemm_only_torch"}
    assert merge([fast, make_run(without, skipped={"gemm_only_torch": "no"})], "").gemm_only == "gemm_only"
    wrong = make_run(fast_at_first, errors={"gemm_only_torch": 2.0}, gemm_only="gemm_only_torch")
    assert merge([fast, wrong], "").gemm_only == "gemm_only"


def test_the_largest_error_counts_and_a_nan_is_not_lost():
    times = {"gemm_only": ([10.0], [10.0]), "naive": ([20.0], [5.0])}
    for error in (3.0, float("inf"), float("nan")):
        runs = [make_run(times), make_run(times, errors={"naive": error}), make_run(times)]
        np.testing.assert_equal(merge(runs, "").method("naive").error_over_bound, error)


def test_kernels_that_were_not_recognised_have_no_kernel_time():
    merged = merge([make_run({"gemm_only": ([10.0, 10.0], [9.0, 9.0]), "odd": ([20.0, 20.0], [0.0, 0.0])})], "")
    odd = merged.method("odd")
    assert odd.kernel_time_us is None and odd.kernel_ratio_to_gemm_only.median == 0 and odd.is_incomplete
    assert ratio(merged, "odd", "gemm_only").median == 2 and ratio(merged, "odd", "gemm_only", "kernel_us").median == 0
    assert ratio(merged, "gemm_only", "unknown") is None


def test_the_order_is_counted_over_the_rounds_of_all_processes():
    names, one = [f"m{index}" for index in range(9)], ([10.0] * 8, [8.0] * 8)
    times = {"gemm_only": one} | dict.fromkeys(names, one)
    words = dataclasses.replace(ON_GPUS, rounds=8).in_words
    runs = [make_run(times, protocol=words(tuple(times), first), first_round=first) for first in (0, 16)]
    protocol = merge(runs, "").protocol
    assert order_in_words([(tuple(times), [*range(8), *range(16, 24)])]) in protocol and "in 16 rounds" in protocol
    assert "in 8 rounds each" in runs[0].protocol and "in 8 rounds each" not in protocol


def test_a_process_with_an_incomplete_recording_adds_no_rounds():
    lost = make_run({"gemm_only": ([10.0], [8.0]), "naive": ([30.0], [9.0])})
    rounds = lost.rounds | {"naive": [Rounds([], [], [31.0], [30.0])]}
    naive = dataclasses.replace(
        make_method("naive"), call_time_us=None, ratio_to_gemm_only=None, details="incomplete: 7"
    )
    naive = dataclasses.replace(naive, kernel_time_us=None, kernel_ratio_to_gemm_only=None)
    lost = dataclasses.replace(lost, rounds=rounds, methods=(lost.methods[0], naive))
    good = make_run({"gemm_only": ([10.0], [8.0]), "naive": ([20.0], [16.0])})
    found = merge([lost, good], "").method("naive")
    assert (found.call_time_us.median, found.ratio_to_gemm_only.median, found.wall_time_us.median) == (20, 2, 26)
    assert not found.is_incomplete and found.details == "incomplete: 7"
    run = merge([lost, lost], "")
    assert run.method("naive").is_incomplete and run.method("naive").call_time_us is None
    assert suites_report.fastest(run) == [] and "incomplete" in suites_report.sweep_table([run])[1][0]
    assert "not measured" in suites_report.markdown_beyond([run])
    # GEMM only, too, may be the one of the two that was not recorded.
    both = {"gemm_only": ([10.0], [8.0]), "gemm_only_torch": ([12.0], [9.0])}
    roof = make_run(both, gemm_only="gemm_only_torch")
    roof.rounds["gemm_only"] = [Rounds([], [], [1.0], [1.0])]
    assert merge([roof, make_run(both)], "").gemm_only == "gemm_only_torch"


@pytest.mark.parametrize(
    "change",
    [{"problem": dataclasses.replace(PROBLEM, k=8)}, {"machine": {"device_kind": "B"}}, {"versions": {"jax": "2"}}],
)
def test_different_runs_are_not_merged(change):
    run = make_run({"gemm_only": ([10.0], [10.0])})
    with pytest.raises(ValueError, match="got 2 kinds"):
        merge([run, dataclasses.replace(run, **change)], "")


def test_a_merged_record_survives_its_file(tmp_path):
    run = make_run({"gemm_only": ([10.0], [10.0]), "naive": ([20.0, 0.25], [5.0, 0.125])})
    peer = PeerResult("torch", "a peer", "measured", "", 0.1, 1e-4, ONE, ONE, ONE, versions={"torch": "2.11"})
    dead = PeerResult("xla", "another", "failed", "killed after 3 s: about to [hang]")
    merged = with_peers(merge([run, run], "command"), [peer, dead])
    path = results.save(merged, tmp_path / results.file_name(merged, "bench"))
    assert path.name == "bench_h200_d2_m128_k256_n512_float16.json"
    assert results.load(path) == merged and merged.peers[0].details == "torch 2.11"
    # Rounds of a process are one line, not one line each.
    assert '"wall_us": [ 21.0, 1.25 ]' in path.read_text()


def test_the_best_evidence_of_a_problem_is_read(tmp_path):
    times = {"gemm_only": ([10.0], [10.0]), "naive": ([20.0], [5.0])}
    single = make_run(times)

    def kept(**files):
        for path in tmp_path.iterdir():
            path.unlink()
        for name, run in files.items():
            results.save(run, tmp_path / f"{name}.json")
        (run,) = results.load_all(tmp_path)
        return run.command

    run = dataclasses.replace(single, command="single")
    three = merge([single] * 3, "three")
    assert kept(run_x=run, bench_x=three) == kept(bench_x=three) == "three"
    assert kept(run_x=run, bench_x=merge([single], "one")) == "single"
    assert kept(bench_quick_x=merge([single], "quick", quick=True), bench_x=three) == "three"
    assert kept(run_x=run, bench_quick_x=merge([single] * 2, "quick", quick=True)) == "single"
    left_out = merge([make_run(times, skipped={"ring": results.NOT_ASKED_FOR})] * 3, "two methods")
    assert kept(run_x=run, bench_x=left_out) == "single"
    other = dataclasses.replace(single, machine={"device_kind": "NVIDIA H100"})
    results.save(other, tmp_path / "run_other.json")
    assert len(results.load_all(tmp_path)) == 2
