"""The ladder from the readable ring kernel to the fast one: right at every rung, and faults in it are caught."""

import dataclasses
import functools
import itertools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fault_verdict import verdict
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import cmm.interpret as ci
from cmm import ladder, results
from cmm.hopper import MatmulDimension, TuningConfig, ladder as kernels
from cmm.hopper.ladder import SpreadSend, ladder_kernel
from cmm.hopper.plan import Plan
from cmm.measure import spread
from cmm.plots.ladder import draw_ladder, ladder_data
from cmm.results import MethodResult, Rounds, Run
from cmm.roofline import Problem

SMALL = TuningConfig(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2)
SEEDS = range(4)
SPREAD = {"spread_sends": True}
WARP_ALONE = {"sender_warp": True}


def _kernel(lhs, rhs, axis_name, *, config, **switches):
    return ladder_kernel(config=config, **switches)(lhs, rhs, axis_name)


def _run(case, switches, core_count, config=SMALL, **options):
    with ci.simulate(core_count=core_count, **options) as sim:
        out = sim.run(case.program(functools.partial(_kernel, config=config, **switches)), case.lhs, case.rhs)
    case.assert_right(out)
    return sim


def _signals(sim, devices):
    (number,) = {sum(e.kind == "signal" for e in sim.events if e.peer == device) for device in range(devices)}
    return number


# The kernels


@pytest.mark.parametrize("late", [(), ci.Late(1e-4, device=0, cta=0), ci.Late(1e-4, device=1), ci.Late(2e-5, thread=0)])
@pytest.mark.parametrize("core_count", [1, 4])
@pytest.mark.parametrize("axis_size", [2, 3, 4])
def test_spread_sends_whoever_is_late(make_case, axis_size, core_count, late):
    case = make_case(256, 256, 128, "float16", (axis_size,), seed=axis_size)
    sim = _run(case, SPREAD, core_count, late=late, seed=core_count)
    assert {sim.bytes_sent(device=device) for device in range(axis_size)} == {(axis_size - 1) * 256 * 256 * 2}
    assert _signals(sim, axis_size) == (axis_size - 1) * 4  # 2 rows of 2 columns


CONFIGS = {
    "minor N": dataclasses.replace(SMALL, grid_minor_dim=MatmulDimension.N),
    "side by side": dataclasses.replace(SMALL, wg_dimension=MatmulDimension.N),
    "four stages": dataclasses.replace(SMALL, max_concurrent_steps=4),
    "deep tiles: more columns than tiles of A": dataclasses.replace(SMALL, tile_k=128),
}


@pytest.mark.parametrize("switches", [SPREAD, WARP_ALONE], ids=["spread sends", "sender warp alone"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_tile_is_sent_once(make_case, config, switches):
    case = make_case(256, 128, 256, "float16", (3,))
    sim = _run(case, switches, 3, config, seed=0)
    sends = [event.region for event in sim.events if event.kind == "send" and event.device == 0]
    assert len(sends) == len(set(sends)) == 2 * (256 // config.cta_tile_m) * (128 // config.tile_k)


@pytest.mark.parametrize("n_shard, senders", [(64, {0}), (128, {0, 1}), (256, {0, 1, 2, 3})])
def test_columns_that_send(make_case, n_shard, senders):
    # As many CTAs as columns, and one row: CTA n computes column n.
    sim = _run(make_case(128, 256, n_shard, "float16", (2,)), SPREAD, n_shard // 64)
    sends = [(event.cta, event.region[2][0]) for event in sim.events if event.kind == "send"]
    assert {cta for cta, _ in sends} == senders
    assert all(k_step % len(senders) == cta for cta, k_step in sends)


@pytest.mark.parametrize(
    "switches, signals",
    [
        ({}, 2),
        (SPREAD, 4),
        (WARP_ALONE, 2),
        (SPREAD | WARP_ALONE, 4),
        (SPREAD | WARP_ALONE | {"chunks": 2}, 8),
        (SPREAD | WARP_ALONE | {"chunks": 2, "late_signals": True}, 8),
        (WARP_ALONE | {"chunks": 2, "late_signals": True}, 4),
    ],
)
def test_every_combination_that_makes_sense(make_case, switches, signals):
    case = make_case(256, 256, 128, "float16", (3,))
    sim = _run(case, switches, 4, late=ci.Late(1e-4, device=0, cta=0), seed=1)
    assert _signals(sim, 3) == 2 * signals


@pytest.mark.parametrize(
    "switches, message",
    [
        ({"chunks": 2}, "chunks=2 needs sender_warp=True"),
        (SPREAD | {"chunks": 4, "late_signals": True}, "chunks=4 needs sender_warp=True"),
        ({"late_signals": True}, "late_signals=True needs sender_warp=True and chunks of 2 or more"),
        (WARP_ALONE | {"late_signals": True}, "late_signals=True needs"),
        ({"chunks": 0}, "chunks must be a whole number of at least 1, got 0"),
        ({"chunks": "4", "sender_warp": True}, "got '4'"),
    ],
)
def test_what_makes_no_sense(switches, message):
    with pytest.raises(ValueError, match=message):
        ladder_kernel(**switches)


def test_chunks_that_do_not_divide_the_products(make_case):
    with pytest.raises(ValueError, match="chunks=3 does not divide"):
        _run(make_case(256, 256, 128, "float16", (2,)), SPREAD | WARP_ALONE | {"chunks": 3}, 2)


def test_without_config_the_kernel_chooses(make_case):
    case = make_case(256, 256, 128, "float16", (2,))
    for switches in (SPREAD, SPREAD | WARP_ALONE | {"chunks": 2}):
        _run(case, switches, 2, config=None)


@pytest.mark.parametrize("switches", [SPREAD, WARP_ALONE, SPREAD | WARP_ALONE | {"chunks": 4}])
def test_rungs_lower_for_cuda(switches):
    text = ci.lower_for_cuda(
        lambda lhs, rhs: ladder_kernel(config=TuningConfig(), **switches)(lhs, rhs, "x"),
        jax.ShapeDtypeStruct((2048, 4096), jnp.float16),
        jax.ShapeDtypeStruct((4096, 8192), jnp.float16),
        mesh_axes={"x": 2},
        in_specs=(P("x", None), P(None, "x")),
        out_specs=P(None, "x"),
    )
    assert text.count("mosaic_gpu_v2") == 1


def test_rules_of_the_published_shape():
    plan = Plan(1024, 4096, 4096, TuningConfig(), 132)
    assert (kernels.senders(plan), SpreadSend.signals(plan)) == (16, 128)


# Faults


def _send_without_waiting_at_the_next_use(self, image, m_tile, n_tile, k_step):
    turn = n_tile == k_step % kernels.senders(self.plan)
    pl.when(turn)(lambda: kernels.Send.use(self, image, m_tile, n_tile, k_step))


def _signals_of_one_column(plan):
    return plan.m_tiles


FAULTS = {
    "stage reused while it is sent": ("use", _send_without_waiting_at_the_next_use, "race"),
    "wait for the signals of one column": ("signals", staticmethod(_signals_of_one_column), "race"),
    "wait for one signal too many": ("signals", staticmethod(lambda plan: plan.m_tiles * 2 + 1), "deadlock"),
    "last stage reused while it is sent": ("finish", lambda self, n_tile: None, "race"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_spread_sends_is_caught_and_its_twin_is_not(make_case, monkeypatch, fault):
    name, changed, check = FAULTS[fault]
    case = make_case(256, 192, 128, "float16", (3,))
    judge = lambda seed: verdict(functools.partial(_kernel, **SPREAD), case, seed, 2, SMALL)
    assert {judge(seed) for seed in SEEDS} == {"quiet"}
    monkeypatch.setattr(SpreadSend, name, changed)
    # Some seeds order the threads so that a race does no harm and cannot be told from luck; most do not.
    verdicts = [judge(seed) for seed in SEEDS]
    assert check in verdicts and set(verdicts) <= {check, "quiet"}, verdicts


# Measuring and drawing


def _measured(times_us, incomplete=()):
    """A record of two processes: for each rung kernel times, round by round."""
    rounds = {name: [Rounds(times, times, times, times)] * 2 for name, times in times_us.items()}
    methods = []
    for name, times in times_us.items():
        time = spread(times)
        ratio = spread([0.5 if name in incomplete else 1.0])
        method = MethodResult(name, ladder.TITLES.get(name, name), "measured", "", 0.1, 1e-4, time, time, ratio)
        methods.append(dataclasses.replace(method, kernel_time_us=time, kernel_ratio_to_gemm_only=ratio))
    machine = {"device_kind": "NVIDIA H200"}
    fixed = ("normal(0, 1)", "protocol", "2026-11-30", "command", tuple(methods))
    return Run(Problem(2, 1024, 4096, 4096), machine, {"jax": "0.11.2"}, False, *fixed, "gemm_only", rounds)


TIMES_US = {"gemm_only": [90.0, 92.0], "naive": [147.0, 148.0]}
TIMES_US |= {name: [104.0 - 2 * i, 106.0 - 3 * i] for i, name in enumerate(ladder.SWITCHES)}
TIMES_US |= {"pallas_fast": [93.0, 93.5], ladder.ASIDE: [100.0, 101.0]}


def test_gains_are_formed_within_a_round():
    run = _measured(TIMES_US)
    assert ladder.gain(run, "ladder_spread", "ladder_readable") == spread([2, 3, 2, 3])
    assert ladder.gain(run, "ladder_spread", "missing") is None


def test_the_figure_shows_each_rung_and_its_gain():
    run = _measured(TIMES_US)
    data = ladder_data(run)
    assert [row["name"] for row in data["rows"]] == list(TIMES_US)
    gains = {row["name"]: row["gain_us"] for row in data["rows"]}
    assert {name for name, gained in gains.items() if gained} == set(list(ladder.SWITCHES)[1:])
    assert gains["ladder_warp"][0] == 2.5 and data["roof_us"] == 91
    fig = draw_ladder(run)
    widths = {patch.get_gid(): patch.get_width() for ax in fig.axes for patch in ax.artists + list(ax.patches)}
    assert widths["time-ladder_spread"] == np.median(TIMES_US["ladder_spread"])
    assert widths["gain-ladder_warp"] == 2.5
    assert fig.get_label() == "From 105 to 95 µs in 4 changes; the product alone takes 91"


def test_no_gain_is_shown_against_a_rung_that_was_not_recorded():
    rows = {row["name"]: row for row in ladder_data(_measured(TIMES_US, incomplete=["ladder_spread"]))["rows"]}
    assert "ladder_spread" not in rows and rows["ladder_warp"]["gain_us"] is None
    assert rows["ladder_chunks"]["gain_us"][0] == 2.5


def test_a_record_without_gpus_is_not_drawn():
    run = _measured(TIMES_US)
    skipped = tuple(dataclasses.replace(method, status="simulated") for method in run.methods)
    with pytest.raises(ValueError, match="Nothing in this record was measured"):
        draw_ladder(dataclasses.replace(run, methods=skipped))


def test_each_rung_has_one_change_more():
    for before, after in itertools.pairwise(ladder.SWITCHES.values()):
        assert before.items() < after.items() and len(after) == len(before) + 1


@pytest.mark.slow
def test_the_command_on_simulated_devices(tmp_path):
    command = [sys.executable, "-m", "cmm.ladder", "--simulate", "--devices", "2", "--processes", "2", "--rounds", "1"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    assert path.name == "ladder_simulated_d2_m256_k512_n128_float16.json"
    run = results.load(path)
    ran = {method.name for method in run.methods if method.status == "simulated" and method.error_over_bound <= 1}
    assert ran == {"gemm_only", "naive", *ladder.SWITCHES, ladder.ASIDE}
    assert run.processes == 2 and len(run.rounds["ladder_spread"]) == 2
    assert results.load_all(tmp_path) == []  # It does not count as a run of the methods.
    assert json.loads(path.read_text())["command"].startswith("python -m cmm.ladder --devices 2 --m-shard 256")


def test_the_command_refuses_machines_without_gpus(tmp_path):
    command = [sys.executable, "-m", "cmm.ladder", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    if jax.default_backend() != "cpu":
        pytest.skip("there are GPUs")
    assert done.returncode == 2 and "measures GPUs" in done.stdout
