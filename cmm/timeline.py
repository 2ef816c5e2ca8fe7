"""What each device does when: spans of time for products and transfers, predicted from two numbers.

A `Span` is also what a recording on real devices is turned into, so that one function draws both.
"""

import dataclasses
from typing import Literal

from cmm.schedule import ring_schedule

Kind = Literal["compute", "send", "receive", "wait"]


@dataclasses.dataclass(frozen=True)
class Span:
    """One stretch of time on one lane of one device.

    Attributes:
      device: the device.
      lane: "compute" for the matrix units, "link" for transfers ("link up" for the second direction).
      kind: what happens. "wait" marks time in which the lane idles because data is missing.
      start_us: start, in microseconds from the start of the call.
      end_us: end, in microseconds from the start of the call.
      step: step of the ring, `None` where there are no steps.
      shard: shard of the activations that is multiplied or travels, `None` for all of them.
      label: short text for figures, such as the name of a recorded GPU kernel.
    """

    device: int
    lane: str
    kind: Kind
    start_us: float
    end_us: float
    step: int | None = None
    shard: int | None = None
    label: str = ""


def naive_timeline(axis_size: int, t_local_us: float, t_hop_us: float) -> tuple[Span, ...]:
    """Predicts all-gather, then matmul: `(axis_size - 1)` hops in which the matrix units idle, then all products.

    Args:
      axis_size: number of devices.
      t_local_us: time of one shard's product, in microseconds.
      t_hop_us: time in which one shard crosses a link, in microseconds.
    """
    gathered_us = (axis_size - 1) * t_hop_us
    end_us = gathered_us + axis_size * t_local_us
    spans = []
    for device in range(axis_size):
        if axis_size > 1:
            spans.append(Span(device, "link", "receive", 0.0, gathered_us, label="all-gather"))
            spans.append(Span(device, "compute", "wait", 0.0, gathered_us))
        spans.append(Span(device, "compute", "compute", gathered_us, end_us, label="matmul"))
    return tuple(spans)


def ring_timeline(axis_size: int, t_local_us: float, t_hop_us: float) -> tuple[Span, ...]:
    """Predicts the ring: each step lasts as long as the longer of its product and its transfer.

    Args: as `naive_timeline`. The model has no cost for changing step; `cmm.roofline.overlapped_estimate_us` has.
    """
    spans = []
    for row in ring_schedule(axis_size):
        for at in row:
            last = at.sends is None
            start_us = at.step * max(t_local_us, t_hop_us)
            computed_us = start_us + t_local_us
            spans.append(Span(at.device, "compute", "compute", start_us, computed_us, at.step, at.computes))
            if last:
                continue
            spans.append(Span(at.device, "link", "send", start_us, start_us + t_hop_us, at.step, at.sends))
            if t_hop_us > t_local_us:
                spans.append(Span(at.device, "compute", "wait", computed_us, start_us + t_hop_us, at.step))
    return tuple(spans)


def duration_us(spans) -> float:
    """Returns the time from the first start to the last end, in microseconds."""
    return max(span.end_us for span in spans) - min(span.start_us for span in spans)


def busy_share(spans, device: int, lane: str = "compute") -> float:
    """Returns the share of the whole duration in which a lane of `device` works rather than waits, 0 to 1."""
    busy_us = sum(s.end_us - s.start_us for s in spans if s.device == device and s.lane == lane and s.kind != "wait")
    return busy_us / duration_us(spans)
