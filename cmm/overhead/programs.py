"""Which programs show where the time goes?"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from cmm.chain import chained
from cmm.devices import random_operands
from cmm.dispatch import METHODS
from cmm.product import local_matmul
from cmm.roofline import Problem

AXIS = "x"
ROWS, COLUMNS = P(AXIS, None), P(None, AXIS)
# Operands of longer chains come round again. Each is larger than the L2 caches of the GPUs that run the kernels.
_DISTINCT_PAIRS = 8
# XLA zeroes a single semaphore by a copy, and several by a kernel, one for all calls of a program.
_SEMAPHORES = 64


class WrongResult(Exception):
    """A kernel gave another result than in a program of one call."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to start calls.

    Attributes:
      title: what it is, in a few words.
      function: what a call computes: a name in `cmm.METHODS`; "gemm_only", which takes gathered activations;
        "stand_in"; or, of `cmm.peers.program_start`, the name of a program.
      calls: number of calls in one program.
      form: how a program holds them. "chain": one after the other on distinct operands. "loop": `lax.fori_loop` on one
        pair. "scan": `lax.scan` over stacked weights. "donated": a call writes to the result of the one before it.
        "replicated": activations lie whole on every device, and the program cuts out the shards.
      options: compiler options, as for `jax.jit`.
    """

    title: str
    function: str
    calls: int = 1
    form: str = "chain"
    options: Mapping[str, bool | int | str] = dataclasses.field(default_factory=dict)

    @property
    def is_checked(self) -> bool:
        """Whether it runs a kernel of Pallas:Mosaic GPU whose result can be checked."""
        return self.function in METHODS and METHODS[self.function].needs_hopper


@dataclasses.dataclass(frozen=True)
class Started:
    """A variant, compiled.

    Attributes:
      start: starts one program and returns its results without waiting.
      check: raises a `WrongResult` where a kernel's result differs from what it gives in a program of one call.
    """

    start: Callable[[], object]
    check: Callable[[], None]


# By default XLA replays five operations or more as a CUDA graph, kernels of Pallas:Mosaic GPU among them.
_NO_BUFFER = {"xla_gpu_enable_command_buffer": ""}
_COMMAND_BUFFER = {"xla_gpu_graph_min_graph_size": 1}
CALLS = (1, 2, 4, 8, 16)


def variants(axis_size: int, kernel: str = "pallas_fast") -> dict[str, Variant]:
    """Returns what is measured on so many devices, by name.

    Args:
      axis_size: number of devices. On one of them the kernel is the local matmul, and nothing is collective.
      kernel: name of the method in `cmm.METHODS`.
    """
    collective = axis_size > 1
    what = "fast kernel" if collective else "local matmul kernel"
    found = {f"kernel_{n}": Variant(f"{what}, {n} per program", kernel, n) for n in CALLS}
    plain = "all-gather + matmul" if collective else "GEMM"
    found |= {f"gather_{n}": Variant(f"{plain}, {n} per program", "naive", n) for n in (1, 8)}
    found |= {
        "kernel_donated": Variant(f"{what}, result donated", kernel, 1, "donated"),
        "kernel_buffered_1": Variant(f"{what}, 1 per program, command buffer", kernel, 1, options=_COMMAND_BUFFER),
        "kernel_unbuffered_8": Variant(f"{what}, 8 per program, no command buffer", kernel, 8, options=_NO_BUFFER),
        "kernel_loop": Variant(f"{what}, fori_loop of 8", kernel, 8, "loop"),
        "tiny_xla": Variant("x + 1", "x + 1"),
        "tiny_kernel": Variant("copy kernel", "kernel"),
    }
    if collective:
        found |= {f"stand_in_{n}": Variant(f"empty collective kernel, {n} per program", "stand_in", n) for n in CALLS}
        found |= {
            "gemm_only_1": Variant("GEMM only", "gemm_only"),
            "kernel_replicated": Variant(f"{what}, activations replicated", kernel, 1, "replicated"),
            "tiny_collective": Variant("copy kernel with one signal", "collective kernel"),
            "tiny_psum": Variant("psum of 16 KiB", "psum"),
            "tiny_all_gather": Variant("all-gather of 16 KiB", "all_gather"),
        }
    # Last: whether XLA's fusion of a slice into the kernel's call leaves addresses on peers right is not known.
    no_fusion = {"xla_gpu_enable_dynamic_slice_fusion": False}
    found["kernel_scan_no_fusion"] = Variant(f"{what}, scan of 8, weights copied", kernel, 8, "scan", no_fusion)
    found["kernel_scan"] = Variant(f"{what}, scan of 8", kernel, 8, "scan")
    return found


def build(variant: Variant, problem: Problem, mesh: Mesh) -> Started:
    """Compiles a variant for the devices of `mesh`, and draws its operands.

    Raises:
      ValueError, NotImplementedError: its function does not run here.
    """
    if variant.function not in METHODS and variant.function not in ("gemm_only", "stand_in"):
        return _tiny(variant, mesh)
    pairs = [random_operands(problem, mesh, seed) for seed in range(min(variant.calls, _DISTINCT_PAIRS))]
    pairs = [pairs[index % len(pairs)] for index in range(variant.calls)]
    gathered = variant.form == "replicated" or variant.function == "gemm_only"
    if gathered:
        pairs = [(jax.device_put(lhs, NamedSharding(mesh, P())), rhs) for lhs, rhs in pairs]
    function = _function(variant.function)
    specs = (P() if variant.function == "gemm_only" else ROWS, COLUMNS)
    compiled = functools.partial(_compiled, mesh=mesh, options=dict(variant.options))
    once = compiled(function, specs, COLUMNS)
    if variant.form == "chain":
        many = compiled(chained(function), ([specs] * variant.calls,), [COLUMNS] * variant.calls)
        start = lambda: many(pairs)
        expected = lambda: [once(*pair) for pair in pairs]
    elif variant.form == "donated":
        start = _Donating(function, specs, mesh, pairs[0], once(*pairs[0]))
        expected = lambda: [once(*pairs[0])]
    elif variant.form == "replicated":
        rows = NamedSharding(mesh, ROWS)
        cutting = jax.jit(lambda lhs, rhs: once(jax.reshard(lhs, rows), rhs))
        start = lambda: [cutting(*pairs[0])]
        lhs = jax.device_put(pairs[0][0], rows)
        expected = lambda: [once(lhs, pairs[0][1])]
    elif variant.form == "loop":
        looping = compiled(functools.partial(_loop, function, variant.calls), specs, COLUMNS)
        start = lambda: [looping(*pairs[0])]
        expected = lambda: [once(*pairs[0])]
    elif variant.form == "scan":
        stack = jax.jit(lambda *all_rhs: jnp.stack(all_rhs), out_shardings=NamedSharding(mesh, P(None, None, AXIS)))
        stacked = stack(*[rhs for _, rhs in pairs])
        scanning = compiled(functools.partial(_scan, function), (ROWS, P(None, None, AXIS)), COLUMNS)
        start = lambda: [scanning(pairs[0][0], stacked)]
        expected = lambda: [once(pairs[0][0], pairs[-1][1])]
    else:
        raise ValueError(f"There is no form {variant.form!r}.")
    # What the stand-in returns was never written, and cuBLAS may add up in another order in another program.
    return Started(start, (lambda: _check(start(), expected())) if variant.is_checked else lambda: None)


def stand_in(lhs, rhs, axis_name):
    """Does for the host what the fast kernel does, and next to nothing on the GPUs: one signal down the ring, one wait.

    Its result is what the memory held before. Operands, results and scratch are those of the fast kernel, so that
    addresses of as many buffers are exchanged; only the descriptors that TMA needs are missing.

    Args:
      lhs, rhs, axis_name: as for `cmm.all_gather_matmul`, on two devices or more.
    """
    from jax.experimental import pallas as pl  # Imported where a kernel is traced, as Pallas is elsewhere.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    size = lax.axis_size(axis_name)

    def body(lhs_gmem, rhs_gmem, out_gmem, scratch_gmem):
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((_SEMAPHORES,))).at[0]
        down = lax.rem(lax.axis_index(axis_name) + size - 1, size)
        pl.semaphore_signal(arrived, device_id={axis_name: down})
        pl.semaphore_wait(arrived)

    out_type = (
        jax.ShapeDtypeStruct((size * lhs.shape[0], rhs.shape[1]), lhs.dtype),
        jax.ShapeDtypeStruct((size - 1, *lhs.shape), lhs.dtype),
    )
    return plgpu.kernel(body, out_type=out_type)(lhs, rhs)[0]


def _function(name) -> Callable:
    if name == "gemm_only":
        return lambda lhs, rhs: local_matmul(lhs, rhs, lhs.dtype)
    return functools.partial(stand_in if name == "stand_in" else METHODS[name].function, axis_name=AXIS)


def _compiled(function, in_specs, out_specs, mesh, options):
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, compiler_options=options or None)


def _tiny(variant, mesh) -> Started:
    from cmm.peers import program_start  # It imports Pallas.

    program = program_start.compiled(program_start.PROGRAMS[variant.function], mesh, variant.calls)
    rows, columns = program_start.BLOCK
    x = jax.device_put(jnp.zeros((mesh.size * rows, columns)), NamedSharding(mesh, P(AXIS)))
    return Started(lambda: program(x), lambda: None)


def _loop(function, calls, lhs, rhs):
    def body(_, out):
        own, _ = lax.optimization_barrier((lhs, out))  # Else the call would not depend on the one before it.
        return function(own, rhs)

    return lax.fori_loop(0, calls, body, jnp.zeros_like(jax.eval_shape(function, lhs, rhs)))


def _scan(function, lhs, stacked):
    def body(out, rhs):
        own, _ = lax.optimization_barrier((lhs, out))
        return function(own, rhs), None

    return lax.scan(body, jnp.zeros_like(jax.eval_shape(function, lhs, stacked[0])), stacked)[0]


class _Donating:
    """Starts calls, each of which writes to the memory of the result before it."""

    def __init__(self, function, specs, mesh, pair, first):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=COLUMNS, check_vma=False)
        self._program = jax.jit(lambda lhs, rhs, old: mapped(lhs, rhs), donate_argnums=2, keep_unused=True)
        self._pair, self._last = pair, first

    def __call__(self):
        self._last = self._program(*self._pair, self._last)
        return [self._last]


def _check(results, expected) -> None:
    for index, (result, right) in enumerate(zip(results, expected, strict=True)):
        different = int(jnp.sum(result != right))
        if different:
            raise WrongResult(f"Result {index} differs from that of a program of one call in {different} elements.")
