"""The recorder: what is sent, in which order, as data."""

import dataclasses
import json

import interpret_kernels as kernels
import numpy as np
import pytest
from test_interpret_jax_example import run as run_example

import cmm.interpret as ci


@pytest.fixture(scope="module", params=[None, 5])
def ring(request):
    with ci.simulate(seed=request.param) as sim:
        kernels.run_ring(sim, 4)
    return sim


def test_bytes_sent_of_a_ring(ring):
    block = kernels.M * kernels.K * 2
    assert ring.bytes_sent() == 4 * 3 * block
    for d in range(4):
        assert ring.bytes_sent(device=d) == 3 * block
        assert ring.bytes_sent(device=d, peer=(d - 1) % 4) == 3 * block
        assert ring.bytes_sent(device=d, peer=(d + 1) % 4) == 0
    assert ci.bytes_sent(ring.events, peer=2) == 3 * block


def test_kinds_and_counts_of_a_ring(ring):
    count = lambda kind: sum(e.kind == kind for e in ring.events)
    assert {e.kind for e in ring.events} <= set(ci.KINDS)
    assert count("send") == 4 * 3
    assert count("load") == count("store") == 4 * 4
    assert count("kernel") == 4
    assert count("signal") == 4 * (3 + 1)
    assert count("wait") == 4 * (3 + 1)


def test_order_respects_causes(ring):
    events = ring.events
    assert [e.index for e in events] == list(range(len(events)))
    ends = [e.end_s for e in events]
    assert ends == sorted(ends)
    assert all(e.start_s <= e.end_s for e in events)
    # A wait for a value comes after that many signals, and each signal after the
    # store that it announces.
    for e in events:
        if e.kind == "wait":
            before = [s for s in events[: e.index] if s.kind == "signal" and s.name == e.name]
            assert sum(s.value for s in before) >= e.awaited
    for d in range(4):
        sends = [e.index for e in events if e.kind == "send" and e.device == d]
        signals = [e.index for e in events if e.kind == "signal" and e.device == d and e.peer == (d - 1) % 4]
        assert all(a < b for a, b in zip(sends, signals))


def test_events_name_where(ring):
    e = next(e for e in ring.events if e.kind == "send")
    assert e.peer == (e.device - 1) % 4 and e.cta == 0 and e.thread == 0
    assert e.num_bytes == kernels.M * kernels.K * 2
    assert e.name == f"output 1 of device {e.peer}"
    assert e.region[1:] == ((0, kernels.M), (0, kernels.K))
    assert "interpret_kernels.py" in e.source
    with pytest.raises(dataclasses.FrozenInstanceError):
        e.device = 7


def test_round_trip_through_json(ring):
    rows = json.loads(json.dumps(ci.to_rows(ring.events)))
    assert ci.from_rows(rows) == ring.events


def test_tile_products_of_a_matmul():
    _, _, sim = run_example(2, (64, 256, 128))
    products = [e for e in sim.events if e.kind == "tile_product"]
    assert sum(e.flops for e in products) == 2 * 2 * (2 * 64) * 256 * 128
    assert {e.thread for e in products} == {0, 1}
    assert np.unique([e.device for e in products]).tolist() == [0, 1]
