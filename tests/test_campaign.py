"""A campaign goes on after a stage that fails or hangs, and says what became of each."""

import importlib.util
import time
import types

import pytest

from cmm import campaign
from cmm.campaign import Stage


def _stage(name, code, limit_s=60, **options):
    return Stage(name, ("-c", code), limit_s, **options)


def test_each_stage_has_its_verdict_and_its_log(tmp_path):
    begun = []
    planned = [
        _stage("fine one", "import os; print('hello', os.environ['WHO'])", environment={"WHO": "there"}),
        _stage("broken", "import sys; print('no'); sys.exit(3)"),
        _stage("for more", "print('not run')", least_gpus=8),
    ]
    outcomes = campaign.run(planned, tmp_path, 60, num_gpus=2, begin=lambda stage: begun.append(stage.name))
    assert [outcome.verdict for outcome in outcomes] == ["ok", "exit status 3", "needs 8 GPUs"]
    assert begun == ["fine one", "broken", "for more"]
    assert (tmp_path / "fine_one.txt").read_text() == "hello there\n"
    assert (tmp_path / "broken.txt").read_text() == "no\n"
    assert not (tmp_path / "for_more.txt").exists()


@pytest.mark.parametrize("how", ["", ", process_group=0", ", start_new_session=True"])
def test_a_stage_that_hangs_is_killed_with_what_it_started(tmp_path, how):
    mark = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(mark)!r}).touch()"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]{how}); time.sleep(60)"
    planned = [_stage("hangs", code, limit_s=1), _stage("next", "pass")]
    outcomes = campaign.run(planned, tmp_path, 60, num_gpus=2)
    assert [outcome.verdict for outcome in outcomes] == ["killed after 1 s", "ok"]
    time.sleep(3)
    assert not mark.exists()


def test_no_stage_begins_when_time_is_up(tmp_path):
    (outcome,) = campaign.run([_stage("late", "pass")], tmp_path, 5, num_gpus=2)
    assert outcome.verdict == "no time left"


def test_modules_of_all_stages_are_there(tmp_path):
    for stage in campaign.stages(tmp_path, 7):
        if stage.arguments[0] == "-m":
            assert importlib.util.find_spec(stage.arguments[1]), stage.arguments[1]
    assert len({stage.name for stage in campaign.stages(tmp_path, 7)}) == len(campaign.stages(tmp_path, 7))


def test_without_gpus_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(campaign.shutil, "which", lambda name: None)
    assert campaign.main([]) == 2
    assert "at least 2 GPUs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "visible, count", [(None, 4), ("", 0), ("-1", 0), ("1,3", 2), ("0,-1,1", 1), ("2,9,3", 1), ("GPU-8f,GPU-11", 2)]
)
def test_gpus_are_counted_as_cuda_does(monkeypatch, visible, count):
    listed = "".join(f"GPU {index}: NVIDIA H200 (UUID: GPU-{index})\n" for index in range(4))
    monkeypatch.setattr(campaign.shutil, "which", lambda name: name)
    monkeypatch.setattr(campaign.subprocess, "run", lambda *args, **options: types.SimpleNamespace(stdout=listed))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert campaign._count_gpus() == count


def test_unknown_stage(capsys):
    with pytest.raises(SystemExit):
        campaign.main(["--only", "nonsense"])
    assert "unknown nonsense" in capsys.readouterr().err
