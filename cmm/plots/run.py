"""The figures of one run of `python -m cmm`: its schedule, its timelines and, where it was measured, its rates."""

import pathlib
from collections.abc import Mapping, Sequence

from cmm.plots.palette import save
from cmm.plots.rates import utilization_data
from cmm.plots.ring import draw_ring_steps, ring_data
from cmm.plots.timeline import draw_predicted_timeline, draw_timeline, predicted_timelines, timeline_data
from cmm.plots.utilization import draw_utilization
from cmm.results import Run
from cmm.timeline import Span

# Order of the schedules in a figure: what is slow stands above what is meant to be faster.
_DRAWN = ("naive", "ring", "ring_copy_engines")
# Of the kernels the first one that was recorded is drawn, below the others.
_KERNELS = ("pallas_fast", "pallas")


def draw_recorded_timelines(timelines: Mapping[str, Sequence[Span]], titles: Mapping[str, str], caption: str):
    """Draws recorded calls of naive, of the rings and of the kernel above each other.

    Args:
      timelines: spans by name of the method (see `cmm.results.load_timelines`).
      titles: what the figure prints for each name.
      caption: the caption of the run.

    Returns:
      A `matplotlib.figure.Figure`.
    """
    drawn = _titled(timelines, titles)
    return draw_timeline(drawn, "Recorded on GPUs: where the tensor cores wait", _recorded_caption(caption, timelines))


def recorded_timelines_data(timelines: Mapping[str, Sequence[Span]], titles: Mapping[str, str], caption: str) -> dict:
    """Returns what `draw_recorded_timelines` draws."""
    return timeline_data(_titled(timelines, titles), _recorded_caption(caption, timelines))


def draw_run(run: Run, timelines: Mapping[str, Sequence[Span]], folder) -> list[pathlib.Path]:
    """Draws what can be drawn honestly of `run`, and returns the paths written.

    Args:
      run: the record of the run.
      timelines: recorded spans by method; empty for simulated devices. Predicted timelines are drawn in any case, and
        say that they are predicted.
      folder: where to write.
    """
    axis_size = run.problem.axis_size
    paths = save(draw_ring_steps(axis_size), folder, "ring_steps", ring_data(axis_size))
    predicted, source = predicted_timelines(axis_size)
    paths += save(draw_predicted_timeline(axis_size), folder, "timeline_predicted", timeline_data(predicted, source))
    if timelines:
        titles = {method.name: method.title for method in run.methods}
        recorded = (timelines, titles, run.caption())
        data = recorded_timelines_data(*recorded)
        paths += save(draw_recorded_timelines(*recorded), folder, "timeline_recorded", data)
    if not run.simulated:
        paths += save(draw_utilization([run]), folder, "utilization", utilization_data([run]))
    return paths


def _titled(timelines, titles):
    kernels = [name for name in _KERNELS if name in timelines]
    return {titles[name]: timelines[name] for name in (*_DRAWN, *kernels[:1]) if name in timelines}


def _recorded_caption(caption: str, timelines) -> str:
    gaps = "Gaps in which a GPU waits for the host are drawn; call times do not count them."
    has_kernel = any(name in timelines for name in _KERNELS)
    inside = " What one kernel waits for while it runs is not visible." if has_kernel else ""
    return f"One call of a chain, recorded by JAX's profiler. {gaps}{inside} {caption}."
