"""Records, and the tables made of them."""

import dataclasses

import pytest

from cmm import report, results
from cmm.results import MethodResult, Run, Spread
from cmm.roofline import Problem
from cmm.timeline import Span


def _measured(name, title, *times):
    return MethodResult(name, title, "measured", "", 0.1, 1e-4, *times)


def _run(**changes):
    methods = (
        _measured("gemm_only", "GEMM only", Spread(91, 90, 92), Spread(100, 98, 103), Spread(1, 1, 1)),
        _measured("naive", "gather", Spread(144, 143, 146), Spread(150, 147, 158), Spread(1.59, 1.57, 1.61)),
        MethodResult("ring", "ring", "skipped", "not asked for"),
    )
    fields = {
        "problem": Problem(2, 1024, 4096, 4096),
        "machine": {"device_kind": "NVIDIA H200"},
        "versions": {"jax": "0.11.2"},
        "simulated": False,
        "distribution": "normal(0, 1)",
        "protocol": "some rounds",
        "date": "2026-01-02",
        "command": "python -m cmm",
        "methods": methods,
    }
    return Run(**(fields | changes))


def test_save_and_load(tmp_path):
    run = _run()
    assert results.load(results.save(run, tmp_path / "deep" / results.file_name(run))) == run
    assert results.file_name(run) == "run_h200_d2_m1024_k4096_n4096_float16.json"
    with pytest.raises(KeyError, match="'magic' is not in this run, which has gemm_only, naive, ring"):
        run.method("magic")


def test_save_and_load_timelines(tmp_path):
    spans = [Span(0, "compute", "compute", 0.0, 4.5, None, None, "matmul"), Span(1, "link", "send", 1.0, 2.0, 0, 1)]
    path = results.save_timelines({"ring": spans}, _run(), tmp_path / "timeline.json")
    assert results.load_timelines(path) == (_run().caption(), {"ring": spans})


def test_ladder_rows():
    gemm_only, naive, ring = report.ladder_rows(_run())
    # 2 * 2 * 1024 * 4096 * 4096 FLOP in 144 us are 477 TFLOP/s, 48 % of 989.5.
    assert naive[3:] == ("144 (143–146)", "477", "48 %", "1.59 (1.57–1.61)", "150 (147–158)")
    assert gemm_only[6] == "1.00"
    assert ring[1] == "skipped" and not any(ring[2:])


def test_unknown_gpu_has_no_share_of_peak():
    rows = report.ladder_rows(_run(machine={"device_kind": "NVIDIA L4"}))
    assert rows[1][5] == "peak unknown"


def test_simulated_runs_claim_no_rates():
    for row in report.ladder_rows(_run(simulated=True)):
        assert not any(row[3:7])


def test_wrong_results_are_marked():
    wrong = MethodResult("ring", "ring", "measured", "", 1.5, 1e-2, Spread(1, 1, 1), Spread(1, 1, 1), Spread(1, 1, 1))
    assert report.is_wrong(_run(), wrong)
    assert "WRONG" in report.ladder_rows(_run(methods=(wrong,)))[0][2]
    assert report.is_wrong(_run(), MethodResult("ring", "ring", "measured", error_over_bound=float("nan")))
    # Within the bound of every element, but not as precise as float16 accumulated in float32.
    assert report.is_wrong(_run(), dataclasses.replace(wrong, error_over_bound=0.5))


def test_markers():
    text = "a\n<!-- t -->\nold\n<!-- /t -->\nb"
    assert report.replace_between_markers(text, "t", "new") == "a\n<!-- t -->\nnew\n<!-- /t -->\nb"
    with pytest.raises(ValueError, match="<!-- u -->"):
        report.replace_between_markers(text, "u", "new")
