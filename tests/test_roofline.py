"""The numbers of the published table, and bounds checked by hand."""

import pytest

from cmm import roofline
from cmm.roofline import H100_SXM, PUBLISHED_ROWS, Problem

# axis_size: (bound, its share of peak in %), (kernel, ...), (reference, ...), as published.
PUBLISHED = {
    2: ((92, 75), (102, 68), (147, 47)),
    4: ((190, 73), (212, 66), (290, 48)),
    8: ((386, 72), (436, 64), (565, 49)),
}


@pytest.mark.parametrize("row", PUBLISHED_ROWS, ids=lambda row: str(row.axis_size))
def test_published_table(row):
    problem = roofline.published_problem(row.axis_size)
    bound, kernel, reference = PUBLISHED[row.axis_size]
    estimate_us = roofline.overlapped_estimate_us(row.axis_size, t_local_us=43, t_round_us=6)
    assert (estimate_us, row.bound_us, row.kernel_us, row.reference_us) == (bound[0], bound[0], kernel[0], reference[0])
    for time_us, percent in (bound, kernel, reference):
        assert round(100 * roofline.utilization(problem, time_us, H100_SXM)) == percent


def test_counts_by_hand():
    problem = Problem(axis_size=4, m_shard=2, k=3, n_shard=5, dtype="float32")
    assert problem.flops_per_device == 4 * 2 * 5 * (3 + 3)
    assert problem.bytes_per_hop == 2 * 3 * 4
    assert problem.bytes_received_per_device == 3 * 24


def test_bounds_by_hand():
    machine = roofline.Machine("toy", {"float16": 1e12}, link_bytes_per_s=1e9, source="made up")
    limit = roofline.bounds(Problem(2, 100, 100, 100, "float16"), machine)
    assert limit.t_math_us == pytest.approx(4.0)
    assert limit.t_comms_us == pytest.approx(20.0)
    assert (limit.t_lower_us, limit.t_upper_us) == (pytest.approx(20.0), pytest.approx(24.0))
    assert not roofline.hop_hides(Problem(2, 100, 100, 100, "float16"), machine)
    assert roofline.hop_hides(Problem(2, 100, 100, 1000, "float16"), machine)


def test_gather_what_has_fewer_rows_or_columns():
    few_rows = roofline.cheaper_gather(Problem(8, m_shard=128, k=4096, n_shard=1024))
    assert (few_rows.gather, few_rows.bytes_activations) == ("activations", 7 * 128 * 4096 * 2)
    many_rows = roofline.cheaper_gather(Problem(8, m_shard=8192, k=4096, n_shard=1024))
    assert (many_rows.gather, many_rows.bytes_weights) == ("weights", 7 * 4096 * 1024 * 2)


def test_bad_values_are_named():
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        Problem(2, 4, 0, 4)
    with pytest.raises(ValueError, match="float16, bfloat16, float32, got 'int8'"):
        Problem(2, 4, 4, 4, "int8")
    with pytest.raises(ValueError, match="float64 on H100 SXM. Known dtypes: float16, bfloat16, float32"):
        roofline.peak_flops_per_s(H100_SXM, "float64")
