"""Figures of predicted and recorded timelines show their spans, shares and sources."""

import pathlib

import pytest
from figure_parts import AXIS_SIZES, by_gid, texts

from cmm import plots, roofline
from cmm.plots.run import recorded_timelines_data
from cmm.plots.traces import trace_figures
from cmm.timeline import Span, naive_timeline, ring_timeline
from cmm.trace import file as trace_file

RECORDED = pathlib.Path(__file__).parents[1] / "figures" / "data"


@pytest.mark.parametrize("axis_size", AXIS_SIZES)
def test_timeline_bars_are_the_spans(axis_size):
    timelines = {"naive": naive_timeline(axis_size, 43.0, 60.0), "ring": ring_timeline(axis_size, 43.0, 60.0)}
    fig = plots.draw_timeline(timelines)
    for index, spans in enumerate(timelines.values()):
        drawn = by_gid(fig, f"span-{index}-")
        bars = {(round(b.get_x(), 6), round(b.get_x() + b.get_width(), 6), b.get_y()) for b in drawn.values()}
        assert len(bars) == len(drawn) >= len(spans)
        for number, span in enumerate(spans):
            bar = drawn[str(number)]
            assert (bar.get_x(), bar.get_x() + bar.get_width()) == pytest.approx((span.start_us, span.end_us))
            assert bool(bar.get_hatch()) == (span.kind == "wait")
    scales = {ax.get_xlim() for ax in fig.axes}
    assert scales == {(0, max(span.end_us for spans in timelines.values() for span in spans))}


def test_predicted_timeline_states_durations_busy_shares_and_sources():
    fig = plots.draw_predicted_timeline(4)
    hop_us = 1024 * 4096 * 2 / 450e9 * 1e6
    naive_us, ring_us = 3 * hop_us + 4 * 43, 4 * 43
    totals = [text.get_text() for text in by_gid(fig, "total-").values()]
    assert totals == [f"{naive_us:.0f} µs", f"{ring_us:.0f} µs"]
    busy = by_gid(fig, "busy-")
    assert {text.get_text() for name, text in busy.items() if name[0] == "0"} == {f"{100 * 172 / naive_us:.0f} % busy"}
    assert {text.get_text() for name, text in busy.items() if name[0] == "1"} == {"100 % busy"}
    caption = " ".join(" ".join(texts(fig)).split())
    for fact in ("Predicted, not measured", "43 µs", "18.6 µs = 8.39 MB at 450 GB/s", roofline.PUBLISHED_SOURCE):
        assert fact in caption


def test_recorded_spans_show_gaps_as_waiting_and_every_lane():
    spans = [
        Span(0, "compute", "compute", 5.0, 45.0, 0, 0, "gemm"),
        Span(0, "compute", "compute", 50.0, 90.0, 1, 1, "gemm"),
        Span(0, "link", "send", 5.0, 30.0, 0, 0),
        Span(0, "link up", "send", 6.0, 31.0, 0, 0),
        Span(1, "compute", "compute", 8.0, 100.0),
    ]
    fig = plots.draw_timeline({"recorded": spans})
    waits = {(b.get_x(), b.get_x() + b.get_width()) for b in by_gid(fig, "span-0-").values() if b.get_hatch()}
    assert waits == {(45.0, 50.0), (90.0, 100.0), (5.0, 8.0)}
    assert {"tensor cores", "link", "link up"} <= set(texts(fig))
    assert by_gid(fig, "total-")["0"].get_text() == "95 µs"
    assert by_gid(fig, "busy-")["0-0"].get_text() == f"{100 * 80 / 95:.0f} % busy"


def test_of_recorded_kernels_the_fast_one_is_drawn():
    titles = {name: name for name in ("pallas", "pallas_fast", "naive", "gemm_only")}
    recorded = {name: [Span(0, "compute", "compute", 0.0, 10.0), Span(0, "barrier", "wait", 0, 1)] for name in titles}
    data = recorded_timelines_data(recorded, titles, "a machine")
    assert [schedule["title"] for schedule in data["schedules"]] == ["naive", "pallas_fast"]
    assert "not visible" in data["source"] and "call times do not count them" in data["source"]
    del recorded["pallas_fast"]
    data = recorded_timelines_data(recorded, titles, "a machine")
    assert [schedule["title"] for schedule in data["schedules"]] == ["naive", "pallas"]


def test_timelines_from_inside_say_who_sends_and_what_a_box_is(tmp_path):
    for path in RECORDED.glob("trace_*_float16.json"):
        record = trace_file.read(path)
        record["summary"]["hidden_send_share"] = 0.51  # Of the recording with a mark at each product.
        trace_file.write(record, tmp_path / path.name)
    drawn = {name: draw() for name, draw, _ in trace_figures(tmp_path)}
    ctas = lambda fig: [text for text in texts(fig) if text.startswith("CTA")]
    for name, fig in drawn.items():
        title = fig.get_label()
        step_change = name.endswith("step_change")
        assert title.endswith("median of all CTAs") if step_change else "51 % of the time of sends" in title
        assert "A box of products holds" in " ".join(" ".join(texts(fig)).split())
        # In the fast kernel all send. In the readable one the second of two CTAs does not.
        one_of_two = name.startswith("kernel_timeline_pallas_h") and name.endswith("step_change")
        expected = [True, False] * 2 if one_of_two else [False] * len(ctas(fig))
        assert [text.endswith(", sends") for text in ctas(fig)] == expected
    assert len(drawn) == 4
