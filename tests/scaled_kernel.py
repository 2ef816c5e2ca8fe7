"""A kernel that is right with one scale only, and a search among its configurations with made-up times."""

import dataclasses

import jax
import numpy as np

import cmm
from cmm import devices
from cmm.roofline import Problem
from cmm.tune.search import search as real_search
from cmm.tune.tunable import Tunable


@dataclasses.dataclass(frozen=True)
class Scale:
    """A configuration of a kernel that is right with 1.0 only."""

    factor: float
    time_us: float


def scaled(lhs, rhs, axis_name, *, config):
    """The kernel that is searched; with a factor of 0 it refuses its operands."""
    if config.factor == 0:
        raise ValueError("does not fit")
    return config.factor * cmm.all_gather_matmul_naive(lhs, rhs, axis_name)


def search_scaled(configs, stop=lambda: False, **options):
    """Returns (problem, mesh, outcome of the search, how many starts each round of timing asked for)."""
    problem = Problem(2, 8, 16, 4, "float32")
    mesh = devices.ring_mesh(jax.devices("cpu")[:2])
    kernel = Tunable("scaled", scaled, lambda problem, device: configs, **options)
    seen = []

    def timer(programs, operands, starts):
        # Which program is which shows in its result.
        lhs, rhs = (np.asarray(operand) for operand in operands[0])
        exact = np.sum(lhs @ rhs)
        factors = [np.sum(program(operands)[0]) / exact for program in programs]
        seen.append(starts)
        return [next(c.time_us for c in configs if abs(c.factor - factor) < 1e-3) for factor in factors]

    return problem, mesh, real_search(problem, kernel, mesh, configs, 3, stop=stop, timer=timer), seen
