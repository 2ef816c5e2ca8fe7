"""How do we call a ring kernel so that it notes when it loads, multiplies, sends, signals and waits?"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from cmm import interpret
from cmm.hopper import KERNELS, fast_kernel, ring_kernel
from cmm.hopper.calls import call_recorded, plan_ring
from cmm.hopper.config import TuningConfig
from cmm.hopper.fast_kernel import plan_fast
from cmm.hopper.marks import Delay, Layout, Recorder
from cmm.hopper.rounds import Rounds
from cmm.hopper.sends import plan_sends
from cmm.roofline import Problem
from cmm.trace.twin import launch as launch_twin

_CELLS_PER_TILE = (4, 3, 2)  # By preference, as far as they divide the products of a tile.


def record_events(
    lhs,
    rhs,
    axis_name,
    kernel: str = "pallas",
    config: TuningConfig | None = None,
    *,
    every: int | None = None,
    delay: Delay | None = None,
):
    """Computes `AllGather(lhs) @ rhs` with a ring kernel that notes what it does. Call it inside `jax.shard_map`.

    On an axis of one device there is nothing to send or to wait for: what runs is the kernel's twin.

    Args:
      lhs, rhs, axis_name, config: as for `cmm.hopper.all_gather_lhs_matmul`.
      kernel: `"pallas"`, the readable one, or `"pallas_fast"`.
      every: what can be noted for each product is noted for the first of so many; by default once in a chunk of k,
        of which a tile has up to four. A divisor of the products of a chunk, in the readable kernel of a tile.
      delay: a pause to plant, for tests.

    Returns:
      The result, `[axis_size * m_shard, n_shard]`, and the record, `i32[1, CTAs, roles, slots, 2]`, which
      `cmm.trace.events.events_from` reads.

    Raises:
      ValueError, NotImplementedError: as the kernel does; also if `kernel` or `every` is not as above.

    Cost: the kernel takes longer; `python -m cmm.trace` prints by how much. Memory for the record: 136 bytes for each
    chunk of each role of each CTA.
    """
    layout, dtype = layout_of(lhs, rhs, axis_name, kernel, config, every)
    if layout.communicates:
        launch = (fast_kernel if kernel == "pallas_fast" else ring_kernel)._launch
    else:
        launch = _twin_of(kernel)
    recorder = Recorder(layout, axis_name, delay)
    out, marks = call_recorded(launch, lhs, rhs, axis_name, layout.plan, dtype, recorder)
    return out, marks[None]


def record_twin(lhs, rhs, axis_name, kernel: str = "pallas", config=None, *, every: int | None = None):
    """Computes `lhs @ rhs` with the twin of a ring kernel, which notes what it does.

    Call it inside `jax.shard_map` with `check_vma=False`. Arguments, results and errors are those of `record_events`,
    but `lhs` is the whole of the activations, `[axis_size * m_shard, k]`, on every device.
    """
    layout, dtype = _twin_layout(lhs, rhs, axis_name, kernel, config, every)
    out, marks = _twin_of(kernel)(axis_name, layout.plan, dtype, lhs, rhs, Recorder(layout, axis_name))
    return out, marks[None]


def multiply_as_twin(lhs, rhs, axis_name, kernel: str = "pallas", config=None):
    """Returns the result of `record_twin`; nothing is noted."""
    layout, dtype = _twin_layout(lhs, rhs, axis_name, kernel, config, None)
    return _twin_of(kernel)(axis_name, layout.plan, dtype, lhs, rhs)


def layout_of(lhs, rhs, axis_name, kernel: str, config=None, every: int | None = None) -> tuple[Layout, jnp.dtype]:
    """Returns where `record_events` puts what, and the dtype of its result. Arguments and errors are the same."""
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}.")
    if kernel == "pallas_fast":
        plan, dtype = plan_fast(lhs, rhs, axis_name, config=config)
        chunk = usual = plan_sends(plan).chunk_steps
    else:
        plan, dtype = plan_ring(kernel, lhs, rhs, axis_name, config=config)
        chunk = plan.k_steps
        usual = chunk // next((count for count in _CELLS_PER_TILE if chunk % count == 0), 1)
    axis_size = jax.lax.axis_size(axis_name)
    communicates = axis_size > 1
    if every is not None and (every < 1 or chunk % every):
        raise ValueError(f"every={every} must divide {chunk}, the products of a chunk.")
    is_fast = kernel == "pallas_fast"
    num_roles = 4 if is_fast and communicates else 3
    shared_rounds = is_fast and Rounds(plan, axis_size).span_steps
    return Layout(plan, axis_size, num_roles, every or usual, communicates, shared_rounds), dtype


def _twin_layout(lhs, rhs, axis_name, kernel, config, every):
    shard = lhs[: lhs.shape[0] // jax.lax.axis_size(axis_name)]
    layout, dtype = layout_of(shard, rhs, axis_name, kernel, config, every)
    return dataclasses.replace(layout, num_roles=3, communicates=False), dtype


def _twin_of(kernel):
    return functools.partial(launch_twin, fast=kernel == "pallas_fast")


def recorded_program(problem: Problem, mesh, kernel: str, config=None, every=None, delay=None, *, twin: bool = False):
    """Returns a jitted function of the global operands that calls `record_events`, and the layout of its record.

    Args:
      problem: shapes and dtype.
      mesh: a mesh of one axis.
      kernel, config, every, delay: as for `record_events`.
      twin: call `record_twin` in its place; the function then takes activations that all devices hold as a whole.

    Calls with the same arguments return the same function, so that it is compiled once.
    """
    core_count = interpret.simulated_core_count() if interpret.is_active() else None
    return _program(problem, mesh, kernel, config, every, delay, twin, core_count)


@functools.cache
def _program(problem, mesh, kernel, config, every, delay, twin, core_count):
    del core_count  # The layout depends on it.
    (axis,) = mesh.axis_names
    specs = (P(None, None) if twin else P(axis, None), P(None, axis))
    layouts = []

    def record(lhs, rhs):
        if twin:
            layouts.append(_twin_layout(lhs, rhs, axis, kernel, config, every)[0])
            return record_twin(lhs, rhs, axis, kernel, config, every=every)
        layouts.append(layout_of(lhs, rhs, axis, kernel, config, every)[0])
        return record_events(lhs, rhs, axis, kernel, config, every=every, delay=delay)

    outs = (P(None, axis), P(axis))
    program = jax.shard_map(record, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=not twin)
    shapes = (mesh.size * problem.m_shard, problem.k), (problem.k, mesh.size * problem.n_shard)
    operands = [
        jax.ShapeDtypeStruct(shape, problem.dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs)
    ]
    jax.eval_shape(program, *operands)  # Traces the program, no more.
    return jax.jit(program), layouts[0]
