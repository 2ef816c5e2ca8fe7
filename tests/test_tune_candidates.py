"""What a search tries: problems of the suites, and for each the configurations that fit, the best ones first."""

import dataclasses

import pytest

from cmm import suites
from cmm.hopper import MatmulDimension
from cmm.hopper.candidates import candidates
from cmm.peers import jax_example
from cmm.roofline import Problem

SHAPES = [(1024, 4096, 4096), (64, 4096, 4096), (2048, 7168, 8192), (4096, 26624, 16384), (128, 64, 64)]  # m, n, k


@pytest.mark.parametrize("m, n, k", SHAPES)
def test_candidates_fit_and_differ(m, n, k):
    found = candidates(m, n, k, "bfloat16", 132)
    assert found and len(set(found)) == len(found)
    for config in found:
        config.check(m, n, k, "bfloat16")
        assert config.tile_m * config.tile_n <= 128 * 128, "the accumulator does not fit into registers"
        # A snake wider than the grid is the same kernel as one of the grid's width: only one width may reach it.
        tiles = (m // config.cta_tile_m, n // config.cta_tile_n)[config.grid_minor_dim]
        wider = dataclasses.replace(config, grid_tile_width=16)
        assert config.grid_tile_width < tiles or config == wider or wider not in found


def test_candidates_are_few_where_order_makes_no_difference():
    one_row = candidates(64, 4096, 4096, "float16", 132)
    assert {config.wg_dimension for config in one_row} == {MatmulDimension.N}
    assert {(config.grid_minor_dim, config.grid_tile_width) for config in one_row} == {(MatmulDimension.M, 8)}


def test_the_most_promising_come_first():
    first = candidates(1024, 4096, 4096, "float16", 132)[:8]
    # Eight rows of 16 tiles of 128 x 256 are one round on 132 multiprocessors; smaller tiles load more.
    assert all(config.cta_tile_m * config.cta_tile_n == 128 * 256 for config in first)
    assert all(config.max_concurrent_steps == 4 for config in first[:5]), "four stages of 48 KB fit, five do not"
    # 2048 x 7168: 448 tiles of 128 x 128 are 4 rounds, 224 of 128 x 256 are 2 rounds of twice the work.
    assert {config.tile_n for config in candidates(2048, 7168, 8192, "float16", 132)[:60]} >= {128, 256}


def test_no_candidates_where_nothing_divides():
    assert candidates(16, 4096, 4096, "float16", 132) == []


def test_the_examples_own_settings():
    found = jax_example.search_space()
    assert len(found) == len(set(found)) == 48
    assert jax_example.PUBLISHED_CONFIG in found
    assert {(c.tile_m, c.tile_n, c.tile_k, c.max_concurrent_steps) for c in found} == {
        (m, n, 64, 4) for m in (128, 256) for n in (64, 128)
    }


@pytest.mark.parametrize(
    "name, axis_size, expected",
    [
        ("W1", 4, [(1024, 4096, 4096, "float16"), (1024, 4096, 4096, "bfloat16")]),
        ("llama3-8b", 8, [(512, 4096, 1792, "bfloat16"), (1024, 4096, 1792, "bfloat16")]),
        ("llama3-70b", 4, [(1024, 8192, 7168, "bfloat16"), (2048, 8192, 7168, "bfloat16")]),
        ("llama3-405b", 2, [(2048, 16384, 26624, "bfloat16"), (4096, 16384, 26624, "bfloat16")]),
        ("m-sweep", 2, [(2**i, 4096, 4096, "float16") for i in range(4, 14)]),
    ],
)
def test_suites(name, axis_size, expected):
    assert suites.suite(name, axis_size) == [Problem(axis_size, *shape) for shape in expected]
    assert {problem.dtype for problem in suites.suite(name, axis_size, "float16")} == {"float16"}


def test_suites_that_cannot_be():
    with pytest.raises(ValueError, match="no suite 'W2'. Known suites: W1, llama3-8b"):
        suites.suite("W2", 2)
    with pytest.raises(ValueError, match="28672 columns of the weights do not divide by 3 devices"):
        suites.suite("llama3-70b", 3)
