"""A peer in a process of its own: what it is told, what it reports, and how a crash or a hang ends."""

import dataclasses
import os
import re
import sys
import textwrap
import time

import pytest
from process_state import runs

from cmm.peers.own_process import PeerResult, from_json, run_peer, to_json
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


READS_OPTIONS = """\
import sys
from cmm.peers.own_process import *
parser = argparse.ArgumentParser()
add_options(parser)
options = parser.parse_args()
"""


@pytest.fixture
def make_module(tmp_path, monkeypatch):
    """Returns a function that makes a module of its source, found by subprocesses, and returns the module's name."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))

    def make(source, before=""):
        (tmp_path / "fake_peer.py").write_text(before + textwrap.dedent(source))
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
        print("noise")
        result = from_json({to_json([RESULT])!r})[0]
        report([dataclasses.replace(result, reason=f"{{problem_of(options)}} {{options.simulate}}")], options.json)
        """,
        before=READS_OPTIONS,
    )
    (result,) = run_peer(module, PROBLEM, 60, simulate=True)
    assert result == dataclasses.replace(RESULT, reason=f"{PROBLEM} True")


def test_what_a_library_said_before_a_peer_failed_is_kept(make_module):
    module = make_module(
        f"""
        print("NCCL WARN no link", file=sys.stderr)
        good = from_json({to_json([RESULT])!r})[0]
        bad = dataclasses.replace(good, status="failed", reason=f"rounds {{options.rounds}}")
        report([good, bad], options.json)
        """,
        before=READS_OPTIONS,
    )
    good, bad = run_peer(module, PROBLEM, 60, arguments=("--rounds", "3"))
    assert good == RESULT and bad.reason == "rounds 3; standard error: NCCL WARN no link"


@pytest.mark.parametrize(
    "source, words",
    [
        ("raise SystemError('out of luck')", "ended with exit status 1: .*SystemError: out of luck"),
        ("pass", "ended with exit status 0"),
    ],
    ids=["crashes", "says nothing"],
)
def test_a_peer_without_a_report_failed(make_module, source, words):
    (result,) = run_peer(make_module(source), PROBLEM, 60)
    assert (result.name, result.status) == ("fake_peer", "failed")
    assert re.fullmatch(words, result.reason, re.DOTALL)


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
    while runs(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not runs(child)
