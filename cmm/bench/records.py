"""Which record of a problem stays in the output folder? One with more evidence is not replaced by one with less."""

import os
import pathlib

from cmm import results
from cmm.results import Run

# Files of this name are not read by `cmm.results.load_all`.
PARTIAL = "partial_"


def write(run: Run, folder: pathlib.Path, prefix: str) -> tuple[pathlib.Path, Run | None]:
    """Writes a record, as it grows. Whoever is killed meanwhile leaves the old file or the new one, no mixture.

    Args:
      run: what is known so far.
      folder: where records are.
      prefix: of the file's name (`cmm.results.file_name`).

    Returns:
      The path, and the record that has more evidence (`cmm.results.evidence`) and was kept. If there is one, the path
      is beside it, and begins with `PARTIAL`.
    """
    path = folder / results.file_name(run, prefix)
    beside = path.with_name(PARTIAL + path.name)
    before = _read(path)
    kept = before if before and results.evidence(before) > results.evidence(run) else None
    target = beside if kept else path
    temporary = results.save(run, target.with_name(f".{target.name}.tmp"))
    os.replace(temporary, target)
    if not kept:
        beside.unlink(missing_ok=True)
    return target, kept


def _read(path) -> Run | None:
    try:
        return results.load(path)
    except (OSError, ValueError, TypeError, KeyError):  # There is none, or nobody can read it.
        return None
