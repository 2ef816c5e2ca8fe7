"""A winner of a search, and where winners are kept and looked up during a test."""

import dataclasses

import jax.numpy as jnp

from cmm.hopper import MatmulDimension, TuningConfig, tuned
from cmm.roofline import Problem
from cmm.winners import Winner, config_fields

H200 = "NVIDIA H200"
PROBLEM = Problem(4, 1024, 4096, 2048, "bfloat16")
CONFIG = TuningConfig(
    128, 128, max_concurrent_steps=3, wg_dimension=MatmulDimension.N, grid_minor_dim=MatmulDimension.N, epi_tile_n=None
)


def make_winner(config=CONFIG, problem=PROBLEM, time_us=200.0, **changes):
    """Returns a winner on H200 that is right."""
    fields = config if isinstance(config, dict) else config_fields(config)
    rest = {"runner_up_us": 201.5, "right": True, "error_over_bound": 0.3, "date": "2026-01-01", "machine": {}}
    winner = Winner("pallas", H200, **dataclasses.asdict(problem), config=fields, time_us=time_us, **rest,
                    versions={"jax": "0"}, command="x")  # fmt: skip
    return dataclasses.replace(winner, **changes)


def look_up(problem=PROBLEM, kernel="pallas", device_kind=H200):
    """Returns the configuration that a call on such devices would take, or None."""
    p = problem
    return tuned.tuned_config(kernel, p.axis_size, p.m_shard, p.n_shard, p.k, jnp.dtype(p.dtype), device_kind)


def empty_cache(tmp_path, monkeypatch):
    """Makes an empty cache, and no shipped table, what a test sees; returns where the cache will be."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "_shipped_table", lambda: tmp_path / "shipped.json")
    return tmp_path / "cache" / "cmm" / "tuned.json"
