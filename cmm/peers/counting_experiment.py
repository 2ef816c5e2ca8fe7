"""What a late CTA does to the results of JAX's example: run, compare, count."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

import cmm.interpret
from cmm import devices
from cmm.job import AXIS
from cmm.peers.jax_example import Config, all_gather_matmul, pretend_machine
from cmm.peers.late_cta import late_cta
from cmm.reference import reference_and_bound
from cmm.roofline import Problem


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is run.

    Attributes:
      problem: shapes and dtype.
      config: tiles of the example. Each CTA has at most one tile, so that nothing else can go wrong.
      ctas_per_device: the number of SMs, since the example launches one CTA on each.
      simulated: whether the devices are simulated ones.
    """

    problem: Problem
    config: Config
    ctas_per_device: int
    simulated: bool

    @property
    def row_blocks(self) -> int:
        """How many blocks of `config.cta_tile_m` rows a shard has."""
        return self.problem.m_shard // self.config.cta_tile_m


@dataclasses.dataclass(frozen=True)
class DelayResult:
    """What one delay did to `repeats` calls. A shard is what one device computed from one shard of the activations.

    Attributes:
      delay_us: nominal sleep of the late CTA; virtual time on simulated devices.
      repeats: calls, each with its own inputs.
      outputs, wrong_outputs: devices x calls, and how many of them are wrong anywhere.
      shards, wrong_shards: devices x shards x calls, and how many of them are wrong anywhere.
      wrong_blocks: `(device, source shard, row block, calls in which it was wrong)`.
      largest_error: largest error of an element that is a number. The products have a standard deviation of sqrt(k).
      error_over_bound: largest ratio of such an error to its bound; right results have at most 1.
      not_finite: elements, over all calls, that are infinite or not a number.
      call_us: median time of a call but the first by the host's clock, to see that the sleep takes place; `None` on
        simulated devices.
      racy_calls: calls in which the simulator found a race; `None` on GPUs.
      race: the first race in words, or empty.
    """

    delay_us: int
    repeats: int
    outputs: int
    wrong_outputs: int
    shards: int
    wrong_shards: int
    wrong_blocks: list[tuple[int, int, int, int]]
    largest_error: float
    error_over_bound: float
    not_finite: int
    call_us: float | None = None
    racy_calls: int | None = None
    race: str = ""


def run_delay(
    delay_us: int, repeats: int, mesh: Mesh, setting: Setting, first_seed: int = 0, report: Callable = lambda: None
) -> DelayResult:
    """Calls the example `repeats` times with a late CTA, and compares every result with a float32 reference.

    Args:
      delay_us: nominal sleep of the late CTA.
      repeats: number of calls. All have their own inputs: the scratch buffer of the previous call may lie where this
        one's does, and stale rows of the same inputs would be right.
      mesh: mesh of the one axis "x" over all devices.
      setting: what is run.
      first_seed: seed of the inputs of the first call; the others count up.
      report: called after each call.
    """
    program, compare = _program(delay_us, mesh, setting), _comparison(mesh, setting)
    seen, call_us, races = [], [], []
    for seed in range(first_seed, first_seed + repeats):
        # Wait for everything: devices start together, and no late write meets memory that is used for something else.
        operands = jax.block_until_ready(devices.random_operands(setting.problem, mesh, seed, AXIS))
        start = time.perf_counter()
        if setting.simulated:
            with cmm.interpret.simulate(on_race="record", seed=seed) as sim:
                out = sim.run(program, *operands)
            races.append(sim.races)
        else:
            out = jax.block_until_ready(program(*operands))
            call_us.append((time.perf_counter() - start) * 1e6)
        seen.append(np.asarray(compare(out, *operands)))
        report()
    return dataclasses.replace(
        _summary(delay_us, np.stack(seen)),
        call_us=float(np.median(call_us[1:])) if call_us[1:] else None,
        racy_calls=sum(map(bool, races)) if setting.simulated else None,
        race=next((str(found[0]) for found in races if found), ""),
    )


def _program(delay_us, mesh, setting):
    """Returns the example with a late CTA as a function of the global operands."""
    return jax.jit(
        jax.shard_map(
            per_device(delay_us, setting),
            mesh=mesh,
            in_specs=(P(AXIS, None), P(None, AXIS)),
            out_specs=P(None, AXIS),
            check_vma=False,
        )
    )


def per_device(delay_us: int, setting: Setting) -> Callable:
    """Returns the example with a late CTA as a function of one device's operands, for `jax.shard_map`."""

    def shard(lhs, rhs):
        with contextlib.ExitStack() as stack:
            if setting.simulated:
                stack.enter_context(pretend_machine(setting.problem.axis_size, setting.ctas_per_device))
            stack.enter_context(late_cta(delay_us))
            return all_gather_matmul(lhs, rhs, AXIS, setting.config)

    return shard


@functools.cache  # One program for all delays.
def _comparison(mesh, setting):
    columns = P(None, AXIS)
    compare = functools.partial(_compare, row_blocks=setting.row_blocks)
    return jax.jit(
        jax.shard_map(
            compare, mesh=mesh, in_specs=(columns, P(AXIS, None), columns), out_specs=P(AXIS), check_vma=False
        )
    )


def _compare(out, lhs, rhs, row_blocks):
    """Returns `f32[1, axis_size, row_blocks, 3]`: largest error, the same over its bound, and elements not finite."""
    reference, bound = reference_and_bound(lhs, rhs, AXIS, out.dtype)
    error = jnp.abs(out.astype(jnp.float32) - reference)
    finite = jnp.isfinite(error)
    error = jnp.where(finite, error, 0)
    blocks = (lax.axis_size(AXIS), row_blocks, -1)
    rows = [
        jnp.max(error.reshape(blocks), axis=-1),
        jnp.max((error / bound).reshape(blocks), axis=-1),
        jnp.sum((~finite).reshape(blocks), axis=-1, dtype=jnp.float32),
    ]
    return jnp.stack(rows, axis=-1)[None]


def _summary(delay_us, seen):
    """Reduces `[repeats, device, source shard, row block, 3]` to a result."""
    error, over_bound, not_finite = np.moveaxis(seen, -1, 0)
    wrong = ~(over_bound <= 1) | (not_finite > 0)
    times = wrong.sum(axis=0)
    shards = wrong.any(axis=-1)
    outputs = shards.any(axis=-1)
    return DelayResult(
        delay_us=delay_us,
        repeats=len(seen),
        outputs=outputs.size,
        wrong_outputs=int(outputs.sum()),
        shards=shards.size,
        wrong_shards=int(shards.sum()),
        wrong_blocks=[(*map(int, place), int(times[tuple(place)])) for place in np.argwhere(times)],
        largest_error=float(error.max()),
        error_over_bound=float(over_bound.max()),
        not_finite=int(not_finite.sum()),
    )
