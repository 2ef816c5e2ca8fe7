"""A record with more evidence is not replaced by one with less, and nothing is lost or read in its place."""

import dataclasses

import pytest
from bench_runs import PROBLEM, make_run

from cmm import results
from cmm.bench import __main__ as bench, records
from cmm.bench.merge import merge

ONE_ROUND = {"gemm_only": ([10.0], [10.0]), "naive": ([20.0], [5.0])}
TWO_ROUNDS = {name: (2 * calls, 2 * kernels) for name, (calls, kernels) in ONE_ROUND.items()}


def record(processes, times=ONE_ROUND, **options):
    return merge([make_run(times, **options)] * processes, f"{processes} processes")


@pytest.mark.parametrize(
    "less",
    [record(2), record(2, TWO_ROUNDS), record(3), record(3, TWO_ROUNDS, skipped={"ring": results.NOT_ASKED_FOR})],
)
def test_less_evidence_lies_beside_more(tmp_path, less):
    more = record(3, TWO_ROUNDS)
    assert records.write(more, tmp_path, "bench") == (tmp_path / results.file_name(more, "bench"), None)
    path, kept = records.write(less, tmp_path, "bench")
    assert path.name == "partial_" + results.file_name(less, "bench") and results.load(path) == less and kept == more
    assert results.load_all(tmp_path) == [more]


def test_a_record_that_grows_takes_the_place_of_an_equal_one(tmp_path):
    old = dataclasses.replace(record(3), command="old")
    path, _ = records.write(old, tmp_path, "bench")
    for processes in (1, 2):
        beside, kept = records.write(record(processes), tmp_path, "bench")
        assert kept == old and results.load(beside).processes == processes
    assert records.write(record(3), tmp_path, "bench") == (path, None)
    assert [file.name for file in tmp_path.iterdir()] == [path.name] and results.load(path).command == "3 processes"


def test_what_nobody_can_read_is_replaced(tmp_path):
    path = tmp_path / results.file_name(record(1), "bench")
    for text in ("", "[]", "{}"):
        path.write_text(text)
        assert records.write(record(1), tmp_path, "bench") == (path, None) and results.load(path) == record(1)


def test_the_command_says_what_it_kept(tmp_path, capsys, monkeypatch):
    def collect(plan, processes, silence_s, collected, on_progress, on_result):
        collected.machine, collected.problems = "2 x GPU", [PROBLEM]
        collected.runs[0] = [make_run(ONE_ROUND)]
        on_result(0)

    more, _ = records.write(record(3), tmp_path, "bench")
    monkeypatch.setattr(bench, "collect", collect)
    assert bench.main(["--out", str(tmp_path)]) in (0, 1)
    out = " ".join(capsys.readouterr().out.split())
    assert f"kept {more.name}, which holds more: 3 processes, 3 rounds in all, against 1 and 1" in out
