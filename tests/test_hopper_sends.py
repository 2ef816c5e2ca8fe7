"""The sends of the fast kernel, tile by tile: each once, early, and announced by as many signals as are awaited."""

import collections
import functools
import itertools

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from cmm.hopper import MatmulDimension, TuningConfig
from cmm.hopper.plan import Plan
from cmm.hopper.sends import plan_sends

M, N = MatmulDimension.M, MatmulDimension.N


def _plan(m_tiles, n_tiles, k_steps, num_ctas, **changes):
    config = TuningConfig(**changes)
    return Plan(m_tiles * config.cta_tile_m, n_tiles * config.cta_tile_n, k_steps * config.tile_k, config, num_ctas)


# The published shape, more rows and more columns than CTAs, bands that the snake goes through backwards, odd sizes.
PLANS = {
    "published": _plan(8, 16, 64, 132),
    "many columns": _plan(8, 56, 64, 132),
    "many rows": _plan(64, 16, 64, 132),
    "backwards": _plan(12, 6, 12, 7, grid_tile_width=4),
    "minor N": _plan(8, 16, 64, 132, grid_minor_dim=N),
    "minor N, narrow": _plan(5, 7, 6, 8, grid_minor_dim=N, grid_tile_width=2),
    "one CTA": _plan(3, 2, 5, 1),
    "one column": _plan(4, 1, 8, 132),
    "few products": _plan(2, 40, 2, 132),
    "three chunks": _plan(3, 5, 9, 16, chunks=3, signal_lag=2),
}
each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def _senders(sends):
    """Returns for each row and k-step the columns that send this tile of A."""
    plan = sends.plan
    every = np.indices((plan.m_tiles, plan.n_tiles, plan.k_steps)).reshape(3, -1)
    of_column = lambda m_tile, n_tile, k_step: sends.is_turn(sends.position(m_tile, n_tile), k_step)
    is_mine = np.asarray(jax.jit(jax.vmap(of_column))(*every))
    senders = collections.defaultdict(list)
    for m_tile, n_tile, k_step in every[:, is_mine].T.tolist():
        senders[m_tile, k_step].append(n_tile)
    return senders


@each_plan
def test_every_tile_is_sent_once(plan):
    senders = _senders(plan_sends(plan))
    assert set(senders) == set(itertools.product(range(plan.m_tiles), range(plan.k_steps)))
    assert {len(columns) for columns in senders.values()} == {1}


@each_plan
def test_every_chunk_gets_as_many_signals_as_are_awaited(plan):
    sends = plan_sends(plan)
    rows, k_steps = np.array(list(_senders(sends))).T
    is_last = np.asarray(jax.vmap(sends.is_last_of_chunk)(k_steps))
    chunks = jax.vmap(functools.partial(sends.chunk, 0))(rows, k_steps)
    signals = collections.Counter(np.asarray(chunks)[is_last].tolist())
    assert signals == dict.fromkeys(range(plan.m_tiles * sends.chunks), sends.signals)
    starts = [k for k in range(plan.k_steps) if sends.is_first_of_chunk(k)]
    assert len(starts) == sends.chunks
    assert len({int(sends.chunk(0, 0, k)) for k in starts}) == sends.chunks


@each_plan
def test_the_columns_that_send_come_first(plan):
    sends = plan_sends(plan)
    config, shape = plan.config, (plan.m_tiles, plan.n_tiles)
    snake = lambda index: plgpu.planar_snake(index, shape, config.grid_minor_dim, config.grid_tile_width)
    visited = np.transpose(jax.jit(jax.vmap(snake))(np.arange(np.prod(shape)))).tolist()
    order = {tuple(tile): index for index, tile in enumerate(visited)}
    senders = _senders(sends)
    for m_tile in range(plan.m_tiles):
        columns = {column for (row, _), (column,) in senders.items() if row == m_tile}
        by_visit = sorted(range(plan.n_tiles), key=lambda column: order[m_tile, column])
        assert columns == set(by_visit[: len(columns)])


def test_the_published_shape_shares_the_sends_of_a_row_among_all_columns():
    sends = plan_sends(PLANS["published"])
    assert (sends.columns, sends.chunks, sends.signals, sends.lag) == (16, 8, 8, 4)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"chunks": 5}, "gives 64 products, which chunks=5 does not divide"),
        ({"chunks": 4, "signal_lag": 17}, "signal_lag=17 must be at most 16"),
        ({"chunks": 1, "signal_lag": 1}, "signal_lag=1 must be at most 0"),
        ({"chunks": 0}, "chunks must be a Python int of at least 1 or None, got 0"),
        ({"signal_lag": -1}, "signal_lag must be a Python int of at least 0 or None, got -1"),
    ],
)
def test_what_does_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        plan_sends(_plan(8, 16, 64, 132, **changes))
