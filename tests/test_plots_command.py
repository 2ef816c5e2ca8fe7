"""The command writes every figure and, beside it, the data that it shows."""

import json
import xml.etree.ElementTree

import pytest
from figure_parts import by_gid, run
from PIL import Image

from cmm import plots, results, roofline
from cmm.plots import palette
from cmm.plots.__main__ import all_figures, main
from cmm.timeline import Span, naive_timeline


def test_command_writes_every_figure_with_its_data(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(palette, "PNG_DPI", 40)
    out, recorded = tmp_path / "out", tmp_path / "recorded"
    runs = [
        run(2, (91.0, 146.0, 92.0)),
        run(4, simulated=True, status="simulated"),
        run(4, m_shard=512),
        run(4, dtype="bfloat16"),
    ]
    for one in runs:
        results.save(one, recorded / results.file_name(one))
    calls = {"naive": list(naive_timeline(2, 45.0, 30.0)), "gemm_only": [Span(0, "compute", "compute", 0.0, 91.0)]}
    results.save_timelines(calls, runs[0], recorded / results.timelines_file_name(runs[0]))
    main(["--out", str(out), "--axis-size", "2", "--runs", str(recorded), "--frames-per-step", "3"])
    timelines, source = plots.predicted_timelines(2)
    like_published = sorted(runs[:2], key=lambda one: one.problem.axis_size)
    expected = {
        "layout": plots.layout_data(2),
        "ring_step": plots.ring_data(2) | {"step": 1},
        "ring_steps": plots.ring_data(2),
        "ring_steps_bidirectional": plots.ring_data(2, "both"),
        "timeline_predicted": plots.timeline_data(timelines, source),
        "roofline_bounds": plots.bounds_data(roofline.published_problem(2)),
        "utilization": plots.utilization_data(like_published),
        "utilization_other": plots.utilization_data(runs[3:], ()),
        "utilization_shapes_h200_d4": plots.utilization_shapes_data(runs[2:3]),
    }
    spans = json.loads((out / "data" / "timeline_recorded_h200_d2.json").read_text())["schedules"][0]["spans"]
    assert [Span(**span) for span in spans] == calls["naive"]
    printed = capsys.readouterr().out
    for name, data in expected.items():
        assert json.loads((out / "data" / f"{name}.json").read_text()) == json.loads(json.dumps(data))
        assert xml.etree.ElementTree.parse(out / f"{name}.svg").getroot().tag.endswith("svg")
        with Image.open(out / f"{name}.png") as picture:
            # Opaque and light to the edge, so that the page behind does not matter.
            corner = picture.convert("RGBA").getpixel((0, 0))
            assert corner[3] == 255 and min(corner[:3]) > 240
        assert f"{name}.svg" in printed.replace("\n", "")
    assert json.loads((out / "data" / "ring.json").read_text()) == plots.ring_data(2)
    names = {path.name for path in out.iterdir()} - {"data"}
    drawn = [*expected, "timeline_recorded_h200_d2"]
    assert names == {f"{name}.{kind}" for name in drawn for kind in ("svg", "png")} | {"ring.gif", "kernel.gif"}


def test_simulated_runs_alone_have_no_figure_of_other_dtypes(tmp_path):
    names = {}
    for simulated in (True, False):
        one = run(dtype="bfloat16", simulated=simulated, status="simulated" if simulated else "measured")
        results.save(one, tmp_path / results.file_name(one))
        names[simulated] = [name for name, *_ in all_figures(2, tmp_path)]
    assert "utilization_other" not in names[True] and "utilization_other" in names[False]


def test_data_of_a_figure_is_what_it_shows(tmp_path):
    fig, data = plots.draw_utilization([run()]), plots.utilization_data([run()])
    plots.save(fig, tmp_path, "utilization", data)
    stored = json.loads((tmp_path / "data" / "utilization.json").read_text())
    shown = [bar.get_width() for name, bar in by_gid(fig, "bar-").items() if not name.endswith("-spread")]
    assert sorted(shown) == pytest.approx(sorted(100 * bar["utilization"] for bar in stored["bars"]))
    assert {bar["provenance"] for bar in stored["bars"]} == {"measured", "published"}
    assert all(bar["source"] for bar in stored["bars"])


def test_command_refuses_an_empty_ring(capsys):
    with pytest.raises(SystemExit):
        main(["--axis-size", "0"])
    assert "must be at least 1, got 0" in capsys.readouterr().err
