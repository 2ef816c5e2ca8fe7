"""Peers are measured after the ladder or alone, and go to the record of the same problem and GPU."""

import dataclasses
import datetime
import pathlib
import sys
import time

import pytest
from bench_runs import ONE, PROBLEM, make_run

from cmm import results
from cmm.bench import __main__ as bench, machine, peers as bench_peers
from cmm.bench.child import Plan
from cmm.bench.merge import merge, with_peers
from cmm.bench.processes import Refused
from cmm.peers.own_process import PeerResult
from cmm.results import Spread

ROOT = pathlib.Path(__file__).parents[1]
_PEERS_ONLY = ["--devices", "2", "--m-shard", "128", "--k", "256", "--n-shard", "512", "--peers-only"]


def _peer_runner(asked):
    def run_peer(module, problem, timeout_s, simulate, arguments):
        asked.append((module, problem, arguments))
        if module == "cmm.peers.xla_rewrite":
            return [PeerResult("xla", "XLA's own", "failed", "killed after 3 s")]
        return [PeerResult("torch", "PyTorch's own", "measured", "", 0.1, 1e-4, ONE, ONE, Spread(1.25, 1.25, 1.25))]

    return run_peer


def _recorded(tmp_path, kind="NVIDIA H200"):
    """Writes a record with older results of peers."""
    old = [PeerResult("xla_old", "", "failed", "old"), PeerResult("torch_old", "", "failed", "old")]
    one = make_run({"gemm_only": ([10.0], [10.0]), "naive": ([20.0], [12.0])}, machine={"device_kind": kind})
    recorded = with_peers(merge([one] * 3, "bench --peers"), old)
    return recorded, results.save(recorded, tmp_path / results.file_name(recorded, "bench"))


def test_peers_troubles_and_what_is_missing_are_in_the_report(tmp_path, capsys, monkeypatch):
    problems = [dataclasses.replace(PROBLEM, m_shard=m) for m in (16, 32)]
    asked = []

    def collect(plan, processes, silence_s, collected, on_progress, on_result):
        collected.machine, collected.problems = "2 x GPU", problems
        collected.troubles.append("process 1 of 3: killed [after] 180 s")
        collected.runs[0] = [make_run({"gemm_only": ([10.0], [10.0]), "naive": ([20.0], [12.0])}, problems[0])] * 3
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
    assert bool(bench_peers.troubles(make_run({"gemm_only": ([10.0], [10.0])}), [peer])) == is_trouble


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
