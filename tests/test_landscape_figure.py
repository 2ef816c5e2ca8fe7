"""The figure of a search over configurations: it shows every trial, and says what the search has gained."""

import dataclasses
import json

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from cmm import results
from cmm.hopper import MatmulDimension, TuningConfig, default_config
from cmm.measure import spread
from cmm.peers import jax_example
from cmm.plots import draw_landscape, landscape_data, save
from cmm.plots.__main__ import all_figures
from cmm.roofline import Problem
from cmm.winners import config_fields

PROBLEM = Problem(2, 2048, 4096, 4096)
DEFAULT = default_config(2048, 4096, 4096, "float16", steps=2)
CHUNKS = dataclasses.replace(DEFAULT, chunks=2, signal_lag=8)
ALONG_N = dataclasses.replace(DEFAULT, grid_minor_dim=MatmulDimension.N)
SQUARE = TuningConfig(tile_m=128, tile_n=128, wg_dimension=MatmulDimension.N)
DEEP = TuningConfig(tile_k=128, max_concurrent_steps=2)
NAME = "tuning_landscape_pallas_fast_h200_d2_m2048_k4096_n4096_float16"


def compared(config, *rounds_us, right=True):
    return trial(config, rounds_us[0] + 1, right) | {"rounds_us": list(rounds_us), "time_us": spread(rounds_us).median}


def trial(config, screened_us, right=None):
    fields = {"config": config_fields(config), "screened_us": screened_us, "rounds_us": [], "time_us": screened_us}
    return fields | {"right": right, "error_over_bound": None, "relative_error": None}


def record(*trials, **changes):
    """The record of an invented search, as `python -m cmm.tune` writes it."""
    return {
        "kernel": "pallas_fast",
        "problem": dataclasses.asdict(PROBLEM),
        "machine": {"device_kind": "NVIDIA H200", "backend": "cuda 13000", "host": "Linux x86_64"},
        "versions": {"python": "3.12.3", "jax": "0.11.2", "jaxlib": "0.11.2", "numpy": "2.4"},
        "distribution": "normal(0, 1)",
        "protocol": "invented",
        "date": "2026-01-31",
        "command": "python -m cmm.tune",
        "stopped": False,
        "trials": list(trials),
        "skipped": [],
    } | changes


# The best groups are not those of the first and the last trial, one trial is far off, and one is wrong.
TRIALS = (
    compared(CHUNKS, 99.0, 100.0, 102.0),
    compared(SQUARE, 101.0, 101.5, 103.0),
    compared(DEFAULT, 103.0, 104.0, 105.0),
    trial(DEEP, 170.0),
    trial(ALONG_N, 90.0, right=False),
    trial(dataclasses.replace(SQUARE, grid_tile_width=4), 119.0),
    trial(dataclasses.replace(DEFAULT, grid_tile_width=4), 118.0),
)


def run(kind="NVIDIA H200", simulated=False, complete=True, problem=PROBLEM):
    share = spread([1.0 if complete else 0.3])
    times = {"call_time_us": spread([96.0]), "kernel_time_us": spread([95.0]), "kernel_ratio_to_gemm_only": share}
    method = results.MethodResult("gemm_only", "GEMM only", "measured", **times)
    about = ("normal(0, 1)", "invented", "2026-02-01", "python -m cmm.bench")
    return results.Run(problem, {"device_kind": kind}, {"jax": "0.11.2"}, simulated, *about, (method,))


def write(folder, found, name="tune_pallas_fast_h200_d2_m2048_k4096_n4096_float16.json"):
    (folder / name).write_text(json.dumps(found))


def landscapes(folder):
    return {name: (draw, data) for name, draw, data in all_figures(4, folder) if "landscape" in name}


def drawn(fig):
    return {line.get_gid(): line for line in fig.axes[0].lines if line.get_gid()}


@pytest.mark.parametrize(
    "trials, expected",
    [
        (TRIALS, "Without a search: 4.0 % slower than the best of 6; worst: 1.7 times as long"),
        (
            # In one of three rounds it is faster.
            [compared(CHUNKS, 100.0, 100.0, 100.0), compared(DEFAULT, 99.0, 100.42, 101.0)],
            "Without a search: within 0.5 % of the best of 2; worst: 1.00 times as long",
        ),
        (
            [compared(DEFAULT, 100.0), compared(CHUNKS, 101.0), trial(DEEP, 250.0)],
            "The choice without a search is the best of 3; worst: 2.5 times as long",
        ),
        (
            [compared(CHUNKS, 100.0), trial(DEFAULT, 99.0, right=False), trial(DEEP, 150.0)],
            "Without a search the result is wrong; the best of 2 takes 100.0 µs",
        ),
        (
            [compared(CHUNKS, 100.0), trial(DEEP, 104.0)],
            "The best of 2 configurations: 100.0 µs; worst: 1.04 times as long",
        ),
        ([compared(DEFAULT, 100.0)], "The choice without a search alone gives a right result"),
        ([compared(CHUNKS, 100.0), trial(DEEP, 90.0, right=False)], "One configuration alone gives a right result"),
        ([trial(DEFAULT, 100.0, right=False)], "No configuration that was tried gives a right result"),
        (
            [compared(CHUNKS, 100.0, right=False), compared(DEFAULT, 101.0)],
            "The fastest of 2 configurations gives a wrong result",
        ),
    ],
)
def test_headline(trials, expected):
    found = record(*trials)
    assert landscape_data(found)["headline"] == draw_landscape(found).get_label() == expected


def test_groups_begin_with_the_best_and_hold_every_trial():
    rows = landscape_data(record(*TRIALS))["rows"]
    order = [0, 2, 4, 6, 1, 5, 3]
    assert [row["config"] for row in rows] == [TRIALS[i]["config"] for i in order]
    assert [row["group"] for row in rows] == [0, 0, 0, 0, 1, 1, 2]
    assert [i for i, row in enumerate(rows) if row["is_winner"]] == [0]
    assert [i for i, row in enumerate(rows) if row["is_untuned"]] == [1]


def test_every_trial_has_a_dot_and_none_is_lost_beyond_the_axis():
    found = record(*TRIALS)
    fig, rows = draw_landscape(found), landscape_data(found)["rows"]
    lines, (ax,) = drawn(fig), fig.axes
    assert {gid for gid in lines if gid.startswith("trial")} == {f"trial-{i}" for i in range(len(TRIALS))}
    places = [lines[f"trial-{i}"].get_xdata()[0] for i in range(len(TRIALS))]
    assert places[:-1] == [row["time_us"] for row in rows[:-1]]
    # Three of seven take more than 1.2 times the fastest, one more than 1.5 times.
    assert places[-1] == 1.5 * 90 and lines["trial-6"].get_marker() == ">"
    assert ax.get_xlim()[0] < 90 and 1.5 * 90 < ax.get_xlim()[1] < 170
    texts = [text.get_text() for text in ax.texts]
    assert {"170.0", "winner 100.0", "without a search 104.0"} <= set(texts)
    # Filled means compared, whiskers are of those alone, and what is wrong is crossed.
    is_filled = [lines[f"trial-{i}"].get_markerfacecolor() == lines[f"trial-{i}"].get_color() for i in range(7)]
    assert is_filled == [bool(row["rounds_us"]) for row in rows] == [f"spread-{i}" in lines for i in range(7)]
    assert list(lines["spread-1"].get_xdata()) == [103.2, 104.8]
    assert [gid for gid in lines if gid.startswith("wrong")] == ["wrong-2"]
    # Orders along M and along N differ by more than their colours.
    assert lines["trial-0"].get_marker() != lines["trial-2"].get_marker()


def test_the_axis_goes_on_while_many_are_far_off():
    slow = [trial(dataclasses.replace(DEEP, grid_tile_width=width), 145.0) for width in (1, 4, 16)]
    lines = drawn(draw_landscape(record(*TRIALS[:3], *slow)))
    assert {lines[f"trial-{i}"].get_xdata()[0] for i in range(3, 6)} == {145.0}


def test_ratio_is_formed_within_a_round():
    found = record(compared(CHUNKS, 100.0, 200.0), compared(DEFAULT, 101.0, 204.0))
    assert landscape_data(found)["untuned_over_winner"]["median"] == pytest.approx(1.015)
    assert landscape_data(record(compared(CHUNKS, 100.0), trial(DEFAULT, 101.0)))["untuned_over_winner"] is None


def test_nothing_is_named_that_a_machine_would_choose_otherwise():
    other = {"device_kind": "NVIDIA H100 PCIe", "backend": "cuda 13000"}  # It has fewer multiprocessors.
    data = landscape_data(record(*TRIALS, machine=other))
    assert not any(row["is_untuned"] for row in data["rows"])


def test_the_examples_own_search():
    published, *others = (config for config in jax_example.search_space() if config.tile_n == 128)
    trials = [
        compared(others[0], 100.0, right=True),
        compared(published, 102.0),
        trial(jax_example.PUBLISHED_CONFIG, 103),
    ]
    found = record(*trials, kernel="jax_example")
    data = landscape_data(found)
    assert [row["is_untuned"] for row in data["rows"]] == [row["time_us"] == 103 for row in data["rows"]]
    assert data["headline"].startswith("Without a search: 3.0 % slower than the best of 3")
    texts = {text.get_text() for text in draw_landscape(found).axes[0].texts}
    assert "order" in texts and "chunks,\nlag" not in texts


def test_the_data_file_holds_every_trial_and_is_no_search(tmp_path):
    write(tmp_path, record(*TRIALS, skipped=[{"config": config_fields(DEEP), "reason": "too large"}]))
    results.save(run(), tmp_path / "bench_h200.json")
    ((name, (draw, data)),) = landscapes(tmp_path).items()
    assert name == NAME
    paths = save(draw(), tmp_path, name, data())
    kept = json.loads(paths[-1].read_text())
    assert sorted(row["time_us"] for row in kept["rows"]) == sorted(each["time_us"] for each in TRIALS)
    assert [entry["reason"] for entry in kept["skipped"]] == ["too large"] and kept["gemm_only"]["time_us"] == 95
    # Figures have their data beside the records.
    paths[-1].rename(tmp_path / paths[-1].name)
    assert set(landscapes(tmp_path)) == {NAME}


def test_the_published_shape_has_a_short_name(tmp_path):
    problem = dataclasses.asdict(Problem(2, 1024, 4096, 4096))
    write(tmp_path, record(*TRIALS, problem=problem), "tune_pallas_h200_d2_m1024_k4096_n4096_float16.json")
    assert set(landscapes(tmp_path)) == {"tuning_landscape_pallas_h200_d2"}


@pytest.mark.parametrize("changes", [{"machine": {"device_kind": "cpu", "backend": "cpu"}}, {"trials": []}])
def test_what_is_simulated_or_empty_is_not_drawn(tmp_path, changes):
    assert not landscapes(tmp_path)
    found = record(*TRIALS, **changes) if "machine" in changes else record()
    write(tmp_path, found)
    assert not landscapes(tmp_path)
    with pytest.raises(ValueError, match="made on GPUs"):
        draw_landscape(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "NVIDIA H100 80GB HBM3"},
        {"simulated": True},
        {"complete": False},
        {"problem": Problem(2, 1024, 4096, 4096)},
    ],
)
def test_gemm_only_is_that_of_the_same_work(tmp_path, changes):
    write(tmp_path, record(*TRIALS))
    results.save(run(**changes), tmp_path / "bench_h200.json")
    ((draw, data),) = landscapes(tmp_path).values()
    assert data()["gemm_only"] is None and "gemm-only" not in drawn(draw())
    results.save(run(), tmp_path / "bench_h200.json")
    ((draw, _),) = landscapes(tmp_path).values()
    assert list(drawn(draw())["gemm-only"].get_xdata()) == [95, 95]


@pytest.mark.parametrize("gemm_us", [95.0, 40.0])
def test_no_text_is_cut_off_or_covered(monkeypatch, gemm_us):
    in_one = trial(dataclasses.replace(SQUARE, epi_tile_m=None, epi_tile_n=None), 112.0)  # It needs one more column.
    near_the_end = record(*TRIALS[:2], trial(DEFAULT, 133.0), *TRIALS[3:], in_one)
    one = run()
    gemm_only = dataclasses.replace(one.methods[0], kernel_time_us=spread([gemm_us]))
    fig = draw_landscape(near_the_end, dataclasses.replace(one, methods=(gemm_only,)))
    renderer, shown = FigureCanvasAgg(fig).get_renderer(), []
    # A figure holds texts that are not drawn, such as the labels of ticks out of view.
    monkeypatch.setattr(Text, "draw", lambda text, renderer: shown.append(text))
    fig.draw_without_rendering()
    shown = [text for text in shown if text.get_visible() and text.get_text()]
    boxes = [(text.get_text(), Text.get_window_extent(text, renderer)) for text in shown]
    assert {"without a search 133.0", "170.0", "128 × 128"} <= {text for text, _ in boxes}
    for text, box in boxes:
        assert box.x0 >= 0 and box.x1 <= fig.bbox.width and box.y0 >= 0 and box.y1 <= fig.bbox.height, text
    for i, (text, box) in enumerate(boxes):
        for other, place in boxes[i + 1 :]:
            # Lines of a table may touch: what counts is whether words lie on each other.
            overlap_x = min(box.x1, place.x1) - max(box.x0, place.x0)
            overlap_y = min(box.y1, place.y1) - max(box.y0, place.y0)
            assert not (overlap_x > 0 and overlap_y > 0.4 * min(box.height, place.height)), (text, other)
