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


def test_accumulation_in_half_precision_exceeds_the_bound(make_case):
    case = make_case(4, 4096, 8, "float16", (2,))
    total = np.zeros((8, 16), np.float16)
    for k in range(4096):
        total += (case.lhs64[:, k : k + 1] * case.rhs64[k : k + 1]).astype(np.float16)
    found = _judge(case, total, "float16")
    assert found.relative_error > 2e-3
    assert found.relative_error > 5 * _judge(case, case.lhs64 @ case.rhs64).relative_error


def test_zeros_are_right(make_case):
    case = make_case(2, 3, 2, "float32", (2,))
    zeros = [case.put(np.zeros(s), "float32", spec) for s, spec in (((4, 3), case.rows), ((3, 4), case.columns))]
    found = accuracy(case.put(np.zeros((4, 4)), "float32", case.columns), *zeros, case.mesh, "x")
    assert (found.error_over_bound, found.relative_error) == (0, 0)
    tiny = case.put(np.full((4, 4), 1e-9), "float32", case.columns)
    assert not accuracy(tiny, *zeros, case.mesh, "x").right
