"""Runs notebooks from top to bottom and saves their outputs in place: `python notebooks/execute.py [NOTEBOOK ...]`.

Without arguments it runs all of them. A notebook that fails, or that prints to stderr, stays as it was.
"""

import pathlib
import sys
import time
from collections.abc import Callable

import nbformat
from nbclient import NotebookClient
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

FOLDER = pathlib.Path(__file__).parent
CELL_TIMEOUT_S = 300


def execute(path: pathlib.Path, report: Callable[[int, int], None] = lambda done, cells: None) -> dict[int, float]:
    """Runs one notebook in its own folder and writes it back, without what differs from machine to machine.

    Args:
      path: the notebook.
      report: called with the number of cells that are done, and of all.

    Returns:
      How many seconds each cell of code took, by its number.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell failed.
      ValueError: a cell printed to stderr.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(FOLDER)}}
    began, seconds = {}, {}

    def begin(cell, cell_index):
        began[cell_index] = time.monotonic()

    def end(cell, cell_index, execute_reply):
        seconds[cell_index] = time.monotonic() - began[cell_index]
        report(cell_index + 1, len(notebook.cells))

    NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        resources=resources,
        record_timing=False,
        on_cell_execute=begin,
        on_cell_executed=end,
    ).execute()
    for number, cell in enumerate(notebook.cells):
        outputs = cell.get("outputs", [])
        if any(output.get("name") == "stderr" for output in outputs):
            raise ValueError(f"{path.name}: cell {number} printed to stderr.")
        if outputs:
            cell.outputs = _merged(outputs)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    nbformat.write(notebook, path)
    return seconds


def _merged(outputs):
    """Joins stretches of printed text: how a kernel cuts them is chance, and nbval compares them piece by piece."""
    merged = []
    for output in outputs:
        if merged and output.output_type == merged[-1].output_type == "stream":
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def _longest(seconds: dict[int, float]) -> str:
    if not seconds:
        return "no code"
    cell = max(seconds, key=seconds.get)
    return f"longest cell {cell}: {seconds[cell]:.0f} s"


def main(names: list[str]) -> None:
    paths = [pathlib.Path(name) for name in names] or sorted(FOLDER.glob("*.ipynb"))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("cells"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, transient=True) as progress:
        for path in paths:
            task = progress.add_task(path.name, total=None)
            seconds = execute(path, lambda done, cells, task=task: progress.update(task, completed=done, total=cells))
            print(f"{path.name}: {sum(seconds.values()):.0f} s, {_longest(seconds)}")
            progress.remove_task(task)


if __name__ == "__main__":
    main(sys.argv[1:])
