"""Predicted timelines: durations by formula, and no device in two places at once."""

import itertools

import pytest

from cmm.roofline import overlapped_estimate_us
from cmm.timeline import busy_share, duration_us, naive_timeline, ring_timeline


@pytest.mark.parametrize("axis_size", [1, 2, 4, 8])
def test_durations(axis_size):
    assert duration_us(naive_timeline(axis_size, 43, 18)) == (axis_size - 1) * 18 + axis_size * 43
    assert duration_us(ring_timeline(axis_size, 43, 18)) == overlapped_estimate_us(axis_size, 43, 0)
    # Transfers longer than products: the last product still follows the last transfer.
    assert duration_us(ring_timeline(axis_size, 10, 25)) == (axis_size - 1) * 25 + 10


def test_busy_share():
    spans = naive_timeline(4, 43, 18)
    assert busy_share(spans, device=2) == pytest.approx(4 * 43 / (4 * 43 + 3 * 18))
    assert busy_share(ring_timeline(4, 43, 18), device=0) == 1


@pytest.mark.parametrize("make", [naive_timeline, ring_timeline])
@pytest.mark.parametrize("t_hop_us", [5, 60])
def test_lanes_do_not_overlap(make, t_hop_us):
    spans = make(4, 43, t_hop_us)
    for lane in {(span.device, span.lane) for span in spans}:
        mine = sorted((s.start_us, s.end_us) for s in spans if (s.device, s.lane) == lane)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(mine))
