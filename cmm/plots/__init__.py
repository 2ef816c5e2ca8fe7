"""Figures of the collective matmul, computed from `cmm.schedule`, `cmm.timeline`, `cmm.roofline` and recorded runs.

`python -m cmm.plots` redraws all of them.
"""

from cmm.plots.animation import ring_animation
from cmm.plots.bounds import bounds_data, draw_roofline_bounds
from cmm.plots.events import draw_events
from cmm.plots.layout import draw_layout, layout_data
from cmm.plots.palette import device_color, render, save, save_data, style
from cmm.plots.rates import utilization_data
from cmm.plots.ring import draw_ring, draw_ring_steps, ring_data
from cmm.plots.timeline import draw_predicted_timeline, draw_timeline, predicted_timelines, timeline_data
from cmm.plots.utilization import draw_utilization

__all__ = [
    "bounds_data",
    "device_color",
    "draw_events",
    "draw_layout",
    "draw_predicted_timeline",
    "draw_ring",
    "draw_ring_steps",
    "draw_roofline_bounds",
    "draw_timeline",
    "draw_utilization",
    "layout_data",
    "predicted_timelines",
    "render",
    "ring_animation",
    "ring_data",
    "save",
    "save_data",
    "style",
    "timeline_data",
    "utilization_data",
]
