"""What each device does when: a lane for the tensor cores and a lane for the link, schedules above each other."""

import dataclasses
from collections.abc import Mapping, Sequence

from cmm import roofline
from cmm.plots.palette import (
    BACKGROUND,
    CAPTION_SIZE,
    HEADING_SIZE,
    INK,
    MUTED,
    NEUTRAL,
    RULE,
    SMALL_SIZE,
    TRACK,
    WIDTH,
    device_color,
    styled,
    tint,
)
from cmm.plots.shapes import MARGIN, axes_at, block, hatched, inches_from, lhs_name, page
from cmm.timeline import Span, busy_share, duration_us, naive_timeline, ring_timeline

_LANE_HEIGHT = {"compute": 0.26}
_LINK_HEIGHT = 0.19
_LANE_GAP = 0.03
_DEVICE_GAP = 0.13
_LEFT = MARGIN + 1.5
_RIGHT = 1.3
# Time scale, device names and heading of one schedule, in inches.
_AXIS, _TITLE = 0.62, 0.42
# Shorter gaps in a recording are not idle time but the resolution of its clock.
_SHORTEST_GAP_US = 0.5


def timeline_data(timelines: Mapping[str, Sequence[Span]], source: str = "") -> dict:
    """Returns what `draw_timeline` draws: all spans, and each schedule's duration and busy shares.

    Args:
      timelines: spans of each schedule by its title.
      source: where the spans come from.

    Raises:
      ValueError: there is no schedule, or one without spans.
    """
    if not timelines or not all(len(spans) for spans in timelines.values()):
        raise ValueError("timelines must hold at least one schedule, and every schedule at least one span.")
    schedules = []
    for title, spans in timelines.items():
        spans = [*spans, *_idle(spans)]
        devices = sorted({span.device for span in spans})
        schedules.append(
            {
                "title": title,
                "duration_us": duration_us(spans),
                "end_us": max(span.end_us for span in spans),
                "busy": [{"device": device, "share": busy_share(spans, device)} for device in devices],
                "spans": [dataclasses.asdict(span) for span in spans],
            }
        )
    return {"schedules": schedules, "source": source}


def _idle(spans: Sequence[Span]) -> list[Span]:
    """Returns an idle "wait" for every stretch in which the tensor cores of a device have no span at all."""
    start, end = min(span.start_us for span in spans), max(span.end_us for span in spans)
    idle = []
    for device in sorted({span.device for span in spans}):
        lane = sorted((s.start_us, s.end_us) for s in spans if s.device == device and s.lane == "compute")
        reached = start
        for begins, ends in [*lane, (end, end)]:
            if begins - reached > _SHORTEST_GAP_US:
                idle.append(Span(device, "compute", "wait", reached, begins))
            reached = max(reached, ends)
    return idle


@styled
def draw_timeline(timelines: Mapping[str, Sequence[Span]], title: str = "", caption: str = ""):
    """Draws schedules one above the other on a common time axis.

    Args:
      timelines: spans of each schedule by its title: predicted by `cmm.timeline`, or recorded.
      title: message of the figure; by default it compares the first schedule with the last.
      caption: where the times come from.

    Returns:
      A `matplotlib.figure.Figure`. Colour and name of a span are those of the shard of A; hatching marks idle tensor
      cores.

    Raises:
      ValueError: there is no schedule, or one without spans.
    """
    schedules = timeline_data(timelines)["schedules"]
    heights = [_TITLE + sum(_device_heights(schedule)) for schedule in schedules]
    fig, bottom = page(sum(heights) + _AXIS, title or _message(schedules), caption)
    end_us = max(schedule["end_us"] for schedule in schedules)
    low = bottom + _AXIS + sum(heights)
    for index, (schedule, height) in enumerate(zip(schedules, heights, strict=True)):
        low -= height
        lanes = height - _TITLE
        ax = axes_at(fig, _LEFT, low, WIDTH - _LEFT - _RIGHT, lanes, xlim=(0, end_us), ylim=(0, lanes))
        _draw_schedule(ax, schedule, index, lanes)
        _dress(ax, last=index == len(schedules) - 1)
    return fig


def draw_predicted_timeline(
    axis_size: int = 4,
    problem: roofline.Problem | None = None,
    machine: roofline.Machine = roofline.H100_SXM,
    t_local_us: float = roofline.PUBLISHED_T_LOCAL_US,
):
    """Draws all-gather then matmul above the ring, predicted from the time of one product and of one hop.

    Args:
      axis_size: number of devices, if `problem` is not given.
      problem: by default that of the published table.
      machine: its link gives the time of one hop.
      t_local_us: time of one shard's product, in microseconds.

    Returns:
      A `matplotlib.figure.Figure` whose caption names both times and where they come from.
    """
    timelines, caption = predicted_timelines(axis_size, problem, machine, t_local_us)
    without, overlapped = (duration_us(spans) for spans in timelines.values())
    devices = len({span.device for span in timelines["Ring, overlapped"]})
    title = f"Predicted for {devices} devices: {overlapped:.0f} µs with overlap, {without:.0f} µs without"
    if devices == 1:
        title = f"Predicted for 1 device: {overlapped:.0f} µs, nothing to overlap"
    return draw_timeline(timelines, title, caption)


def predicted_timelines(
    axis_size: int = 4,
    problem: roofline.Problem | None = None,
    machine: roofline.Machine = roofline.H100_SXM,
    t_local_us: float = roofline.PUBLISHED_T_LOCAL_US,
) -> tuple[dict[str, tuple[Span, ...]], str]:
    """Returns the two schedules of `draw_predicted_timeline` by title, and the caption. Args: as there."""
    problem = problem or roofline.published_problem(axis_size)
    t_hop_us = problem.bytes_per_hop / machine.link_bytes_per_s * 1e6
    times = (problem.axis_size, t_local_us, t_hop_us)
    timelines = {"All-gather, then matmul": naive_timeline(*times), "Ring, overlapped": ring_timeline(*times)}
    caption = (
        f"Predicted, not measured. One product: {t_local_us:.3g} us ({roofline.PUBLISHED_SOURCE}). One hop: "
        f"{t_hop_us:.1f} us = {problem.bytes_per_hop / 1e6:.2f} MB at {machine.link_bytes_per_s / 1e9:.0f} GB/s. "
        f"Per shard M={problem.m_shard}, K={problem.k}, N={problem.n_shard}, {problem.dtype}. "
        "Starting a step, launches and signals cost nothing here."
    )
    return timelines, caption.replace(" us", " µs")


def _message(schedules) -> str:
    first, last = schedules[0], schedules[-1]
    if len(schedules) == 1:
        return f"{first['title']}: {first['duration_us']:.0f} µs"
    if abs(first["duration_us"] - last["duration_us"]) < 0.5:
        return f"{last['title']}: {last['duration_us']:.0f} µs, nothing gained"
    return f"{last['title']}: {last['duration_us']:.0f} µs instead of {first['duration_us']:.0f} µs"


def _draw_schedule(ax, schedule: dict, index: int, top: float):
    """Draws the lanes of all devices from `top` down, with names on the left, and busy shares at the ends of lanes."""
    title = {"transform": inches_from(ax), "size": HEADING_SIZE, "weight": "bold"}
    ax.text(MARGIN - _LEFT, top + 0.14, schedule["title"], **title)
    end = schedule["end_us"] * _inches_per_us(ax) + 0.1
    # A schedule that ends early must not write its duration over its own title.
    beside_title = MARGIN - _LEFT + 0.115 * len(schedule["title"]) + 0.2
    ax.text(max(end, beside_title), top + 0.14, f"{schedule['duration_us']:.0f} µs", gid=f"total-{index}", **title)
    ax.axvline(schedule["end_us"], color=INK, linewidth=1.5, zorder=5, gid=f"end-{index}", clip_on=False)
    for busy, device_height in zip(schedule["busy"], _device_heights(schedule), strict=True):
        device, share = busy["device"], f"{100 * busy['share']:.0f} % busy"
        middle = top - _LANE_HEIGHT["compute"] / 2
        settings = {"transform": inches_from(ax), "va": "center_baseline", "size": SMALL_SIZE}
        ax.text(MARGIN - _LEFT, middle, f"device {device}", **settings)
        # The ground keeps lines of the time scale off the letters.
        ground = {"facecolor": BACKGROUND, "edgecolor": "none", "pad": 1}
        ax.text(end, middle, share, gid=f"busy-{index}-{device}", bbox=ground, **settings)
        _draw_device(ax, schedule, index, device, top)
        top -= device_height


def _draw_device(ax, schedule: dict, index: int, device: int, top: float):
    for lane in _lanes(schedule, device):
        height = _LANE_HEIGHT.get(lane, _LINK_HEIGHT)
        top -= height
        name = "tensor cores" if lane == "compute" else lane
        place = {"transform": inches_from(ax), "ha": "right", "va": "center_baseline"}
        ax.text(-0.08, top + height / 2, name, size=CAPTION_SIZE - 1, color=MUTED, **place)
        block(ax, 0, top, schedule["end_us"], height, TRACK, linewidth=0, zorder=1)
        for number, span in enumerate(schedule["spans"]):
            if (span["device"], span["lane"]) == (device, lane):
                _draw_span(ax, span, top, height, f"span-{index}-{number}")
        top -= _LANE_GAP


def _draw_span(ax, span: dict, low: float, height: float, gid: str):
    """Draws one span; its text only if it fits."""
    length = span["end_us"] - span["start_us"]
    color = NEUTRAL if span["shard"] is None else device_color(span["shard"])
    text = span["label"] or (span["kind"] if span["shard"] is None else lhs_name(span["shard"]))
    look = {"linewidth": 0.6, "gid": gid}
    if span["kind"] == "wait":
        text, look = "idle" if span["lane"] == "compute" else "wait", look | hatched(MUTED)
    elif span["lane"] != "compute":
        # Paler and thinner than products, so that the lanes differ without colour too.
        color = tint(color, 0.55)
    size = SMALL_SIZE if span["lane"] == "compute" else CAPTION_SIZE - 1
    letters = 2 if text.startswith("$") else len(text)
    fits = letters * size * 0.0105 < length * _inches_per_us(ax)
    block(ax, span["start_us"], low, length, height, color, text if fits else "", size, **look)


def _lanes(schedule: dict, device: int) -> list[str]:
    """Returns the lanes of a device from top to bottom, the tensor cores first."""
    lanes = {span["lane"] for span in schedule["spans"] if span["device"] == device}
    return sorted(lanes, key=lambda lane: (lane != "compute", lane))


def _device_heights(schedule: dict) -> list[float]:
    """Returns the height of each device's lanes, in inches."""
    heights = []
    for busy in schedule["busy"]:
        lanes = [_LANE_HEIGHT.get(lane, _LINK_HEIGHT) + _LANE_GAP for lane in _lanes(schedule, busy["device"])]
        heights.append(sum(lanes) + _DEVICE_GAP)
    return heights


def _inches_per_us(ax) -> float:
    return ax.get_window_extent().width / ax.figure.dpi / ax.get_xlim()[1]


def _dress(ax, last: bool):
    """Gives an axes its time scale; only the lowest one has numbers."""
    ax.set_yticks([])
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.grid(axis="x", color=RULE, linewidth=0.8, zorder=0)
    ax.set_axisbelow(True)
    ax.tick_params(axis="x", length=0, labelbottom=last)
    if last:
        ax.set_xlabel("time since the start of the call, µs")
