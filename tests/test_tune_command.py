"""The command that tunes: where its winners go, what it leaves out, repeats or refuses, and a run on GPUs."""

import dataclasses
import json

import jax
import pytest
from scaled_kernel import Scale, scaled, search_scaled
from tuned_winners import empty_cache, look_up

from cmm import devices, suites, winners
from cmm.hopper.candidates import candidates
from cmm.roofline import Problem
from cmm.tune import __main__ as tune
from cmm.tune.tunable import TUNABLES, Tunable

SMALL = ["--m-shard", "16", "--k", "16", "--n-shard", "4"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no shipped table."""
    return empty_cache(tmp_path, monkeypatch)


@pytest.fixture
def fake_gpus(monkeypatch, cache):
    """Two devices that pass for GPUs, and in the place of "pallas_fast" a kernel that takes made-up times."""
    configs = [Scale(1.25, 1.0), Scale(1.0, 3.0)]
    monkeypatch.setattr(tune, "_find_gpus", lambda count, kernel: jax.devices("cpu")[:2])
    kernel = Tunable("pallas_fast", scaled, lambda problem, device: configs if problem.m_shard > 8 else [])
    monkeypatch.setitem(TUNABLES, "pallas_fast", kernel)
    monkeypatch.setattr(tune.search, "search", lambda problem, kernel, mesh, *rest: search_scaled(configs)[2])


def _words(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        tune.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in (*TUNABLES, *suites.SUITES, "--limit-s", "--table", "examples:"))


def test_without_hopper_gpus_it_says_so(capsys, tmp_path, monkeypatch):
    cpu = jax.devices("cpu")
    monkeypatch.setattr(devices, "find_devices", lambda count: cpu[:count])
    assert tune.main(["--devices", "2", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().out.strip() == (
        "Tuning needs Hopper GPUs, such as H100 or H200; found 2 x cpu. Times on other devices say nothing about them."
    )
    assert not (tmp_path / "out").exists()


def test_options_that_do_not_go_together(capsys):
    with pytest.raises(SystemExit) as stop:
        tune.main(["--suite", "W1", "--k", "64"])
    assert stop.value.code == 2 and "--suite has its own shapes" in capsys.readouterr().err


def test_winners_go_to_the_cache_or_to_a_table(fake_gpus, cache, capsys, tmp_path):
    out, table = ["--out", str(tmp_path)], tmp_path / "table.json"
    assert tune.main([*SMALL, *out]) == 0
    (kept,) = winners.read(cache)
    assert (kept.config["factor"], kept.problem) == (1.0, Problem(2, 16, 16, 4))
    assert f"kept in {cache}" in _words(capsys).replace(" /", "/").replace("kept in", "kept in ")
    cache.unlink()
    assert tune.main([*SMALL, *out, "--table", str(table)]) == 0
    assert [winner.problem for winner in winners.read(table)] == [kept.problem] and not cache.exists()
    raw = json.loads((tmp_path / "tune_pallas_fast_cpu_d2_m16_k16_n4_float16.json").read_text())
    assert raw["problem"] == dataclasses.asdict(kept.problem) and len(raw["trials"]) == 2


def test_a_search_is_not_repeated(fake_gpus, cache, capsys, monkeypatch, tmp_path):
    arguments = [*SMALL, "--out", str(tmp_path)]
    # What the real search would be given; its stand-in returns two trials, too.
    monkeypatch.setattr(tune.tuning_record, "is_repeat", lambda found, *_: bool(found))
    assert tune.main(arguments) == 0
    cache.unlink()
    monkeypatch.setattr(tune.search, "search", None)
    assert tune.main(arguments) == 0 and "done before" in _words(capsys)
    assert len(winners.read(cache)) == 1, "its winner is kept all the same"
    (tmp_path / "tune_pallas_fast_cpu_d2_m16_k16_n4_float16.json").write_text("[broken")
    with pytest.raises(TypeError):
        tune.main(arguments)


def test_what_does_not_fit_is_left_out_and_a_broken_table_found_first(fake_gpus, capsys, tmp_path):
    assert tune.main(["--m-shard", "8", "--out", str(tmp_path)]) == 0
    assert "left out, no configuration has tiles that divide these sizes" in _words(capsys)
    (tmp_path / "table.json").write_text("{}")
    assert tune.main([*SMALL, "--out", str(tmp_path), "--table", str(tmp_path / "table.json")]) == 2
    assert "must be a list, got dict" in _words(capsys)


def test_no_winner_is_a_failure(monkeypatch, fake_gpus, capsys, tmp_path):
    for configs, reason in (([Scale(1.25, 1.0)], "none of 1 configurations gives"), ([Scale(0, 1.0)], "does not fit")):
        monkeypatch.setattr(tune.search, "search", lambda *_, configs=configs: search_scaled(configs)[2])
        assert tune.main([*SMALL, "--out", str(tmp_path)]) == 1
        assert reason in _words(capsys)


def test_time_limit_between_problems(monkeypatch, fake_gpus, capsys, tmp_path):
    clock = iter([0.0] + [100.0] * 10)
    monkeypatch.setattr(tune.time, "monotonic", lambda: next(clock))
    assert tune.main(["--suite", "W1", "--limit-s", "50", "--out", str(tmp_path)]) == 1
    assert "time is up: 1 of 2 problems are left" in _words(capsys)


@pytest.mark.gpu
def test_on_gpus(gpus, cache, tmp_path):
    shape = ["--m-shard", "256", "--k", "1024", "--n-shard", "1024", "--out", str(tmp_path)]
    assert tune.main([*shape, "--candidates", "5", "--rounds", "2"]) == 0
    found = look_up(Problem(len(gpus), 256, 1024, 1024), device_kind=gpus[0].device_kind)
    assert found in candidates(256, 1024, 1024, "float16", gpus[0].core_count)[:5]
