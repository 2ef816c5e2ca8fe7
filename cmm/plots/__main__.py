"""Redraws every figure of the project: `python -m cmm.plots`."""

import argparse
import functools
import pathlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from cmm import roofline
from cmm.cli import positive
from cmm.plots.account import account_data, draw_account
from cmm.plots.animation import ring_animation
from cmm.plots.bounds import bounds_data, draw_roofline_bounds
from cmm.plots.kernel_animation import kernel_animation
from cmm.plots.ladder import draw_ladder, ladder_data
from cmm.plots.landscape import landscape_figures
from cmm.plots.layout import draw_layout, layout_data
from cmm.plots.palette import save, save_data
from cmm.plots.rates import utilization_data
from cmm.plots.ring import draw_ring, draw_ring_steps, ring_data
from cmm.plots.run import draw_recorded_timelines, recorded_timelines_data
from cmm.plots.sweep import draw_sweep, sweep_data, sweep_groups
from cmm.plots.timeline import draw_predicted_timeline, predicted_timelines, timeline_data
from cmm.plots.traces import trace_figures
from cmm.plots.utilization import draw_utilization
from cmm.plots.utilization_shapes import draw_utilization_shapes, utilization_shapes_groups
from cmm.plots.utilization_shapes_records import utilization_shapes_data
from cmm.results import Run, load, load_all, load_timelines, timelines_file_name
from cmm.trace.account import load as load_account

FRAMES_PER_STEP = 36

# A figure: its file name, and a function that draws it and one that gives its data.
Figure = tuple[str, Callable, Callable]


def figures(axis_size: int, runs: list[Run]) -> Iterator[Figure]:
    """Yields name, drawing function and data function of the figures that need nothing but the schedule and `runs`.

    Args:
      axis_size: number of devices in the figures that explain the method.
      runs: recorded runs. Those with shapes and dtype of the published table share its figure, those with other dtypes
        have another. Those that differ only in their rows per device share one. All other shapes share one for each
        kind and number of devices.
    """
    step = min(1, axis_size - 1)
    problem = roofline.published_problem(axis_size)
    yield "layout", lambda: draw_layout(axis_size), lambda: layout_data(axis_size)
    yield "ring_step", lambda: draw_ring(axis_size, step), lambda: ring_data(axis_size) | {"step": step}
    yield "ring_steps", lambda: draw_ring_steps(axis_size), lambda: ring_data(axis_size)
    both = (axis_size, "both")
    yield "ring_steps_bidirectional", lambda: draw_ring_steps(*both), lambda: ring_data(*both)
    timelines, source = predicted_timelines(axis_size)
    yield "timeline_predicted", lambda: draw_predicted_timeline(axis_size), lambda: timeline_data(timelines, source)
    yield "roofline_bounds", lambda: draw_roofline_bounds(problem), lambda: bounds_data(problem)
    for name, group in sweep_groups(runs):
        yield name, functools.partial(draw_sweep, group), functools.partial(sweep_data, group)
    for name, group in utilization_shapes_groups(runs):
        data = functools.partial(utilization_shapes_data, group)
        yield name, functools.partial(draw_utilization_shapes, group), data
    reference = [run for run in runs if run.is_reference_work]
    other_dtypes = [run for run in runs if run.has_published_shape and run not in reference]
    yield "utilization", lambda: draw_utilization(reference), lambda: utilization_data(reference)
    if not all(run.simulated for run in other_dtypes):
        draw, data = lambda: draw_utilization(other_dtypes, ()), lambda: utilization_data(other_dtypes, ())
        yield "utilization_other", draw, data


def recorded_timelines(runs: list[Run], folder) -> Iterator[Figure]:
    """Yields a figure for each run of the published problem whose calls were recorded as timelines in `folder`."""
    for run in (run for run in runs if run.is_reference_work):
        path = pathlib.Path(folder) / timelines_file_name(run)
        if path.exists():
            caption, timelines = load_timelines(path)
            call = (timelines, {method.name: method.title for method in run.methods}, caption)
            name = path.stem.partition("_m")[0].replace("timeline_", "timeline_recorded_")
            draw = functools.partial(draw_recorded_timelines, *call)
            data = functools.partial(recorded_timelines_data, *call)
            yield name, draw, data


def accounts(folder) -> Iterator[Figure]:
    """Yields a figure for each account (`cmm.trace.account`) in `folder`."""
    for path in sorted(pathlib.Path(folder).glob("account_*.json")):
        account = load_account(path)
        is_reference = account.problem == roofline.published_problem(account.problem.axis_size)
        # Its data lies in the same folder as the accounts, so it must not look like one.
        stem = path.stem.replace("account_", "breakdown_", 1)
        name = stem.partition("_m")[0] if is_reference else stem
        yield name, functools.partial(draw_account, account), functools.partial(account_data, account)


def ladders(folder) -> Iterator[Figure]:
    """Yields a figure for each ladder from the readable kernel to the fast one (`cmm.ladder`) measured in `folder`."""
    for path in sorted(pathlib.Path(folder).glob("ladder_*.json")):
        run = load(path)
        if ladder_data(run)["rows"]:
            # Its data lies in the same folder as the ladders, so it must not look like one.
            stem = f"kernel_{path.stem}"
            name = stem.partition("_m")[0] if run.is_reference_work else stem
            yield name, functools.partial(draw_ladder, run), functools.partial(ladder_data, run)


def all_figures(axis_size: int, runs_folder) -> list[Figure]:
    """Returns the figures that explain the method and those of the runs recorded in `runs_folder`."""
    recorded = load_all(runs_folder)
    runs = [run for run in recorded if run.problem.axis_size > 1]  # One device gathers nothing.
    kernels = (
        *accounts(runs_folder),
        *ladders(runs_folder),
        *trace_figures(runs_folder),
        *landscape_figures(runs_folder, recorded),
    )
    return [*figures(axis_size, runs), *recorded_timelines(runs, runs_folder), *kernels]


def redraw(out, axis_size: int, runs_folder, frames_per_step=FRAMES_PER_STEP, progress=None) -> list[pathlib.Path]:
    """Draws all figures into the folder `out`, each with its data file, and returns the paths written.

    Args:
      out: folder of the figures.
      axis_size: number of devices in the figures that explain the method.
      runs_folder: folder of recorded runs, `run_*.json`. It may be empty or missing.
      frames_per_step: frames of one step of the ring's animation. With fewer than usual that of the kernel gets
        shorter, too.
      progress: called with the name of each figure before it is drawn, and with "" at the end.

    Raises:
      RuntimeError: JAX has started with fewer than four simulated devices.
    """
    progress = progress or (lambda name: None)
    # First: it asks JAX for simulated devices, and others may start JAX without them.
    progress("kernel")
    paths = [pathlib.Path(out) / "kernel.gif"]
    every = slice(None, None, max(1, FRAMES_PER_STEP // frames_per_step))
    paths.append(save_data(kernel_animation(paths[0], frame_numbers=every), out, "kernel"))
    for name, draw, data in all_figures(axis_size, runs_folder):
        progress(name)
        paths += save(draw(), out, name, data())
    progress("ring")
    paths.append(ring_animation(pathlib.Path(out) / "ring.gif", axis_size, frames_per_step=frames_per_step))
    paths.append(save_data(ring_data(axis_size), out, "ring"))
    progress("")
    return paths


def main(argv=None):
    """Reads the command line, redraws with a progress bar, and lists what was written."""
    parser = argparse.ArgumentParser(prog="python -m cmm.plots", description="Redraw all figures, each with its data.")
    parser.add_argument("--out", default="figures", help="folder to write to (default: %(default)s)")
    parser.add_argument("--axis-size", type=positive, default=4, help="devices on the ring (default: %(default)s)")
    parser.add_argument("--runs", default="figures/data", help="folder of recorded runs (default: %(default)s)")
    frames_help = "frames of one step of the ring's animation; with fewer, both get shorter (default: %(default)s)"
    parser.add_argument("--frames-per-step", type=positive, default=FRAMES_PER_STEP, help=frames_help)
    args = parser.parse_args(argv)
    count = 2 + len(all_figures(args.axis_size, args.runs))
    columns = (TextColumn("{task.description:<26}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("", total=count)
        # A figure counts as done when the next one begins.
        done = iter(range(count + 1))
        show = lambda name: bar.update(task, description=name or "done", completed=next(done))  # noqa: E731
        paths = redraw(args.out, args.axis_size, args.runs, args.frames_per_step, show)
    for path in paths:
        print(f"{path.stat().st_size / 1024:8.0f} KB  {path}")


if __name__ == "__main__":
    main()
