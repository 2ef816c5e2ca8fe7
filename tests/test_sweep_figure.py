"""The figure of times against rows: it shows the records of a sweep, and where the fast kernel begins to pay."""

import dataclasses

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from cmm import results
from cmm.plots.__main__ import all_figures
from cmm.plots.sweep import draw_sweep, sweep_groups
from cmm.plots.sweep_records import PANELS, is_faster, less_certain_text, sweep_data
from cmm.roofline import Problem

ROWS = (64, 256, 1024, 4096)
TITLES = {
    "gemm_only": "GEMM only",
    "gemm_only_torch": "GEMM only, PyTorch",
    "naive": "all-gather + matmul",
    "ring": "ring",
    "ring_bidirectional": "ring, both ways",
    "ring_copy_engines": "ring, copy engines",
    "pallas": "one kernel",
    "pallas_fast": "one kernel, fast",
    "jax_example": "JAX's example kernel",
}
# Invented. Every method has a part that does not depend on the rows, and one that is proportional to them.
PARTS_US = {name: (10 + 2 * i, 0.09 + 0.01 * i) for i, name in enumerate(TITLES)} | {
    "naive": (20, 0.15),
    "pallas_fast": (40, 0.10),
    "pallas": (45, 0.11),
}
# Invented, too: what the host adds to the time of a call.
HOST_US = {"call_us": 0, "wall_in_program_us": 10, "wall_us": 20, "kernel_us": -5}
KERNEL_HOST_US = {"call_us": 0, "wall_in_program_us": 30, "wall_us": 120, "kernel_us": -5}


def spread(time_us):
    return results.Spread(time_us, 0.97 * time_us, 1.03 * time_us)


def run(rows, axis_size=2, kind="NVIDIA H200", simulated=False, names=tuple(TITLES), **problem):
    methods, rounds = [], {}
    for name in names:
        fixed, each = PARTS_US[name]
        host_us = KERNEL_HOST_US if name.startswith("pallas") else HOST_US
        us = {kind: fixed + each * rows + host_us[kind] for kind in PANELS}
        times = {field: spread(us[kind]) for kind, (field, _) in PANELS.items()}
        methods.append(results.MethodResult(name, TITLES[name], "simulated" if simulated else "measured", **times))
        rounds[name] = [results.Rounds(**{kind: [0.97 * t, t, 1.03 * t] for kind, t in us.items()})]
    sizes = {"axis_size": axis_size, "m_shard": rows, "k": 4096, "n_shard": 4096, "dtype": "float16"} | problem
    about = ("normal(0, 1)", "invented", "2026-01-31", "python -m cmm.bench --suite m-sweep")
    machine, versions = {"device_kind": kind}, {"jax": "0.11.2"}
    return results.Run(Problem(**sizes), machine, versions, simulated, *about, tuple(methods), rounds=rounds)


def replace(one, name, **changes):
    changed = [dataclasses.replace(m, **changes) if m.name == name else m for m in one.methods]
    return dataclasses.replace(one, methods=tuple(changed))


def lines(ax):
    return {line.get_gid(): line for line in ax.lines if line.get_gid()}


def test_lines_are_the_medians_of_the_records():
    runs = [run(rows) for rows in ROWS]
    fig = draw_sweep(runs)
    for ax, (kind, (field, name_of_panel)) in zip(fig.axes, PANELS.items(), strict=True):
        assert name_of_panel in [text.get_text() for text in ax.texts]
        drawn = lines(ax)
        assert set(drawn) == {f"{kind}-{name}" for name in TITLES}
        for name in TITLES:
            x, y = drawn[f"{kind}-{name}"].get_data()
            assert list(x) == list(ROWS)
            assert list(y) == [getattr(one.method(name), field).median for one in runs]
            assert drawn[f"{kind}-{name}"].is_dashed() == name.startswith("gemm_only")
    # They can be compared.
    assert len({(ax.get_xlim(), ax.get_ylim()) for ax in fig.axes}) == 1
    # No two methods look alike to somebody who sees no colours, but the two dashed ones.
    markers = [lines(fig.axes[0])[f"call_us-{name}"].get_marker() for name in TITLES if "gemm" not in name]
    assert len(set(markers)) == len(markers)


def test_what_is_wrong_incomplete_or_missing_is_not_drawn():
    runs = [run(rows) for rows in ROWS]
    runs[1] = replace(runs[1], "ring", error_over_bound=7.0, relative_error=1e-4)
    runs[2] = replace(runs[2], "ring", kernel_ratio_to_gemm_only=results.Spread(0.3, 0.3, 0.3))
    skipped = {field: None for field, _ in PANELS.values()}
    runs[3] = replace(runs[3], "pallas_fast", status="skipped", **skipped)
    runs[0] = replace(runs[0], "naive", kernel_time_us=None, wall_time_in_program_us=None)
    data = {method["name"]: method for method in sweep_data(runs)["methods"]}
    rows = lambda name, kind="call_us": [point[0] for point in data[name][kind]]
    assert rows("ring") == rows("ring", "kernel_us") == [64, 4096]
    # The host's clock does not depend on what the GPUs have recorded.
    assert rows("ring", "wall_us") == [64, 1024, 4096]
    assert rows("pallas_fast") == rows("pallas_fast", "wall_us") == [64, 256, 1024]
    assert rows("naive") == list(ROWS) and rows("naive", "kernel_us") == [256, 1024, 4096]
    assert rows("naive", "wall_in_program_us") == [256, 1024, 4096]


@pytest.mark.parametrize("missing", ["wall_in_program_us", "wall_us"])
def test_a_time_that_no_run_recorded_has_no_panel(missing):
    runs = [run(rows) for rows in ROWS]
    for name in TITLES:
        runs = [replace(one, name, **{PANELS[missing][0]: None}) for one in runs]
    fig = draw_sweep(runs)
    shown = [text.get_text() for ax in fig.axes for text in ax.texts]
    assert [name in shown for _, name in PANELS.values()] == [kind != missing for kind in PANELS]
    # Every column has the numbers of its rows below its lowest panel.
    has_numbers = [ax.xaxis.get_tick_params()["labelbottom"] for ax in fig.axes]
    assert has_numbers == [False, True, True]
    assert ("in a program" in fig.get_label()) == (missing == "wall_us")


def crossing(runs, kind="call_us"):
    found = sweep_data(runs)["crossings"][kind]
    return found and (found["below_rows"], found["from_rows"])


def test_crossing_is_where_the_kernel_begins_to_pay():
    # 40 + 0.10 M is less than 20 + 0.15 M from 400 rows on, and by more than 6 % from about 540 on.
    runs = [run(rows) for rows in (*ROWS[:2], 512, *ROWS[2:])]
    assert crossing([runs[i] for i in (0, 1, 3, 4)]) == (256, 1024)
    # Ratios within a round do not see the spread that both have in common.
    assert crossing(runs) == (256, 512)
    # Without rounds that is not known.
    assert crossing([dataclasses.replace(one, rounds={}) for one in runs]) is None
    # On the host's clock the kernel begins to pay at 800 and 2400 rows. Kernels alone are not compared.
    assert crossing(runs, "wall_in_program_us") == (512, 1024) and crossing(runs, "wall_us") == (1024, 4096)
    assert "kernel_us" not in sweep_data(runs)["crossings"]
    fig = draw_sweep(runs)
    assert fig.get_label() == "Fast kernel beats gathering first at M ≥ 512 on the GPU, M ≥ 1024 in a program"
    for ax, ends in zip(fig.axes, ((256, 512), (512, 1024), (1024, 4096), None), strict=True):
        spans = {patch.get_gid(): patch for patch in ax.patches if patch.get_gid()}
        assert bool(spans) == bool(ends)
        if ends:
            assert spans["not-faster"].get_x() + spans["not-faster"].get_width() == ends[0]
            assert spans["crossing"].get_x() == ends[0]
            assert spans["crossing"].get_x() + spans["crossing"].get_width() == ends[1]


@pytest.mark.parametrize(
    "ratios, faster",
    [
        ([0.5, 0.5, 1.01], False),
        ([0.9, 0.9, 0.99], True),
        # One of six is more than 10 %, however near to 1 it lies.
        ([0.5] * 5 + [1.0001], False),
        ([0.9] * 9 + [5.0], True),
        ([0.9] * 8 + [1.0, 0.5], True),
        ([0.9] * 8 + [1.0, 1.0], False),
    ],
)
def test_faster_is_who_takes_less_time_in_nine_of_ten_rounds(ratios, faster):
    one, gathered_us = run(1024), [100.0 + i for i in range(len(ratios))]
    own_us = [us * value for us, value in zip(gathered_us, ratios, strict=True)]
    # Rounds of two processes count together.
    split = lambda times_us: [results.Rounds(call_us=times_us[:2]), results.Rounds(call_us=times_us[2:])]
    one = dataclasses.replace(one, rounds={"pallas_fast": split(own_us), "naive": split(gathered_us)})
    assert is_faster(one, "call_us") is faster
    # Who is slower is not the other.
    assert is_faster(one, "call_us", "naive", "pallas_fast") is False
    assert is_faster(one, "wall_us") is None


def test_the_kernel_compared_is_the_one_that_auto_takes():
    runs = [run(rows) for rows in ROWS]
    slow = [results.Rounds(**{kind: [10_000.0] * 3 for kind in PANELS})]
    assert crossing([dataclasses.replace(one, rounds=one.rounds | {"pallas_fast": slow}) for one in runs]) == (
        4096,
        None,
    )
    assert crossing([run(rows, names=("gemm_only", "naive", "pallas")) for rows in ROWS]) is None


def test_a_kernel_that_always_or_never_pays_has_no_crossing():
    always = [run(rows) for rows in (4096, 8192, 16384)]
    assert crossing(always) == (None, 4096)
    assert draw_sweep(always).get_label().endswith("at M ≥ 4096, on the GPU and in a program")
    never = [run(rows) for rows in (16, 64, 256)]
    assert crossing(never) == (256, None)
    assert draw_sweep(never).get_label().endswith("at no M, on the GPU and in a program")
    plain = [run(rows, names=("gemm_only", "naive", "ring")) for rows in ROWS]
    assert "gathering" not in draw_sweep(plain).get_label()


def test_it_counts_only_from_the_last_exception_on():
    runs = [run(rows) for rows in (1024, 2048, 4096)]
    late = dataclasses.replace(runs[1], rounds=runs[1].rounds | {"pallas_fast": [results.Rounds(call_us=[900.0] * 3)]})
    assert crossing([runs[0], late, runs[2]]) == (2048, 4096)


def test_caption_names_what_is_less_certain():
    runs = [dataclasses.replace(run(rows), processes=3 if rows < 1024 else 1) for rows in ROWS]
    details = "tile_m=128, not searched for this problem"
    runs = [
        replace(one, "jax_example", details=details if one.problem.m_shard != 1024 else "tile_m=128") for one in runs
    ]
    runs[0] = replace(runs[0], "jax_example", status="skipped")
    caption = " ".join(text.get_text() for text in draw_sweep(runs).texts).replace("\n", " ")
    assert "one process of 3 rounds: M = 1024, 4096." in caption
    assert "JAX's example kernel ran with a setting that was not searched for M = 256, 4096." in caption


def test_rounds_of_a_run_are_those_of_the_method_with_most():
    of = lambda *counts: [results.Rounds(call_us=[1.0] * count, wall_us=[1.0] * (count - 1)) for count in counts]
    rounds = {"naive": of(6, 6), "ring": [*of(6), results.Rounds()]}
    assert dataclasses.replace(run(64), rounds=rounds, processes=2).total_rounds == 12
    assert dataclasses.replace(run(64), rounds={}, processes=2).total_rounds == 0


@pytest.mark.parametrize(
    "processes, rounds, text",
    [
        (1, 0, "one process"),
        (1, 6, "one process of 6 rounds"),
        (2, 0, "2 processes"),
        (2, 12, "2 processes, 12 rounds in all"),
    ],
)
def test_rounds_are_named_where_they_are_recorded(processes, rounds, text):
    assert less_certain_text(processes, rounds) == text


def test_simulated_runs_are_refused():
    with pytest.raises(ValueError, match="measured on GPUs"):
        draw_sweep([run(rows, simulated=True) for rows in ROWS])


def test_groups_hold_one_kind_of_gpu_and_have_names():
    runs = [run(rows) for rows in ROWS] + [run(rows, kind="NVIDIA H100 80GB HBM3") for rows in ROWS]
    runs += [run(rows, simulated=True) for rows in ROWS] + [run(rows, axis_size=1) for rows in ROWS]
    runs += [run(rows, dtype="bfloat16") for rows in ROWS[:3]] + [run(rows, axis_size=4) for rows in ROWS[:2]]
    assert {name: len(group) for name, group in sweep_groups(runs)} == {
        "time_against_rows_h200_d2": 4,
        "time_against_rows_h100_80gb_hbm3_d2": 4,
        "time_against_rows_h200_d2_k4096_n4096_bfloat16": 3,
    }


@pytest.mark.parametrize("count", [2, 3])
def test_the_command_draws_it_from_three_runs_on(tmp_path, count):
    for rows in ROWS[:count]:
        one = run(rows)
        results.save(one, tmp_path / results.file_name(one, "bench"))
    names = [name for name, *_ in all_figures(4, tmp_path)]
    assert ("time_against_rows_h200_d2" in names) == (count >= 3)
    # Runs of a sweep have their own figure. Otherwise they are drawn like other shapes.
    assert ("utilization_shapes_h200_d2" in names) == (count < 3)


def test_no_text_is_cut_off(monkeypatch):
    fig = draw_sweep([run(2**power) for power in range(4, 14)])
    renderer, drawn = FigureCanvasAgg(fig).get_renderer(), []
    # A figure holds texts that are not drawn, such as the labels of ticks out of view.
    monkeypatch.setattr(Text, "draw", lambda text, renderer: drawn.append(text))
    fig.draw_without_rendering()
    shown = [text for text in drawn if text.get_visible() and text.get_text()]
    assert {text.get_text() for text in shown} >= {*TITLES.values(), *(name for _, name in PANELS.values())}
    for text in shown:
        box = text.get_window_extent(renderer)
        inside = box.x0 >= 0 and box.x1 <= fig.bbox.width and box.y0 >= 0 and box.y1 <= fig.bbox.height
        assert inside, text
