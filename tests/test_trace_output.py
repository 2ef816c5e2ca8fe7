"""What is made of a recorded call: its file, its numbers, its figure, and the command that makes them."""

import json

import numpy as np
import pytest
from traced_calls import each_kernel, traced_call

from cmm.hopper.marks import MULTIPLIERS, Delay
from cmm.plots.kernel_timeline import draw_kernel_timeline, step_change
from cmm.roofline import Problem
from cmm.trace import __main__ as command, file as trace_file
from cmm.trace.critical import call_us
from cmm.trace.record import KERNELS
from cmm.trace.summary import links_us, stretches_us, summarize


@pytest.fixture(scope="module", params=KERNELS)
def traced(request):
    """A recorded call on three devices, every product noted, and what the simulator has seen."""
    return traced_call(request.param, axis_size=3, every=1, shape=(256, 256, 192))


def test_file_keeps_what_figures_need(traced, tmp_path):
    trace, _ = traced
    problem = Problem(3, 256, 256, 192, "float16")
    path = trace_file.write(trace_file.to_record(trace, problem, summarize(trace)), tmp_path / "trace.json")
    again = trace_file.from_record(trace_file.read(path))
    kept = trace_file.kept_ctas(trace.layout)
    assert [e.kind for e in again.events(kept)] and again.layout == trace.layout
    np.testing.assert_allclose(again.times.marks[:, kept], trace.times.marks[:, kept], atol=0.5, equal_nan=True)
    np.testing.assert_allclose(again.times.end, trace.times.end, atol=0.5)


def test_perfetto_file(traced, tmp_path):
    trace, _ = traced
    rows = json.loads(trace_file.write_perfetto(trace, tmp_path / "p.json", ctas=[0]).read_text())["traceEvents"]
    named = {(r["pid"], r["tid"]) for r in rows if r["name"] == "thread_name"}
    assert {(r["pid"], r["tid"]) for r in rows if r["ph"] != "M"} == named
    assert {r["pid"] for r in rows} == {0, 1, 2}
    for thread in named:
        slices = sorted(
            (r["ts"], r["ts"] + r["dur"]) for r in rows if r["ph"] == "X" and (r["pid"], r["tid"]) == thread
        )
        # One after the other, or one inside the other.
        for index, (_, end) in enumerate(slices):
            assert all(end <= later + 1e-3 or ends <= end + 1e-3 for later, ends in slices[index + 1 :])


def test_numbers(traced):
    trace, _ = traced
    summary = summarize(trace)
    assert len(summary["call_us"]) == 3 and min(summary["call_us"]) > 10
    assert 0 < summary["hidden_send_share"] <= 1
    assert summary["step_change_us"]["count"] == 2 * 2 * 2 * 3  # Roles, CTAs, changes, devices.
    waits = {(w["role"], w["reason"]): w for w in summary["waits"]}
    begin, end = trace.spans("full", 0)
    full = waits["multiplier 0", "full stage"]
    assert full["per_cta_us"] == pytest.approx(np.nansum(end - begin) / 1e3 / 6, abs=2e-3) and not full["sampled"]
    assert waits["loader", "signals"]["count"] == sum(e.kind == "wait" for e in trace.events())


def test_stretches_of_a_cta_add_up_to_the_call(traced):
    trace, _ = traced
    for device in range(3):
        for cta in range(2):
            stretches = stretches_us(trace, device, cta)
            assert sum(stretches.values()) == pytest.approx(call_us(trace)[device])
            assert stretches["between tiles of a step"] > 0  # Each has three tiles in a step.


PAUSE_US = 50.0


@each_kernel
@pytest.mark.parametrize(("use", "name"), [(3, "products, steps that send"), (11, "products, last step")])
def test_a_pause_lengthens_its_stretch(kernel, use, name):
    shape = {"axis_size": 2, "core_count": 4, "every": 1, "shape": (256, 512, 128)}  # One tile of 8 products a step.
    usual, _ = traced_call(kernel, **shape)
    delay = Delay(device=1, cta=2, role=MULTIPLIERS, use=use, duration_ns=int(1e3 * PAUSE_US))
    late, _ = traced_call(kernel, **shape, delay=delay)
    before, after = stretches_us(usual, 1, 2), stretches_us(late, 1, 2)
    longer = {one: after[one] - before[one] for one in after}
    # A part of the pause lies under a wait that was there before.
    assert max(longer, key=longer.get) == name and longer[name] == pytest.approx(PAUSE_US, abs=0.2 * PAUSE_US)


@pytest.mark.slow
def test_the_links_of_a_step_change_say_that_column_0_is_late():
    shape = {"axis_size": 2, "core_count": 4, "every": 1, "shape": (128, 512, 256)}  # One row of four tiles.
    pause = Delay(device=0, cta=0, role=MULTIPLIERS, use=7, duration_ns=int(1e3 * PAUSE_US))
    usual, late = (links_us(traced_call("pallas", **shape, delay=delay)[0], range(4)) for delay in (None, pause))
    longer = {name: late[name] - usual[name] for name in usual}
    # Of two CTAs of column 0, one on each device, one is late. The signal is late, but is seen as soon as it comes.
    assert longer.pop("column 0 is late") == pytest.approx(PAUSE_US / 2, abs=4)
    assert all(abs(value) < 2 for value in longer.values()), longer


def test_a_cta_is_named_with_its_column_if_it_has_one():
    trace, _ = traced_call("pallas_fast", axis_size=2, core_count=4, every=1, shape=(256, 512, 128))
    fig = draw_kernel_timeline(trace.events(), "Two columns", ctas=[1, 2])
    names = [text.get_text() for text in fig.axes[0].texts if text.get_text().startswith(("CTA", "column"))]
    assert names == 2 * ["CTA 1", "column 0", "CTA 2", "column 1"]
    trace, _ = traced_call("pallas_fast", axis_size=3, every=1, shape=(256, 256, 192))
    fig = draw_kernel_timeline(trace.events(), "Three columns")
    assert not any(text.get_text().startswith("column") for text in fig.axes[0].texts)


@pytest.mark.parametrize("causal", [False, True])
def test_figure(traced, causal):
    trace, _ = traced
    events = trace.events()
    low_s, high_s = step_change(events)
    assert {e.step for e in events if e.kind == "tile_product" and low_s < e.end_s and e.start_s < high_s} >= {0, 1}
    fig = draw_kernel_timeline(events, "Change of step", causal=causal)
    names = [text.get_text() for text in fig.axes[0].texts]
    assert [name for name in names if name.startswith("device")] == ["device 0", "device 1", "device 2"]
    assert names.count("CTA 0") == names.count("CTA 1") == 3
    with pytest.raises(ValueError, match="Nothing happens"):
        draw_kernel_timeline(events, "Nothing", window_s=(5.0, 6.0))


@each_kernel
def test_command(kernel, tmp_path, capsys):
    shape = ["--devices", "2", "--m-shard", "128", "--k", "256", "--n-shard", "64"]
    arguments = [
        "--simulate",
        "--kernel",
        kernel,
        *shape,
        "--out",
        str(tmp_path),
        "--perfetto",
        str(tmp_path / "p.json"),
    ]
    assert command.main(arguments) == 0
    (path,) = tmp_path.glob("trace_*.json")
    record = trace_file.read(path)
    assert record["simulated"] and record["cost_us"] is None and record["command"].endswith(str(tmp_path / "p.json"))
    assert "Simulated devices" in capsys.readouterr().out


def test_command_says_what_does_not_work(tmp_path, capsys):
    assert command.main(["--devices", "2", "--out", str(tmp_path)]) == 2
    assert "needs Hopper GPUs" in capsys.readouterr().out
