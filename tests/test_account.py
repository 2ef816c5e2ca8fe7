"""Accounts of where time goes: terms that add up, a rest that is what they leave, and figures of nothing else."""

import dataclasses
import functools
import itertools
import types

import jax
import pytest
from rich.console import Console

import cmm.interpret as ci
from cmm import devices, measure, rungs
from cmm.completeness import IncompleteRecording
from cmm.measure import spread
from cmm.plots import palette
from cmm.plots.__main__ import accounts
from cmm.plots.account import account_data, draw_account
from cmm.plots.traces import trace_figures
from cmm.recording import GpuEvent
from cmm.roofline import Problem
from cmm.trace import account as account_module, account_round, account_run, file as trace_file
from cmm.trace.account import GROUPS, INSIDE, NOT_ATTRIBUTED, TERMS, Account
from cmm.trace.account_table import print_account
from cmm.trace.account_terms import Round, account_of
from cmm.trace.call import OffsetsAround, trace_call
from cmm.trace.critical import PARTS
from cmm.trace.periods import kernel_us, period_parts_us
from cmm.trace.summary import summarize


def _event(name, start_us, end_us, stream="1"):
    return GpuEvent(0, stream, name, start_us, end_us)


def _chain(starts=3, calls=4, matmul_us=90.0):
    """Returns events of calls that take 130 µs: barrier, a copy to a peer that a matmul overlaps half, another copy."""
    events = []
    for start_us in range(0, starts * calls * 130, 130):
        events += [
            _event("MultiGpuBarrierKernel", start_us, start_us + 5),
            _event("MemcpyP2P", start_us + 5, start_us + 25, "2"),
            _event("gemm", start_us + 15, start_us + 15 + matmul_us),
            _event("MemcpyD2D", start_us + 108, start_us + 128),
        ]
    return events


def test_every_moment_of_a_call_counts_once():
    parts = period_parts_us(_chain(), starts=3, calls=4)
    expected = {"matmul": 90, "transfer": 10, "memory": 20, "barrier": 5, "gap": 5}
    assert parts == pytest.approx(expected) and sum(parts.values()) == pytest.approx(130)
    assert kernel_us(_chain(), starts=3, calls=4) == pytest.approx(90)


def test_an_incomplete_recording_is_refused():
    with pytest.raises(ValueError, match="11 matmuls"):
        period_parts_us([e for e in _chain() if (e.name, e.start_us) != ("gemm", 15)], starts=3, calls=4)
    with pytest.raises(ValueError, match="0 matmuls"):
        kernel_us([], starts=3, calls=4)


def test_a_gpu_without_events_is_no_fast_one():
    events = [_event("mosaic", 100 * i, 100 * i + 90) for i in range(account_round.STARTS * account_round.CALLS)]
    other = [dataclasses.replace(event, device=1) for event in events]
    assert account_round.Piece(None, 2, events={0: events, 1: other}).kernels_us() == {0: 90, 1: 90}
    with pytest.raises(IncompleteRecording, match="Of 2 GPUs only 1"):
        account_round.Piece(None, 2, events={0: events}).kernels_us()
    with pytest.raises(IncompleteRecording, match="31"):
        account_round.Piece(None, 2, events={0: events, 1: other[1:]}).kernels_us()


def _account(**more_us):
    """Returns an account of three rounds in which a ring kernel takes 10 µs longer, of which 9.5 are explained."""
    gemm_us = [93.0, 93.5, 94.0]
    period = {"matmul": 103.0, "transfer": 0.0, "memory": 0.0, "barrier": 3.0, "gap": 1.0}
    twin_parts = dict.fromkeys(PARTS, 0.0) | {"products_sending": 43.0, "products_last": 43.0, "end": 1.5}
    parts = twin_parts | {"products_sending": 48.0, "announce": 2.5, "flight": 1.0} | more_us
    kernel = lambda gemm: Round(
        gemm + 14.75, gemm + 15, gemm + 10, period, gemm + 1, parts, twin_parts, gemm + 10.6, twin_recorded=gemm + 1.5
    )
    other = period | {"transfer": 54.0, "barrier": 0.0}
    naive = lambda gemm: Round(gemm + 55, gemm + 57, gemm, other | {"matmul": gemm - 1})
    details = {"recorded_calls": 24, "clock_error_ns": 32.0, "device_bound_ns": 900.0}
    methods = (
        account_of("gemm_only", "GEMM only", [naive(gemm) for gemm in gemm_us], gemm_us),
        account_of("naive", "all-gather + matmul", [naive(gemm) for gemm in gemm_us], gemm_us),
        account_of("pallas", "one kernel", [kernel(gemm) for gemm in gemm_us], gemm_us, **details),
    )
    return Account(
        Problem(2, 1024, 4096, 4096, "float16"),
        {"device_kind": "NVIDIA H200"},
        {"jax": "0.11.2"},
        "normal(0, 1)",
        "rounds",
        "2026-01-31",
        "python -m cmm.trace --account",
        3,
        spread(gemm_us),
        methods,
        {"ring": "RuntimeError: no events"},
    )


def test_terms_and_rest_add_up():
    _, naive, kernel = _account().methods
    assert kernel.kernel.difference_us.median == pytest.approx(10)
    assert kernel.kernel.explained_us.median == pytest.approx(9.5)
    assert kernel.kernel.rest_us.median == pytest.approx(0.5) and kernel.kernel.share == pytest.approx(0.95)
    assert kernel.kernel.recording_us.median == pytest.approx(0.1)
    assert set(INSIDE) < set(kernel.terms) == set(TERMS)
    for method, beyond in ((naive, 55), (kernel, 14.75)):
        total = sum(term.median for term in method.terms.values()) + method.rest_us.median
        assert total == pytest.approx(beyond)
    assert naive.terms["own_products"].median == pytest.approx(-1) and naive.kernel is None
    assert naive.terms["recorder"].median == pytest.approx(-2) and naive.rest_us.median == pytest.approx(3)
    assert naive.sums() == pytest.approx((54 - 1 + 1, -2, 54 + 1 + 1 + 2))


def test_what_has_no_cause_counts_as_not_attributed_and_cancelling_shows():
    account = _account(refill=4.0, epilogue=-4.0)
    kernel = account.methods[-1]
    # The share is the same whatever the parts are: they cancel.
    assert kernel.kernel.share == pytest.approx(_account().methods[-1].kernel.share)
    assert kernel.sums(INSIDE) == pytest.approx((9.5 - 4, 4, 9.5 + 8))
    assert {name for name in TERMS if TERMS[name][1] == "not attributed"} == set(NOT_ATTRIBUTED)
    assert set(NOT_ATTRIBUTED) == {"refill", "wait", "recorder"}
    assert {group for _, group in TERMS.values()} == set(GROUPS)
    (drawn,) = account_data(account)["kernels"]
    assert (drawn["not_attributed_us"], drawn["absolute_us"]) == pytest.approx((4, 17.5))
    bars = {bar["name"]: bar for bar in account_data(account)["methods"][-1]["bars"]}
    assert bars["not attributed"]["end_us"] - bars["not attributed"]["start_us"] == pytest.approx(4 - 0.25)
    assert bars["gaps"]["end_us"] - bars["gaps"]["start_us"] == pytest.approx(1)


def test_file_and_figure(tmp_path):
    account = _account()
    path = account_module.save(account, tmp_path / account_module.file_name(account))
    assert path.name == "account_h200_d2_m1024_k4096_n4096_float16.json"
    assert account_module.load(path) == dataclasses.replace(account, methods=account_module.load(path).methods)
    ((name, draw, data),) = accounts(tmp_path)
    assert name == "breakdown_h200_d2"
    palette.save(draw(), tmp_path, name, data())
    assert len(list(accounts(tmp_path / "data"))) == 0  # What is drawn is not taken for an account.
    fig, data = draw_account(account), account_data(account)
    patches = {p.get_gid(): p for ax in fig.axes for p in ax.patches + ax.artists + ax.get_children() if p.get_gid()}
    looks: dict[str, set] = {}
    for method in data["methods"]:
        end_us = 0.0
        for bar in method["bars"]:
            patch = patches[f"account-{method['name']}-{bar['name'].replace(' ', '-')}"]
            assert patch.get_x() == pytest.approx(end_us) and bar["start_us"] == pytest.approx(end_us)
            end_us = patch.get_x() + patch.get_width()
            looks.setdefault(bar["name"], set()).add((patch.get_facecolor(), patch.get_hatch()))
        assert end_us == pytest.approx(method["total_us"], abs=1e-6)
    # What stands side by side looks alike everywhere, and in grey print differs in hatching or clearly in brightness.
    assert all(len(found) == 1 for found in looks.values()) and {"unexplained", "communication", "gaps"} < set(looks)
    for (one, (a,)), (other, (b,)) in itertools.combinations(looks.items(), 2):
        assert a[1] != b[1] or abs(_brightness(a[0]) - _brightness(b[0])) > 0.1, (one, other)
    assert patches["term-pallas-announce"].get_width() == pytest.approx(2.5)
    assert "term-pallas-drain" not in patches  # Nothing.


def _brightness(color) -> float:
    return sum(share * channel for share, channel in zip((0.299, 0.587, 0.114), color))


def test_the_figure_says_how_far_rounds_differ_in_what_is_unexplained():
    account = _account()
    *others, kernel = account.methods
    kernel = dataclasses.replace(kernel, rest_us=dataclasses.replace(kernel.rest_us, p10=-7.0, p90=8.25))
    account = dataclasses.replace(account, methods=(*others, kernel))
    drawn = account_data(account)["methods"][-1]
    assert (drawn["unexplained_p10_us"], drawn["unexplained_p90_us"]) == (-7.0, 8.25)
    texts = [text.get_text() for ax in draw_account(account).axes for text in ax.texts]
    assert sum(text.startswith("unexplained") and text.endswith("(-7.0 to +8.2)") for text in texts) == 1


def test_table(capsys):
    print_account(Console(width=160), _account(refill=4.0, epilogue=-4.0))
    out = capsys.readouterr().out
    assert "the sum covers 95 %" in out and "recorded calls stand for usual ones" in out
    assert "With a cause +5.50, not attributed +4.00, absolute terms 17.50 together" in out
    assert out.count("(not attributed)") == 3 and "not attributed and unexplained" in out
    assert "ring: RuntimeError: no events" in out


def test_timelines_of_recorded_calls(tmp_path):
    mesh, problem = devices.ring_mesh(jax.devices("cpu")[:2]), Problem(2, 256, 256, 128, "float16")
    with ci.simulate(core_count=2) as sim:
        trace = trace_call(problem, mesh, "pallas", calls=1, run=sim.run)
    about = {"device_kind": "NVIDIA H200", "versions": {"jax": "0.11.2"}, "date": "2026-01-31"}
    record = trace_file.to_record(trace, problem, summarize(trace), **about)
    trace_file.write(record, tmp_path / trace_file.file_name(record))
    assert list(trace_figures(tmp_path)) == []  # Simulated times are not drawn as times.
    record |= {"simulated": False}
    trace_file.write(record, tmp_path / trace_file.file_name(record))
    found = {name: (draw(), data()) for name, draw, data in trace_figures(tmp_path)}
    names = ["kernel_timeline_pallas_h200_d2_call", "kernel_timeline_pallas_h200_d2_step_change"]
    assert list(found) == names
    low, high = found[names[0]][1]["window_us"]
    inner = found[names[1]][1]["window_us"]
    assert low == 0 <= inner[0] < inner[1] <= high


def test_measuring_makes_an_account_of_every_method_that_runs(monkeypatch):
    """All but the GPUs' record: kernels run on simulated devices, their kernel times are made up."""
    mesh, problem = devices.ring_mesh(jax.devices("cpu")[:2]), Problem(2, 128, 128, 256, "float16")
    small = {"CALLS": 2, "STARTS": 2, "SHORT_STARTS": 1, "LONG_STARTS": 2}
    for (name, value), module in itertools.product(small.items(), (account_round, account_run)):
        monkeypatch.setattr(module, name, value)
    in_shard_map = rungs.in_shard_map

    def record_in_turn(runs, mark, gpus):
        assert gpus == mesh.size
        for run, wait in runs:
            wait(run())
        events = [GpuEvent(d, "1", "mosaic", 100.0 * i, 100.0 * i + 90 + d) for d in range(2) for i in range(4)]
        return [events] * len(runs)

    with ci.simulate(core_count=2) as sim:

        def program(start, operands, start_chain):
            return measure.Program(start, operands, start_chain=lambda pairs: sim.run(start_chain, pairs))

        def build(*arguments, **options):
            made = lambda *parts: in_shard_map(*arguments, **options)(*parts)
            return lambda *parts: program((one := made(*parts)).start, one.operands, one.start_chain)

        monkeypatch.setattr(account_run, "Program", program)
        monkeypatch.setattr(account_run, "in_shard_map", build)
        monkeypatch.setattr(rungs, "in_shard_map", build)
        monkeypatch.setattr(account_round, "record_in_turn", record_in_turn)
        monkeypatch.setattr(account_run, "OffsetsAround", functools.partial(OffsetsAround, run=sim.run))
        monkeypatch.setattr(devices, "is_simulated", lambda found: False)
        account = account_run.measure_account(problem, mesh, ("gemm_only_torch", "pallas"), rounds=1)
    assert list(account.skipped) == ["gemm_only_torch"] and account.rounds == 1
    gemm, kernel = account.methods
    assert gemm.kernel_us.median == kernel.kernel_us.median == 91
    assert kernel.kernel.recorded_calls == 1 and kernel.kernel.difference_us.median == 0
    assert set(kernel.terms) == set(TERMS) and kernel.terms["announce"].median > 0
    assert gemm.terms["gap"].median == pytest.approx(9)


@pytest.fixture
def look_inside(monkeypatch):
    """`look(noted)`: reads recorded calls of which those called "bad" are none; returns parts, traces, the method."""

    def read_trace(kernel, layout, raw, offsets):
        if raw == "bad":
            raise ValueError(f"clocks of a {raw} call")
        return types.SimpleNamespace(length_us=[90.0, float(raw)], missing=lambda: 0)

    monkeypatch.setattr(account_round, "read_trace", read_trace)
    monkeypatch.setattr(account_round, "offsets_from", lambda noted: None)
    monkeypatch.setattr(account_round, "between", lambda before, after: None)
    monkeypatch.setattr(account_round, "call_us", lambda trace: trace.length_us)
    monkeypatch.setattr(account_round, "critical_parts_us", lambda trace, device: {"end": trace.length_us[device]})

    def look(noted, kind="recorded"):
        method = account_round.Method("pallas", "one kernel", None)
        setattr(method, kind, types.SimpleNamespace(layout=None))
        pieces = {("pallas", kind, when): types.SimpleNamespace(noted=[0]) for when in ("before", "after")}
        pieces["pallas", kind] = types.SimpleNamespace(noted=noted)
        return *account_round._look_inside(method, kind, pieces), method

    return look


def test_recorded_calls_that_cannot_be_read_are_left_out_and_named(look_inside):
    parts, traces, method = look_inside(["91", "bad", "93"], "twin_recorded")
    assert parts == {"end": 92.0} and len(traces) == 2
    assert method.unreadable == {"twin_recorded": ["clocks of a bad call"]}
    assert account_run._unreadable([method]) == {"pallas, 1 calls (twin_recorded)": "clocks of a bad call"}
    with pytest.raises(RuntimeError, match=r"1 of 2 calls \(recorded\) can be read. clocks of a bad call"):
        look_inside(["91", "bad"])


@pytest.mark.parametrize("recorded_first", [False, True])
def test_calls_are_timed_as_usual_and_while_gpus_are_recorded(monkeypatch, recorded_first):
    # While it is recorded, the host is late with each start by as long as the GPUs work on it.
    order = []
    start_us = lambda program: account_round.CALLS * program

    def recorded_us(program, starts):
        order.append("recorded")
        return 500.0 + starts * 2 * start_us(program)

    def usual_us(program, short, long):
        order.append("usual")
        return program

    def record_in_turn(runs, mark, gpus):
        found = []
        for number, (run, wait) in enumerate(runs):
            wait(run())
            time_us, starts = (95.0, 150.0)[number // 2], (account_round.LONG_STARTS, 4)[number % 2]
            calls = [
                2 * start_us(time_us) * start + time_us * call
                for start in range(starts)
                for call in range(account_round.CALLS)
            ]
            found.append([GpuEvent(d, "1", "mosaic", at, at + time_us) for at in calls for d in range(gpus)])
        return found

    monkeypatch.setattr(account_run, "wall_time_in_program_us", usual_us)
    monkeypatch.setattr(account_round, "starts_us", recorded_us)
    monkeypatch.setattr(account_round, "record_in_turn", record_in_turn)
    methods = [types.SimpleNamespace(program=time_us) for time_us in (95.0, 150.0)]
    usual, walls = account_run._walls(methods, None, 2, recorded_first)
    assert usual == [95.0, 150.0] and [wall.call_us for wall in walls] == pytest.approx([190.0, 300.0])
    assert order == (["recorded"] * 4 + ["usual"] * 2 if recorded_first else ["usual"] * 2 + ["recorded"] * 4)
    for time_us, wall in zip(usual, walls):  # By how much the host was late is a gap.
        period = wall.period_us(1)
        assert period["matmul"] == pytest.approx(time_us) and period["gap"] == pytest.approx(time_us, rel=0.03)
        with pytest.raises(IncompleteRecording):
            dataclasses.replace(wall, gpus=3).period_us(1)


def test_simulated_devices_have_no_account():
    mesh = devices.ring_mesh(jax.devices("cpu")[:2])
    with pytest.raises(NotImplementedError, match="needs GPUs"):
        account_run.measure_account(Problem(2, 128, 128, 128, "float16"), mesh)
    with pytest.raises(ValueError, match="must be among"):
        account_run.measure_account(Problem(2, 128, 128, 128, "float16"), mesh, ("gemm_only",))
