"""Rounds that span steps: every tile once and in order; with them the fast kernel is right, quiet and traceable."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from late_kernels import late_shard

import cmm.interpret as ci
from cmm import devices
from cmm.hopper import MatmulDimension, TuningConfig, all_gather_lhs_matmul_fast, default_config, fast_kernel
from cmm.hopper.calls import plan_step
from cmm.hopper.marks import Layout
from cmm.hopper.plan import Plan, plan_tiles
from cmm.hopper.rounds import Rounds
from cmm.hopper.sends import plan_sends, with_short_chunks
from cmm.roofline import Problem
from cmm.trace.call import trace_call
from cmm.trace.cells import cells_of

SMALL = TuningConfig(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2)


def _plan(m_tiles, n_tiles, num_ctas, k_steps=4, config=SMALL):
    return Plan(m_tiles * config.cta_tile_m, n_tiles * config.cta_tile_n, k_steps * config.tile_k, config, num_ctas)


# Tiles of a step, CTAs, steps: half of the CTAs, a few of them, more tiles than CTAs, one tile.
SPANNING = [(4, 16, 132, 2), (1, 32, 132, 4), (2, 2, 3, 3), (3, 3, 8, 4), (5, 1, 4, 8), (1, 1, 3, 8), (1, 1, 9, 8)]
# Two rounds or more in a step, of which one is saved; fewer than two, of which one of 8 or 16 is saved.
SPANNING += [(16, 28, 128, 2), (4, 8, 13, 2), (2, 5, 4, 3), (3, 4, 7, 4), (5, 3, 8, 8)]
# As many tiles as CTAs or nearly so, one CTA, one step: no round would be saved.
ALONE = [(8, 16, 132, 2), (8, 16, 132, 8), (2, 2, 1, 3), (3, 4, 6, 2), (2, 2, 5, 3), (2, 2, 3, 1)]


@pytest.mark.parametrize("m_tiles, n_tiles, num_ctas, axis_size", SPANNING + ALONE)
def test_every_tile_is_computed_once_and_in_order(m_tiles, n_tiles, num_ctas, axis_size):
    rounds = Rounds(_plan(m_tiles, n_tiles, num_ctas), axis_size)
    assert rounds.span_steps == ((m_tiles, n_tiles, num_ctas, axis_size) in SPANNING)
    most = -(-m_tiles * n_tiles // num_ctas)

    def of_one_cta(_):
        here = rounds.in_kernel()
        steps = [here.of_step(step) for step in range(axis_size)]
        tiles = [jnp.stack([jnp.stack(plan.tile_at(i)) for i in range(most)]) for plan in steps]
        counts = jnp.stack([plan.my_tiles() for plan in steps])
        first_uses = jnp.stack([here.first_use(step) for step in range(axis_size + 1)])
        numbered = [jnp.stack(here.tile_at(number)) for number in range(axis_size * most)]
        return jnp.stack(tiles), counts, first_uses, jnp.stack(numbered), here.my_tiles()

    mapped = jax.jit(jax.vmap(of_one_cta, axis_name="cta"))(jnp.arange(num_ctas))
    seen, most_uses = [], 0
    for tiles, counts, first_uses, numbered, total in zip(*map(np.asarray, mapped)):
        assert first_uses.tolist() == [0, *np.cumsum(counts * rounds.plan.k_steps)]
        mine = [(step, *tiles[step, i]) for step in range(axis_size) for i in range(counts[step])]
        assert total == len(mine)
        assert numbered[:total].tolist() == [list(map(int, tile)) for tile in mine]
        seen += mine
        most_uses = max(most_uses, first_uses[-1])
    assert sorted(seen) == list(itertools.product(range(axis_size), range(m_tiles), range(n_tiles)))
    expected = -(-axis_size * m_tiles * n_tiles // num_ctas) if rounds.span_steps else axis_size * most
    assert most_uses == expected * rounds.plan.k_steps


WIDE = dataclasses.replace(SMALL, tile_n=256)
# Tiles of a step, multiprocessors, steps; then how many CTAs there are, and how many tiles are halved.
HALVING = [(8, 14, 132, 4, 128, 64), (8, 7, 132, 8, 131, 55), (6, 16, 66, 1, 64, 32), (2, 3, 8, 3, 8, 2)]
HALVING += [(1, 5, 4, 2, 4, 2), (4, 6, 20, 2, 20, 8), (1, 2, 3, 8, 3, 1), (2, 5, 8, 2, 8, 4), (5, 4, 8, 1, 8, 4)]


@pytest.mark.parametrize("m_tiles, n_tiles, core_count, axis_size, num_ctas, halved", HALVING)
def test_every_half_and_every_other_tile_is_computed_once(m_tiles, n_tiles, core_count, axis_size, num_ctas, halved):
    plan = plan_tiles(m_tiles * WIDE.cta_tile_m, n_tiles * WIDE.cta_tile_n, 256, WIDE, core_count, axis_size)
    rounds = Rounds(plan, axis_size)
    assert (plan.num_ctas, rounds.deal.halved) == (num_ctas, halved)
    most, last = rounds.deal.rounds, axis_size - 1

    def of_one_cta(_):
        here = rounds.in_kernel()
        half = here.halves()
        steps = [here.of_step(step) for step in range(axis_size)]
        tiles = [jnp.stack([jnp.stack(plan.tile_at(i)) for i in range(most)]) for plan in steps]
        counts = jnp.stack([plan.my_tiles() for plan in steps])
        first_uses = jnp.stack([here.first_use(step) for step in range(axis_size + 1)])
        numbered = jnp.stack([jnp.stack(here.tile_at(number)) for number in range(most)])
        return (
            jnp.stack(half.tile_at(0)),
            half.my_tiles(),
            jnp.stack(tiles),
            counts,
            first_uses,
            numbered,
            here.my_tiles(),
        )

    mapped = jax.jit(jax.vmap(of_one_cta, axis_name="cta"))(jnp.arange(num_ctas))
    seen, cut = [], []
    for half, halves, tiles, counts, first_uses, numbered, total in zip(*map(np.asarray, mapped)):
        assert first_uses.tolist() == [0, *np.cumsum(counts * plan.k_steps)]
        assert (counts.sum(), total) == (most - 1, most - 1 + halves)
        mine = [(step, *tiles[step, i]) for step in range(axis_size) for i in range(counts[step])]
        seen += mine
        cut += [(last, *map(int, half))] * halves
        mine += [(last, half[0] // 2, half[1])] * halves
        assert numbered[:total].tolist() == [list(map(int, item)) for item in mine]
    rest = set(itertools.product(range(axis_size), range(m_tiles), range(n_tiles))) - set(seen)
    assert len(set(seen)) == len(seen) and len(rest) == halved
    assert sorted(cut) == sorted((step, 2 * row + half, column) for step, row, column in rest for half in (0, 1))


def test_what_counts_beside_rounds():
    sizes = lambda m, n, **more: (lambda c: (c.cta_tile_m, c.cta_tile_n))(default_config(m, n, 4096, "float16", **more))
    # The readable kernel computes no halves.
    assert (sizes(768, 4096), sizes(768, 4096, halves=False)) == ((128, 128), (128, 256))
    for axis_size, tile_n in ((1, 128), (2, 256)):
        plan = plan_step("pallas", axis_size, 768, 4096, 4096, "float16", "another GPU", 132)
        assert plan.config.cta_tile_n == tile_n
    assert sizes(2048, 7168) == (128, 256)  # 448 tiles in four rounds of 112, which are faster than full ones.


def test_a_half_is_stored_in_the_same_parts():
    fits = {part: dataclasses.replace(WIDE, epi_tile_n=part).can_be_halved for part in (None, 256, 128, 64)}
    assert fits == {None: False, 256: False, 128: True, 64: True}
    assert not dataclasses.replace(WIDE, wg_dimension=MatmulDimension.N, tile_n=128).can_be_halved


def test_where_halves_do_not_pay_off():
    narrow = dataclasses.replace(SMALL, tile_n=128)
    deal = lambda m_tiles, n_tiles, config, core_count, steps: config.deal(
        m_tiles * config.cta_tile_m, n_tiles * config.cta_tile_n, core_count, steps
    )
    for m_tiles, n_tiles, config, core_count, steps in (
        (2, 5, SMALL, 8, 1),  # Half of such a tile would be too narrow.
        (3, 32, narrow, 132, 2),  # Narrow tiles in a ring.
        (3, 16, WIDE, 32, 2),  # More than half of the CTAs have a tile in the last round.
        (1, 73, WIDE, 8, 1),  # So few CTAs are idle that whole rounds would be fast.
        (1, 12, WIDE, 16, 2),  # One round before.
        (1, 4, WIDE, 13, 8),  # Rounds that span four steps.
    ):
        assert deal(m_tiles, n_tiles, config, core_count, steps).halved == 0
    assert deal(2, 5, narrow, 8, 1).halved == 2 and deal(2, 5, narrow, 8, 2).halved == 0


def _run(case, config, core_count, seed=0, **options):
    function = functools.partial(all_gather_lhs_matmul_fast, config=config)
    with ci.simulate(core_count=core_count, seed=seed, **options) as sim:  # Raises if there is a race or a deadlock.
        return sim.run(case.program(function), case.lhs, case.rhs), sim


N_MINOR = dataclasses.replace(SMALL, grid_minor_dim=MatmulDimension.N, grid_tile_width=1)
SIDE_BY_SIDE = dataclasses.replace(SMALL, wg_dimension=MatmulDimension.N)
# Devices, shape of a shard, CTAs, configuration. Tiles of a step: 1 to 8, fewer than CTAs and more.
RUNS = {
    "half of the CTAs": (2, (128, 512, 128), 4, SMALL),
    "a CTA with nothing to do": (2, (256, 256, 64), 5, SMALL),
    "all steps at once": (4, (128, 512, 64), 4, SMALL),
    "all steps at once, 8 devices": (8, (128, 256, 64), 9, SMALL),
    "more tiles than CTAs": (3, (256, 256, 128), 3, SMALL),
    "many more": (3, (256, 128, 256), 6, N_MINOR),
    "one round of eight saved": (4, (256, 256, 384), 7, SMALL),
    "two steps at a time": (4, (256, 256, 64), 4, dataclasses.replace(SMALL, max_concurrent_steps=3)),
    "64 rows": (8, (64, 256, 128), 3, SIDE_BY_SIDE),
    "64 rows, one product": (3, (64, 64, 128), 2, SIDE_BY_SIDE),
    "two chunks": (3, (128, 512, 64), 2, dataclasses.replace(SMALL, chunks=2, signal_lag=4)),
    "fewer chunks than steps at once": (8, (128, 256, 64), 8, dataclasses.replace(SMALL, chunks=2, signal_lag=2)),
    "one chunk": (8, (128, 256, 128), 7, dataclasses.replace(SMALL, chunks=1)),
    "signals at once": (4, (128, 512, 64), 3, dataclasses.replace(SMALL, chunks=8, signal_lag=0)),
    "a round saved": (3, (256, 512, 320), 4, SMALL),
    "a round saved, latest signals": (2, (256, 512, 320), 4, dataclasses.replace(SMALL, chunks=2, signal_lag=4)),
    "halves": (4, (128, 128, 1792), 8, WIDE),
    "halves in few steps": (2, (256, 128, 1280), 8, WIDE),
    "halves, two chunks": (2, (128, 512, 1280), 4, dataclasses.replace(WIDE, chunks=2, signal_lag=4)),
    "halves, steps at once": (8, (128, 128, 512), 3, WIDE),
    "halves, long steps": (2, (128, 256, 9 * 256), 4, WIDE),
    "long pipeline": (3, (256, 256, 64), 5, dataclasses.replace(SMALL, max_concurrent_steps=7)),
}
each_run = pytest.mark.parametrize("axis_size, shape, core_count, config", RUNS.values(), ids=RUNS)


@each_run
def test_ring(make_case, axis_size, shape, core_count, config):
    m, k, n = shape
    assert Rounds(Plan(m, n, k, config, core_count), axis_size).span_steps
    plan = plan_tiles(m, n, k, config, core_count, axis_size)
    assert (Rounds(plan, axis_size).deal.halved > 0) == (config.tile_n > 64)
    case = make_case(m, k, n, "float16", (axis_size,))
    out, sim = _run(case, config, core_count)
    case.assert_right(out)
    assert [sim.bytes_sent(device=d) for d in range(axis_size)] == [(axis_size - 1) * m * k * 2] * axis_size
    # Chunks are short where the steps overlap, that is where a step has less than two rounds of tiles.
    sends = plan_sends(with_short_chunks(plan) if plan.tiles < 2 * core_count else plan)
    signals = (axis_size - 1) * plan.m_tiles * sends.chunks * sends.signals
    assert sum(event.kind == "signal" for event in sim.events) == axis_size * signals


LATE = [
    ci.Late(3e-6, device=0, cta=0),
    ci.Late(1e-4, device=1),
    ci.Late(2e-5, thread=0),
    ci.Late(1e-4, device=0, cta=2, thread=2),
    ci.Late(5e-5, cta=1),
]


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("name", ["all steps at once", "more tiles than CTAs", "a round saved", "halves"])
def test_somebody_late(make_case, name, late):
    axis_size, (m, k, n), core_count, config = RUNS[name]
    case = make_case(m, k, n, "float16", (axis_size,))
    case.assert_right(_run(case, config, core_count, 1, late=late)[0])


@pytest.mark.slow
@each_run
def test_no_false_alarm_in_shuffled_runs(make_case, axis_size, shape, core_count, config):
    case = make_case(*shape, "float16", (axis_size,))
    for seed in range(6):
        late = [None, *LATE][seed]
        case.assert_right(_run(case, config, core_count, seed, **({"late": late} if late else {}))[0])


def test_a_step_that_leaves_no_idle_cta_keeps_its_large_tiles():
    # 112 and 120 tiles of 128 x 256 in a step: more, smaller tiles would span steps, and take longer.
    for m, n, k, axis_size in ((1024, 3584, 1024, 4), (768, 5120, 1024, 8)):
        config = default_config(m, n, k, "float16", 132, axis_size)
        assert (config.cta_tile_m, config.cta_tile_n) == (128, 256)


def test_chunks_are_short_where_ctas_wait_for_the_first():
    plan = _plan(4, 16, 132, k_steps=64)
    sends = plan_sends(with_short_chunks(plan))
    assert (sends.chunk_steps, sends.lag, sends.signals) == (4, 1, 4)
    deep = dataclasses.replace(SMALL, tile_k=128)
    assert plan_sends(with_short_chunks(_plan(4, 16, 132, k_steps=32, config=deep))).chunk_steps == 2
    assert plan_sends(with_short_chunks(_plan(4, 16, 132, k_steps=27))).chunk_steps == 3
    for k_steps, chunks, lag in ((7, 7, 1), (4, 1, 0)):
        sends = plan_sends(with_short_chunks(_plan(4, 16, 132, k_steps=k_steps)))
        assert (sends.chunks, sends.lag) == (chunks, lag)
    for changes in ({"chunks": 2}, {"signal_lag": 16}):
        same = dataclasses.replace(plan, config=dataclasses.replace(SMALL, **changes))
        assert with_short_chunks(same) == same


def test_a_signal_does_not_wait_for_the_next_tile(make_case, monkeypatch):
    # Without what is left of the lag at the end of a tile, signals wait in a circle, or are never sent.
    axis_size, shape, core_count, config = RUNS["two chunks"]
    case = make_case(*shape, "float16", (axis_size,))
    _run(case, config, core_count)
    monkeypatch.setattr(fast_kernel, "_announces_within_tile", lambda rounds: False)
    with pytest.raises(ci.DeadlockError):
        _run(case, config, core_count)


def _best(m, axis_size, num_ctas=132):
    config = default_config(m, 4096, 4096, "float16", num_ctas, axis_size)
    plan = Plan(m, 4096, 4096, config, num_ctas)
    return config.cta_tile_m, config.cta_tile_n, Rounds(plan, axis_size).span_steps


@pytest.mark.parametrize(
    "m, axis_size, best",
    [
        (64, 2, (64, 128, True)),  # 64 tiles in one round.
        (128, 2, (128, 64, True)),  # 128 tiles in one round.
        (256, 2, (128, 128, True)),  # 128 tiles in one round again, in place of 128 smaller ones in each step.
        (384, 2, (128, 128, False)),
        (512, 2, (128, 128, False)),
        (768, 2, (128, 128, True)),
        (1024, 2, (128, 256, False)),
        (64, 4, (64, 128, True)),
        (128, 4, (128, 64, True)),
        (256, 4, (128, 128, True)),
        (512, 4, (128, 256, True)),
        (1024, 4, (128, 256, False)),
        (256, 8, (128, 128, True)),
        (1024, 8, (128, 256, False)),
    ],
)
def test_default_configuration_of_a_ring(m, axis_size, best):
    assert _best(m, axis_size) == best


def _lower(function, axis_size, m, config, **more):
    return ci.lower_for_cuda(
        function,
        jax.ShapeDtypeStruct((m * axis_size, 4096), jnp.float16),
        jax.ShapeDtypeStruct((4096, 4096 * axis_size), jnp.float16),
        *more.get("operands", ()),
        mesh_axes={"x": axis_size},
        in_specs=(P("x", None), P(None, "x"), *more.get("specs", ())),
        out_specs=P(None, "x"),
    )


@pytest.mark.parametrize("axis_size, m", [(2, 64), (2, 128), (4, 256), (8, 128)])
def test_default_lowers_for_cuda(axis_size, m):
    function = lambda lhs, rhs: all_gather_lhs_matmul_fast(lhs, rhs, "x")
    assert _lower(function, axis_size, m, None).count("mosaic_gpu_v2") == 1


def test_wide_tiles_lower_for_cuda_with_somebody_late():
    function = functools.partial(all_gather_lhs_matmul_fast, axis_name="x", config=TuningConfig())
    late = {"operands": [jax.ShapeDtypeStruct((6,), jnp.int32)], "specs": [P()]}
    assert _lower(late_shard(function, ("x",)), 2, 512, TuningConfig(), **late).count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    "axis_size, shape, core_count, config, halves",
    [(2, (384, 128, 64), 2, SMALL, 0), (3, (128, 128, 64), 2, SMALL, 0), (2, (128, 128, 1280), 4, WIDE, 4)],
)
def test_trace(axis_size, shape, core_count, config, halves):
    (m, k, n), config = shape, dataclasses.replace(config, chunks=2)
    mesh = devices.ring_mesh(jax.devices("cpu")[:axis_size])
    problem = Problem(axis_size, m, k, n, "float16")
    with ci.simulate(core_count=core_count, seed=1) as sim:
        trace = trace_call(problem, mesh, "pallas_fast", config, every=1, calls=1, run=sim.run)
    assert trace.layout.shared_rounds and trace.missing() == 0
    checked, worst_ns = trace.causality()
    assert checked and worst_ns <= 0
    cells = trace.cells
    items = axis_size * (m // config.cta_tile_m) * (n // config.cta_tile_n) + halves // 2
    assert cells.exists.sum() == items * (k // config.tile_k)
    assert (cells.half[cells.exists] > 0).sum() == halves * (k // config.tile_k)
    seen = np.stack([cells.step, cells.m_tile, cells.n_tile, cells.half, cells.k_step])[:, cells.exists]
    assert np.unique(seen, axis=1).shape[1] == cells.exists.sum()
    flops = sum(event.flops for event in trace.events(kinds=("tile_product",)))
    assert flops == axis_size * Problem(axis_size, m, k, n, "float16").flops_per_device
    call = max(event.call for event in sim.events if event.kind == "tile_product")
    for kind in ("send", "signal", "wait", "tile_product"):
        noted = [(event.device, event.cta) for event in trace.events(kinds=(kind,))]
        happened = [(e.device, e.cta) for e in sim.events if e.kind == kind and e.call == call]
        assert sorted(noted) == sorted(happened), kind


def test_only_cells_of_the_fast_kernel_span_steps():
    readable = cells_of(Layout(_plan(2, 2, 3), 3, 3, 4))
    fast = cells_of(Layout(_plan(2, 2, 3), 3, 4, 4, shared_rounds=True))
    assert readable.step[0].tolist() == [0, 0, 1, 1, 2, 2] and readable.exists[0].all()
    assert fast.step[0, fast.exists[0]].tolist() == [0, 0, 1, 2]
    assert fast.step[2, fast.exists[2]].tolist() == [0, 1, 2, 2]
