"""Several processes measure the same problems; one that breaks, hangs or is late costs little."""

import dataclasses
import json
import pathlib
import sys
import textwrap
import time

import pytest
from bench_runs import PROBLEM, make_run
from process_state import runs

from cmm import results
from cmm.bench.child import Plan
from cmm.bench.processes import Collected, Refused, collect

ROOT = pathlib.Path(__file__).parents[1]


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
        results.save(make_run({"gemm_only": ([10.0], [10.0])}, problem), tmp_path / f"{index}.json")

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
    assert not runs((tmp_path / "pid").read_text())


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
