"""What does `python -m cmm.bench` print of its results?"""

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cmm import report
from cmm.bench.suites_report import RATIO_HEADER, ratio_rows, shape_text, sweep_table
from cmm.results import Run


def print_run(console: Console, run: Run) -> None:
    """Prints the ladder of one problem, its ratios, and why methods did not run."""
    console.print()
    kind = "simulated: times say nothing about GPUs" if run.simulated else "M × K × N per GPU"
    # Columns that no row fills are left out; so is the status where all is measured but what is listed below.
    columns, rows = list(report.HEADER), report.ladder_rows(run)
    if run.simulated:
        columns[-1] = "time on this CPU, µs"
    shown = [
        place
        for place, column in enumerate(columns)
        if any(row[place] for row in rows) and (run.simulated or column != "status")
    ]
    rows = [[row[place] for place in shown] for row in rows]
    _print_table(console, f"{shape_text(run.problem)} ({kind})", [columns[place] for place in shown], rows)
    if ratios := ratio_rows(run):
        _print_table(console, "ratios within a round: median (10th–90th percentile)", RATIO_HEADER, ratios)
    notes = [f"{run.caption()}.", f"{run.protocol}.", report.roof_note(run), report.peers_note(run)]
    for result in (*run.methods, *run.peers):
        status = "" if report.has_times(result) else f"{result.status}, "
        told = f"{status}{result.reason}" if result.reason else ""
        notes += [f"{result.title}: {text}" for text in (told, result.details) if text]
    for note in filter(None, notes):
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def print_sweep(console: Console, runs: Sequence[Run]) -> None:
    """Prints the table of a sweep over rows (see `cmm.bench.suites_report.sweeps`)."""
    console.print()
    p = runs[0].problem
    what = "time on this CPU, µs" if runs[0].simulated else "call / kernel time, µs"
    title = f"{p.axis_size} devices, {p.dtype}, per device K = {p.k}, N = {p.n_shard}: {what}"
    _print_table(console, title, *sweep_table(runs))
    if not runs[0].simulated:
        console.print("* fastest by call time, and what the spread of ratios does not tell apart from it")


def _print_table(console, title, columns, rows) -> None:
    # As the table's own title it would be broken at the width of the table.
    console.print(title, style="bold", highlight=False, soft_wrap=True)
    table = Table()
    for place, column in enumerate(columns):
        table.add_column("\n".join(textwrap.wrap(column, 10)), justify="right" if place else "left", no_wrap=not place)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
