"""`python -m cmm` from the outside: what it prints, writes and returns."""

import os
import pathlib
import subprocess
import sys

import pytest

from cmm import __main__ as main_module, job, results

ROOT = pathlib.Path(main_module.__file__).parents[1]


def _cmm(*arguments, cwd, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "PJRT_"))}
    return subprocess.run(
        [sys.executable, "-m", "cmm", *arguments],
        cwd=cwd,
        env=clean | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_simulated_run(tmp_path):
    done = _cmm("--simulate", "--devices", "3", "--m-shard", "5", "--k", "16", "--n-shard", "8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3 simulated CPU devices" in done.stdout and "times mean nothing about GPUs" in done.stdout
    assert "ring, copy engines: skipped, needs GPUs" in done.stdout
    run = results.load(tmp_path / "out" / "run_simulated_d3_m5_k16_n8_float16.json")
    assert [result.name for result in run.methods] == [rung.name for rung in job.RUNGS]
    for result in run.methods:
        assert result.title in done.stdout
        if result.name == "ring_copy_engines":
            assert (result.status, result.reason) == ("skipped", "needs GPUs")
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
        (["--methods", "naive,magic"], "unknown: magic; known: naive, ring"),
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
    wrong = job.METHODS["ring"]
    doubled = type(wrong)(wrong.name, wrong.title, lambda *args, **options: 1.01 * wrong.function(*args, **options))
    monkeypatch.setitem(job.METHODS, "ring", doubled)
    shape = ["--devices", "2", "--m-shard", "4", "--k", "8", "--n-shard", "4"]
    assert main_module.main(["--simulate", *shape, "--dtype", "float32", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out and "Wrong results: ring." in out


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
