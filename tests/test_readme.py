"""The README shows what is recorded, and its example runs."""

import pathlib
import re

import jax
import numpy as np

from cmm import readme, results
from cmm.roofline import published_problem

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_tables_show_what_is_recorded():
    runs = results.load_all(ROOT / "figures" / "data")
    assert readme.updated(README, runs) == README, "run `make figures`"
    measured = next(run for run in runs if run.problem == published_problem(4))
    assert f"{measured.method('naive').call_time_us.median:.0f} (" in README


def test_example():
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    assert len(code.splitlines()) <= 11
    names = {}
    # On simulated devices also where there are GPUs: this is about the text, not about speed.
    with jax.default_device(jax.devices("cpu")[0]):
        code = code.replace("jax.device_count()", "4").replace('("x",))', '("x",), devices=jax.devices("cpu")[:4])')
        exec(code, names)
    np.testing.assert_array_equal(np.asarray(names["C"], np.float32), 512.0)


def test_every_linked_file_is_there():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert len(links) > 10
    assert not [link for link in links if not (ROOT / link).exists()]
