"""Calls of the ring kernels on simulated devices, recorded from inside."""

import dataclasses
import functools

import jax
import pytest

import cmm.interpret as ci
from cmm import devices
from cmm.hopper import MatmulDimension, TuningConfig
from cmm.roofline import Problem
from cmm.trace.call import trace_call
from cmm.trace.record import KERNELS

each_kernel = pytest.mark.parametrize("kernel", KERNELS)
SMALL = TuningConfig(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2)
CASES = {  # Devices, multiprocessors, configuration, which products are noted, sizes of a shard.
    "two devices": (2, 2, SMALL, None, (256, 512, 192)),
    "three devices": (3, 2, SMALL, 1, (256, 128, 192)),
    "minor N": (
        2,
        3,
        dataclasses.replace(SMALL, grid_minor_dim=MatmulDimension.N, grid_tile_width=2),
        1,
        (256, 256, 192),
    ),
    "rounds that span long steps": (3, 2, SMALL, None, (640, 64, 64)),
    "two chunks": (2, 4, dataclasses.replace(SMALL, chunks=2, signal_lag=1, grid_tile_width=1), 2, (256, 512, 256)),
}


@functools.cache  # Several tests look at the same call.
def traced_call(kernel, axis_size=2, core_count=2, config=SMALL, every=None, shape=(256, 512, 192), seed=0, delay=None):
    """Returns (the trace of one call, its simulation)."""
    mesh = devices.ring_mesh(jax.devices("cpu")[:axis_size])
    problem = Problem(axis_size, *shape, "float16")
    with ci.simulate(seed=seed, core_count=core_count) as sim:
        trace = trace_call(problem, mesh, kernel, config, every=every, calls=1, run=sim.run, delay=delay)
    return trace, sim
