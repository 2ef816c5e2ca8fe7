"""The README shows what is recorded, and its example runs."""

import dataclasses
import pathlib
import re

import jax
import numpy as np

from cmm import loopback, readme, results
from cmm.report import markdown_headline
from cmm.results import MethodResult, Rounds, Spread
from cmm.roofline import Problem, published_problem

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_tables_show_what_is_recorded():
    runs, loops = results.load_all(ROOT / "figures" / "data"), loopback.load_all(ROOT / "figures" / "data")
    assert readme.updated(README, runs, loops) == README, "run `make figures`"
    measured = next(run for run in runs if run.problem == published_problem(4))
    assert f"{measured.method('naive').call_time_us.median:.0f} (" in README


def test_headline_is_that_of_most_gpus_where_the_fast_kernel_ran():
    runs = [run for run in results.load_all(ROOT / "figures" / "data") if run.is_reference_work]
    two = next(run for run in runs if run.problem.axis_size == 2)
    time_us = two.method("pallas_fast").call_time_us.median
    headline = markdown_headline(runs)
    assert "On 2 H200 GPUs, float16" in headline and f"**{time_us:.0f} µs of GPU" in headline
    slower = dataclasses.replace(two.method("pallas_fast"), call_time_us=Spread(777.0, 770.0, 780.0))
    four = dataclasses.replace(two, problem=published_problem(4), methods=(*two.methods[:3], slower))
    assert (
        markdown_headline([*runs, four]).count("On 4 H200 GPUs")
        == markdown_headline([*runs, four]).count("777 µs")
        == 1
    )
    wrong = dataclasses.replace(four, methods=(*two.methods[:3], dataclasses.replace(slower, error_over_bound=2.0)))
    assert markdown_headline([wrong]) == markdown_headline([dataclasses.replace(two, methods=two.methods[:3])]) == ""


def test_runs_of_other_shapes_are_a_compact_table_where_there_are_markers():
    runs = results.load_all(ROOT / "figures" / "data")
    recorded = next(run for run in runs if run.is_reference_work)
    kernel = MethodResult("pallas_fast", "one kernel, fast", "measured", "", 0.1, 1e-4, *[Spread(24.0, 23.0, 25.0)] * 5)
    rounds = {name: [Rounds(call_us=[time_us])] for name, time_us in (("naive", 36.0), ("pallas_fast", 24.0))}
    methods = (*recorded.methods, kernel)
    other = dataclasses.replace(
        recorded, problem=Problem(2, 16, 8192, 512, "bfloat16"), methods=methods, rounds=rounds, processes=3
    )
    text = readme.updated(README, [*runs, other])
    table = text.partition("<!-- beyond the published shape -->")[2].partition("<!-- /beyond")[0]
    (row,) = [line for line in table.splitlines() if line.startswith("| bfloat16, 16 × 8192 × 512")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:2] == ["bfloat16, 16 × 8192 × 512", "2"]
    assert (cells[3], cells[6:8]) == ("24", ["24", "0.67"]) and other.command in table
    # Simulated runs are no measurement; the published shape has its own table.
    assert readme.updated(README, [*runs, dataclasses.replace(other, simulated=True)]) == readme.updated(README, runs)
    bare = README.replace("<!-- beyond the published shape -->", "").replace("<!-- /beyond the published shape -->", "")
    assert "bfloat16, 16 × 8192" not in readme.updated(bare, [*runs, other])


def test_example():
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    assert len(code.splitlines()) <= 11
    names = {}
    # On simulated devices also where there are GPUs: this is about the text, not about speed.
    with jax.default_device(jax.devices("cpu")[0]):
        code = code.replace("jax.device_count()", "4").replace('("x",))', '("x",), devices=jax.devices("cpu")[:4])')
        exec(code, names)
    np.testing.assert_array_equal(np.asarray(names["C"], np.float32), 512.0)


def test_example_of_the_simulator(capsys):
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[1]
    exec(code, {})
    assert re.fullmatch(r"32768 bytes sent by device 0, \d+ events\n", capsys.readouterr().out)


def test_every_linked_file_is_there():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert len(links) > 10
    assert not [link for link in links if not (ROOT / link).exists()]
