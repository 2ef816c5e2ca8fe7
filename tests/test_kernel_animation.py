"""The animation of the readable kernel shows what the simulated kernel did, in an order that respects causes."""

import json

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from cmm.plots import palette
from cmm.plots.kernel_animation import draw_frames, kernel_animation
from cmm.plots.kernel_frames import frames
from cmm.plots.kernel_uses import K_STEPS, M_TILES, N_TILES, PROBLEM, devices_of, record_kernel
from cmm.schedule import neighbour, shard_at

D = PROBLEM.axis_size
RANK = {"empty": 0, "at work": 1, "done": 2}


@pytest.fixture(scope="module")
def events():
    return record_kernel()


@pytest.fixture(scope="module")
def pictures(events):
    return frames(events)


def test_uses_are_the_kernels_loads_and_sends(events):
    found = devices_of(events)
    for device in range(D):
        uses = found[device].uses
        # Each step takes every tile of its shard once per column of the result, and sends it on the first visit.
        for step in range(D):
            mine = [use for use in uses if use.step == step]
            assert {use.shard for use in mine} == {shard_at(device, step, D)}
            assert sorted((use.n, use.m, use.k) for use in mine) == [
                (n, m, k) for n in range(N_TILES) for m in range(M_TILES) for k in range(K_STEPS)
            ]
            assert all((use.send_ns is not None) == (use.n == 0 and step < D - 1) for use in mine)
        # What is matched by counting agrees with what the recorded sends say of themselves.
        sends = sorted((e for e in events if e.kind == "send" and e.device == device), key=lambda e: e.start_s)
        said = [tuple(begin for begin, _ in e.region[:3]) for e in sends]  # Slot, row and column of the tile.
        assert said == [(use.step, use.m, use.k) for use in uses if use.send_ns]
        assert {e.peer for e in sends} == {neighbour(device, D)}
        for use in uses:
            assert use.load_ns[1] <= use.product_ns[0] <= use.turn_ns
            assert not use.send_ns or use.turn_ns <= use.send_ns[0]


def test_nothing_is_undone_and_everything_gets_done(pictures):
    flat = lambda d: [RANK[state] for slot in d.slots for state in slot] + [RANK[state] for state in d.tiles]
    for device in range(D):
        states = np.array([[*flat(p.devices[device]), *p.devices[device].received] for p in pictures])
        assert (np.diff(states, axis=0) >= 0).all()
        assert not states[0].any()
        assert (states[-1] == 2).all() and M_TILES == 2


def test_causes_come_before_effects(pictures):
    for picture in pictures:
        for device in picture.devices:
            for slot, count in enumerate(device.received):
                # So many signals, so many blocks of rows have landed.
                assert set(device.slots[slot][: count * K_STEPS]) <= {"done"}
            for stage in filter(None, device.stages):
                if stage.use.step > 0:
                    assert device.received[stage.use.step - 1] == M_TILES
                assert not (stage.loading and stage.multiplying)


def test_what_is_sent_is_what_arrives(pictures):
    for picture in pictures:
        for number, device in enumerate(picture.devices):
            target = picture.devices[neighbour(number, D)]
            for stage in filter(None, device.stages):
                if stage.sending:
                    assert target.slots[stage.use.step][stage.use.m * K_STEPS + stage.use.k] == "at work"


def test_the_text_says_what_the_picture_shows(pictures):
    assert sum("product" in p.text and "stage" in p.text for p in pictures[1:]) == D * M_TILES * N_TILES * K_STEPS
    for picture in pictures:
        lines = picture.text.split("\n")
        assert len(lines) == 2 and max(map(len, lines)) <= 95  # More do not fit into the width.
        if picture.focus is None:
            continue
        kind, number = picture.focus
        for device in picture.devices:
            if kind == "stage":
                assert device.stages[number].multiplying
                assert ("sent from there" in picture.text) == device.stages[number].sending
            else:
                assert f"slot {number}" in picture.text
                assert f"{device.received[number]} of {M_TILES}" in picture.text
    seconds = sum(p.duration_ms for p in pictures) / 1000
    assert 20 <= seconds <= 40


def test_devices_that_do_not_move_alike_are_refused(events):
    first = next(e for e in events if e.kind == "signal" and e.device == 1)
    with pytest.raises(ValueError, match="same times"):
        frames([e for e in events if e is not first])


def test_file_holds_the_frames_and_its_data(tmp_path, events, pictures):
    chosen = slice(2, None, 30)
    data = kernel_animation(tmp_path / "new" / "kernel.gif", events, chosen)
    assert [row["text"] for row in data["frames"]] == [p.text for p in pictures[chosen]]
    assert json.loads(json.dumps(data)) == data
    with Image.open(tmp_path / "new" / "kernel.gif") as gif:
        assert (gif.n_frames, gif.width, gif.info["loop"]) == (len(data["frames"]), 800, 0)
        for number, (picture, image) in enumerate(zip(pictures[chosen], draw_frames(pictures[chosen]), strict=True)):
            gif.seek(number)
            assert gif.info["duration"] == picture.duration_ms
            shown, meant = (np.asarray(each.convert("RGB"), int) for each in (gif, image))
            # Few colours, and yet nobody sees a difference.
            assert np.abs(shown - meant).mean() < 1.5
    again = tmp_path / "again.gif"
    kernel_animation(again, events, chosen)
    assert again.read_bytes() == (tmp_path / "new" / "kernel.gif").read_bytes()


def test_every_device_has_its_colour(pictures):
    colors = np.asarray(draw_frames(pictures[-1:])[0]).reshape(-1, 3)
    for device in range(D):
        fill = np.rint(255 * np.array(to_rgb(palette.device_color(device))))
        assert (np.abs(colors - fill).max(axis=1) <= 1).sum() > 1000
