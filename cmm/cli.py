"""What the commands of the package share in reading their options."""

import argparse


def positive(text: str) -> int:
    """Reads a whole number of at least 1, for `argparse`."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
