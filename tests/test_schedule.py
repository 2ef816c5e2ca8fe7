"""The ring's schedule: a complete, conflict-free plan, and the one that the definition in words gives."""

import pytest

from cmm.schedule import ring_schedule, send_pairs

AXIS_SIZES = [1, 2, 3, 4, 5, 8]


def test_published_rule_for_four_devices():
    # Device d computes shard (d + i) % 4 and sends it to d - 1. Worked out by hand.
    computed = [[at.computes for at in row] for row in ring_schedule(4)]
    assert computed == [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]]
    assert [at.send_to for at in ring_schedule(4)[0]] == [3, 0, 1, 2]


def test_mirror_image():
    computed = [[at.computes for at in row] for row in ring_schedule(3, "up")]
    assert computed == [[0, 1, 2], [2, 0, 1], [1, 2, 0]]
    assert [at.send_to for at in ring_schedule(3, "up")[0]] == [1, 2, 0]


@pytest.mark.parametrize("direction", ["down", "up"])
@pytest.mark.parametrize("axis_size", AXIS_SIZES)
def test_every_device_computes_every_shard_once(axis_size, direction):
    schedule = ring_schedule(axis_size, direction)
    for device in range(axis_size):
        assert sorted(row[device].computes for row in schedule) == list(range(axis_size))


@pytest.mark.parametrize("direction", ["down", "up"])
@pytest.mark.parametrize("axis_size", AXIS_SIZES)
def test_what_is_computed_has_arrived_in_the_slot_that_is_read(axis_size, direction):
    slots = {}  # (device, slot) -> shard
    for row in ring_schedule(axis_size, direction):
        for at in row:
            held = at.device if at.reads_slot is None else slots[at.device, at.reads_slot]
            assert held == at.computes
        for at in row:
            if at.sends is not None:
                assert at.sends == at.computes
                assert (at.send_to, at.send_slot) not in slots, "a slot is written twice"
                slots[at.send_to, at.send_slot] = at.sends
    assert len(slots) == axis_size * (axis_size - 1)


@pytest.mark.parametrize("axis_size", AXIS_SIZES)
def test_pairs_for_ppermute_agree_with_the_schedule(axis_size):
    for direction in ("down", "up"):
        for row in ring_schedule(axis_size, direction)[:-1]:
            assert [(at.device, at.send_to) for at in row] == send_pairs(axis_size, direction)


def test_nothing_is_sent_in_the_last_step():
    assert all(at.sends is at.send_to is at.send_slot is None for at in ring_schedule(4)[-1])


def test_bad_arguments():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        ring_schedule(0)
    with pytest.raises(ValueError, match="'left'"):
        ring_schedule(2, "left")
