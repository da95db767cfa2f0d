"""Run one stress by name and report what it found.

A stress is `scripts/stresses/NAME.py` with `run(args) -> dict` and, when it takes more than
--seconds and --seed, `add_arguments(parser)`. Its dict has "ok"; the exit status follows it.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

STRESSES = Path(__file__).resolve().parent / "stresses"


def known() -> list[str]:
    """Return the names of the stresses: the modules in `stresses/` that have a `run`."""
    return sorted(
        path.stem for path in STRESSES.glob("*.py") if "def run(" in path.read_text(encoding="utf-8")
    )


def main() -> int:
    """Parse the command line, run, print; 0: nothing found, 1: a fault, 2: no such stress."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in known() and name not in ("-h", "--help"):
        print(f"stress: no stress {name!r}; there are: {', '.join(known())}", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="stress", description="Long runs that hunt for faults.")
    parser.add_argument("name", help=f"one of: {', '.join(known())}")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to run (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="the seed every choice is drawn from (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    if name in ("-h", "--help"):
        parser.print_help()
        return 0
    stress = importlib.import_module(f"stresses.{name}")
    if hasattr(stress, "add_arguments"):
        stress.add_arguments(parser)
    found = stress.run(parser.parse_args())
    if parser.parse_args().json:
        print(json.dumps(found))
    else:
        table = Table(title=f"stress {name}")
        table.add_column("what")
        table.add_column("value", justify="right")
        for key, value in found.items():
            table.add_row(key, str(value))
        Console().print(table)
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
