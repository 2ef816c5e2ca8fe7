"""`python -m cmm.readme`: rewrites the tables of README.md, between their markers, from the recorded runs."""

import argparse
import pathlib
import sys

from cmm import loopback
from cmm.bench.suites_report import beyond_published, markdown_beyond
from cmm.report import (
    markdown_headline,
    markdown_ladder,
    markdown_local,
    markdown_published,
    replace_between_markers,
)
from cmm.results import Run, load_all

# Between these markers stand a few sentences, runs of other shapes, and two kinds of runs of one GPU. A README without
# them has none.
_HEADLINE, _BEYOND, _LOCAL, _LOOP = "headline", "beyond the published shape", "local product", "loop back"


def updated(text: str, runs: list[Run], loops: list[dict] = ()) -> str:
    """Returns the README `text` with its tables made anew from `runs`.

    Args:
      text: the README. Its tables stand between markers.
      runs: recorded runs, at most one per problem and kind of device (see `cmm.results.load_all`).
      loops: records of a GPU that is its own neighbour (see `cmm.loopback`).

    Raises:
      ValueError: a marker is missing, or no run has the shapes of the published table.
    """
    reference = [run for run in runs if run.is_reference_work and not run.simulated]
    local = [run for run in reference if run.problem.axis_size == 1]
    ladder = [run for run in reference if run.problem.axis_size > 1]
    if not ladder:
        raise ValueError("No recorded run has the shapes and dtype of the published table.")
    text = replace_between_markers(text, "measured ladder", markdown_ladder(ladder))
    text = replace_between_markers(text, "published ladder", markdown_published())
    if f"<!-- {_HEADLINE} -->" in text:
        text = replace_between_markers(text, _HEADLINE, markdown_headline(ladder))
    if f"<!-- {_LOCAL} -->" in text:
        text = replace_between_markers(text, _LOCAL, markdown_local(local))
    if f"<!-- {_BEYOND} -->" in text:
        text = replace_between_markers(text, _BEYOND, markdown_beyond(beyond_published(runs)))
    if f"<!-- {_LOOP} -->" in text:
        text = replace_between_markers(text, _LOOP, "\n\n".join(map(loopback.markdown, loops)))
    return text


def main(arguments=None) -> int:
    """Rewrites the README, or with --check says whether it is up to date; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cmm.readme", description=__doc__)
    parser.add_argument("--readme", type=pathlib.Path, default=pathlib.Path("README.md"))
    parser.add_argument("--data", type=pathlib.Path, default=pathlib.Path("figures/data"))
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if it is out of date")
    options = parser.parse_args(arguments)
    text = options.readme.read_text()
    new = updated(text, load_all(options.data), loopback.load_all(options.data))
    if options.check:
        return int(new != text)
    options.readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
