"""The command and its child from end to end: on simulated devices, without GPUs, when something fails."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time

from bench_runs import PROBLEM, make_run

from cmm import results
from cmm.bench import __main__ as bench, child as bench_child
from cmm.bench.child import Plan
from cmm.bench.merge import merge
from cmm.roofline import Problem

ROOT = pathlib.Path(__file__).parents[1]


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


def test_a_record_is_replaced_as_a_whole(tmp_path, capsys, monkeypatch):
    # Whoever is killed while it writes must leave the old file.
    run = merge([make_run({"gemm_only": ([10.0], [10.0])})], "old")
    path = results.save(run, tmp_path / results.file_name(run, "bench"))

    def dies(*args):
        raise OSError("disk full")

    def collect(plan, processes, silence_s, collected, on_progress, on_result):
        collected.machine, collected.problems = "2 x GPU", [PROBLEM]
        collected.runs[0] = [make_run({"gemm_only": ([12.0], [12.0])})]
        on_result(0)

    monkeypatch.setattr(bench, "collect", collect)
    monkeypatch.setattr(bench.records.os, "replace", dies)
    assert bench.main(["--out", str(tmp_path)]) == 2
    assert results.load(path) == run and len(results.load_all(tmp_path)) == 1


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
