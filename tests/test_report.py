"""Records, and the tables made of them."""

import dataclasses
import json

import pytest

from cmm import report, results, roofline
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


def test_a_file_without_kernel_times_loads(tmp_path):
    path = results.save(_run(), tmp_path / "run.json")
    raw = json.loads(path.read_text())
    del raw["gemm_only"]
    for method in raw["methods"]:
        for name in ("kernel_time_us", "kernel_ratio_to_gemm_only", "details"):
            del method[name]
    path.write_text(json.dumps(raw))
    assert results.load(path) == _run()


def test_save_and_load_timelines(tmp_path):
    spans = [Span(0, "compute", "compute", 0.0, 4.5, None, None, "matmul"), Span(1, "link", "send", 1.0, 2.0, 0, 1)]
    path = results.save_timelines({"ring": spans}, _run(), tmp_path / "timeline.json")
    assert results.load_timelines(path) == (_run().caption(), {"ring": spans})


def test_ladder_rows():
    gemm_only, naive, ring = report.ladder_rows(_run())
    # 2 * 2 * 1024 * 4096 * 4096 FLOP in 144 us are 477 TFLOP/s, 48 % of 989.5.
    assert naive[3:] == ("144 (143–146)", "", "477", "48 %", "1.59 (1.57–1.61)", "", "150 (147–158)")
    assert gemm_only[7] == "1.00"
    assert ring[1] == "skipped" and not any(ring[2:])


def test_unknown_gpu_has_no_share_of_peak():
    rows = report.ladder_rows(_run(machine={"device_kind": "NVIDIA L4"}))
    assert rows[1][6] == "peak unknown"


def test_simulated_runs_claim_no_rates():
    for row in report.ladder_rows(_run(simulated=True)):
        assert not any(row[3:9])


def test_wrong_results_are_marked():
    wrong = MethodResult("ring", "ring", "measured", "", 1.5, 1e-2, Spread(1, 1, 1), Spread(1, 1, 1), Spread(1, 1, 1))
    assert report.is_wrong(_run(), wrong)
    assert "WRONG" in report.ladder_rows(_run(methods=(wrong,)))[0][2]
    assert report.is_wrong(_run(), MethodResult("ring", "ring", "measured", error_over_bound=float("nan")))
    # Within the bound of every element, but not as precise as float16 accumulated in float32.
    assert report.is_wrong(_run(), dataclasses.replace(wrong, error_over_bound=0.5))


def _with_kernels(run):
    """Returns `run` on two GPUs with kernel times, one more roof and one more method, as a later run has them."""
    gemm_only, naive, ring = run.methods
    torch = _measured("gemm_only_torch", "GEMM only, PyTorch", Spread(88, 87, 89), Spread(95, 94, 96), Spread(1, 1, 1))
    kernel = dataclasses.replace(
        _measured("pallas", "one kernel", Spread(100, 99, 102), Spread(120, 118, 130), Spread(1.14, 1.13, 1.15)),
        kernel_time_us=Spread(92, 91, 93),
        wall_time_in_program_us=Spread(103, 102, 104),
        details="tile_m=128",
    )
    return dataclasses.replace(run, methods=(gemm_only, torch, naive, ring, kernel), gemm_only="gemm_only_torch")


def test_kernel_times_are_in_the_rows():
    *_, kernel = report.ladder_rows(_with_kernels(_run()))
    assert kernel[3:5] == ("100 (99–102)", "92")


def test_markdown_of_runs_with_different_methods():
    new, old = _with_kernels(_run()), _run(problem=roofline.published_problem(4))
    text = report.markdown_ladder([new, old])
    assert text.startswith("**2 GPUs**\n\n")
    first, rest = text.removeprefix("**2 GPUs**\n\n").split("\n\n**4 GPUs**\n\n")
    second, details = rest.split("\n\n", 1)
    tables = []
    for table in (first, second):
        header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
        assert all(len(row) == len(header) for row in rows)
        tables.append({row[0]: dict(zip(header, row, strict=True)) for row in rows})
    assert list(tables[0]) == ["GEMM only", "GEMM only, PyTorch", "gather", "ring", "one kernel"]
    kernel = tables[0]["one kernel"]
    assert (kernel["call, µs"], kernel["kernel, µs"], kernel["× GEMM only"]) == ("100 (99–102)", "92", "1.14")
    assert (kernel["wall in a program, µs"], kernel["wall alone, µs"]) == ("103", "120")
    assert tables[0]["ring"]["call, µs"] == tables[1]["ring"]["call, µs"] == "skipped"
    assert list(tables[1]) == ["GEMM only", "gather", "ring"]
    # Nobody recorded kernel times on four GPUs: no column of nothing.
    assert not {"kernel, µs", "wall in a program, µs"} & set(tables[1]["gather"])
    assert details.count("is the faster one here: GEMM only, PyTorch.") == 1
    assert "one kernel: tile_m=128." in details


def test_an_incomplete_recording_shows_no_times_of_gpus():
    half = dataclasses.replace(_run().methods[1], kernel_ratio_to_gemm_only=Spread(0.5, 0.5, 0.5))
    run = _run(methods=(_run().methods[0], half))
    assert report.ladder_rows(run)[1][3:] == ("incomplete", "", "", "", "", "", "150 (147–158)")
    row = report.markdown_ladder([run]).splitlines()[5]
    assert "incomplete" in row and "144" not in row and "150" in row


def test_wrong_results_are_marked_in_markdown():
    wrong = dataclasses.replace(_run().methods[1], error_over_bound=2.0)
    assert "144 (143–146) WRONG" in report.markdown_ladder([_run(methods=(_run().methods[0], wrong))])


def test_peers_have_rows_and_a_note_of_what_they_are_compared_with():
    times = (Spread(120, 119, 121), Spread(130, 128, 133), Spread(1.3, 1.2, 1.4))
    peers = (_measured("torch", "PyTorch's own", *times), MethodResult("xla", "XLA's own", "failed", "crashed"))
    run = _run(peers=peers)
    *_, torch, xla = report.ladder_rows(run)
    assert torch[0] == "PyTorch's own" and torch[7] == "1.30 (1.20–1.40)"
    assert xla[:2] == ("XLA's own", "failed") and not any(xla[2:])
    table = report.markdown_ladder([run, _run(problem=roofline.published_problem(4))])
    assert "| XLA's own | failed |" in table and "ratios to their own GEMM only: PyTorch's own." in table
    assert report.peers_note(_run()) == ""


def test_markers():
    text = "a\n<!-- t -->\nold\n<!-- /t -->\nb"
    assert report.replace_between_markers(text, "t", "new") == "a\n<!-- t -->\nnew\n<!-- /t -->\nb"
    with pytest.raises(ValueError, match="<!-- u -->"):
        report.replace_between_markers(text, "u", "new")
