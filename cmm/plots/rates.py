"""Which times may be drawn as a share of the peak: those measured on machines with a known peak, and published ones."""

import dataclasses
from collections.abc import Sequence

from cmm import roofline
from cmm.results import MethodResult, Run


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar: a method on a number of devices.

    Attributes:
      panel: title of the panel: what was run where.
      axis_size: number of devices.
      method: name of the method.
      title: what the figure prints beside the bar.
      time_us: median call time in microseconds.
      p10_us, p90_us: its 10th and 90th percentile, `None` if not known.
      wall_utilization: share of the peak by the host's clock, in which gaps between kernels count; `None` if not known.
      wall_of: "calls in a program" or "calls alone", whichever time by the host's clock this is.
      kernel_utilization: share of the peak by the time of the matmul kernels alone; `None` if not known.
      utilization: share of the peak, 0 to 1.
      peak_tflops: what 100 % means, in TFLOP/s per device.
      provenance: "measured" or "published".
      source: where the number comes from, in words.
    """

    panel: str
    axis_size: int
    method: str
    title: str
    time_us: float
    p10_us: float | None
    p90_us: float | None
    wall_utilization: float | None
    wall_of: str
    kernel_utilization: float | None
    utilization: float
    peak_tflops: float
    provenance: str
    source: str


@dataclasses.dataclass(frozen=True)
class Limit:
    """A dashed line over the bars of one number of devices: a bound on the time, and its share of the peak."""

    panel: str
    axis_size: int
    name: str
    time_us: float
    utilization: float


def utilization_data(runs: Sequence[Run] = (), published=roofline.PUBLISHED_ROWS) -> dict:
    """Returns what `cmm.plots.draw_utilization` draws: `bars`, `limits`, and what was `left_out` and why.

    Args:
      runs: recorded runs. Only results with status "measured" on a machine with a known peak become bars.
      published: rows of the published table, or none.

    Returns:
      A dictionary of lists: the fields of `Bar`, the fields of `Limit`, and entries with run, method and reason.
    """
    bars, limits, left_out = [], [], []
    for run in runs:
        machine, no_peak = _machine(run)
        reasons = {result.name: no_peak or _why_not(result) for result in run.methods}
        left_out += [{"run": run.caption(), "method": name, "reason": why} for name, why in reasons.items() if why]
        drawn = [_measured_bar(run, result, machine) for result in run.methods if not reasons[result.name]]
        bars += drawn
        limits += _measured_limits(run, machine) if drawn else []
    for row in published:
        bars += _published_bars(row)
        limits.append(_published_limit(row))
    as_dicts = {"bars": bars, "limits": limits}
    as_dicts = {name: [dataclasses.asdict(value) for value in values] for name, values in as_dicts.items()}
    return as_dicts | {"left_out": left_out}


def _machine(run: Run) -> tuple[roofline.Machine | None, str]:
    """Returns the machine of a run, or why none of its times may be drawn."""
    kind = run.machine.get("device_kind", "unknown device")
    if run.simulated:
        return None, "simulated devices: their times say nothing about GPUs"
    if kind not in roofline.MACHINES_BY_DEVICE_KIND:
        return None, f"no peak is known for {kind}"
    machine = roofline.MACHINES_BY_DEVICE_KIND[kind]
    if run.problem.dtype not in machine.peak_flops_per_s:
        return None, f"no peak is known for {run.problem.dtype} on {machine.name}"
    return machine, ""


def _why_not(result: MethodResult) -> str:
    if result.status != "measured":
        return f"{result.status}: {result.reason}" if result.reason else result.status
    if not result.call_time_us:
        return "no call time was recorded"
    return "the recording of the GPUs lacks kernels" if result.is_incomplete else ""


def _panel(run: Run) -> str:
    return f"{run.machine['device_kind']}, {_shapes(run.problem)}"


def _measured_bar(run: Run, result: MethodResult, machine: roofline.Machine) -> Bar:
    time = result.call_time_us
    share = lambda spread: spread and roofline.utilization(run.problem, spread.median, machine)
    peak_tflops = roofline.peak_flops_per_s(machine, run.problem.dtype) / 1e12
    where = (_panel(run), run.problem.axis_size, result.name, result.title)
    times = (time.median, time.p10, time.p90)
    in_program = result.wall_time_in_program_us
    wall = share(in_program or result.wall_time_us), f"calls {'in a program' if in_program else 'alone'}"
    shares = (share(result.kernel_time_us), share(time))
    return Bar(*where, *times, *wall, *shares, peak_tflops, "measured", run.caption())


def _measured_limits(run: Run, machine: roofline.Machine) -> list[Limit]:
    bounds = roofline.bounds(run.problem, machine)
    times = {"T_lower": bounds.t_lower_us, "T_upper": bounds.t_upper_us}
    if run.problem.axis_size == 1:
        del times["T_upper"]
    return [
        Limit(_panel(run), run.problem.axis_size, name, time_us, roofline.utilization(run.problem, time_us, machine))
        for name, time_us in times.items()
    ]


def _published_bars(row: roofline.PublishedRow) -> list[Bar]:
    machine, problem = roofline.H100_SXM, roofline.published_problem(row.axis_size)
    peak_tflops = roofline.peak_flops_per_s(machine, problem.dtype) / 1e12
    methods = (
        ("published_kernel", "JAX example kernel", row.kernel_us),
        ("published_reference", "NCCL all-gather + cuBLAS", row.reference_us),
    )
    return [
        Bar(
            *(_published_panel(problem), row.axis_size, name, title, time_us, None, None, None, "", None),
            *(roofline.utilization(problem, time_us, machine), peak_tflops, "published", roofline.PUBLISHED_SOURCE),
        )
        for name, title, time_us in methods
    ]


def _published_limit(row: roofline.PublishedRow) -> Limit:
    problem = roofline.published_problem(row.axis_size)
    share = roofline.utilization(problem, row.bound_us, roofline.H100_SXM)
    return Limit(_published_panel(problem), row.axis_size, "published bound", row.bound_us, share)


def _published_panel(problem: roofline.Problem) -> str:
    return f"{roofline.H100_SXM.name}, {_shapes(problem)}"


def _shapes(p: roofline.Problem) -> str:
    return f"{p.dtype}, per shard M={p.m_shard} K={p.k} N={p.n_shard}"
