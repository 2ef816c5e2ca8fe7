"""The figures show what the schedule, the predictions and the recorded runs say, and nothing else."""

import dataclasses
import functools
import itertools
import json
import pathlib
import xml.etree.ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.text import Text
from PIL import Image

from cmm import plots, results, roofline
from cmm.plots import palette
from cmm.plots.__main__ import FRAMES_PER_STEP, main
from cmm.plots.animation import _Scene
from cmm.plots.palette import DEVICE_COLORS, device_color, text_color
from cmm.plots.run import recorded_timelines_data
from cmm.plots.traces import trace_figures
from cmm.schedule import ring_schedule
from cmm.timeline import Span, naive_timeline, ring_timeline
from cmm.trace import file as trace_file

RECORDED = pathlib.Path(__file__).parents[1] / "figures" / "data"
AXIS_SIZES = (1, 2, 3, 4, 8)
# Three tests look at the same figures.
ring_steps = functools.cache(plots.draw_ring_steps)
PARTS = {"down": {"down": "all"}, "up": {"up": "all"}, "both": {"down": "upper", "up": "lower"}}


def by_gid(fig, prefix):
    """Returns the artists whose name begins with `prefix`, by the rest of their name."""
    artists = itertools.chain(*(ax.get_children() for ax in fig.axes))
    named = [artist for artist in artists if (artist.get_gid() or "").startswith(prefix)]
    assert len({artist.get_gid() for artist in named}) == len(named)
    return {artist.get_gid().removeprefix(prefix): artist for artist in named}


def texts(fig):
    return [text.get_text() for text in fig.findobj(Text) if text.get_text()]


def labels(blocks):
    """Returns the text in the middle of each rectangle, by the same keys."""
    (ax,) = {block.axes for block in blocks.values()} or {None}
    at = {}
    for text in ax.texts if ax else ():
        place = tuple(np.round(text.get_position(), 6))
        assert place not in at
        at[place] = text.get_text()
    return {key: at[tuple(np.round(block.get_center(), 6))] for key, block in blocks.items()}


def run(axis_size=4, times=(182.0, 290.0, 184.0), status="measured", simulated=False, kind="NVIDIA H200", **sizes):
    """Returns a run of three methods, and a fourth that was skipped."""
    problem = dataclasses.replace(roofline.published_problem(axis_size), **sizes)
    names = (("gemm_only", "GEMM only"), ("naive", "all-gather, then matmul"), ("kernel", "a kernel"))
    methods = [
        results.MethodResult(*name, status, call_time_us=results.Spread(time, 0.98 * time, 1.05 * time))
        for name, time in zip(names, times, strict=True)
    ]
    methods.append(results.MethodResult("late", "a later kernel", "skipped", "needs 8 devices"))
    about = ("normal(0, 1)", "chains", "2026-01-31", "python -m cmm bench")
    return results.Run(problem, {"device_kind": kind}, {"jax": "0.11.2"}, simulated, *about, tuple(methods))


def every_figure(axis_size):
    problem = roofline.published_problem(axis_size)
    yield plots.draw_layout(axis_size, axis_size - 1)
    yield plots.draw_ring(axis_size, axis_size // 2)
    for direction in ("down", "both"):
        yield plots.draw_ring_steps(axis_size, direction)
    yield plots.draw_predicted_timeline(axis_size)
    yield plots.draw_roofline_bounds(problem)
    yield plots.draw_utilization([run(axis_size)])


# The ring.


@pytest.mark.parametrize("direction", ["down", "up", "both"])
@pytest.mark.parametrize("axis_size", AXIS_SIZES)
def test_ring_arrows_and_shards_are_those_of_the_schedule(axis_size, direction):
    fig = ring_steps(axis_size, direction)
    sends, computes = set(), {}
    for one_way, part in PARTS[direction].items():
        for at in itertools.chain(*ring_schedule(axis_size, one_way)):
            computes[f"{at.step}-{at.device}-{at.computes}-{part}"] = f"$A_{{{at.computes}}}$"
            if at.sends is not None:
                sends.add(f"{at.step}-{at.device}-{at.send_to}-{at.sends}-{part}")
    assert set(by_gid(fig, "send-")) == sends
    assert labels(by_gid(fig, "compute-")) == computes
    names = {name: f"$A_{{{name.split('-')[3]}}}$" for name in sends}
    assert labels(by_gid(fig, "label-send-")) == names


@pytest.mark.parametrize("direction", ["down", "up", "both"])
@pytest.mark.parametrize("axis_size", AXIS_SIZES)
def test_ring_arrows_lead_from_the_sender_to_the_receiver(axis_size, direction):
    fig = ring_steps(axis_size, direction)
    cards = {name: card.get_path().get_extents() for name, card in by_gid(fig, "card-").items()}
    for name, arrow in by_gid(fig, "send-").items():
        step, device, send_to, *_ = name.split("-")
        curve = arrow._path_original.vertices
        for end, expected in ((curve[0], device), (curve[-1], send_to)):
            gaps = {key: distance_to(card, end) for key, card in cards.items() if key.startswith(f"{step}-")}
            assert min(gaps, key=gaps.get) == f"{step}-{expected}"
            assert 0 < gaps[f"{step}-{expected}"] < 0.2


def distance_to(box, point):
    outside = np.maximum(np.maximum(box.min - point, point - box.max), 0)
    return np.linalg.norm(outside)


@pytest.mark.parametrize("direction", ["down", "up", "both"])
@pytest.mark.parametrize("axis_size", AXIS_SIZES)
def test_row_blocks_of_c_fill_as_shards_are_multiplied(axis_size, direction):
    fig = ring_steps(axis_size, direction)
    expected = {}
    for one_way, part in PARTS[direction].items():
        step_of = {(at.device, at.computes): at.step for at in itertools.chain(*ring_schedule(axis_size, one_way))}
        for (device, shard), done_at in step_of.items():
            for step in range(axis_size):
                state = "finished" if step > done_at else "now" if step == done_at else "empty"
                expected[f"{step}-{device}-{shard}-{part}-{state}"] = state, shard
    blocks = by_gid(fig, "out-")
    assert set(blocks) == set(expected)
    for name, (state, shard) in expected.items():
        filled = to_hex(blocks[name].get_facecolor()).upper() == device_color(shard).upper()
        assert filled == (state == "finished")
        assert bool(blocks[name].get_hatch()) == (state == "now")


def test_one_step_is_the_same_step_of_all_steps():
    for step in range(4):
        single, together = plots.draw_ring(4, step), ring_steps(4, "down")
        for kind in ("send", "compute", "out"):
            assert set(by_gid(single, f"{kind}-{step}-")) == set(by_gid(together, f"{kind}-{step}-"))
            assert not set(by_gid(single, f"{kind}-")) - set(by_gid(together, f"{kind}-"))


@pytest.mark.parametrize(
    "draw, message",
    [
        (lambda: plots.draw_ring(4, 4), "step must be between 0 and axis_size - 1 = 3, got 4"),
        (lambda: plots.draw_ring(4, 0, "left"), "direction must be"),
        (lambda: plots.draw_ring_steps(0), "axis_size must be at least 1, got 0"),
        (lambda: plots.draw_layout(4, 4), "device must be between 0 and axis_size - 1 = 3, got 4"),
        (lambda: plots.draw_timeline({}), "at least one schedule"),
        (lambda: plots.render(plots.draw_layout(2), "pdf"), 'kind must be "svg" or "png"'),
    ],
)
def test_errors_name_the_values(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


# The animation.


@pytest.mark.parametrize("direction", ["down", "up", "both"])
def test_parcels_travel_from_sender_to_receiver_while_blocks_fill(direction):
    data = plots.ring_data(3, direction)
    with plots.style():
        for step in range(3):
            scene = _Scene(data, step, "")
            sending = [action for action in scene.actions if action["sends"] is not None]
            assert len(scene.moving) == len(sending) == (0 if step == 2 else 3 * len(PARTS[direction]))
            chips = by_gid(scene.ax.figure, f"compute-{step}-")
            for share, end in ((0.0, "device"), (1.0, "send_to")):
                scene.frame(share)
                for action, parcel in zip(sending, scene.moving, strict=True):
                    at_end = next(b for name, b in chips.items() if is_chip(name, action[end], action["part"]))
                    assert np.allclose(parcel.rectangle.get_bbox().bounds, at_end.get_bbox().bounds)
                    assert parcel.text.get_text() == f"$A_{{{action['sends']}}}$"
            assert all(block.get_width() == pytest.approx(full) for block, full in scene.growing)


def is_chip(name, device, part):
    return name.split("-")[0] == str(device) and name.split("-")[2] == part


def test_animation_is_a_small_endless_gif_of_readme_width(tmp_path):
    # A third of the usual number of frames, and so a third of the size that a page can bear, 1.5 MB.
    path = plots.ring_animation(tmp_path / "new" / "ring.gif", 4, frames_per_step=FRAMES_PER_STEP // 3)
    with Image.open(path) as gif:
        assert gif.width == 800
        assert gif.info["loop"] == 0
        # Frames in which nothing moves may have been merged.
        assert FRAMES_PER_STEP < gif.n_frames <= 4 * FRAMES_PER_STEP // 3 + 1
    assert path.stat().st_size < 0.5e6


def test_animation_drawn_twice_gives_the_same_bytes(tmp_path):
    first, second = (plots.ring_animation(tmp_path / name, 2, frames_per_step=2) for name in ("a.gif", "b.gif"))
    assert first.read_bytes() == second.read_bytes()


# The layout.


@pytest.mark.parametrize("axis_size", AXIS_SIZES)
def test_layout_shows_owners_and_what_a_device_lacks(axis_size):
    device = axis_size - 1
    fig = plots.draw_layout(axis_size, device)
    for kind, letter in (("lhs", "A"), ("rhs", "B"), ("out", "C")):
        blocks = by_gid(fig, f"holds-{kind}-")
        assert labels(blocks) == {str(owner): f"${letter}_{{{owner}}}$" for owner in range(axis_size)}
        for owner, block in blocks.items():
            assert to_hex(block.get_facecolor()) == device_color(int(owner)).lower()
    missing = {int(shard) for shard, block in by_gid(fig, "needs-lhs-").items() if block.get_hatch()}
    assert missing == set(range(axis_size)) - {device}
    made = {str(shard): f"$A_{{{shard}}}$$B_{{{device}}}$" for shard in range(axis_size)}
    assert labels(by_gid(fig, "makes-out-")) == made


# Timelines.


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
        record["summary"]["hidden_send_share"] = 0.0  # Of another call: the figure shows this one.
        trace_file.write(record, tmp_path / path.name)
    drawn = {name: draw() for name, draw, _ in trace_figures(tmp_path)}
    ctas = lambda fig: [text for text in texts(fig) if text.startswith("CTA")]
    for name, fig in drawn.items():
        title = fig.get_label()
        assert title.endswith("median of all CTAs") if name.endswith("step_change") else "under products" in title
        assert " 0 %" not in title and "A box of products holds" in " ".join(" ".join(texts(fig)).split())
        # In the fast kernel all send. In the readable one the second of two CTAs does not.
        one_of_two = name.startswith("kernel_timeline_pallas_h") and name.endswith("step_change")
        expected = [True, False] * 2 if one_of_two else [False] * len(ctas(fig))
        assert [text.endswith(", sends") for text in ctas(fig)] == expected
    assert len(drawn) == 4


# Utilization.


def test_bars_are_measured_rates():
    fig = plots.draw_utilization([run(2, (91.0, 146.0, 92.0)), run(4)], published=())
    bars = {name: bar for name, bar in by_gid(fig, "bar-0-").items() if not name.endswith("-spread")}
    times = {"2-gemm_only": 91, "2-naive": 146, "2-kernel": 92, "4-gemm_only": 182, "4-naive": 290, "4-kernel": 184}
    assert set(bars) == set(times)
    for name, time_us in times.items():
        flops = 2 * int(name[0]) * 1024 * 4096 * 4096
        percent = 100 * flops / (time_us * 1e-6) / 989.5e12
        assert bars[name].get_width() == pytest.approx(percent)
        assert f"{percent:.0f} %   {time_us} µs" in texts(fig)
        spread = by_gid(fig, f"bar-0-{name}-spread")[""]
        assert spread.get_xdata() == pytest.approx([percent / 1.05, percent / 0.98])
    assert not any("published" in text.lower() for text in texts(fig))


def test_bounds_are_dashed_lines_at_their_rates():
    fig = plots.draw_utilization([run(4)], published=())
    limits = by_gid(fig, "limit-0-4-")
    bounds = roofline.bounds(roofline.published_problem(4), roofline.H200_SXM)
    expected = {"T_lower": 100.0, "T_upper": 100 * bounds.t_lower_us / bounds.t_upper_us}
    assert {name: line.get_xdata()[0] for name, line in limits.items()} == pytest.approx(expected)
    assert all(line.is_dashed() for line in limits.values())


@pytest.mark.parametrize(
    "left_out, reason",
    [
        (run(simulated=True, status="simulated"), "simulated devices"),
        # Whatever its methods claim, a run on simulated devices has no times of GPUs.
        (run(simulated=True), "simulated devices"),
        (run(status="simulated"), "simulated"),
        (run(kind="TPU v9"), "no peak is known for TPU v9"),
    ],
)
def test_simulated_runs_and_unknown_peaks_are_left_out(left_out, reason):
    fig = plots.draw_utilization([left_out], published=())
    assert not by_gid(fig, "bar-") and not by_gid(fig, "limit-")
    assert "Nothing measured here yet" in texts(fig)
    data = plots.utilization_data([left_out], published=())
    assert len(data["left_out"]) == len(left_out.methods)
    assert all(reason in entry["reason"] for entry in data["left_out"] if entry["method"] != "late")
    # They do not disturb a run that can be drawn.
    both = plots.draw_utilization([left_out, run()], published=())
    assert set(by_gid(both, "bar-")) == set(by_gid(plots.draw_utilization([run()], published=()), "bar-"))


def test_skipped_methods_and_missing_times_are_left_out_with_their_reason():
    timeless = dataclasses.replace(run().methods[0], call_time_us=None)
    data = plots.utilization_data([dataclasses.replace(run(), methods=(timeless, *run().methods[1:]))], published=())
    assert [bar["method"] for bar in data["bars"]] == ["naive", "kernel"]
    reasons = {entry["method"]: entry["reason"] for entry in data["left_out"]}
    assert reasons == {"gemm_only": "no call time was recorded", "late": "skipped: needs 8 devices"}


def test_title_names_the_fastest_method_on_most_devices_beside_the_baseline():
    runs = [run(2, (91.0, 90.0, 90.0)), run(4, (182.0, 290.0, 190.0)), run(8, dtype="float32")]
    share = lambda size, time: 100 * roofline.utilization(roofline.published_problem(size), time, roofline.H200_SXM)
    words = "{}: {:.0f} % of peak on {} x H200, {} {:.0f} %".format
    naive = runs[0].methods[1].title
    assert plots.draw_utilization(runs).get_label() == words("A kernel", share(4, 190), 4, naive, share(4, 290))
    # Fewer devices, if only there a kernel of this project was measured.
    kernel = dataclasses.replace(runs[0].methods[2], name="pallas", title="one kernel")
    kernel = dataclasses.replace(kernel, call_time_us=results.Spread(80, 79, 81))
    runs[0] = dataclasses.replace(runs[0], methods=(*runs[0].methods[:2], kernel))
    assert plots.draw_utilization(runs).get_label() == words("One kernel", share(2, 80), 2, naive, share(2, 90))
    # The baseline itself stands beside the roof.
    runs[0] = dataclasses.replace(runs[0], methods=runs[0].methods[:2])
    title = words(naive[0].upper() + naive[1:], share(2, 90), 2, "GEMM only", share(2, 91))
    assert plots.draw_utilization(runs[:1]).get_label() == title


def test_diamonds_follow_the_hosts_clock_and_so_does_who_is_called_the_fastest():
    # Busy for a shorter time, yet later by the host's clock: such a method must not be called the best.
    gaps = dataclasses.replace(
        run(),
        methods=tuple(
            dataclasses.replace(m, wall_time_us=results.Spread(wall, wall, wall))
            for m, wall in zip(run().methods, (100, 160, 400))
        ),
    )
    fig = plots.draw_utilization([gaps], published=())
    marks = {line.get_gid(): line.get_xdata()[0] for line in fig.axes[0].lines if str(line.get_gid()).endswith("-wall")}
    problem = gaps.problem
    share = lambda time: 100 * roofline.utilization(problem, time, roofline.H200_SXM)
    assert sorted(marks.values()) == pytest.approx(sorted(map(share, (100, 160, 400))))
    # The number is that of the bar.
    assert fig.get_label().startswith(f"All-gather, then matmul: {share(290):.0f} % of peak")


def test_kernel_times_are_triangles_and_two_roofs_are_one():
    kernels = {"gemm_only": 180, "naive": 181, "kernel": 183}
    methods = [
        dataclasses.replace(m, kernel_time_us=m.call_time_us and results.Spread(*[kernels[m.name]] * 3))
        for m in run(times=(182.0, 620.0, 190.0)).methods
    ]
    torch = dataclasses.replace(methods[0], name="gemm_only_torch", title="GEMM only, PyTorch")
    torch = dataclasses.replace(torch, call_time_us=results.Spread(176, 175, 178), kernel_time_us=None)
    recorded = dataclasses.replace(run(), methods=(methods[0], torch, *methods[1:]))
    fig = plots.draw_utilization([recorded], published=())
    lines = {line.get_gid(): line for line in fig.axes[0].lines if str(line.get_gid()).endswith("-kernel")}
    share = lambda time: 100 * roofline.utilization(recorded.problem, time, roofline.H200_SXM)
    marks = {gid.split("-")[3]: line.get_xdata()[0] for gid, line in lines.items() if line.get_marker() == "^"}
    assert marks == pytest.approx({name: share(time) for name, time in kernels.items()})
    assert any("Triangles" in text for text in texts(fig))
    # The faster roof is no method, and the one that the baseline is seen against.
    naive = plots.draw_utilization([dataclasses.replace(recorded, methods=recorded.methods[:3])], published=())
    assert naive.get_label().endswith(f" {share(620):.0f} % of peak on 4 x H200, GEMM only {share(176):.0f} %")
    assert not any("Triangles" in text for text in texts(plots.draw_utilization([run()], published=())))


def test_the_projects_own_kernel_stands_out():
    names = ("gemm_only", "gemm_only_torch", "naive", "ring", "pallas", "jax_example")
    methods = [results.MethodResult(n, n, "measured", call_time_us=results.Spread(200, 199, 201)) for n in names]
    fig = plots.draw_utilization([dataclasses.replace(run(), methods=tuple(methods))], published=())
    bars = {name: bar for name, bar in by_gid(fig, "bar-0-4-").items() if not name.endswith("-spread")}
    colors = {name: to_hex(bar.get_facecolor()) for name, bar in bars.items()}
    assert [name for name, color in colors.items() if color == palette.ACCENT.lower()] == ["pallas"]
    assert not any(bar.get_hatch() for bar in bars.values())


def test_published_rows_are_marked_and_hatched():
    fig = plots.draw_utilization()
    bars = by_gid(fig, "bar-0-")
    expected = {(2, "kernel"): 68, (4, "kernel"): 66, (8, "kernel"): 64}
    assert {key: round(bars[f"{key[0]}-published_{key[1]}"].get_width()) for key in expected} == expected
    assert all(bar.get_hatch() for bar in bars.values())
    assert any(text.startswith("published, H100, not measured here") for text in texts(fig))
    for row in roofline.PUBLISHED_ROWS:
        assert f"published bound {row.bound_us:.0f} µs" in texts(fig)


def test_a_rate_above_the_peak_is_not_cut_off():
    fig = plots.draw_utilization([run(times=(100.0, 110.0, 120.0))], published=())
    widest = max(bar.get_width() for name, bar in by_gid(fig, "bar-").items() if not name.endswith("-spread"))
    assert 100 < widest < fig.axes[0].get_xlim()[1]


# Bounds.


@pytest.mark.parametrize("axis_size", AXIS_SIZES)
def test_curves_are_the_bounds(axis_size):
    problem = roofline.published_problem(axis_size)
    fig = plots.draw_roofline_bounds(problem)
    for name in ("m_shard", "n_shard"):
        for curve in ("t_math_us", "t_comms_us", "t_lower_us", "t_upper_us"):
            lines = by_gid(fig, f"{curve}-{name}")
            assert bool(lines) == (curve != "t_comms_us" or axis_size > 1)
            for line in lines.values():
                sizes, times = line.get_data()
                assert {16, 1024, 8192} <= set(sizes)
                for size, time_us in zip(sizes, times, strict=True):
                    bounds = roofline.bounds(dataclasses.replace(problem, **{name: int(size)}), roofline.H100_SXM)
                    assert time_us == getattr(bounds, curve)
                assert line.is_dashed() == (curve in ("t_lower_us", "t_upper_us"))
    assert any("Predicted, not measured" in text for text in texts(fig))


@pytest.mark.parametrize("axis_size", [2, 3, 4, 8])
def test_shading_ends_where_products_take_as_long_as_transfers(axis_size):
    problem = roofline.published_problem(axis_size)
    data = plots.bounds_data(problem)
    fig = plots.draw_roofline_bounds(problem)
    low, high = (dataclasses.replace(problem, n_shard=int(data["n_shard_where_hidden"]) + more) for more in (0, 1))
    for sizes, hidden in ((low, False), (high, True)):
        bounds = roofline.bounds(sizes, roofline.H100_SXM)
        assert (bounds.t_math_us >= bounds.t_comms_us) == hidden
    (shading,) = by_gid(fig, "communication-shows").values()
    assert shading.get_x() + shading.get_width() == pytest.approx(data["n_shard_where_hidden"])
    fewest = data["n_shard_where_a_hop_hides"]
    hides = [
        roofline.hop_hides(dataclasses.replace(problem, n_shard=n), roofline.H100_SXM) for n in (fewest - 1, fewest)
    ]
    assert hides == [False, True]


# All figures.


@pytest.mark.parametrize("axis_size", AXIS_SIZES)
def test_no_text_is_cut_off_or_lies_on_other_text(axis_size, monkeypatch):
    for fig in every_figure(axis_size):
        renderer = FigureCanvasAgg(fig).get_renderer()
        shown = drawn_texts(fig, monkeypatch)
        names = [text.get_text() for text in shown]
        # Boxes of text have room for strokes that few letters have: a pixel or two of overlap shows nothing.
        boxes = [text.get_window_extent(renderer).padded(-2) for text in shown]
        low, high = (np.array([getattr(box, corner) for box in boxes]) for corner in ("min", "max"))
        clipped = (low < 0).any(axis=1) | (high > fig.bbox.max).any(axis=1)
        assert not clipped.any(), np.array(names)[clipped]
        overlap = ((low[:, None] < high[None]) & (high[:, None] > low[None])).all(axis=-1) & ~np.eye(
            len(low), dtype=bool
        )
        assert not overlap.any(), (fig.get_label(), [(names[a], names[b]) for a, b in np.argwhere(overlap)])


def test_long_names_get_smaller_letters():
    long_name = "a kernel whose name says everything that it does at once"
    one = run()
    methods = [dataclasses.replace(result, title=long_name) for result in one.methods]
    fig = plots.draw_utilization([dataclasses.replace(one, methods=tuple(methods))], published=())
    renderer = FigureCanvasAgg(fig).get_renderer()
    for name, text in by_gid(fig, "name-").items():
        bar = by_gid(fig, name)[""]
        assert text.get_window_extent(renderer).x1 < bar.get_window_extent(renderer).x0
    (title,) = [text for text in fig.texts if text.get_gid() == "title"]
    assert title.get_text().startswith(long_name[0].upper() + long_name[1:])
    assert title.get_window_extent(renderer).x1 < fig.bbox.width


def drawn_texts(fig, monkeypatch):
    """Returns the texts that are drawn. A figure holds others, such as the labels of ticks out of view."""
    drawn = []
    with monkeypatch.context() as patched:
        patched.setattr(Text, "draw", lambda text, renderer: drawn.append(text))
        fig.draw_without_rendering()
    return [text for text in drawn if text.get_visible() and text.get_text()]


def test_redrawing_gives_the_same_bytes(monkeypatch):
    monkeypatch.setattr(palette, "PNG_DPI", 40)
    # Every second figure: between them they have all kinds of marks.
    for first, second in itertools.islice(zip(every_figure(2), every_figure(2), strict=True), 0, None, 2):
        assert plots.render(first, "svg") == plots.render(second, "svg")
    first, second = plots.draw_ring(2), plots.draw_ring(2)
    assert plots.render(first, "png") == plots.render(second, "png") == plots.render(first, "png")


def test_settings_of_the_reader_neither_change_nor_are_changed():
    expected = plots.render(plots.draw_predicted_timeline(2))
    theirs = {"font.size": 30, "axes.facecolor": "black", "svg.hashsalt": None, "font.weight": "bold"}
    with matplotlib.rc_context(theirs):
        before = dict(matplotlib.rcParams)
        assert plots.render(plots.draw_predicted_timeline(2)) == expected
        assert dict(matplotlib.rcParams) == before


def test_text_on_every_colour_can_be_read():
    def luminance(color):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in matplotlib.colors.to_rgb(color)]
        return np.dot((0.2126, 0.7152, 0.0722), linear)

    for color in DEVICE_COLORS:
        dark, light = sorted((luminance(color), luminance(text_color(color))))
        assert (light + 0.05) / (dark + 0.05) > 4


# The command.


def test_command_writes_every_figure_with_its_data(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(palette, "PNG_DPI", 40)
    out, recorded = tmp_path / "out", tmp_path / "recorded"
    runs = [run(2, (91.0, 146.0, 92.0)), run(4, simulated=True, status="simulated"), run(4, m_shard=512)]
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
        "utilization_other": plots.utilization_data(runs[2:], ()),
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
