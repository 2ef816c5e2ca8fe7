"""`python -m cmm.bench`: what several processes say together, and what is left when one of them breaks."""

import dataclasses
import datetime
import json
import os
import pathlib
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from cmm import results, rungs
from cmm.bench import __main__ as bench, child as bench_child, machine, peers as bench_peers, suites_report
from cmm.bench.child import Plan
from cmm.bench.merge import merge, ratio, with_peers
from cmm.bench.options import command_of, parse, plan_of
from cmm.bench.processes import Collected, Refused, collect
from cmm.peers.own_process import PeerResult
from cmm.protocol import ON_GPUS, on_gpus, order_in_words
from cmm.results import MethodResult, Rounds, Run, Spread
from cmm.roofline import Problem

ROOT = pathlib.Path(__file__).parents[1]
PROBLEM = Problem(2, 128, 256, 512, "float16")
ONE = Spread(1.0, 1.0, 1.0)


def _method(name, status="measured", reason="", error=0.1):
    if status != "measured":
        return MethodResult(name, name, status, reason)
    return MethodResult(name, name, status, reason, error, 1e-4, ONE, ONE, ONE, ONE, ONE)


def _run(times, problem=PROBLEM, skipped=None, errors=None, **changes):
    """A record of one process. `times`: for each method call and kernel times, round by round; the wall has 1 more."""
    rounds = {name: [Rounds(call, kernel, [t + 1.0 for t in call])] for name, (call, kernel) in times.items()}
    methods = [_method(name, error=(errors or {}).get(name, 0.1)) for name in times]
    methods += [_method(name, "skipped", reason) for name, reason in (skipped or {}).items()]
    fields = {
        "problem": problem,
        "machine": {"device_kind": "NVIDIA H200"},
        "versions": {"jax": "0.11.2"},
        "simulated": False,
        "distribution": "normal(0, 1)",
        "protocol": ON_GPUS.in_words(tuple(times)),
        "date": "2026-01-02",
        "command": "child",
        "methods": tuple(methods),
        "rounds": rounds,
    }
    return Run(**(fields | changes))


# Merging


def test_medians_are_over_all_rounds_and_ratios_within_a_round():
    first = _run({"gemm_only": ([10.0, 20.0], [8.0, 16.0]), "naive": ([20.0, 20.0], [8.0, 8.0])})
    second = _run({"gemm_only": ([40.0, 10.0], [40.0, 10.0]), "naive": ([40.0, 50.0], [20.0, 10.0])}, date="2026-01-03")
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
    first = _run({"gemm_only": ([10.0], [10.0])}, skipped={"pallas": "XlaRuntimeError: bad luck"})
    second = _run({"gemm_only": ([20.0], [20.0]), "pallas": ([40.0], [30.0])})
    for runs in ([first, second], [second, first]):
        pallas = merge(runs, "").method("pallas")
        assert (pallas.status, pallas.ratio_to_gemm_only.median) == ("measured", 2)
        assert pallas.reason == "ran in 1 of 2 processes: XlaRuntimeError: bad luck"
    never = merge([first, first], "").method("pallas")
    assert (never.status, never.reason, never.call_time_us) == ("skipped", "XlaRuntimeError: bad luck", None)


def test_the_roof_is_the_faster_one_over_all_rounds_that_is_right_and_ran_everywhere():
    fast_at_first = {"gemm_only": ([10.0], [10.0]), "gemm_only_torch": ([9.0], [9.0]), "naive": ([20.0], [5.0])}
    slow_then = fast_at_first | {"gemm_only_torch": ([12.0], [12.0])}
    fast = _run(fast_at_first, gemm_only="gemm_only_torch")
    assert merge([fast, fast], "").gemm_only == "gemm_only_torch"
    merged = merge([fast, _run(slow_then)], "")
    assert merged.gemm_only == "gemm_only" and merged.method("naive").ratio_to_gemm_only.median == 2
    without = {name: times for name, times in fast_at_first.items() if name != "gemm_only_torch"}
    assert merge([fast, _run(without, skipped={"gemm_only_torch": "no"})], "").gemm_only == "gemm_only"
    wrong = _run(fast_at_first, errors={"gemm_only_torch": 2.0}, gemm_only="gemm_only_torch")
    assert merge([fast, wrong], "").gemm_only == "gemm_only"


def test_the_largest_error_counts_and_a_nan_is_not_lost():
    times = {"gemm_only": ([10.0], [10.0]), "naive": ([20.0], [5.0])}
    for error in (3.0, float("inf"), float("nan")):
        runs = [_run(times), _run(times, errors={"naive": error}), _run(times)]
        np.testing.assert_equal(merge(runs, "").method("naive").error_over_bound, error)


def test_kernels_that_were_not_recognised_have_no_kernel_time():
    merged = merge([_run({"gemm_only": ([10.0, 10.0], [9.0, 9.0]), "odd": ([20.0, 20.0], [0.0, 0.0])})], "")
    odd = merged.method("odd")
    assert odd.kernel_time_us is None and odd.kernel_ratio_to_gemm_only.median == 0 and odd.is_incomplete
    assert ratio(merged, "odd", "gemm_only").median == 2 and ratio(merged, "odd", "gemm_only", "kernel_us").median == 0
    assert ratio(merged, "gemm_only", "unknown") is None


def test_the_order_is_counted_over_the_rounds_of_all_processes():
    names, one = [f"m{index}" for index in range(9)], ([10.0] * 8, [8.0] * 8)
    times = {"gemm_only": one} | dict.fromkeys(names, one)
    words = dataclasses.replace(ON_GPUS, rounds=8).in_words
    runs = [_run(times, protocol=words(tuple(times), first), first_round=first) for first in (0, 16)]
    protocol = merge(runs, "").protocol
    assert order_in_words([(tuple(times), [*range(8), *range(16, 24)])]) in protocol and "in 16 rounds" in protocol
    assert "in 8 rounds each" in runs[0].protocol and "in 8 rounds each" not in protocol


def test_a_process_with_an_incomplete_recording_adds_no_rounds():
    lost = _run({"gemm_only": ([10.0], [8.0]), "naive": ([30.0], [9.0])})
    rounds = lost.rounds | {"naive": [Rounds([], [], [31.0], [30.0])]}
    naive = dataclasses.replace(_method("naive"), call_time_us=None, ratio_to_gemm_only=None, details="incomplete: 7")
    naive = dataclasses.replace(naive, kernel_time_us=None, kernel_ratio_to_gemm_only=None)
    lost = dataclasses.replace(lost, rounds=rounds, methods=(lost.methods[0], naive))
    good = _run({"gemm_only": ([10.0], [8.0]), "naive": ([20.0], [16.0])})
    found = merge([lost, good], "").method("naive")
    assert (found.call_time_us.median, found.ratio_to_gemm_only.median, found.wall_time_us.median) == (20, 2, 26)
    assert not found.is_incomplete and found.details == "incomplete: 7"
    run = merge([lost, lost], "")
    assert run.method("naive").is_incomplete and run.method("naive").call_time_us is None
    assert suites_report.fastest(run) == [] and "incomplete" in suites_report.sweep_table([run])[1][0]
    assert "not measured" in suites_report.markdown_beyond([run])
    # GEMM only, too, may be the one of the two that was not recorded.
    both = {"gemm_only": ([10.0], [8.0]), "gemm_only_torch": ([12.0], [9.0])}
    roof = _run(both, gemm_only="gemm_only_torch")
    roof.rounds["gemm_only"] = [Rounds([], [], [1.0], [1.0])]
    assert merge([roof, _run(both)], "").gemm_only == "gemm_only_torch"


@pytest.mark.parametrize(
    "change",
    [{"problem": dataclasses.replace(PROBLEM, k=8)}, {"machine": {"device_kind": "B"}}, {"versions": {"jax": "2"}}],
)
def test_different_runs_are_not_merged(change):
    run = _run({"gemm_only": ([10.0], [10.0])})
    with pytest.raises(ValueError, match="got 2 kinds"):
        merge([run, dataclasses.replace(run, **change)], "")


def test_a_merged_record_survives_its_file(tmp_path):
    run = _run({"gemm_only": ([10.0], [10.0]), "naive": ([20.0, 0.25], [5.0, 0.125])})
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
    single = _run(times)

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
    left_out = merge([_run(times, skipped={"ring": results.NOT_ASKED_FOR})] * 3, "two methods")
    assert kept(run_x=run, bench_x=left_out) == "single"
    other = dataclasses.replace(single, machine={"device_kind": "NVIDIA H100"})
    results.save(other, tmp_path / "run_other.json")
    assert len(results.load_all(tmp_path)) == 2


# Tables


def test_a_tie_with_the_fastest_is_marked_too():
    times = {"gemm_only": ([5.0] * 3, [5.0] * 3), "naive": ([20.0] * 3, [5.0] * 3)}
    times |= {"pallas": ([10.0, 10.0, 10.0], [9.0] * 3), "pallas_fast": ([9.0, 11.0, 12.0], [8.0] * 3)}
    run = merge([_run(times)], "")
    assert suites_report.fastest(run) == ["pallas", "pallas_fast"]
    clear = merge([_run(times | {"pallas_fast": ([11.0, 12.0, 12.0], [8.0] * 3)})], "")
    assert suites_report.fastest(clear) == ["pallas"]
    wrong = merge([_run(times, errors={"pallas": 2.0})], "")
    assert suites_report.fastest(wrong) == ["pallas_fast"]


def test_sweep():
    times = {"gemm_only": ([5.0], [4.0]), "naive": ([20.0], [10.0]), "ring": ([30.0], [10.0])}
    runs = [merge([_run(times, dataclasses.replace(PROBLEM, m_shard=m))], "") for m in (64, 16, 32)]
    other = merge([_run(times, dataclasses.replace(PROBLEM, k=8))], "")
    assert suites_report.sweeps([*runs[:2], other]) == []
    (sweep,) = suites_report.sweeps([*runs, other])
    header, rows = suites_report.sweep_table(sweep)
    assert header == ["M per device", "gemm_only", "naive", "ring"]
    assert rows[0] == ["16", "5 / 4", "20 / 10*", "30 / 10"] and [row[0] for row in rows] == ["16", "32", "64"]


def _table(runs):
    text = suites_report.markdown_beyond(runs)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    lead, *how = [line for line in text.splitlines() if line and line[0] not in "|<"]
    return lead, rows[2:], how


def test_table_of_other_shapes_has_the_kernel_that_auto_takes():
    times = {"gemm_only": ([5.0], [4.0]), "naive": ([20.0], [5.0])}
    fast = times | {"pallas": ([7.0], [5.0]), "pallas_fast": ([10.0], [8.0])}
    run = _run(fast)
    run.rounds["naive"] = [Rounds([20.0], [5.0], [21.0], [40.0])]
    run.rounds["pallas_fast"] = [Rounds([10.0], [8.0], [11.0], [30.0])]
    lead, rows, _ = _table([merge([run], "")])
    # The readable one was faster here.
    assert rows == [["128 × 256 × 512", "2", "4", "8", "2.00", "20", "10", "0.50", "0.75"]]
    assert "float16" in lead and "auto" not in lead
    unfit = merge([_run(times, skipped={"pallas_fast": "m=16 must be divisible by 64"})], "")
    lead, rows, _ = _table([unfit])
    assert rows[0][3:] == ["none fits", "", "20", "", "", ""] and 'method="auto"' in lead
    left_out = merge([_run(times, skipped={"pallas_fast": results.NOT_ASKED_FOR})], "")
    wrong = merge([_run(fast, errors={"pallas_fast": 2.0})], "")
    other = merge([_run(fast, dataclasses.replace(PROBLEM, dtype="bfloat16"))], "")
    lead, rows, _ = _table([left_out, wrong, other])
    assert [row[3] for row in rows] == ["not measured", "WRONG", "8"] and "auto" not in lead
    assert rows[2][0] == "bfloat16, 128 × 256 × 512" and "float16" not in lead


def test_runs_that_were_measured_alike_are_described_once():
    times = {"gemm_only": ([5.0], [4.0]), "naive": ([20.0], [10.0])}

    def of_rows(m, starts, **changes):
        words = dataclasses.replace(ON_GPUS, short_starts=starts).in_words(tuple(times))
        run = _run(times, dataclasses.replace(PROBLEM, m_shard=m), protocol=words, **changes)
        return merge([run], f"bench --m-shard {m} --k 256")

    (line,) = _table([of_rows(16, 3), of_rows(32, 4)])[2]
    assert line.startswith("- 16, 32 × 256 × 512: 2 x NVIDIA H200, JAX 0.11.2, normal(0, 1), 2026-01-02. 20 rounds, ")
    assert "; wall time in a program: difference per call; wall time alone: one call per program, 20 and" in line
    assert "one process. What differs" in line and line.endswith("Command: `bench --m-shard M --k 256`.")
    (alike,) = _table([of_rows(16, 3), of_rows(32, 3)])[2]
    assert "3 and 15 starts" in alike and "What differs" not in alike
    assert "--m-shard 16 " in _table([of_rows(16, 3)])[2][0]
    for change in ({"date": "2026-01-03"}, {"versions": {"jax": "0.12"}}, {"machine": {"device_kind": "NVIDIA H100"}}):
        assert len(_table([of_rows(16, 3), of_rows(32, 3, **change)])[2]) == 2
    three = merge([_run(times, dataclasses.replace(PROBLEM, m_shard=64))] * 3, "bench --m-shard 64 --k 256")
    assert len(_table([of_rows(16, 3), three])[2]) == 2


def test_ratios_of_call_times_to_nccl_and_cublas():
    run = merge([_run({"gemm_only": ([5.0], [4.0]), "naive": ([20.0], [10.0]), "pallas": ([10.0], [6.0])})], "")
    assert suites_report.ratio_rows(run)[2] == ("pallas", "1.50", "2.00", "0.50")
    assert suites_report.ratio_rows(dataclasses.replace(run, simulated=True)) == []


# Processes

CHILD = """
import json, pathlib, runpy, shutil, sys, time
say = runpy.run_path("ROOT/cmm/bench/children.py")["say"]  # Without the package, which would import JAX.
here = pathlib.Path(__file__).parent
plan = json.loads(pathlib.Path(sys.argv[1]).read_text())
process = int(pathlib.Path(plan["folder"]).name)
with (here / "calls").open("a") as calls:
    calls.write(json.dumps([process, plan["todo"]]) + "\\n")
assert plan["first_round"] == process * plan["rounds"]
for noise in ("some noise", "[1]", "{"):
    print(noise)
print("an unfinished line", end="")
problems = json.loads((here / "problems.json").read_text())

def start():
    say("start", machine="2 x GPU", problems=problems)

def measure(index):
    say("progress", problem=index, what="compiling ring", done=0.5)
    shutil.copy(here / f"{index}.json", plan["folder"])
    say("result", problem=index)

todo = range(len(problems)) if plan["todo"] is None else plan["todo"]
"""
USUAL = """
start()
for index in todo:
    measure(index)
"""


@pytest.fixture
def make_child(tmp_path):
    """Returns a function that makes a child process of its source, and the command that runs it."""
    (tmp_path / "work").mkdir()
    problems = [dataclasses.replace(PROBLEM, m_shard=m) for m in (16, 32, 64)]
    (tmp_path / "problems.json").write_text(json.dumps([dataclasses.asdict(problem) for problem in problems]))
    for index, problem in enumerate(problems):
        results.save(_run({"gemm_only": ([10.0], [10.0])}, problem), tmp_path / f"{index}.json")

    def make(source):
        (tmp_path / "child.py").write_text(CHILD.replace("ROOT", str(ROOT)) + textwrap.dedent(source))
        return [sys.executable, str(tmp_path / "child.py")]

    return make


def _collect(tmp_path, child, processes=3, silence_s=60.0, **plan):
    collected, seen = Collected(), []
    plan = Plan(str(tmp_path / "work"), **plan)
    collect(plan, processes, silence_s, collected, on_result=seen.append, child=child)
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    counts = [len(collected.runs.get(index, ())) for index in range(len(collected.problems))]
    assert sorted(seen) == sorted(index for index, count in enumerate(counts) for _ in range(count))
    return collected, counts, calls


def test_every_process_measures_every_problem(tmp_path, make_child):
    collected, counts, calls = _collect(tmp_path, make_child(USUAL))
    assert counts == [3, 3, 3] and calls == [[0, None], [1, None], [2, None]] and not collected.troubles
    assert collected.machine == "2 x GPU"
    assert [run.problem.m_shard for run in collected.runs[1]] == [32, 32, 32]


@pytest.mark.parametrize(
    "broken, words",
    [
        ('say("failed", problem=1, reason="no link"); sys.exit(1)', "failed: no link"),
        ('sys.exit("out of luck")', "ended with exit status 1: out of luck (while compiling ring)"),
        ("import os; os.kill(os.getpid(), 9)", "ended by signal SIGKILL (while compiling ring)"),
    ],
)
def test_a_problem_that_breaks_costs_one_process_that_problem_alone(tmp_path, make_child, broken, words):
    source = f"""
    start()
    for index in todo:
        if (process, index) == (0, 1):
            say("progress", problem=1, what="compiling ring", done=0.5)
            {broken}
        measure(index)
    """
    collected, counts, calls = _collect(tmp_path, make_child(source))
    assert counts == [3, 2, 3] and calls == [[0, None], [0, [2]], [1, None], [2, None]]
    assert collected.troubles == [f"process 1 of 3, float16, 32 × 256 × 512: {words}"]


def test_a_process_that_hangs_is_killed_and_the_others_go_on(tmp_path, make_child):
    source = """
    start()
    for index in todo:
        if (process, index) == (1, 2):
            import subprocess
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            (here / "pid").write_text(str(child.pid))
            say("progress", problem=2, what="timing, round 3 of 20", done=0.5)
            print("last words", file=sys.stderr, flush=True)
            time.sleep(60)
        measure(index)
    """
    began = time.monotonic()
    collected, counts, _ = _collect(tmp_path, make_child(source), silence_s=4)
    assert counts == [3, 3, 2] and time.monotonic() - began < 40
    (trouble,) = collected.troubles
    assert trouble.endswith("64 × 256 × 512: killed after 4 s of silence: last words (while timing, round 3 of 20)")
    stat = pathlib.Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


@pytest.mark.parametrize("broken", ["sys.exit(3)", "start(); sys.exit(3)", "start(); sys.exit(0)"])
def test_a_process_that_measures_nothing_is_not_started_again(tmp_path, make_child, broken):
    source = f"if process == 0:\n    {broken}\n{USUAL}"
    collected, counts, calls = _collect(tmp_path, make_child(source), processes=2)
    assert counts == [1, 1, 1] and calls == [[0, None], [1, None]]
    assert len(collected.troubles) == 1 and collected.troubles[0].startswith("process 1 of 2: ended with")


def test_time_that_is_up_ends_it_between_problems_and_between_processes(tmp_path, make_child):
    collected, counts, calls = _collect(tmp_path, make_child(USUAL), until=time.time() - 1)
    # This child does not look at the time: the second process is not started.
    assert counts == [1, 1, 1] and collected.time_is_up and len(calls) == 1
    stops = 'start()\nmeasure(0)\nsay("time is up")'
    collected, counts, calls = _collect(tmp_path, make_child(stops))
    assert counts == [1, 0, 0] and collected.time_is_up and not collected.troubles and len(calls) == 2


def test_a_machine_that_does_not_do_is_refused_unless_it_did_before(tmp_path, make_child):
    with pytest.raises(Refused, match="no GPU"):
        _collect(tmp_path, make_child('say("refused", reason="no GPU"); sys.exit(2)'))
    source = f'if process == 1:\n    say("refused", reason="a GPU is gone"); sys.exit(2)\n{USUAL}'
    collected, counts, _ = _collect(tmp_path, make_child(source))
    assert counts == [2, 2, 2] and collected.troubles == ["process 2 of 3: a GPU is gone"]


# The child


def test_only_asked_rungs_run_and_none_of_them_ends_all():
    by_name = {rung.name: rung for rung in bench_child.rungs_for(("ring", "pallas"))}
    assert list(by_name) == [rung.name for rung in rungs.RUNGS]
    assert by_name["gemm_only"] is rungs.GEMM_ONLY
    assert by_name["pallas"].needs == "Hopper GPUs" and by_name["pallas"].peer and by_name["ring"].peer
    # The faster roof decides on ratios, so that both run whatever was asked for.
    assert by_name["gemm_only_torch"].build is next(r.build for r in rungs.RUNGS if r.name == "gemm_only_torch")
    with pytest.raises(NotImplementedError, match="^not asked for$"):
        by_name["jax_example"].build(None, None, None)


def test_problems_of_a_plan():
    assert Plan("", shape=(1, 2, 3), dtype="float32").problems(4) == [Problem(4, 1, 2, 3, "float32")]
    both = Plan("", ("W1", "m-sweep"), dtype="float16").problems(2)
    assert len(both) == 10 and both[0].m_shard == 1024, "a problem that two suites share is measured once"
    assert max(p.k for p in Plan("", ("llama3-405b",), simulate=True).problems(2)) == 256


def test_the_child_stops_between_problems_when_time_is_up(tmp_path, capsys):
    # Simulated devices of this process.
    options = {"suites": ("W1",), "devices": 2, "methods": ("naive",), "rounds": 1, "simulate": True}
    plan = Plan(str(tmp_path), until=time.time() - 1, **options)
    (tmp_path / "plan.json").write_text(json.dumps(dataclasses.asdict(plan)))
    assert bench_child.main([str(tmp_path / "plan.json")]) == 0
    said = [json.loads(line)["event"] for line in capsys.readouterr().out.split("\n") if line]
    assert said[0] == "start" and said.count("result") == 1 and said[-1] == "time is up"
    run = results.load(plan.record(0))
    assert [len(of_process.wall_us) for of_process in run.rounds["naive"]] == [1]
    assert run.method("ring").reason == results.NOT_ASKED_FOR and not plan.record(1).exists()


def test_a_problem_that_fails_is_reported(tmp_path, capsys, monkeypatch):
    def breaks(*args, **options):
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(bench_child, "run_ladder", breaks)
    plan = Plan(str(tmp_path), ("W1",), devices=2, simulate=True)
    (tmp_path / "plan.json").write_text(json.dumps(dataclasses.asdict(plan)))
    assert bench_child.main([str(tmp_path / "plan.json")]) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"event": "failed", "problem": 0, "reason": "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS"}


# The command


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--suite", "W1,magic"], "unknown: magic; known: W1, llama3-8b"),
        (["--methods", "gemm"], "unknown: gemm; known: gemm_only_torch"),
        (["--suite", "W1", "--k", "8"], "--suite has its own shapes"),
        (["--quick", "--processes", "2"], "--quick is one process"),
        (["--limit-s", "0"], "must be at least 1"),
        (["--peers", "magic"], "unknown: magic; known: xla_rewrite, torch_symm_mem"),
        (["--peers-only"], "--peers-only needs --devices"),
        (["--peers-only", "--devices", "2", "--methods", "ring"], "leave out --methods"),
    ],
)
def test_bad_options(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        bench.main(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, processes, rounds",
    [([], 3, 8), (["--quick"], 1, 5), (["--quick", "--rounds", "7"], 1, 7), (["--simulate"], 2, 5)],
)
def test_processes_and_rounds(arguments, processes, rounds):
    options = parse(arguments)
    assert (options.processes, options.rounds) == (processes, rounds)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--suite", "W1,m-sweep", "--quick"],
        ["--k", "8", "--methods", "ring", "--peers", "--rounds", "3"],
        ["--peers", "torch_symm_mem", "--simulate"],
        ["--peers-only", "--peers", "torch_symm_mem", "--rounds", "3", "--dtype", "float16"],
        ["--peers-only", "--quick"],
    ],
)
def test_the_recorded_command_repeats_the_run(arguments):
    options = parse([*arguments, "--devices", "2"])
    command = command_of(options, plan_of(options, "", None), 2).split()
    again = parse(command[3:])
    methods = None if options.peers_only else options.methods or rungs.CHOICES
    assert plan_of(again, "", None) == dataclasses.replace(plan_of(options, "", None), methods=methods)
    assert again.peers_only == options.peers_only
    assert (again.processes, again.quick, again.peers) == (options.processes, options.quick, options.peers)


def test_without_gpus_it_says_so_and_starts_no_backend_itself(tmp_path):
    code = "import sys, jax; from cmm.bench import __main__ as bench; status = bench.main(['--out', sys.argv[1]])\n"
    code += "assert not jax._src.xla_bridge.backends_are_initialized(); sys.exit(status)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stdout.strip().splitlines()
    assert "measures GPUs, and JAX finds none here" in line and not list(tmp_path.iterdir())


def test_simulated_end_to_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    asked = ["--methods", "naive,ring", "--rounds", "3", "--devices", "2"]
    assert bench.main(["--simulate", *asked, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    runs = results.load_all(tmp_path)
    assert [run.problem for run in runs] == [Problem(2, 16, 64, 64, "bfloat16"), Problem(2, 16, 64, 64, "float16")]
    for run in runs:
        assert run.simulated and run.processes == 2 and run.protocol.startswith("2 processes of 3 rounds")
        assert [len(of_process.wall_us) for of_process in run.rounds["ring"]] == [3, 3]
        assert run.method("ring").status == "simulated" and run.method("ring").error_over_bound <= 1
        assert run.method("pallas").reason == results.NOT_ASKED_FOR
        assert results.file_name(run, "bench") in out
    assert "simulated: times say nothing about GPUs" in out and "TFLOP/s" not in out and "%" not in out
    assert "GEMM only, PyTorch: skipped, needs GPUs" in out and "ring, both ways: skipped, not asked for" in out


def test_peers_troubles_and_what_is_missing_are_in_the_report(tmp_path, capsys, monkeypatch):
    problems = [dataclasses.replace(PROBLEM, m_shard=m) for m in (16, 32)]
    asked = []

    def collect(plan, processes, silence_s, collected, on_progress, on_result):
        collected.machine, collected.problems = "2 x GPU", problems
        collected.troubles.append("process 1 of 3: killed [after] 180 s")
        collected.runs[0] = [_run({"gemm_only": ([10.0], [10.0]), "naive": ([20.0], [12.0])}, problems[0])] * 3
        on_result(0)

    monkeypatch.setattr(bench, "collect", collect)
    monkeypatch.setattr(bench_peers, "run_peer", _peer_runner(asked))
    assert bench.main(["--out", str(tmp_path), "--peers", "--rounds", "7"]) == 1
    out = capsys.readouterr().out
    assert asked == [(module, problems[0], ("--rounds", "7")) for module in bench_peers.MODULES.values()]
    (run,) = results.load_all(tmp_path)
    assert [peer.status for peer in run.peers] == ["failed", "measured"] and run.processes == 3
    for words in ("XLA's own: failed, killed after 3 s", "process 1 of 3: killed [after] 180 s", "1.25", "2.00"):
        assert words in out
    assert "not measured: float16, 32 × 256 × 512" in out and "ratios to their own GEMM only: PyTorch's own" in out


def _peer_runner(asked):
    def run_peer(module, problem, timeout_s, simulate, arguments):
        asked.append((module, problem, arguments))
        if module == "cmm.peers.xla_rewrite":
            return [PeerResult("xla", "XLA's own", "failed", "killed after 3 s")]
        return [PeerResult("torch", "PyTorch's own", "measured", "", 0.1, 1e-4, ONE, ONE, Spread(1.25, 1.25, 1.25))]

    return run_peer


_PEERS_ONLY = ["--devices", "2", "--m-shard", "128", "--k", "256", "--n-shard", "512", "--peers-only"]


def _recorded(tmp_path, kind="NVIDIA H200"):
    """Writes a record with older results of peers."""
    old = [PeerResult("xla_old", "", "failed", "old"), PeerResult("torch_old", "", "failed", "old")]
    one = _run({"gemm_only": ([10.0], [10.0]), "naive": ([20.0], [12.0])}, machine={"device_kind": kind})
    recorded = with_peers(merge([one] * 3, "bench --peers"), old)
    return recorded, results.save(recorded, tmp_path / results.file_name(recorded, "bench"))


def test_peers_alone_are_added_to_the_records_that_are_there(tmp_path, capsys, monkeypatch):
    arguments, asked = [*_PEERS_ONLY, "--out", str(tmp_path), "--rounds", "7"], []
    monkeypatch.setattr(bench_peers, "run_peer", _peer_runner(asked))
    monkeypatch.setattr(machine, "device_kind", lambda count, simulate: "NVIDIA H200")
    assert bench.main(arguments) == 2 and not asked
    assert "holds no record of these problems" in capsys.readouterr().out
    recorded, path = _recorded(tmp_path)
    assert bench.main([*arguments, "--peers", "torch_symm_mem"]) == 0
    assert [(module, *more[1:]) for module, *more in asked] == [("cmm.peers.torch_symm_mem", ("--rounds", "7"))]
    run, today = results.load(path), datetime.date.today().isoformat()
    assert [peer.name for peer in run.peers] == ["xla_old", "torch"]
    assert run.peers[1].details == f"run on {today}" and run.date == recorded.date
    command = f"python -m cmm.bench {' '.join(_PEERS_ONLY[2:8])} --devices 2 --peers-only --rounds 7 --peers"
    assert run.command == f"bench --peers && {command} torch_symm_mem"
    assert dataclasses.replace(run, peers=recorded.peers, command=recorded.command) == recorded
    # A peer that fails shows in the exit status; what was measured before does not.
    capsys.readouterr()
    assert bench.main(arguments) == 1
    assert "peer xla, float16, 128 × 256 × 512: killed after 3 s" in capsys.readouterr().out
    run = results.load(path)
    assert [peer.name for peer in run.peers] == ["xla", "torch"]
    assert run.command == f"bench --peers && {command} xla_rewrite,torch_symm_mem"
    assert [path] == list(tmp_path.iterdir())


def test_peers_go_to_no_record_of_another_kind_of_gpu(tmp_path, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(bench_peers, "run_peer", _peer_runner(asked))
    monkeypatch.setattr(machine, "device_kind", lambda count, simulate: "NVIDIA H100 80GB HBM3")
    other, path = _recorded(tmp_path)
    arguments = [*_PEERS_ONLY, "--out", str(tmp_path), "--peers", "torch_symm_mem"]
    assert bench.main(arguments) == 2 and not asked and results.load(path) == other
    assert "no record of these problems from NVIDIA H100" in capsys.readouterr().out
    _, own_path = _recorded(tmp_path, "NVIDIA H100 80GB HBM3")
    assert bench.main(arguments) == 0 and results.load(path) == other
    assert [peer.name for peer in results.load(own_path).peers] == ["xla_old", "torch"]


@pytest.mark.parametrize(
    "peer, is_trouble",
    [
        (PeerResult("torch", "", "skipped", "PyTorch is not installed"), False),
        (PeerResult("torch", "", "measured", "", 0.1, 1e-4, ONE, ONE, ONE), False),
        (PeerResult("torch", "", "measured", "", 2.0, 1e-4, ONE, ONE, ONE), True),
        (PeerResult("torch", "", "failed", "crashed"), True),
    ],
)
def test_failed_and_wrong_peers_are_troubles(peer, is_trouble):
    assert bool(bench_peers.troubles(_run({"gemm_only": ([10.0], [10.0])}), [peer])) == is_trouble


def test_the_kind_of_device_is_asked_in_another_process(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert machine.device_kind(2, simulate=True) == "cpu"
    with pytest.raises(Refused, match="JAX finds none here"):
        machine.device_kind(2)
    monkeypatch.setattr(machine, "python_module", lambda *words: [sys.executable, "-c", "raise SystemExit('broken')"])
    with pytest.raises(Refused, match="cannot be found out: .*broken"):
        machine.device_kind(2)


def test_peers_do_not_start_when_time_is_up(monkeypatch):
    monkeypatch.setattr(bench_peers, "run_peer", lambda *args, **options: pytest.fail("started"))
    (peer,) = bench_peers.measure("torch_symm_mem", PROBLEM, Plan("", until=time.time() - 1))
    assert (peer.name, peer.status, peer.reason) == ("torch_symm_mem", "skipped", "time was up")


def test_a_record_is_replaced_as_a_whole(tmp_path, capsys, monkeypatch):
    # Whoever is killed while it writes must leave the old file.
    run = merge([_run({"gemm_only": ([10.0], [10.0])})], "old")
    path = results.save(run, tmp_path / results.file_name(run, "bench"))

    def dies(*args):
        raise OSError("disk full")

    def collect(plan, processes, silence_s, collected, on_progress, on_result):
        collected.machine, collected.problems = "2 x GPU", [PROBLEM]
        collected.runs[0] = [_run({"gemm_only": ([12.0], [12.0])})]
        on_result(0)

    monkeypatch.setattr(bench, "collect", collect)
    monkeypatch.setattr(bench.os, "replace", dies)
    assert bench.main(["--out", str(tmp_path)]) == 2
    assert results.load(path) == run and len(results.load_all(tmp_path)) == 1


def test_long_calls_are_timed_in_shorter_chains():
    published = on_gpus(Problem(2, 1024, 4096, 4096))
    assert published == ON_GPUS
    long = on_gpus(Problem(2, 4096, 16384, 26624, "bfloat16"))
    assert (long.rounds, long.operand_sets) == (ON_GPUS.rounds, ON_GPUS.operand_sets) and ON_GPUS.operand_sets >= 8
    assert 1 <= long.short_chain < long.long_chain < 10 and 1 <= long.short_starts < long.long_starts < 4
    assert long.recorded_starts == 1 and "1 recorded start but" in long.in_words(("ring",))
