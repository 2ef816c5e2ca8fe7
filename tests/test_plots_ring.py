"""Figures of the layout and of the ring, still or moving, show what the schedule says."""

import functools
import itertools

import numpy as np
import pytest
from figure_parts import AXIS_SIZES, by_gid, labels
from matplotlib.colors import to_hex
from PIL import Image

from cmm import plots
from cmm.plots.__main__ import FRAMES_PER_STEP
from cmm.plots.animation import _Scene
from cmm.plots.palette import device_color
from cmm.schedule import ring_schedule

PARTS = {"down": {"down": "all"}, "up": {"up": "all"}, "both": {"down": "upper", "up": "lower"}}
each_ring = pytest.mark.parametrize("axis_size, direction", list(itertools.product(AXIS_SIZES, PARTS)))
# Three tests look at the same figures.
ring_steps = functools.cache(plots.draw_ring_steps)


@each_ring
def test_ring_arrows_and_shards_are_those_of_the_schedule(axis_size, direction):
    fig = ring_steps(axis_size, direction)
    sends, computes = set(), {}
    for one_way, part in PARTS[direction].items():
        for at in itertools.chain(*ring_schedule(axis_size, one_way)):
            computes[f"{at.step}-{at.device}-{at.computes}-{part}"] = f"$A_{{{at.computes}}}$"
            if at.sends is not None:
                sends.add(f"{at.step}-{at.device}-{at.send_to}-{at.sends}-{part}")
    assert set(by_gid(fig, "send-")) == sends
    assert labels(by_gid(fig, "compute-")) == computes
    names = {name: f"$A_{{{name.split('-')[3]}}}$" for name in sends}
    assert labels(by_gid(fig, "label-send-")) == names


@each_ring
def test_ring_arrows_lead_from_the_sender_to_the_receiver(axis_size, direction):
    fig = ring_steps(axis_size, direction)
    cards = {name: card.get_path().get_extents() for name, card in by_gid(fig, "card-").items()}
    for name, arrow in by_gid(fig, "send-").items():
        step, device, send_to, *_ = name.split("-")
        curve = arrow._path_original.vertices
        for end, expected in ((curve[0], device), (curve[-1], send_to)):
            gaps = {key: distance_to(card, end) for key, card in cards.items() if key.startswith(f"{step}-")}
            assert min(gaps, key=gaps.get) == f"{step}-{expected}"
            assert 0 < gaps[f"{step}-{expected}"] < 0.2


def distance_to(box, point):
    outside = np.maximum(np.maximum(box.min - point, point - box.max), 0)
    return np.linalg.norm(outside)


@each_ring
def test_row_blocks_of_c_fill_as_shards_are_multiplied(axis_size, direction):
    fig = ring_steps(axis_size, direction)
    expected = {}
    for one_way, part in PARTS[direction].items():
        step_of = {(at.device, at.computes): at.step for at in itertools.chain(*ring_schedule(axis_size, one_way))}
        for (device, shard), done_at in step_of.items():
            for step in range(axis_size):
                state = "finished" if step > done_at else "now" if step == done_at else "empty"
                expected[f"{step}-{device}-{shard}-{part}-{state}"] = state, shard
    blocks = by_gid(fig, "out-")
    assert set(blocks) == set(expected)
    for name, (state, shard) in expected.items():
        filled = to_hex(blocks[name].get_facecolor()).upper() == device_color(shard).upper()
        assert filled == (state == "finished")
        assert bool(blocks[name].get_hatch()) == (state == "now")


def test_one_step_is_the_same_step_of_all_steps():
    for step in range(4):
        single, together = plots.draw_ring(4, step), ring_steps(4, "down")
        for kind in ("send", "compute", "out"):
            assert set(by_gid(single, f"{kind}-{step}-")) == set(by_gid(together, f"{kind}-{step}-"))
            assert not set(by_gid(single, f"{kind}-")) - set(by_gid(together, f"{kind}-"))


@pytest.mark.parametrize("axis_size", AXIS_SIZES)
def test_layout_shows_owners_and_what_a_device_lacks(axis_size):
    device = axis_size - 1
    fig = plots.draw_layout(axis_size, device)
    for kind, letter in (("lhs", "A"), ("rhs", "B"), ("out", "C")):
        blocks = by_gid(fig, f"holds-{kind}-")
        assert labels(blocks) == {str(owner): f"${letter}_{{{owner}}}$" for owner in range(axis_size)}
        for owner, block in blocks.items():
            assert to_hex(block.get_facecolor()) == device_color(int(owner)).lower()
    missing = {int(shard) for shard, block in by_gid(fig, "needs-lhs-").items() if block.get_hatch()}
    assert missing == set(range(axis_size)) - {device}
    made = {str(shard): f"$A_{{{shard}}}$$B_{{{device}}}$" for shard in range(axis_size)}
    assert labels(by_gid(fig, "makes-out-")) == made


@pytest.mark.parametrize("direction", PARTS)
def test_parcels_travel_from_sender_to_receiver_while_blocks_fill(direction):
    data = plots.ring_data(3, direction)
    with plots.style():
        for step in range(3):
            scene = _Scene(data, step, "")
            sending = [action for action in scene.actions if action["sends"] is not None]
            assert len(scene.moving) == len(sending) == (0 if step == 2 else 3 * len(PARTS[direction]))
            chips = by_gid(scene.ax.figure, f"compute-{step}-")
            for share, end in ((0.0, "device"), (1.0, "send_to")):
                scene.frame(share)
                for action, parcel in zip(sending, scene.moving, strict=True):
                    at_end = next(b for name, b in chips.items() if is_chip(name, action[end], action["part"]))
                    assert np.allclose(parcel.rectangle.get_bbox().bounds, at_end.get_bbox().bounds)
                    assert parcel.text.get_text() == f"$A_{{{action['sends']}}}$"
            assert all(block.get_width() == pytest.approx(full) for block, full in scene.growing)


def is_chip(name, device, part):
    return name.split("-")[0] == str(device) and name.split("-")[2] == part


def test_animation_is_a_small_endless_gif_of_readme_width(tmp_path):
    # A third of the usual number of frames, and so a third of the size that a page can bear, 1.5 MB.
    path = plots.ring_animation(tmp_path / "new" / "ring.gif", 4, frames_per_step=FRAMES_PER_STEP // 3)
    with Image.open(path) as gif:
        assert gif.width == 800
        assert gif.info["loop"] == 0
        # Frames in which nothing moves may have been merged.
        assert FRAMES_PER_STEP < gif.n_frames <= 4 * FRAMES_PER_STEP // 3 + 1
    assert path.stat().st_size < 0.5e6


def test_animation_drawn_twice_gives_the_same_bytes(tmp_path):
    first, second = (plots.ring_animation(tmp_path / name, 2, frames_per_step=2) for name in ("a.gif", "b.gif"))
    assert first.read_bytes() == second.read_bytes()
