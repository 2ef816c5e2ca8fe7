"""Which rows does the ladder have, and how is the program of each made?"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal

import jax
from jax.sharding import Mesh, PartitionSpec as P

from cmm.chain import chained
from cmm.devices import is_simulated
from cmm.dispatch import METHODS
from cmm.measure import Program
from cmm.peers import jax_example, torch_matmul
from cmm.product import local_matmul
from cmm.ring import COPY_ENGINE_OPTIONS
from cmm.roofline import Problem

AXIS = "x"

# Makes a program of a problem, a mesh and operand pairs; raises what says why it cannot.
Build = Callable[[Problem, Mesh, Sequence], Program]


@dataclasses.dataclass(frozen=True)
class Rung:
    """One row of the ladder.

    Attributes:
      name: what `--methods` takes.
      title: what tables and figures print.
      build: makes its program.
      gathered: whether it gets activations that are already gathered, so that it shows the roof over all methods.
      needs: what it does not run without.
      peer: whether it is the work of others. Unless it was asked for by name, it is skipped whatever it raises.
      beside: whether it may be compiled while other programs are compiled and run. Not where XLA chooses kernels for
        its products by timing them: they must have the GPUs to themselves.
    """

    name: str
    title: str
    build: Build
    gathered: bool = False
    needs: Literal["", "GPUs", "Hopper GPUs"] = ""
    peer: bool = False
    beside: bool = False


def in_shard_map(function: Callable, *, gathered=False, check_vma=True, compiler_options=None) -> Build:
    """Returns a `Build` that lowers `function(lhs, rhs, axis_name)` for the mesh.

    Args:
      function: computes this device's columns of the product.
      gathered: whether `lhs` is the whole of the activations, on every device.
      check_vma: as in `jax.shard_map`.
      compiler_options: as in `jax.jit`.
    """

    def build(problem, mesh, operands):
        def compiled(body, in_specs, out_specs):
            body = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
            return jax.jit(body, compiler_options=compiler_options)

        one = lambda lhs, rhs: function(lhs, rhs, AXIS)
        pair = (P(None, None) if gathered else P(AXIS, None), P(None, AXIS))
        program = compiled(one, pair, P(None, AXIS))
        chain = compiled(chained(one), ([pair] * len(operands),), [P(None, AXIS)] * len(operands))
        lowered = [program.lower(*operands[0])]
        if not is_simulated(mesh.devices.flat):  # There the chain is not timed.
            lowered.append(chain.lower(operands))
        return Program(program, operands, start_chain=chain, lowered=lowered)

    return build


def _method(name, compiler_options=None) -> Build:
    return in_shard_map(lambda *shards: METHODS[name].function(*shards), compiler_options=compiler_options)


def _kernel(name) -> Build:
    """Like `_method`, with the configuration that a call takes by itself, so that a record can say it."""

    def build(problem, mesh, operands):
        from cmm import hopper  # Imports Pallas, which a machine without GPUs need not.

        p, gpu = problem, mesh.devices.flat[0]
        core_count = getattr(gpu, "core_count", hopper.config.H100_MULTIPROCESSORS)  # Simulated devices have none.
        sizes = (p.m_shard, p.n_shard, p.k, p.dtype)
        config = hopper.chosen_config(name, p.axis_size, *sizes, gpu.device_kind, core_count)
        function = functools.partial(hopper.KERNELS[name], config=config)
        program = in_shard_map(function)(problem, mesh, operands)
        return dataclasses.replace(program, details=_fields_text(config))

    return build


def _fields_text(config) -> str:
    return ", ".join(f"{name}={getattr(value, 'name', value)}" for name, value in dataclasses.asdict(config).items())


def _jax_example(problem, mesh, operands) -> Program:
    config = jax_example.best_config(problem)
    function = functools.partial(jax_example.all_gather_matmul, config=config)
    program = in_shard_map(function, check_vma=False)(problem, mesh, operands)
    found = "" if jax_example.is_searched(problem) else ", not searched for this problem"
    return dataclasses.replace(program, details=_fields_text(config) + found)


GEMM_ONLY = Rung(
    "gemm_only",
    "GEMM only",
    in_shard_map(lambda lhs, rhs, _: local_matmul(lhs, rhs, lhs.dtype), gathered=True),
    gathered=True,
)
_METHODS = tuple(
    Rung(method.name, method.title, _kernel(method.name), needs="Hopper GPUs", beside=True)
    if method.needs_hopper
    else Rung(method.name, method.title, _method(method.name))
    for method in METHODS.values()
)
# In the order of the tables: the roof, what plain JAX reaches, and kernels.
RUNGS = (
    GEMM_ONLY,
    Rung("gemm_only_torch", "GEMM only, PyTorch", torch_matmul.build, gathered=True, needs="GPUs", peer=True),
    *(rung for rung in _METHODS if not rung.needs),
    Rung("ring_copy_engines", "ring, copy engines", _method("ring", COPY_ENGINE_OPTIONS), needs="GPUs"),
    *(rung for rung in _METHODS if rung.needs),
    Rung("jax_example", "JAX's example kernel", _jax_example, needs="Hopper GPUs", peer=True, beside=True),
)
CHOICES = tuple(rung.name for rung in RUNGS if rung is not GEMM_ONLY)
