"""A ring kernel on one simulated device that is its own neighbour, and the command that measures it."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import cmm.interpret as ci
from cmm import loopback
from cmm.hopper import TuningConfig
from cmm.hopper.loopback import looped_back, plan_loop
from cmm.hopper.rounds import Rounds
from cmm.roofline import Problem

SMALL = TuningConfig(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2)


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("kernel, n", [("pallas", 128), ("pallas_fast", 128), ("pallas_fast", 64)])
def test_every_step_gives_the_product(kernel, n, steps):
    gpu, rng = jax.devices("cpu")[0], np.random.default_rng(0)
    plan = plan_loop(kernel, steps, 128, 256, n, "float16", gpu, 2, SMALL)
    lhs, rhs = (rng.standard_normal(shape).astype("float16") for shape in ((128, 256), (256, n)))
    with ci.simulate(core_count=2) as sim:  # Raises if there is a race or a deadlock.
        out, slots = sim.run(looped_back(kernel, plan, steps, "float16", gpu), lhs, rhs)
    product = lhs.astype(np.float32) @ rhs.astype(np.float32)
    np.testing.assert_allclose(np.asarray(out, np.float32), np.tile(product, (steps, 1)), rtol=2e-3, atol=2e-2)
    np.testing.assert_array_equal(np.asarray(slots), np.tile(lhs, (steps - 1, 1, 1)))
    assert Rounds(plan, steps).span_steps == (n == 64)


def test_one_step_is_no_loop():
    with pytest.raises(ValueError, match="2 steps or more, got 1"):
        plan_loop("pallas", 1, 128, 256, 128, "float16", jax.devices("cpu")[0], 132, SMALL)


def test_lowers_for_cuda():
    gpu = jax.devices("cpu")[0]
    for kernel in loopback.KERNELS:
        plan = plan_loop(kernel, 4, 256, 4096, 4096, "float16", gpu, 132)
        program = looped_back(kernel, plan, 4, "float16", gpu)
        shapes = [jax.ShapeDtypeStruct(shape, "float16") for shape in ((256, 4096), (4096, 4096))]
        text = program.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("mosaic_gpu_v2") == 1


def test_needs_a_hopper_gpu(capsys, tmp_path):
    assert loopback.main(["--out", str(tmp_path / "out")]) == 2
    assert "needs a Hopper GPU, found cpu" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_bad_kernel_and_dtype():
    gpu = jax.devices("cpu")[0]
    with pytest.raises(ValueError, match="kernel='naive' is unknown. Known kernels: 'pallas', 'pallas_fast'"):
        plan_loop("naive", 2, 128, 256, 128, "float16", gpu, 132)
    with pytest.raises(NotImplementedError, match="The kernel takes operands in float16 or bfloat16, got float32"):
        plan_loop("pallas", 2, 128, 256, 128, "float32", gpu, 132)


class _Gpu:
    """What the command asks of a GPU."""

    compute_capability, device_kind, platform = "9.0", "NVIDIA H200", "gpu"


def _command(monkeypatch, folder, measure, *more):
    monkeypatch.setattr(jax, "devices", lambda: [_Gpu()])
    monkeypatch.setattr(loopback.devices, "ring_mesh", lambda gpus: None)
    monkeypatch.setattr(loopback.provenance, "machine", lambda mesh: {"device_kind": "NVIDIA H200"})
    monkeypatch.setattr(loopback, "measure", measure)
    return loopback.main(["--out", str(folder), "--rounds", "2", "--steps", "2", *more])


def _row(problem, gpu, rounds):
    methods = {name: {"rounds_us": [float(problem.m_shard)] * rounds} for name in ("gemm_only", *loopback.KERNELS)}
    return {"problem": dataclasses.asdict(problem), "methods": methods}


def test_what_is_measured_stays(monkeypatch, tmp_path):
    def fails_late(problem, gpu, rounds):
        if problem.m_shard == 256:
            raise RuntimeError("lost events")
        return _row(problem, gpu, rounds)

    with pytest.raises(RuntimeError, match="lost events"):
        _command(monkeypatch, tmp_path, fails_late, "--m-shard", "64", "128", "256")
    (record,) = loopback.load_all(tmp_path)
    assert [row["problem"]["m_shard"] for row in record["rows"]] == [64, 128]
    assert "2 of 3 problems, then it ended" in loopback.markdown(record)
    # Fewer problems do not take the place of more.
    assert _command(monkeypatch, tmp_path, _row, "--m-shard", "512") == 0
    assert len(loopback.load_all(tmp_path)[0]["rows"]) == 2
    assert _command(monkeypatch, tmp_path, _row, "--m-shard", "64", "128", "256") == 0
    assert "of 3 problems" not in loopback.markdown(loopback.load_all(tmp_path)[0])


def test_suites_in_one_record(monkeypatch, tmp_path):
    more = ("--suite", "llama3-8b", "W1", "--steps", "2", "4")
    assert _command(monkeypatch, tmp_path, _row, *more) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["loopback_h200_llama3-8b-W1_bfloat16-float16.json"]
    (record,) = loopback.load_all(tmp_path)
    shapes = [tuple(row["problem"].values())[:4] for row in record["rows"]]
    llama = [(2, 2048, 4096, 7168), (2, 4096, 4096, 7168), (4, 1024, 4096, 3584), (4, 2048, 4096, 3584)]
    assert shapes == [*llama, *[(2, 1024, 4096, 4096)] * 2, *[(4, 1024, 4096, 4096)] * 2]
    assert "| bfloat16, 1024 × 4096 × 4096 | 2 |" in loopback.markdown(record)


def test_suite_that_does_not_divide(monkeypatch, tmp_path, capsys):
    assert _command(monkeypatch, tmp_path, _row, "--suite", "llama3-8b", "--steps", "3") == 2
    assert "do not divide by 3 devices" in " ".join(capsys.readouterr().out.split())


def test_out_is_a_file(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert _command(monkeypatch, tmp_path / "file", _row) == 2
    assert "File exists" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["--steps", "1"], ["--steps", "x"], ["--m-shard", "0"], ["--dtype", "float32"], ["--suite", "W1", "--k", "64"]],
)
def test_bad_options(arguments):
    with pytest.raises(SystemExit):
        loopback.main(arguments)


def test_table_of_a_record():
    methods = {
        "pallas": {"skipped": "no tile fits"},
        "pallas_fast": {"rounds_us": [30.0, 33.0], "right": False, "error_over_bound": 2.0},
        "gemm_only": {"rounds_us": [20.0, 30.0]},
    }
    rows = [{"problem": dataclasses.asdict(Problem(4, 64, 1, 2)), "methods": methods}]
    record = {"distribution": "normal", "date": "a day", "protocol": "P", "command": "c", "asked": 1, "rows": rows}
    record |= {"machine": {"device_kind": "GPU"}, "versions": {"jax": "0"}}
    text = loopback.markdown(json.loads(json.dumps(record)))
    assert "| 64 × 1 × 2 | 4 | 25.0 | none fits | 31.5 WRONG | 1.30 (1.14–1.46) |" in text
    assert "1 x GPU, JAX 0, float16, normal, a day. P. Command: `c`." in text
