"""The check that every method must pass finds what it should."""

import numpy as np
import pytest

from cmm.reference import accuracy


@pytest.fixture
def case(make_case):
    return make_case(16, 256, 8, "float16")


def _judge(case, product, dtype="float16"):
    out = case.put(product, dtype, case.columns)
    return accuracy(out, case.lhs, case.rhs, case.mesh, "x")


def test_right_result(case):
    found = _judge(case, case.lhs64 @ case.rhs64)
    assert found.right and 0 < found.error_over_bound < 1
    assert 1e-4 < found.relative_error < 5e-4  # one rounding to float16


@pytest.mark.parametrize(
    "spoil",
    {
        "one element": lambda c: _with(c, (3, 5), 40.0),
        "one shard missing": lambda c: np.where(np.arange(64)[:, None] < 16, 0.0, c),
        "two shards swapped": lambda c: np.concatenate([c[16:32], c[:16], c[32:]]),
        "not a number": lambda c: _with(c, (0, 0), np.nan),
        "infinite": lambda c: _with(c, (63, 31), np.inf),
    }.items(),
    ids=lambda item: item[0],
)
def test_wrong_results(case, spoil):
    assert not _judge(case, spoil[1](case.lhs64 @ case.rhs64)).right


def _with(product, index, value):
    product = product.copy()
    product[index] = value
    return product


@pytest.mark.parametrize("k", [256, 4096])
def test_accumulation_in_half_precision_is_wrong(make_case, k):
    case = make_case(4, k, 8, "float16", (2,))
    total = np.zeros((8, 16), np.float16)
    for i in range(k):
        total += (case.lhs64[:, i : i + 1] * case.rhs64[i : i + 1]).astype(np.float16)
    assert not _judge(case, total).right
    assert _judge(case, case.lhs64 @ case.rhs64).right


def test_float32_with_ten_bits_of_mantissa_is_wrong(make_case):
    # What TF32 tensor cores make of float32 operands.
    case = make_case(4, 4096, 8, "float32", (2,))
    truncated = [(x.astype(np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32) for x in (case.lhs64, case.rhs64)]
    assert not _judge(case, truncated[0].astype(np.float64) @ truncated[1], "float32").right
    assert _judge(case, case.lhs64 @ case.rhs64, "float32").right


def test_one_lost_term_of_the_sum_is_wrong(make_case):
    case = make_case(4, 4096, 8, "float16", (2,))
    assert not _judge(case, case.lhs64[:, 1:] @ case.rhs64[1:]).right


def test_zeros_are_right(make_case):
    case = make_case(2, 3, 2, "float32", (2,))
    zeros = [case.put(np.zeros(s), "float32", spec) for s, spec in (((4, 3), case.rows), ((3, 4), case.columns))]
    found = accuracy(case.put(np.zeros((4, 4)), "float32", case.columns), *zeros, case.mesh, "x")
    assert (found.error_over_bound, found.relative_error) == (0, 0)
    tiny = case.put(np.full((4, 4), 1e-9), "float32", case.columns)
    assert not accuracy(tiny, *zeros, case.mesh, "x").right
