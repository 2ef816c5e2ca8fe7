"""The figure of other shapes: which problems it shows, what its bars are, and what title and caption say."""

import dataclasses

import numpy as np
import pytest
from figure_parts import by_gid
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from cmm import results, roofline
from cmm.plots.__main__ import all_figures
from cmm.plots.utilization_shapes import draw_utilization_shapes, utilization_shapes_groups
from cmm.plots.utilization_shapes_records import suite_title, utilization_shapes_data
from cmm.roofline import Problem
from cmm.suites import SUITES, suite

NAME = "utilization_shapes_h200_d2"
TITLES = {
    "gemm_only": "GEMM only",
    "gemm_only_torch": "GEMM only, PyTorch",
    "naive": "all-gather + matmul",
    "ring": "ring",
    "pallas": "one kernel",
    "pallas_fast": "one kernel, fast",
    "jax_example": "JAX's example kernel",
}
# Invented.
SHARES = dict(zip(TITLES, (0.76, 0.78, 0.60, 0.5, 0.66, 0.75, 0.64), strict=True))
LLAMA = ((2048, 4096, 7168), (4096, 4096, 7168), (2048, 8192, 14336), (4096, 8192, 14336))
ROUNDS = (0.98, 1.0, 1.04)


def run(m=2048, k=8192, n=14336, dtype="bfloat16", axis_size=2, simulated=False, processes=1, repeats=1, **shares):
    """A run whose methods have the given shares of the peak, in `repeats` times three rounds per process."""
    problem = Problem(axis_size, m, k, n, dtype)
    methods, rounds = [], {}
    for name, share in (SHARES | shares).items():
        us = problem.flops_per_device / (share * roofline.peak_flops_per_s(roofline.H200_SXM, dtype)) * 1e6
        time = results.Spread(us, ROUNDS[0] * us, ROUNDS[-1] * us)
        methods.append(
            results.MethodResult(name, TITLES[name], "simulated" if simulated else "measured", call_time_us=time)
        )
        rounds[name] = [results.Rounds(call_us=[factor * us for factor in ROUNDS] * repeats)] * processes
    about = ({"device_kind": "NVIDIA H200"}, {"jax": "0.11.2"}, simulated, "normal(0, 1)", "invented", "2026-01-31")
    more = {"gemm_only": "gemm_only_torch", "rounds": rounds, "processes": processes}
    return results.Run(problem, *about, "python -m cmm.bench", tuple(methods), **more)


def replace(one, name, **changes):
    changed = [dataclasses.replace(m, **changes) if m.name == name else m for m in one.methods]
    return dataclasses.replace(one, methods=tuple(changed))


def caption(fig):
    plain = (text.get_text().replace("\n", " ").replace("\N{NO-BREAK SPACE}", " ") for text in fig.texts)
    return " ".join(plain)


def labels(runs):
    return [problem["label"] for problem in utilization_shapes_data(runs)["problems"]]


def test_figures_divide_the_records(tmp_path):
    llama = [run(*sizes) for sizes in LLAMA]
    usual = [run(1024, 4096, 4096, dtype) for dtype in ("float16", "bfloat16", "float32")]
    swept = [run(rows, 4096, 4096, "float16") for rows in (64, 256, 2048)]
    # Three numbers of rows make a sweep, but not one of the published weights.
    more_rows = [run(1024, 8192, 14336)]
    too_few = [run(64, 4096, 4096)]
    apart = [run(*LLAMA[0], axis_size=4), run(*LLAMA[0], axis_size=1), run(*LLAMA[1], dtype="float16", simulated=True)]
    for one in (*llama, *usual, *swept, *more_rows, *too_few, *apart):
        results.save(one, tmp_path / results.file_name(one, "bench"))
    data = {name: data for name, _, data in all_figures(2, tmp_path)}
    assert {name for name in data if name.startswith("utilization_")} == {
        *(NAME, "utilization_shapes_h200_d4", "utilization_other")
    }
    shown = [problem["label"] for problem in data[NAME]()["problems"]]
    assert sorted(shown) == sorted(labels([*llama, *more_rows, *too_few]))
    other = data["utilization_other"]()
    assert {bar["panel"] for bar in other["bars"]} == {
        f"NVIDIA H200, {dtype}, per shard M=1024 K=4096 N=4096" for dtype in ("bfloat16", "float32")
    }
    assert {bar["method"] for bar in other["bars"]} == set(TITLES)


def test_problems_are_sorted_by_flops_and_have_the_names_of_their_suites():
    runs = [run(2048, 8192, 14336, "float16"), run(512, 8192, 2048), *(run(*sizes) for sizes in reversed(LLAMA))]
    fig = draw_utilization_shapes(runs)
    names, suites = ({i: text.get_text() for i, text in by_gid(fig, of).items()} for of in ("label-", "suite-"))
    expected = [
        ("bfloat16, 512 × 8192 × 2048", None),
        ("bfloat16, 2048 × 4096 × 7168", "Llama-3 8B"),
        ("bfloat16, 4096 × 4096 × 7168", "Llama-3 8B"),
        ("bfloat16, 2048 × 8192 × 14336", "Llama-3 70B"),
        ("float16, 2048 × 8192 × 14336", "Llama-3 70B"),
        ("bfloat16, 4096 × 8192 × 14336", "Llama-3 70B"),
    ]
    assert [(names[f"{i}"], suites.get(f"{i}")) for i in range(len(runs))] == expected
    # The tops of the axes go down, left before right.
    places = [(-ax.get_position().y1, ax.get_position().x0) for ax in fig.axes]
    assert places == sorted(places) and len({x for _, x in places}) == 2


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_each_column_has_the_numbers_of_its_axis_below_its_last_problem(count):
    axes = draw_utilization_shapes([run(*sizes) for sizes in LLAMA[:count]]).axes
    has_numbers = [ax.xaxis.get_tick_params()["labelbottom"] for ax in axes]
    assert has_numbers == [False] * (count - 2) + [True] * min(count, 2)


def test_suites_depend_on_the_number_of_devices():
    assert suite_title(Problem(2, 4096, 16384, 26624, "bfloat16")) == "Llama-3 405B"
    assert suite_title(Problem(4, 1024, 8192, 7168, "bfloat16")) == "Llama-3 70B"
    assert suite_title(Problem(4, 2048, 8192, 14336, "bfloat16")) == ""
    assert suite_title(Problem(3, 2048, 8192, 14336, "bfloat16")) == ""


@pytest.mark.parametrize("name", SUITES)
def test_suites_have_titles_in_words(name):
    (title,) = {suite_title(problem) for problem in suite(name, 4)[:1]}
    assert title and title not in SUITES


def test_bars_are_shares_of_the_peak():
    fig = draw_utilization_shapes([run()])
    drawn = by_gid(fig, "bar-0-")
    bars = {name: bar.get_width() for name, bar in drawn.items() if not name.endswith("-spread")}
    shown = ("gemm_only_torch", "naive", "pallas_fast", "jax_example")
    assert bars == pytest.approx({name: 100 * SHARES[name] for name in shown})
    for name in shown:
        ends = [100 * SHARES[name] / factor for factor in (ROUNDS[-1], ROUNDS[0])]
        assert list(drawn[f"{name}-spread"].get_xdata()) == pytest.approx(ends)
    texts = [text.get_text() for text in fig.axes[0].texts]
    assert {f"{100 * SHARES[name]:.0f} %  {TITLES[name]}" for name in shown} <= set(texts)


def test_what_is_wrong_incomplete_or_missing_has_no_bar_but_a_reason():
    one = replace(run(), "pallas_fast", error_over_bound=7.0, relative_error=1e-4)
    one = replace(one, "naive", kernel_ratio_to_gemm_only=results.Spread(0.3, 0.3, 0.3))
    one = replace(one, "jax_example", status="skipped", reason="no tiles fit", call_time_us=None)
    (problem,) = utilization_shapes_data([one])["problems"]
    assert [(row["method"], row.get("status"), row.get("reason")) for row in problem["rows"]] == [
        ("gemm_only_torch", None, None),
        ("naive", "incomplete recording", "the recording of the GPUs lacks kernels"),
        ("pallas_fast", "wrong result", "wrong result"),
        ("jax_example", "skipped", "skipped: no tiles fit"),
    ]
    fig = draw_utilization_shapes([one])
    assert set(by_gid(fig, "bar-")) == {"0-gemm_only_torch", "0-gemm_only_torch-spread"}
    assert "one kernel, fast: wrong result" in [text.get_text() for text in fig.axes[0].texts]
    assert "beats" not in fig.get_label()
    # What nobody asked for is not missing.
    one = replace(run(), "jax_example", status="skipped", reason=results.NOT_ASKED_FOR, call_time_us=None)
    assert "jax_example" not in [row["method"] for row in utilization_shapes_data([one])["problems"][0]["rows"]]


def test_title_counts_what_the_rounds_say():
    # Rounds of both methods vary alike: only ratios within a round tell 0.62 from 0.60.
    runs = [run(*sizes, pallas_fast=share) for sizes, share in zip(LLAMA, (0.62, 0.75, 0.60, 0.57), strict=True)]
    expected = "Fast kernel: 57 to 75 % of peak, beats gathering first in 2 of 4 problems, loses in 1"
    assert draw_utilization_shapes(runs).get_label() == expected
    unmeasured = replace(run(512), "naive", status="skipped", call_time_us=None)
    expected = "Fast kernel: 75 % of peak, beats gathering first in 1 of 1 problems"
    assert draw_utilization_shapes([runs[1], unmeasured]).get_label() == expected
    assert "beats" not in draw_utilization_shapes([unmeasured]).get_label()
    beats = "Beats: the kernel's call takes less time in at least 90 % of the rounds"
    assert f"{beats}; loses: more time." in caption(draw_utilization_shapes(runs))
    assert f"{beats}." in caption(draw_utilization_shapes(runs[:2]))
    assert "Beats:" not in caption(draw_utilization_shapes([unmeasured]))


def test_caption_names_what_is_less_certain():
    runs = [run(*LLAMA[0], processes=3, repeats=3), run(*LLAMA[1], processes=2, repeats=4)]
    runs += [run(*sizes) for sizes in LLAMA[2:]] + [run(512, 512, 512, processes=3, repeats=2)]
    details = "tile_m=128, not searched for this problem"
    said = caption(draw_utilization_shapes([replace(one, "jax_example", details=details) for one in runs]))
    assert "JAX's example kernel ran with a setting that was not searched for any of these problems." in said
    assert (
        "Less certain, fewer than 3 processes or 20 rounds in all: "
        "one process of 3 rounds (bfloat16, 2048, 4096 × 8192 × 14336), "
        "2 processes, 24 rounds in all (bfloat16, 4096 × 4096 × 7168), "
        "3 processes, 18 rounds in all (bfloat16, 512 × 512 × 512)."
    ) in said
    assert "2 x NVIDIA H200, JAX 0.11.2, normal(0, 1), 2026-01-31." in said
    said = caption(draw_utilization_shapes(runs[:1]))
    assert "Less certain" not in said and "not searched" not in said
    one = replace(runs[0], "jax_example", details=details)
    assert "not searched for bfloat16, 2048 × 4096 × 7168." in caption(draw_utilization_shapes([one, runs[1]]))


def test_peaks_are_named_by_dtype_where_they_differ():
    one, other = run(), run(dtype="float32")
    assert "100 % is 989.5 TFLOP/s." in caption(draw_utilization_shapes([one, run(dtype="float16")]))
    both = caption(draw_utilization_shapes([one, other]))
    assert "100 % is 989.5 TFLOP/s for bfloat16, 66.9 TFLOP/s for float32." in both


def test_runs_that_cannot_be_shown_are_refused_and_have_no_figure():
    unknown = dataclasses.replace(run(), machine={"device_kind": "NVIDIA A100"})
    # One device gathers nothing.
    assert not list(utilization_shapes_groups([unknown, run(simulated=True), run(axis_size=1)]))
    for runs, message in (
        ([], "measured on GPUs"),
        ([run(simulated=True)], "measured on GPUs"),
        ([run(), run(axis_size=4)], "one kind and number of devices, got .*2.*4"),
        ([unknown], "No share of a peak can be drawn of 2 x NVIDIA A100"),
    ):
        with pytest.raises(ValueError, match=message):
            utilization_shapes_data(runs)


def test_a_rate_above_the_peak_is_not_cut_off():
    fig = draw_utilization_shapes([run(), run(512, pallas_fast=1.3)])
    widest = by_gid(fig, "bar-0-")["pallas_fast"].get_width()
    assert widest == pytest.approx(130) and all(ax.get_xlim()[1] > widest for ax in fig.axes)


def test_caption_calls_gemm_only_the_faster_one_only_where_two_ran():
    # PyTorch's is the faster one of both.
    both, text = run(), "GEMM only: the faster of XLA and PyTorch"
    alone = dataclasses.replace(run(512), gemm_only="gemm_only")
    alone = replace(alone, "gemm_only_torch", status="skipped", reason="no PyTorch", call_time_us=None)
    slower = dataclasses.replace(run(1024), gemm_only="gemm_only")
    assert f"{text}." in caption(draw_utilization_shapes([both]))
    assert f"{text} where both ran." in caption(draw_utilization_shapes([both, alone]))
    assert text not in caption(draw_utilization_shapes([alone]))
    assert text not in caption(draw_utilization_shapes([both, slower]))


def many():
    """Long labels, short and long bars, missing bars, and a rate above the peak."""
    runs = [run(2**power, 16384, 26624, naive=0.05 * power, pallas_fast=0.08 * power) for power in range(7, 13)]
    return [*runs, run(131072, 131072, 131072, jax_example=1.1), replace(run(), "pallas_fast", status="failed")]


@pytest.mark.parametrize("runs", [[run()], many()[:3], many()], ids=len)
def test_no_text_is_cut_off_or_lies_on_other_text(runs, monkeypatch):
    fig = draw_utilization_shapes(runs)
    renderer, drawn = FigureCanvasAgg(fig).get_renderer(), []
    # A figure holds texts that are not drawn, such as the labels of ticks out of view.
    monkeypatch.setattr(Text, "draw", lambda text, renderer: drawn.append(text))
    fig.draw_without_rendering()
    shown = [text for text in drawn if text.get_visible() and text.get_text()]
    boxes = [text.get_window_extent(renderer).padded(-2) for text in shown]
    low, high = (np.array([getattr(box, corner) for box in boxes]) for corner in ("min", "max"))
    names = np.array([text.get_text() for text in shown])
    clipped = (low < 0).any(axis=1) | (high > fig.bbox.max).any(axis=1)
    assert not clipped.any(), names[clipped]
    overlap = ((low[:, None] < high[None]) & (high[:, None] > low[None])).all(axis=-1) & ~np.eye(len(low), dtype=bool)
    assert not overlap.any(), [(names[a], names[b]) for a, b in np.argwhere(overlap)]
    # Nor does text lie on whiskers.
    bars = by_gid(fig, "bar-")
    for name, text in by_gid(fig, "text-bar-").items():
        spread, box = (a.get_window_extent(renderer).padded(-2) for a in (bars[f"{name}-spread"], text))
        assert box.x1 < spread.x0 or spread.x1 < box.x0, text


def test_eight_problems_fit_on_a_screen():
    runs = [run(*sizes, dtype) for sizes in LLAMA for dtype in ("float16", "bfloat16")]
    assert draw_utilization_shapes(runs).get_figheight() / 8 < 0.8
