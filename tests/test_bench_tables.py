"""Tables and ratios of merged records: what is marked, what is left out, what is said once."""

import dataclasses

from bench_runs import PROBLEM, make_run

from cmm import results
from cmm.bench import suites_report
from cmm.bench.merge import merge
from cmm.protocol import ON_GPUS
from cmm.results import Rounds


def test_a_tie_with_the_fastest_is_marked_too():
    times = {"gemm_only": ([5.0] * 3, [5.0] * 3), "naive": ([20.0] * 3, [5.0] * 3)}
    times |= {"pallas": ([10.0, 10.0, 10.0], [9.0] * 3), "pallas_fast": ([9.0, 11.0, 12.0], [8.0] * 3)}
    run = merge([make_run(times)], "")
    assert suites_report.fastest(run) == ["pallas", "pallas_fast"]
    clear = merge([make_run(times | {"pallas_fast": ([11.0, 12.0, 12.0], [8.0] * 3)})], "")
    assert suites_report.fastest(clear) == ["pallas"]
    wrong = merge([make_run(times, errors={"pallas": 2.0})], "")
    assert suites_report.fastest(wrong) == ["pallas_fast"]


def test_sweep():
    times = {"gemm_only": ([5.0], [4.0]), "naive": ([20.0], [10.0]), "ring": ([30.0], [10.0])}
    runs = [merge([make_run(times, dataclasses.replace(PROBLEM, m_shard=m))], "") for m in (64, 16, 32)]
    other = merge([make_run(times, dataclasses.replace(PROBLEM, k=8))], "")
    assert suites_report.sweeps([*runs[:2], other]) == []
    (sweep,) = suites_report.sweeps([*runs, other])
    header, rows = suites_report.sweep_table(sweep)
    assert header == ["M per device", "gemm_only", "naive", "ring"]
    assert rows[0] == ["16", "5 / 4", "20 / 10*", "30 / 10"] and [row[0] for row in rows] == ["16", "32", "64"]


def _table(runs):
    text = suites_report.markdown_beyond(runs)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    lead, *how = [line for line in text.splitlines() if line and line[0] not in "|<"]
    return lead, rows[2:], how


def test_table_of_other_shapes_has_the_kernel_that_auto_takes():
    times = {"gemm_only": ([5.0], [4.0]), "naive": ([20.0], [5.0])}
    fast = times | {"pallas": ([7.0], [5.0]), "pallas_fast": ([10.0], [8.0])}
    run = make_run(fast)
    run.rounds["naive"] = [Rounds([20.0], [5.0], [21.0], [40.0])]
    run.rounds["pallas_fast"] = [Rounds([10.0], [8.0], [11.0], [30.0])]
    lead, rows, _ = _table([merge([run], "")])
    # The readable one was faster here.
    assert rows == [["128 × 256 × 512", "2", "4", "8", "2.00", "20", "10", "0.50", "0.75"]]
    assert "float16" in lead and "auto" not in lead
    unfit = merge([make_run(times, skipped={"pallas_fast": "m=16 must be divisible by 64"})], "")
    lead, rows, _ = _table([unfit])
    assert rows[0][3:] == ["none fits", "", "20", "", "", ""] and 'method="auto"' in lead
    left_out = merge([make_run(times, skipped={"pallas_fast": results.NOT_ASKED_FOR})], "")
    wrong = merge([make_run(fast, errors={"pallas_fast": 2.0})], "")
    other = merge([make_run(fast, dataclasses.replace(PROBLEM, dtype="bfloat16"))], "")
    lead, rows, _ = _table([left_out, wrong, other])
    assert [row[3] for row in rows] == ["not measured", "WRONG", "8"] and "auto" not in lead
    assert rows[2][0] == "bfloat16, 128 × 256 × 512" and "float16" not in lead


def test_runs_that_were_measured_alike_are_described_once():
    times = {"gemm_only": ([5.0], [4.0]), "naive": ([20.0], [10.0])}

    def of_rows(m, starts, **changes):
        words = dataclasses.replace(ON_GPUS, short_starts=starts).in_words(tuple(times))
        run = make_run(times, dataclasses.replace(PROBLEM, m_shard=m), protocol=words, **changes)
        return merge([run], f"bench --m-shard {m} --k 256")

    (line,) = _table([of_rows(16, 3), of_rows(32, 4)])[2]
    assert line.startswith("- 16, 32 × 256 × 512: 2 x NVIDIA H200, JAX 0.11.2, normal(0, 1), 2026-01-02. 20 rounds, ")
    assert "; wall time in a program: difference per call; wall time alone: one call per program, 20 and" in line
    assert "one process. What differs" in line and line.endswith("Command: `bench --m-shard M --k 256`.")
    (alike,) = _table([of_rows(16, 3), of_rows(32, 3)])[2]
    assert "3 and 15 starts" in alike and "What differs" not in alike
    assert "--m-shard 16 " in _table([of_rows(16, 3)])[2][0]
    for change in ({"date": "2026-01-03"}, {"versions": {"jax": "0.12"}}, {"machine": {"device_kind": "NVIDIA H100"}}):
        assert len(_table([of_rows(16, 3), of_rows(32, 3, **change)])[2]) == 2
    three = merge([make_run(times, dataclasses.replace(PROBLEM, m_shard=64))] * 3, "bench --m-shard 64 --k 256")
    assert len(_table([of_rows(16, 3), three])[2]) == 2


def test_ratios_of_call_times_to_nccl_and_cublas():
    run = merge([make_run({"gemm_only": ([5.0], [4.0]), "naive": ([20.0], [10.0]), "pallas": ([10.0], [6.0])})], "")
    assert suites_report.ratio_rows(run)[2] == ("pallas", "1.50", "2.00", "0.50")
    assert suites_report.ratio_rows(dataclasses.replace(run, simulated=True)) == []
