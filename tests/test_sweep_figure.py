"""The figure of times against rows: it shows the records of a sweep, and where a kernel begins to pay."""

import dataclasses

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from cmm import results
from cmm.plots.__main__ import all_figures
from cmm.plots.sweep import draw_sweep, sweep_data, sweep_groups
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


def spread(time_us):
    return results.Spread(time_us, 0.97 * time_us, 1.03 * time_us)


def run(rows, axis_size=2, kind="NVIDIA H200", simulated=False, names=tuple(TITLES), **problem):
    methods, rounds = [], {}
    for name in names:
        fixed, each = PARTS_US[name]
        call_us = fixed + each * rows
        times = {"call_time_us": spread(call_us), "kernel_time_us": spread(call_us - 5)}
        methods.append(results.MethodResult(name, TITLES[name], "simulated" if simulated else "measured", **times))
        rounds[name] = [results.Rounds(call_us=[0.97 * call_us, call_us, 1.03 * call_us])]
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
    for ax, kind, field in zip(fig.axes, ("call_us", "kernel_us"), ("call_time_us", "kernel_time_us"), strict=True):
        drawn = lines(ax)
        assert set(drawn) == {f"{kind}-{name}" for name in TITLES}
        for name in TITLES:
            x, y = drawn[f"{kind}-{name}"].get_data()
            assert list(x) == list(ROWS)
            assert list(y) == [getattr(one.method(name), field).median for one in runs]
            assert drawn[f"{kind}-{name}"].is_dashed() == name.startswith("gemm_only")
    # No two methods look alike to somebody who sees no colours, but the two dashed ones.
    markers = [lines(fig.axes[0])[f"call_us-{name}"].get_marker() for name in TITLES if "gemm" not in name]
    assert len(set(markers)) == len(markers)


def test_what_is_wrong_incomplete_or_missing_is_not_drawn():
    runs = [run(rows) for rows in ROWS]
    runs[1] = replace(runs[1], "ring", error_over_bound=7.0, relative_error=1e-4)
    runs[2] = replace(runs[2], "ring", kernel_ratio_to_gemm_only=results.Spread(0.3, 0.3, 0.3))
    runs[3] = replace(runs[3], "pallas_fast", status="skipped", call_time_us=None, kernel_time_us=None)
    runs[0] = replace(runs[0], "naive", kernel_time_us=None)
    data = {method["name"]: method for method in sweep_data(runs)["methods"]}
    rows = lambda name, kind="call_us": [point[0] for point in data[name][kind]]
    assert rows("ring") == rows("ring", "kernel_us") == [64, 4096]
    assert rows("pallas_fast") == [64, 256, 1024]
    assert rows("naive") == list(ROWS) and rows("naive", "kernel_us") == [256, 1024, 4096]


def crossing(runs):
    found = sweep_data(runs)["crossing"]
    return found and (found["kernel"], found["below_rows"], found["from_rows"])


def test_crossing_is_where_the_kernel_begins_to_pay():
    # 40 + 0.10 M is less than 20 + 0.15 M from 400 rows on, and by more than 6 % from about 540 on.
    runs = [run(rows) for rows in (*ROWS[:2], 512, *ROWS[2:])]
    assert crossing([runs[i] for i in (0, 1, 3, 4)]) == ("pallas_fast", 256, 1024)
    # Ratios within a round do not see the spread that both have in common.
    assert crossing(runs) == ("pallas_fast", 256, 512)
    assert crossing([dataclasses.replace(one, rounds={}) for one in runs]) == ("pallas_fast", 512, 1024)
    fig = draw_sweep(runs)
    assert fig.get_label() == "One kernel, fast: faster than gathering first from M = 512 on"
    spans = {patch.get_gid(): patch for patch in fig.axes[0].patches if patch.get_gid()}
    assert spans["crossing"].get_x() == 256
    assert spans["crossing"].get_x() + spans["crossing"].get_width() == 512


def test_crossing_names_the_kernel_that_is_fastest_at_most_rows():
    slow = [replace(run(rows), "pallas_fast", call_time_us=spread(10_000)) for rows in ROWS]
    assert crossing(slow)[0] == "pallas"


def test_a_kernel_that_always_or_never_pays_has_no_crossing():
    assert crossing([run(rows) for rows in ROWS[2:]]) == ("pallas_fast", None, 1024)
    never = [run(rows) for rows in (16, 64, 256)]
    assert crossing(never) == ("pallas_fast", 256, None)
    assert "not faster" in draw_sweep(never).get_label()
    plain = [run(rows, names=("gemm_only", "naive", "ring")) for rows in ROWS]
    assert crossing(plain) is None
    draw_sweep(plain)


def test_it_counts_only_from_the_last_exception_on():
    runs = [run(rows) for rows in (1024, 2048, 4096)]
    late = dataclasses.replace(runs[1], rounds=runs[1].rounds | {"pallas_fast": [results.Rounds(call_us=[900.0] * 3)]})
    assert crossing([runs[0], late, runs[2]]) == ("pallas_fast", 2048, 4096)


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
    assert ("utilization_other" in names) == (count < 3)


def test_no_text_is_cut_off(monkeypatch):
    fig = draw_sweep([run(2**power) for power in range(4, 14)])
    renderer, drawn = FigureCanvasAgg(fig).get_renderer(), []
    # A figure holds texts that are not drawn, such as the labels of ticks out of view.
    monkeypatch.setattr(Text, "draw", lambda text, renderer: drawn.append(text))
    fig.draw_without_rendering()
    shown = [text for text in drawn if text.get_visible() and text.get_text()]
    assert {text.get_text() for text in shown} >= {*TITLES.values(), "Call", "Matmul kernels alone"}
    for text in shown:
        box = text.get_window_extent(renderer)
        inside = box.x0 >= 0 and box.x1 <= fig.bbox.width and box.y0 >= 0 and box.y1 <= fig.bbox.height
        assert inside, text
