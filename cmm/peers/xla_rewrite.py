"""`python -m cmm.peers.xla_rewrite`: XLA's own collective matmul, made from a plain product of sharded operands.

With "windowed einsum" XLA's partitioner replaces all-gather and product by a loop that multiplies a shard while a
collective permute passes it on. The GPU compiler does so above `xla_gpu_threshold_for_windowed_einsum_mib`, which no
product reaches by default; the CPU compiler never does. The rewrite works on a product that `jax.jit` partitions (with
Shardy, too), not inside `jax.shard_map`. With `xla_gpu_multi_streamed_windowed_einsum` the loop is unrolled, and its
products run on several streams.

Each way to use streams is measured in a process of its own: one that crashes or hangs must not take the other along.
"""

import argparse
import dataclasses
import functools
import sys

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from cmm import devices
from cmm.hlo import compiled_lines
from cmm.job import run_ladder
from cmm.measure import Program
from cmm.peers.own_process import PeerResult, add_options, problem_of, report, run_peer
from cmm.product import local_matmul
from cmm.protocol import ON_GPUS, on_gpus
from cmm.report import is_wrong
from cmm.results import MethodResult
from cmm.ring import COPY_ENGINE_OPTIONS
from cmm.roofline import Problem
from cmm.rungs import AXIS, GEMM_ONLY, Rung

_WINDOWED = {
    "xla_gpu_threshold_for_windowed_einsum_mib": 0,
    "xla_gpu_enable_latency_hiding_scheduler": True,
}
VARIANTS = {
    "streams": ("many streams", {"xla_gpu_multi_streamed_windowed_einsum": True}),
    "one_stream": ("one stream", {"xla_gpu_multi_streamed_windowed_einsum": False}),
}
# Some versions of XLA cannot compile many streams together with products that Triton generates.
_WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}
_NOT_REWRITTEN = "not rewritten"


def main(arguments=None) -> int:
    """Runs all variants, or the one that `--variant` names, and reports them; returns the exit status, always 0."""
    parser = argparse.ArgumentParser(prog="python -m cmm.peers.xla_rewrite", description=__doc__.split("\n\n", 1)[1])
    add_options(parser)
    parser.add_argument("--variant", choices=tuple(VARIANTS), help="measure this one, in this process")
    options = parser.parse_args(arguments)
    problem = problem_of(options)
    if options.variant:
        results = measure_variant(problem, options.variant, options.rounds, simulate=options.simulate)
    else:
        results = []
        for variant in VARIANTS:
            of_variant = run_peer(
                "cmm.peers.xla_rewrite",
                problem,
                options.timeout / len(VARIANTS),
                simulate=options.simulate,
                arguments=("--variant", variant, "--rounds", str(options.rounds)),
                own_group=False,
            )
            results += [_named_after(variant, result) for result in of_variant]
    report(results, options.json)
    return 0


def measure_variant(
    problem: Problem, variant: str, rounds: int = ON_GPUS.rounds, *, simulate: bool = False
) -> list[PeerResult]:
    """Measures GEMM only and one variant, with NCCL and with copy engines, by the protocol of the ladder.

    Args:
      problem: shapes, dtype and number of devices.
      variant: key of `VARIANTS`.
      rounds: how often each program is timed on GPUs.
      simulate: use simulated devices even where there are GPUs.
    """
    try:
        found = devices.find_devices(problem.axis_size, simulate=simulate)
    except (ValueError, RuntimeError) as error:
        return [PeerResult(f"xla_{variant}", _title(variant), "skipped", str(error))]
    # On axes of type Auto the compiler partitions the product; Explicit ones would ask us to.
    mesh = jax.make_mesh((len(found),), (AXIS,), devices=found, axis_types=(AxisType.Auto,))
    options_of = options_by_name(variant)
    rungs = [
        Rung(name, _title(variant, name), functools.partial(build, options), peer=True)
        for name, options in options_of.items()
    ]
    protocol = None if devices.is_simulated(found) else dataclasses.replace(on_gpus(problem), rounds=rounds)
    run, _ = run_ladder(problem, mesh, rungs=(GEMM_ONLY, *rungs), protocol=protocol)
    return [_peer_result(variant, method, options_of.get(method.name, {}), run) for method in run.methods]


def options_by_name(variant: str) -> dict[str, dict]:
    """Returns the programs of a variant: their names, and the compiler options of each."""
    options = _WINDOWED | VARIANTS[variant][1]
    return {f"xla_{variant}": options, f"xla_{variant}_copy_engines": options | COPY_ENGINE_OPTIONS}


def build(options: dict, problem: Problem, mesh, operands) -> Program:
    """Compiles the product of sharded operands, whose partitioning is left to XLA.

    Args:
      options: compiler options. One that this XLA does not know is an error, not an abort as in `XLA_FLAGS`.
      problem: shapes and dtype; the operands have them already.
      mesh: mesh of the one axis "x".
      operands: `lhs` sharded over rows, `rhs` over columns, in pairs.
    """
    rows, columns = NamedSharding(mesh, P(AXIS, None)), NamedSharding(mesh, P(None, AXIS))

    def compile_with(options):
        product = jax.jit(
            lambda lhs, rhs: local_matmul(lhs, rhs, lhs.dtype),
            in_shardings=(rows, columns),
            out_shardings=columns,
            compiler_options=options,
        )
        return product.lower(*operands[0]).compile()

    try:
        compiled, note = compile_with(options), ""
    except jax.errors.JaxRuntimeError as error:
        first_line = str(error).splitlines()[0]
        compiled, note = compile_with(options | _WITHOUT_TRITON), f"; without Triton, with which: {first_line}"
    return Program(compiled, operands, details=what_happened(compiled) + note)


def what_happened(compiled) -> str:
    """Says whether a compiled program passes shards around a ring, and names the collectives by which one can tell.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns.
    """
    # The two halves of an asynchronous collective count once.
    count = {
        name: sum(f"{name}-done(" not in line for line in compiled_lines(compiled, name))
        for name in ("collective-permute", "all-gather", "while")
    }
    rewritten = count["collective-permute"] and not count["all-gather"]
    held = ", ".join(f"{number} {name}" for name, number in count.items())
    return f"{'rewritten' if rewritten else _NOT_REWRITTEN}: the compiled program holds {held}"


def _title(variant, name=""):
    return f"XLA windowed einsum, {VARIANTS[variant][0]}" + ", copy engines" * name.endswith("copy_engines")


def _peer_result(variant, method: MethodResult, options, run) -> PeerResult:
    fields = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    shared = {"protocol": run.protocol, "versions": run.versions}
    if method.name == GEMM_ONLY.name:
        own = {"name": f"xla_{variant}_gemm_only", "title": f"GEMM only, beside {_title(variant)}"}
        return PeerResult(**(fields | shared | own))
    rewritten = None if method.status == "skipped" else not method.details.startswith(_NOT_REWRITTEN)
    fields |= {"options": options, "rewritten": rewritten}
    if method.status == "skipped":  # Asked for, and it did not run.
        fields["status"] = "failed"
    elif is_wrong(run, method):
        fields |= {"status": "failed", "reason": f"wrong result, {method.error_over_bound:.3g} times the error bound"}
    elif not rewritten:
        fields["reason"] = method.details
    return PeerResult(**(fields | shared))


def _named_after(variant, result):
    """Gives a result that says only that the variant's process failed the name of the variant."""
    if result.name.startswith(f"xla_{variant}"):
        return result
    return dataclasses.replace(result, name=f"xla_{variant}", title=_title(variant))


if __name__ == "__main__":
    sys.exit(main())
