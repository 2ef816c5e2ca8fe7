"""The figures of tiles and stages: they show what the kernels do, tile by tile and use by use."""

import functools

import numpy as np
import pytest
from matplotlib.patches import FancyArrowPatch, Rectangle

import cmm.interpret as ci
from cmm.hopper import MatmulDimension, TuningConfig, all_gather_lhs_matmul, matmul
from cmm.hopper.plan import Plan
from cmm.plots.tiles import draw_stages, draw_tile_order, stage_spans, tile_order

CONFIG = TuningConfig(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=3, grid_tile_width=2)


def local_events(make_case, m, k, n, config, core_count=1):
    case = make_case(m, k, n, "float16", (1,))
    program = case.program(lambda lhs, rhs, axis: matmul(lhs, rhs, config=config))
    with ci.simulate(core_count=core_count) as sim:
        case.assert_right(sim.run(program, case.lhs, case.rhs))
    return sim.events


@pytest.fixture
def ring_events(make_case):
    """Events of device 0 and 1: 2 x 2 tiles, two steps along k, one CTA each."""
    case = make_case(256, 128, 128, "float16", (2,))
    with ci.simulate(seed=0) as sim:
        sim.run(case.program(functools.partial(all_gather_lhs_matmul, config=CONFIG)), case.lhs, case.rhs)
    return sim.events


@pytest.mark.parametrize("minor", MatmulDimension)
def test_tile_order_is_that_of_the_kernel(make_case, minor):
    config = TuningConfig(
        tile_m=64, tile_n=64, epi_tile_m=None, epi_tile_n=None, grid_minor_dim=minor, grid_tile_width=2
    )
    plan = Plan(384, 192, 64, config, num_ctas=2)
    order = tile_order(plan)
    for cta in range(plan.num_ctas):
        events = local_events(make_case, plan.m, plan.k, plan.n, config, plan.num_ctas)
        # Warpgroup 0 stores the upper half of a tile.
        stores = [e for e in events if (e.kind, e.cta, e.thread) == ("store", cta, 0)]
        stores.sort(key=lambda e: e.start_s)
        done = [
            (rows[0] // config.cta_tile_m, columns[0] // config.cta_tile_n)
            for rows, columns in (e.region for e in stores)
        ]
        assert done == order[cta :: plan.num_ctas]


def test_figure_names_the_cta_of_every_tile():
    plans = {"first": Plan(512, 192, 64, CONFIG, 5), "second": Plan(256, 128, 64, CONFIG, 132)}
    fig = draw_tile_order(plans, "Order")
    (ax,) = fig.axes
    numbers = [t.get_text() for t in ax.texts if t.get_zorder() > 3]
    assert numbers == [str(i % 5) for i in range(12)] + [str(i) for i in range(4)]
    boxes = {b.get_gid(): b for b in ax.get_children() if isinstance(b, Rectangle) and b.get_gid()}
    # Column 0 is marked, and each round of tiles has a colour.
    assert all((b.get_linewidth() > 1) == gid.endswith("-0") for gid, b in boxes.items())
    first = [b for b in ax.get_children() if isinstance(b, Rectangle) and b.get_gid()][:12]
    colors = [b.get_facecolor() for b in first]
    assert [len(set(colors[:5])), len(set(colors[5:10])), len(set(colors))] == [1, 1, 3]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_stage_is_loaded_then_multiplied_then_loaded_again(make_case, stages):
    config = TuningConfig(tile_m=64, tile_n=64, max_concurrent_steps=stages)
    spans = stage_spans(local_events(make_case, 256, 256, 64, config), stages)
    assert sorted(s.use for s in spans) == sorted(2 * list(range(8)))  # two tiles of four steps
    for stage in range(stages):
        mine = sorted((s for s in spans if s.stage == stage), key=lambda s: s.begin_s)
        uses = range(stage, 8, stages)
        assert [(s.use, s.kind) for s in mine] == [(use, kind) for use in uses for kind in ("load", "multiply")]
        assert all(a.end_s <= b.begin_s for a, b in zip(mine, mine[1:]))


def test_sends_belong_to_the_visits_of_column_0_in_step_0(ring_events):
    plan = Plan(256, 128, 128, CONFIG, 1)
    visits = [(step, n) for step in range(2) for _, n in tile_order(plan) for _ in range(plan.k_steps)]
    for device in range(2):
        spans = stage_spans(ring_events, 3, device)
        sends = {s.use for s in spans if s.kind == "send"}
        assert sends == {use for use, (step, n) in enumerate(visits) if step == 0 and n == 0}
        assert all(s.step == visits[s.use][0] for s in spans)
        products = {s.use: s for s in spans if s.kind == "multiply"}
        assert all(products[s.use].begin_s <= s.begin_s <= products[s.use].end_s for s in spans if s.kind == "send")


def test_figure_of_stages_shows_all_spans_on_one_scale(make_case, ring_events):
    local = local_events(make_case, 128, 256, 64, CONFIG)
    fig = draw_stages({"local": (local, 3), "ring": (ring_events, 3)}, "Stages")
    assert np.allclose(fig.axes[0].get_xlim(), fig.axes[1].get_xlim())
    for ax, events in zip(fig.axes, (local, ring_events)):
        spans = stage_spans(events, 3)
        boxes = {b.get_gid(): b for b in ax.get_children() if isinstance(b, Rectangle) and b.get_gid()}
        arrows = [a for a in ax.get_children() if isinstance(a, FancyArrowPatch)]
        assert len(boxes) + len(arrows) == len(spans)
        assert len(arrows) == sum(s.kind == "send" for s in spans)
        for s in spans:
            if s.kind != "send":
                box = boxes[f"{s.kind}-{s.use}"]
                assert int(box.get_y()) == 2 - s.stage
                assert np.isclose(box.get_x(), s.begin_s) and np.isclose(box.get_width(), s.end_s - s.begin_s)
    texts = [t.get_text() for t in fig.texts]
    assert texts.count("stage 2") == 2 and "ring" in texts
    assert any("Arrow" in text for text in texts)
    only_local = draw_stages({"local": (local, 3)}, "Stages")
    assert not any("Arrow" in t.get_text() for t in only_local.texts)
