"""What each method asks of the network, read from the lowered program, equals what `cmm.roofline` says."""

import jax.numpy as jnp
import pytest
from jax import lax

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


@pytest.mark.parametrize("axis_size", AXIS_SIZES)
def test_no_two_products_of_the_ring_can_be_merged(make_case, axis_size):
    case = make_case(8, 8, 8, "float16", (axis_size,))
    lowered = case.program(cmm.all_gather_matmul_ring).lower(case.lhs, case.rhs)
    assert hlo.independent_products(lowered) == (axis_size, 0)


def test_only_the_halves_of_one_step_can_be_merged(make_case):
    case = make_case(8, 8, 8, "float16")
    lowered = case.program(cmm.all_gather_matmul_ring_bidirectional).lower(case.lhs, case.rhs)
    assert hlo.independent_products(lowered) == (8, 4)


def test_without_a_barrier_all_products_can_be_merged(make_case):
    # What the two tests above guard against, so that they are known to be able to fail.
    def ring_without_barrier(lhs, rhs, axis):
        products = []
        for _ in range(4):
            products.append(lhs @ rhs)
            lhs = lax.ppermute(lhs, axis, [(d, (d - 1) % 4) for d in range(4)])
        return jnp.concatenate(products)

    case = make_case(8, 8, 8, "float16")
    lowered = case.program(ring_without_barrier).lower(case.lhs, case.rhs)
    assert hlo.independent_products(lowered) == (4, 6)
