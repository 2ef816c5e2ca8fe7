"""The figure of a kernel's events: it shows all of them, and causes before what they cause."""

import pytest
from matplotlib.patches import FancyArrowPatch, Rectangle
from test_primitives import BROKEN, KERNELS, random_blocks, run

import cmm.interpret as ci
from cmm import plots
from cmm.plots.events import begin_of, draw_events, end_of, moments

ORDERS = [{}, {"seed": 0}, {"seed": 1, "late": ci.Late(5e-6, device=0)}]


def events_of(name, num_devices=3, **options):
    function, num_results = KERNELS[name][:2] if name in KERNELS else (BROKEN[name][0], 1)
    with ci.simulate(on_race="record", **options) as sim:
        run(function, num_results, random_blocks(num_devices), sim.run)
    return sim.events


def boxes_of(fig):
    """Returns the blocks of the events, without the ground, and the thin bars of waits that found their value."""
    (ax,) = fig.axes
    drawn = [a for a in ax.get_children() if isinstance(a, Rectangle) and a is not ax.patch and a.get_linewidth() > 0]
    return [b for b in drawn if b.get_gid() != "found"], [b for b in drawn if b.get_gid() == "found"]


def arrows_of(fig):
    return [a for a in fig.axes[0].get_children() if isinstance(a, FancyArrowPatch)]


@pytest.mark.parametrize("options", ORDERS)
def test_shows_every_transfer_signal_and_wait(options):
    events = events_of("neighbour_exchange", **options)
    fig = draw_events(events, "Exchange")
    styles = [a.get_linestyle() for a in arrows_of(fig)]
    # Three devices, two copies and two signals each.
    assert (styles.count("solid"), styles.count("dotted")) == (6, 6)
    boxes, found = boxes_of(fig)
    assert sum(bool(b.get_hatch()) for b in boxes) + len(found) == 6
    assert len(found) == sum(e.kind == "wait" and e.start_s == e.end_s for e in events)
    assert sum(not b.get_hatch() for b in boxes) == 3 + 6
    assert [t.get_text() for t in fig.texts if t.get_text().startswith("device")] == [
        "device 0",
        "device 1",
        "device 2",
    ]


@pytest.mark.parametrize("options", ORDERS)
@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("name", [*KERNELS, "no_wait"])
def test_causes_lie_left_of_what_they_cause(name, num_devices, options):
    events = events_of(name, num_devices, **options)
    at = moments(events)
    assert sorted(at.values()) == list(range(len(at)))
    assert all(at[a] < at[b] for a in at for b in at if a < b)
    for e in events:
        before = [o for o in events if o.index < e.index]
        if e.kind == "signal":
            sends = [o for o in before if o.kind == "send" and (o.device, o.peer) == (e.device, e.peer)]
            assert sends and all(at[end_of(o)] < at[end_of(e)] for o in sends)
        if e.kind == "wait":
            # The signals that were there when the wait ended all lie left of its end.
            signals = [o for o in before if o.kind == "signal" and o.peer == e.device and o.name == e.name]
            assert signals and all(at[end_of(o)] < at[end_of(e)] for o in signals)
        if e.kind == "kernel":
            own = [o for o in before if o.device == e.device and o.kind in ("signal", "wait")]
            assert own and all(at[end_of(o)] <= at[end_of(e)] for o in own)
            assert all(at[end_of(o)] < at[end_of(e)] for o in own if o.kind == "signal")
        assert at[begin_of(e)] <= at[end_of(e)]


@pytest.mark.parametrize("options", ORDERS)
@pytest.mark.parametrize("name", ["ring_shift", "ping_pong"])
def test_arrows_start_at_their_boxes_and_arrive_before_the_next_moment(name, options):
    fig = draw_events(events_of(name, 4, **options), "Shift")
    edges = {round(b.get_x() + b.get_width(), 6) for b in boxes_of(fig)[0]}
    ends = sorted(b.get_x() + b.get_width() for bars in boxes_of(fig) for b in bars)
    for arrow in arrows_of(fig):
        (start, _), (stop, _) = arrow._posA_posB
        assert start < stop < start + 1
        assert start == round(start)
        if arrow.get_linestyle() == "solid":
            assert start in edges
        # Nothing ends while an arrow is under way, so no wait seems to end before its signal has come.
        assert not [x for x in ends if start < x < stop]


def test_late_device_in_the_notebook():
    events = events_of("ring_shift", 3, **ORDERS[2])
    fig = draw_events(events, "Device 0 is late")
    boxes, found = boxes_of(fig)
    hatched = sorted(b.get_x() + b.get_width() for b in boxes if b.get_hatch())
    dotted = sorted(a._posA_posB[1][0] for a in arrows_of(fig) if a.get_linestyle() == "dotted")
    # To devices 0, 1 and 2; devices 1 and 2 wait for theirs, device 0 finds it.
    assert len(hatched) == 2 and len(found) == 1
    assert dotted[1] < hatched[0] < dotted[2] < hatched[1]


def test_call_without_events():
    events = events_of("ring_shift", 2)
    with pytest.raises(ValueError, match="no events of call=1"):
        plots.draw_events(events, "Shift", call=1)
