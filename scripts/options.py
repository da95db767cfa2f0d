"""Numbers on the command lines of scripts, with what they may be."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import TypeVar

MAX_S = 31_536_000.0
"""A year. In nanoseconds some hundred years are more than a clock counts."""
MAX_SEED = (1 << 64) - 1

Number = TypeVar("Number", int, float)


def between(least: Number, most: Number) -> Callable[[str], Number]:
    """Make what reads a number of that range for argparse: whole ones if the bounds are."""
    kind = type(least)

    def read(text: str) -> Number:
        with contextlib.suppress(ValueError):
            if least <= (value := kind(text)) <= most:  # a nan is not
                return value
        what = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: give {what} from {least:,} to {most:,}")

    return read
