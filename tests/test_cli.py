"""Commands in result files repeat the measurement, and name no folder of a machine."""

import pytest

from cmm import cli


@pytest.mark.parametrize(
    "arguments, command",
    [
        ([], "python -m cmm.trace"),
        (["--account", "--out", "/home/me/out", "--rounds", "20"], "python -m cmm.trace --account --rounds 20"),
        (["--out=/home/me/out", "--kernel", "pallas_fast"], "python -m cmm.trace --kernel pallas_fast"),
        (["--m-shard", "64", "--out"], "python -m cmm.trace --m-shard 64"),
        (["--methods", "naive ring"], "python -m cmm.trace --methods 'naive ring'"),
    ],
)
def test_a_command_is_repeated_without_its_folder(arguments, command, monkeypatch):
    assert cli.repeating("cmm.trace", arguments) == command
    monkeypatch.setattr("sys.argv", ["__main__.py", *arguments])
    assert cli.repeating("cmm.trace") == command
