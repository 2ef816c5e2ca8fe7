"""`python -m cmm` from the outside: what it prints, writes and returns."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

import cmm
from cmm import __main__ as main_module, results, rungs

ROOT = pathlib.Path(main_module.__file__).parents[1]


# What simulated devices cannot show, and why.
SKIPPED = {
    "gemm_only_torch": "needs GPUs",
    "ring_copy_engines": "needs GPUs",
    "jax_example": "needs Hopper GPUs",
} | {name: "needs Hopper GPUs" for name, method in cmm.METHODS.items() if method.needs_hopper}


def _environment(**changes):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "PJRT_"))}
    return clean | {"PYTHONPATH": str(ROOT)} | changes


def _cmm(*arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, "-m", "cmm", *arguments],
        cwd=cwd,
        env=_environment(**environment),
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_simulated_run(tmp_path):
    done = _cmm("--simulate", "--devices", "3", "--m-shard", "5", "--k", "16", "--n-shard", "8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3 simulated CPU devices" in done.stdout and "times mean nothing about GPUs" in done.stdout
    assert "ring, copy engines: skipped, needs GPUs" in done.stdout
    assert "JAX's example kernel: skipped, needs Hopper GPUs" in done.stdout
    run = results.load(tmp_path / "out" / "run_simulated_d3_m5_k16_n8_float16.json")
    assert [result.name for result in run.methods] == [rung.name for rung in rungs.RUNGS]
    for result in run.methods:
        assert result.title in done.stdout
        if result.name in SKIPPED:
            assert (result.status, result.reason) == ("skipped", SKIPPED[result.name])
        else:
            assert result.status == "simulated" and result.error_over_bound <= 1
            assert result.call_time_us is None, "simulated devices have no GPU time"
    # No rate and no share of the peak is claimed from simulated devices.
    assert "TFLOP/s" not in done.stdout and "%" not in done.stdout
    assert run.command.startswith("python -m cmm --devices 3 --m-shard 5 --k 16 --n-shard 8 --dtype float16")
    written = [line.removeprefix("wrote ") for line in done.stdout.splitlines() if line.startswith("wrote ")]
    assert len(written) > 4 and all((tmp_path / path).stat().st_size > 0 for path in written)
    assert not any("utilization" in path for path in written)


def test_eight_simulated_devices_by_default(tmp_path):
    done = _cmm("--m-shard", "2", "--k", "4", "--n-shard", "2", "--methods", "naive", cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    assert "8 simulated CPU devices" in done.stdout
    assert "ring: skipped, not asked for" in done.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--methods", "naive,magic"], "unknown: magic; known: gemm_only_torch, naive, ring"),
        (["--m-shard", "0"], "must be at least 1, got 0"),
        (["--devices", "-2"], "must be at least 1, got -2"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_bad_options(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main_module.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_wrong_method_is_shown_and_fails(monkeypatch, tmp_path, capsys):
    wrong = cmm.METHODS["ring"]
    doubled = type(wrong)(wrong.name, wrong.title, lambda *args, **options: 1.01 * wrong.function(*args, **options))
    monkeypatch.setitem(cmm.METHODS, "ring", doubled)
    shape = ["--devices", "2", "--m-shard", "4", "--k", "8", "--n-shard", "4"]
    assert main_module.main(["--simulate", *shape, "--dtype", "float32", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out and "Wrong results: ring." in out


def test_every_rung_can_be_asked_for_by_name(tmp_path, capsys):
    shape = ["--devices", "2", "--m-shard", "4", "--k", "8", "--n-shard", "4", "--out", str(tmp_path)]
    assert main_module.main(["--simulate", *shape, "--methods", ",".join(SKIPPED)]) == 0
    run = results.load(next(tmp_path.glob("run_*.json")))
    assert {name: run.method(name).reason for name in SKIPPED} == SKIPPED
    assert run.method("naive").reason == "not asked for"
    assert run.command.endswith(f"--methods {','.join(SKIPPED)} --simulate")


def test_reasons_are_printed_as_they_are(monkeypatch, tmp_path, capsys):
    # Square brackets are markup to the library that prints.
    def refuses(lhs, rhs, axis):
        raise ValueError("lhs must be [m, k]")

    ring = cmm.METHODS["ring"]
    monkeypatch.setitem(cmm.METHODS, "ring", type(ring)(ring.name, ring.title, refuses))
    shape = ["--devices", "2", "--m-shard", "4", "--k", "8", "--n-shard", "4", "--out", str(tmp_path)]
    assert main_module.main(["--simulate", *shape]) == 0
    assert "ring: skipped, lhs must be [m, k]" in capsys.readouterr().out


def test_control_c_ends_it_with_one_line(tmp_path):
    # Far more work than there is time for.
    large = ["--simulate", "--devices", "2", "--m-shard", "4096", "--k", "16384", "--n-shard", "4096"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "cmm", *large],
        cwd=tmp_path,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if "to receive" in line:  # The last line before the work begins.
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "Interrupted." in out and "Traceback" not in out + err


def test_more_devices_than_there_are(capsys, tmp_path):
    assert main_module.main(["--simulate", "--devices", "9", "--out", str(tmp_path)]) == 2
    assert "started its backend with 8 simulated device(s), 9 are needed" in " ".join(capsys.readouterr().out.split())


def test_an_output_folder_that_cannot_be_made_is_found_before_anything_runs(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert main_module.main(["--simulate", "--out", str(tmp_path / "file" / "out")]) == 2
    assert "Not a directory" in capsys.readouterr().out


def test_missing_libraries_are_named():
    code = "import sys; sys.modules['rich'] = None; import cmm.__main__"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.strip().startswith("python -m cmm needs rich") and "pip install '.[cli]'" in done.stderr
