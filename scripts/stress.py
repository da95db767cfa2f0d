"""Run one stress by name and report what it found.

A stress is `scripts/stresses/NAME.py` with `run(args) -> dict` and, when it takes more than
--seconds and --seed, `add_arguments(parser)`. Its dict has "ok"; the exit status follows it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from named import Shelf
from options import MAX_S, MAX_SEED, between
from rich.console import Console
from rich.table import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of every stress."""
    parser.add_argument(
        "--seconds", type=between(0.0, MAX_S), default=60.0, help="how long to run (default 60)"
    )
    parser.add_argument(
        "--seed", type=between(0, MAX_SEED), default=1, help="the seed every choice is drawn from (default 1)"
    )


def run(stress: ModuleType, args: argparse.Namespace) -> dict[str, Any]:
    """Run one stress."""
    found: dict[str, Any] = stress.run(args)
    return found


def show(name: str, found: Mapping[str, Any]) -> None:
    """Print what a stress found for a person."""
    table = Table(title=f"stress {name}")
    table.add_column("what")
    table.add_column("value", justify="right")
    for key, value in found.items():
        table.add_row(key, str(value))
    Console().print(table)


STRESSES = Shelf(
    prog="stress",
    folder="stresses",
    description="Long runs that hunt for faults. Exit status 1: one was found; 2: no such stress.",
    add_arguments=add_arguments,
    run=run,
    show=show,
    ok=lambda found: bool(found["ok"]),
)

if __name__ == "__main__":
    sys.exit(STRESSES.main())
