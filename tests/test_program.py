"""What each method asks of the network, read from the lowered program, equals what `cmm.roofline` says."""

import pytest

import cmm
from cmm import hlo
from cmm.roofline import Problem

DTYPES = ["float16", "bfloat16", "float32"]
AXIS_SIZES = [1, 2, 3, 4, 8]


def _collectives(make_case, method, axis_size, m_shard, dtype="float16"):
    case = make_case(m_shard, 8, 4, dtype, (axis_size,))
    lowered = case.program(cmm.all_gather_matmul, method=method).lower(case.lhs, case.rhs)
    return hlo.collectives(lowered), Problem(axis_size, m_shard, 8, 4, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis_size", AXIS_SIZES)
def test_naive_has_one_all_gather(make_case, axis_size, dtype):
    found, problem = _collectives(make_case, "naive", axis_size, 6, dtype)
    assert [c.op for c in found] == ["all_gather"]
    assert found[0].operand_shape == (6, 8)
    assert found[0].bytes_received == problem.bytes_received_per_device


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis_size", AXIS_SIZES)
def test_ring_permutes_one_shard_per_hop(make_case, axis_size, dtype):
    found, problem = _collectives(make_case, "ring", axis_size, 6, dtype)
    assert [c.op for c in found] == ["collective_permute"] * (axis_size - 1)
    assert all(c.bytes_received == problem.bytes_per_hop for c in found)
    assert sum(c.bytes_received for c in found) == problem.bytes_received_per_device


@pytest.mark.parametrize("m_shard", [6, 7])
@pytest.mark.parametrize("axis_size", AXIS_SIZES)
def test_bidirectional_ring_permutes_two_halves_per_hop(make_case, axis_size, m_shard):
    found, problem = _collectives(make_case, "ring_bidirectional", axis_size, m_shard)
    assert [c.op for c in found] == ["collective_permute"] * 2 * (axis_size - 1)
    assert all(c.operand_shape[0] in (m_shard // 2, (m_shard + 1) // 2) for c in found)
    assert sum(c.bytes_received for c in found) == problem.bytes_received_per_device


@pytest.mark.parametrize("method", ["ring", "ring_bidirectional"])
def test_compiled_ring_multiplies_shard_by_shard(make_case, method):
    # XLA would merge products that share an operand into one, after the last transfer. Nothing would overlap then.
    case = make_case(64, 64, 64, "float32")
    compiled = case.program(cmm.all_gather_matmul, method=method).lower(case.lhs, case.rhs).compile()
    products = {"ring": 4, "ring_bidirectional": 8}[method]
    text = compiled.as_text()
    assert text.count(" dot(") + text.count('custom_call_target="__onednn$matmul"') == products


def test_barrier_is_what_keeps_the_products_apart(make_case):
    # Each product but the first must depend on the one before it, through an optimization barrier per hop.
    case = make_case(8, 8, 8, "float32")
    text = case.program(cmm.all_gather_matmul_ring).lower(case.lhs, case.rhs).as_text()
    assert text.count("stablehlo.optimization_barrier") == case.axis_size - 1
