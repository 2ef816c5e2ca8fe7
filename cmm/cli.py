"""What the commands of the package share in reading their options."""

import argparse
import shlex
import sys
from collections.abc import Sequence


def positive(text: str) -> int:
    """Reads a whole number of at least 1, for `argparse`."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def repeating(module: str, arguments: Sequence[str] | None = None) -> str:
    """Returns the command that repeats this one, for result files: without `--out`, a folder of one machine.

    Args:
      module: what `python -m` runs.
      arguments: of the command; by default those of this process.
    """
    kept, words = [], iter(sys.argv[1:] if arguments is None else arguments)
    for word in words:
        if word == "--out":
            next(words, None)
        elif not word.startswith("--out="):
            kept.append(word)
    return shlex.join(["python", "-m", module, *kept])
