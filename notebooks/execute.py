"""Runs notebooks from top to bottom and saves their outputs in place: `python notebooks/execute.py [NOTEBOOK ...]`.

Without arguments it runs all of them. A notebook that fails, or that prints to stderr, stays as it was.
"""

import pathlib
import sys

import nbformat
from nbclient import NotebookClient
from rich.progress import track

FOLDER = pathlib.Path(__file__).parent
CELL_TIMEOUT_S = 300


def execute(path: pathlib.Path) -> None:
    """Runs one notebook in its own folder and writes it back, without what differs from machine to machine.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell failed.
      ValueError: a cell printed to stderr.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources=resources, record_timing=False).execute()
    for number, cell in enumerate(notebook.cells):
        outputs = cell.get("outputs", [])
        if any(output.get("name") == "stderr" for output in outputs):
            raise ValueError(f"{path.name}: cell {number} printed to stderr.")
        if outputs:
            cell.outputs = _merged(outputs)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    nbformat.write(notebook, path)


def _merged(outputs):
    """Joins stretches of printed text: how a kernel cuts them is chance, and nbval compares them piece by piece."""
    merged = []
    for output in outputs:
        if merged and output.output_type == merged[-1].output_type == "stream":
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


if __name__ == "__main__":
    paths = [pathlib.Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb"))
    for path in track(paths, description="running notebooks"):
        execute(path)
