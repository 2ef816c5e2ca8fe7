"""Figures of the collective matmul, computed from `cmm.schedule`, `cmm.timeline`, `cmm.roofline` and recorded runs.

`python -m cmm.plots` redraws all of them.
"""

from cmm.plots.account import account_data, draw_account
from cmm.plots.animation import ring_animation
from cmm.plots.bounds import bounds_data, draw_roofline_bounds
from cmm.plots.events import draw_events
from cmm.plots.ladder import draw_ladder, ladder_data
from cmm.plots.landscape import draw_landscape
from cmm.plots.landscape_records import landscape_data
from cmm.plots.layout import draw_layout, layout_data
from cmm.plots.palette import device_color, render, save, save_data, style
from cmm.plots.rates import utilization_data
from cmm.plots.ring import draw_ring, draw_ring_steps, ring_data
from cmm.plots.sweep import draw_sweep, sweep_data
from cmm.plots.timeline import draw_predicted_timeline, draw_timeline, predicted_timelines, timeline_data
from cmm.plots.utilization import draw_utilization
from cmm.plots.utilization_shapes import draw_utilization_shapes
from cmm.plots.utilization_shapes_records import utilization_shapes_data

__all__ = [
    "account_data",
    "bounds_data",
    "device_color",
    "draw_account",
    "draw_events",
    "draw_ladder",
    "draw_landscape",
    "draw_layout",
    "draw_predicted_timeline",
    "draw_ring",
    "draw_ring_steps",
    "draw_roofline_bounds",
    "draw_sweep",
    "draw_timeline",
    "draw_utilization",
    "draw_utilization_shapes",
    "ladder_data",
    "landscape_data",
    "layout_data",
    "predicted_timelines",
    "render",
    "ring_animation",
    "ring_data",
    "save",
    "save_data",
    "style",
    "sweep_data",
    "timeline_data",
    "utilization_data",
    "utilization_shapes_data",
]
