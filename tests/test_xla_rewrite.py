"""XLA's own rewrite: what is asked of the compiler, and how one sees that it has done it."""

import jax
import pytest
from jax.sharding import AxisType

from cmm.devices import random_operands
from cmm.hlo import compiled_lines
from cmm.peers import xla_rewrite
from cmm.peers.own_process import run_peer
from cmm.roofline import Problem

PROBLEM = Problem(4, 32, 64, 64, "float16")


def test_options_of_the_rewrite():
    for variant, streams in (("streams", True), ("one_stream", False)):
        plain, copies = xla_rewrite.options_by_name(variant).values()
        assert plain["xla_gpu_threshold_for_windowed_einsum_mib"] == 0
        assert plain["xla_gpu_multi_streamed_windowed_einsum"] is streams
        assert "xla_gpu_collective_permute_mode" not in plain
        assert copies == plain | {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}


def test_xla_knows_the_options_and_refuses_others():
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices("cpu")[:4], axis_types=(AxisType.Auto,))
    operands = [random_operands(PROBLEM, mesh, seed=0)]
    for variant in xla_rewrite.VARIANTS:
        for options in xla_rewrite.options_by_name(variant).values():
            # A fallback would hide an option that is not known.
            details = xla_rewrite.build(options, PROBLEM, mesh, operands).details
            assert details == "not rewritten: the compiled program holds 0 collective-permute, 1 all-gather, 0 while"
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_no_such_option"):
        xla_rewrite.build({"xla_gpu_no_such_option": 1}, PROBLEM, mesh, operands)


class Compiled:
    """A compiled program of which only the text is there."""

    def __init__(self, text):
        self.text = text

    def as_text(self):
        return self.text


# Shortened from what XLA's GPU compiler made of the product on four devices, many streams.
REWRITTEN = Compiled(
    """\
  %collective-permute.10.2 = f16[1024,4096]{1,0} collective-permute(%get-tuple-element.48), channel_id=4
  %collective-permute-start.2 = ((f16[8,8]{1,0}), f16[8,8]{1,0}) collective-permute-start(%collective-permute.11.2)
  %collective-permute-done.2 = f16[8,8]{1,0} collective-permute-done(%collective-permute-start.2)
  %while.2 = (f16[8,8]{1,0}, u32[]) while(%tuple.11), condition=%cond, body=%unrolled_windowed_dot_general_body_ag
"""
)


def test_the_rewrite_is_recognised():
    assert xla_rewrite.what_happened(REWRITTEN) == (
        "rewritten: the compiled program holds 2 collective-permute, 0 all-gather, 1 while"
    )
    gathers = Compiled("  %all-gather.3 = f16[4096,4096]{1,0} all-gather(%param), channel_id=1\n")
    assert compiled_lines(gathers, "all-gather")
    assert xla_rewrite.what_happened(gathers).startswith("not rewritten: ")
    assert xla_rewrite.what_happened(Compiled(REWRITTEN.text + gathers.text)).startswith("not rewritten: ")


@pytest.mark.slow
def test_xla_on_simulated_devices():
    results = {r.name: r for r in run_peer("cmm.peers.xla_rewrite", PROBLEM, 90, simulate=True)}
    programs = [name for variant in xla_rewrite.VARIANTS for name in xla_rewrite.options_by_name(variant)]
    assert set(results) == {*programs, *(f"xla_{variant}_gemm_only" for variant in xla_rewrite.VARIANTS)}
    for result in results.values():
        assert result.status == "simulated" and result.error_over_bound <= 1 and result.wall_time_us.median > 0
    for name in programs:
        # The CPU compiler has no such rewrite.
        assert results[name].rewritten is False and results[name].reason.startswith("not rewritten: ")
        assert results[name].options["xla_gpu_threshold_for_windowed_einsum_mib"] == 0
