"""Figures of measured rates and of the bounds show what records and the roofline model say."""

import dataclasses

import pytest
from figure_parts import AXIS_SIZES, by_gid, run, texts
from matplotlib.colors import to_hex

from cmm import plots, results, roofline
from cmm.plots import palette


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


def test_caption_says_which_time_by_the_hosts_clock_is_drawn():
    def with_walls(one, field):
        methods = (dataclasses.replace(m, **{field: m.call_time_us}) for m in one.methods)
        return dataclasses.replace(one, methods=tuple(methods))

    said = lambda *runs: " ".join(" ".join(texts(plots.draw_utilization(runs, published=()))).split())
    alone, in_program = with_walls(run(4), "wall_time_us"), with_walls(run(2), "wall_time_in_program_us")
    assert "count too: calls alone. " in said(alone)
    assert "count too: calls alone on 4 devices, calls in a program on 2 devices. " in said(alone, in_program)
    one_device = with_walls(run(1), "wall_time_in_program_us")
    assert "calls in a program on 1 and 2 devices" in said(in_program, one_device, alone)
    assert "count too: calls in a program on 1 device, calls alone on 4 devices. " in said(one_device, alone)
    # Bars without diamonds do not count, and without any there is nothing to say.
    some = dataclasses.replace(in_program, methods=(*in_program.methods[:2], *run(2).methods[2:]))
    assert "count too: calls in a program. " in said(some)
    assert "Diamonds" not in said(run(2))
    # Methods on the same devices may differ.
    mixed = dataclasses.replace(
        alone, methods=(*with_walls(run(4), "wall_time_in_program_us").methods[:2], alone.methods[2])
    )
    kinds = "calls in a program (alone where that is not recorded)"
    assert f"count too: {kinds}. " in said(mixed)
    assert f"count too: {kinds} on 4 devices, calls in a program on 2 devices. " in said(mixed, in_program)


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
