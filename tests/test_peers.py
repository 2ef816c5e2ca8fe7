"""JAX's example as it is, and with a late CTA: right where it should be, and caught where it is not."""

import collections
import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cmm.interpret as ci
from cmm import devices
from cmm.peers import counting_experiment, counting_fault, jax_example
from cmm.peers.counting_experiment import Setting, per_device, run_delay
from cmm.peers.late_cta import late_cta
from cmm.roofline import Problem

SMALL = jax_example.Config(64, 64, 64, max_concurrent_steps=2, grid_minor_dim="M", epi_tile_m=None, epi_tile_n=None)
EXAMPLE = jax_example.load_example()


def setting(num_devices, ctas, config=SMALL, shape=None, dtype="float16"):
    # One tile of 64 x 128 for each CTA.
    shape = shape or (64 * ctas, 128, 128)
    return Setting(Problem(num_devices, *shape, dtype), config, ctas, simulated=True)


def mesh_of(num_devices):
    return devices.ring_mesh(devices.simulated_devices(8)[:num_devices])


def run(num_devices, ctas, delay_us, repeats=2, **options):
    return run_delay(delay_us, repeats, mesh_of(num_devices), setting(num_devices, ctas, **options))


# --- Right and wrong ---


@pytest.mark.parametrize(
    "num_devices, ctas, dtype",
    [(1, 1, "float16"), (2, 1, "bfloat16"), (3, 1, "float16"), (4, 1, "float16"), (3, 2, "float16")],
)
def test_right_and_quiet_without_delay(num_devices, ctas, dtype):
    result = run(num_devices, ctas, 0, dtype=dtype)
    assert (result.wrong_shards, result.wrong_outputs, result.racy_calls, result.not_finite) == (0, 0, 0, 0)
    assert (result.shards, result.outputs) == (2 * num_devices**2, 2 * num_devices)
    assert 0 < result.largest_error < 0.3 and 0 < result.error_over_bound <= 1
    assert result.wrong_blocks == [] and result.race == "" and result.call_us is None


def test_agrees_with_numpy(make_case):
    case = make_case(128, 128, 128, "float16", (3,))
    with ci.simulate() as sim:
        program = counting_experiment._program(0, case.mesh, setting(3, 2))
        case.assert_right(sim.run(program, case.lhs, case.rhs))


@pytest.mark.parametrize("num_devices", [3, 4])
def test_a_late_cta_is_caught_from_three_devices_on(num_devices):
    result = run(num_devices, 2, 200)
    assert result.racy_calls == result.repeats and "RACE" in result.race
    assert result.wrong_shards and result.wrong_outputs and result.not_finite
    # Wrong are the rows that the late CTA sends, on the devices down the ring from it.
    assert (0, 1) in {(shard, block) for _, shard, block, _ in result.wrong_blocks}
    if num_devices == 3:  # With more, later shards go wrong in turn.
        assert {place[:3] for place in result.wrong_blocks} <= {(1, 0, 1), (2, 0, 1)}
        assert sum(calls for *_, calls in result.wrong_blocks) == result.wrong_shards


def test_two_devices_are_not_fooled():
    result = run(2, 2, 200)
    assert (result.wrong_shards, result.racy_calls) == (0, 0)


def test_finite_errors_are_found_and_placed():
    # One wrong element on device 1 (8 columns), in shard 1 (32 rows), in its row block 1 (16 rows).
    config = jax_example.Config(16, 4, 8, max_concurrent_steps=2)
    mesh, small = mesh_of(2), Setting(Problem(2, 32, 8, 8), config, 2, simulated=True)
    lhs, rhs = devices.random_operands(small.problem, mesh, 0)
    right = np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32)
    for value in (1e3, np.inf, np.nan):
        wrong = right.copy()
        wrong[32 + 20, 8 + 3] = value
        out = jax.device_put(jnp.asarray(wrong, jnp.float16), jax.NamedSharding(mesh, P(None, "x")))
        seen = np.asarray(counting_experiment._comparison(mesh, small)(out, lhs, rhs))
        result = counting_experiment._summary(5, np.stack([seen, seen]))
        assert result.wrong_blocks == [(1, 1, 1, 2)]
        assert (result.wrong_shards, result.shards, result.wrong_outputs, result.outputs) == (2, 8, 2, 4)
        finite = np.isfinite(value)
        assert result.not_finite == (0 if finite else 2)
        assert (result.error_over_bound > 1) == finite and (result.largest_error > 900) == finite


# --- The late CTA ---


def test_only_one_cta_sleeps_and_only_once():
    mesh, small = mesh_of(3), setting(3, 2)
    operands = devices.random_operands(small.problem, mesh, 0)
    for delay_us in (3, 25):
        with ci.simulate(on_race="record") as sim:
            sim.run(counting_experiment._program(delay_us, mesh, small), *operands)
        slept = collections.Counter()
        for event in sim.events:
            if event.kind == "delay":
                slept[event.device, event.cta, event.thread] += event.end_s - event.start_s
        assert slept == {(0, 1, thread): pytest.approx(delay_us * 1e-6) for thread in range(3)}


def test_without_delay_nothing_is_wrapped():
    before = EXAMPLE.hopper_matmul_mgpu
    with late_cta(0):
        assert EXAMPLE.hopper_matmul_mgpu is before


def test_jax_is_as_it_was():
    module, kernel, names = EXAMPLE.hopper_matmul_mgpu, EXAMPLE.hopper_matmul_mgpu.kernel, dict(vars(EXAMPLE))
    count = jax.device_count()
    with pytest.raises(ZeroDivisionError):
        with jax_example.pretend_machine(count + 1, 2), late_cta(7):
            assert EXAMPLE.jax.device_count() == EXAMPLE.jax.local_device_count() == count + 1
            assert EXAMPLE.jax.devices()[0].core_count == 2
            assert EXAMPLE.hopper_matmul_mgpu is not module
            assert EXAMPLE.hopper_matmul_mgpu.TuningConfig is module.TuningConfig
            assert module.kernel is kernel and jax.device_count() == count
            raise ZeroDivisionError
    assert EXAMPLE.jax is jax and vars(EXAMPLE) == names and module.kernel is kernel


@pytest.mark.parametrize("delay_us", [0, 50, 1000])
def test_lowers_for_cuda_at_the_published_shapes(delay_us):
    published = setting(4, 132, jax_example.PUBLISHED_CONFIG, (1024, 4096, 4096))
    text = ci.lower_for_cuda(
        per_device(delay_us, published),
        jax.ShapeDtypeStruct((4 * 1024, 4096), jnp.float16),
        jax.ShapeDtypeStruct((4096, 4 * 4096), jnp.float16),
        mesh_axes={"x": 4},
        in_specs=(P("x"), P(None, "x")),
        out_specs=P(None, "x"),
    )
    assert text.count("mosaic_gpu_v2") == 1
    assert text.count("nanosleep") == (1 if delay_us else 0)


# --- What the example refuses, and what it needs ---


def test_published_config_is_what_the_example_takes():
    made = jax_example._tuning_config(EXAMPLE, jax_example.PUBLISHED_CONFIG)
    dimension = EXAMPLE.MatmulDimension
    assert (made.tile_m, made.tile_n, made.tile_k, made.max_concurrent_steps) == (128, 128, 64, 4)
    assert (made.grid_minor_dim, made.grid_tile_width, made.wg_dimension) == (dimension.M, 8, dimension.N)
    assert (made.epi_tile_m, made.epi_tile_n, made.cluster_dimension) == (64, 64, None)
    assert (jax_example.PUBLISHED_CONFIG.cta_tile_m, jax_example.PUBLISHED_CONFIG.cta_tile_n) == (128, 256)


def test_errors_of_the_example_come_through(make_case):
    case = make_case(64, 64, 128, "float16", (5,))
    program = case.program(lambda *args, **options: jax_example.all_gather_matmul(*args, config=SMALL, **options))
    with pytest.raises(ValueError, match="over all devices"):
        program(case.lhs, case.rhs)
    float32 = [operand.astype("float32") for operand in (case.lhs, case.rhs)]
    with pytest.raises(NotImplementedError, match="Only f16 and bf16"), ci.simulate() as sim:
        sim.run(counting_experiment._program(0, case.mesh, setting(5, 1)), *float32)


def _python(code):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "PJRT_"))}
    root = str(pathlib.Path(counting_fault.__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, clean.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )


def test_without_absl_the_error_says_so():
    done = _python(
        "import sys; sys.modules['absl'] = None\n"
        "from cmm.peers import counting_fault, jax_example\n"
        "try: jax_example.all_gather_matmul(None, None, 'x')\n"
        "except ImportError as error: print(error)\n"
        "sys.exit(counting_fault.main(['--simulate']))"
    )
    assert done.returncode == 2, done.stderr
    message = "JAX's example kernel needs absl-py, which JAX does not install: pip install absl-py"
    assert done.stdout.splitlines() == [message, message]


def test_a_jax_without_the_example(monkeypatch):
    monkeypatch.setattr(jax_example, "_MODULE", "jax.experimental.no_such_example")
    with pytest.raises(ImportError, match="does not offer jax.experimental.no_such_example"):
        jax_example.load_example()


# --- The command ---


def test_the_command(tmp_path, capsys):
    path = tmp_path / "new" / "fault.json"
    arguments = ["--simulate", "--devices", "3", "--delays", "0,100", "--repeats", "2", "--out", str(path)]
    assert counting_fault.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "3 simulated CPU devices, 2 CTAs each" in printed and "RACE on output 1 of device" in printed
    assert "0 µs: 0 of 18 shards wrong" in printed and "block 1 of shard 0" in printed
    text = path.read_text()
    assert str(tmp_path) not in text and str(pathlib.Path.home()) not in text and os.sep + "site-packages" not in text
    record = json.loads(text)
    assert record["problem"] == {"axis_size": 3, "m_shard": 128, "k": 128, "n_shard": 128, "dtype": "float16"}
    assert record["command"] == ("python -m cmm.peers.counting_fault --devices 3 --delays 0,100 --repeats 2 --simulate")
    assert record["simulated"] and record["versions"]["jax"] == jax.__version__ and record["date"]
    quiet, wrong = record["results"]
    assert (quiet["delay_us"], quiet["wrong_shards"], quiet["racy_calls"]) == (0, 0, 0)
    assert (wrong["delay_us"], wrong["racy_calls"]) == (100, 2) and wrong["wrong_shards"]


def test_results_are_kept_after_each_delay(tmp_path, monkeypatch):
    def hang_later(delay_us, *args):
        if delay_us == 7:
            raise KeyboardInterrupt
        return run_delay(delay_us, *args)

    monkeypatch.setattr(counting_fault, "run_delay", hang_later)
    path = tmp_path / "fault.json"
    with pytest.raises(KeyboardInterrupt):
        counting_fault.main(["--simulate", "--delays", "0,7", "--repeats", "1", "--out", str(path)])
    record = json.loads(path.read_text())
    assert record["delays_us"] == [0, 7] and [result["delay_us"] for result in record["results"]] == [0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--delays", "0,-5"], "must be at least 0, got -5"),
        (["--delays", "fast"], "must be whole µs with commas between them, got fast"),
        (["--repeats", "0"], "must be at least 1, got 0"),
        (["--devices", "0"], "must be at least 1, got 0"),
    ],
)
def test_bad_options(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        counting_fault.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "capability, kind, found, there, message",
    [
        ("8.0", "NVIDIA A100", 4, 4, "runs on Hopper GPUs only, found NVIDIA A100"),
        ("9.0", "NVIDIA H200", 2, 2, "needs at least 3 GPUs, got 2 x NVIDIA H200"),
        ("9.0", "NVIDIA H200", 3, 4, "works on all 4 GPUs that the process sees, not on 3 of them"),
    ],
)
def test_machines_that_do_not_do(monkeypatch, capsys, capability, kind, found, there, message):
    gpu = types.SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)
    monkeypatch.setattr(devices, "find_devices", lambda *_, **__: [gpu] * found)
    monkeypatch.setattr(jax, "device_count", lambda: there)
    assert counting_fault.main([]) == 2
    assert message in " ".join(capsys.readouterr().out.split())


def test_more_gpus_than_there_are(monkeypatch, capsys):
    def refuse(*_, **__):
        raise ValueError("9 devices were asked for, 4 are there")

    monkeypatch.setattr(devices, "find_devices", refuse)
    assert counting_fault.main(["--devices", "9"]) == 2
    assert "9 devices were asked for, 4 are there" in capsys.readouterr().out
