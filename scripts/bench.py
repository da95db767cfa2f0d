"""Run one benchmark by name and show what it measured.

A benchmark is `scripts/benches/NAME.py` with a `run(quick: bool) -> dict` whose dict holds
`bench`, `results` (a list of {case, impl, value, unit}) and `ratios`; one with options of its own has
`add_arguments(parser)` too, and then `run(quick, args)`. The method of each is in
its own docstring; this file only finds, runs and prints.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

BENCHES = Path(__file__).resolve().parent / "benches"


def known() -> list[str]:
    """Return the names of the benchmarks: the modules in `benches/` that have a `run`."""
    return sorted(
        path.stem for path in BENCHES.glob("*.py") if "def run(" in path.read_text(encoding="utf-8")
    )


def _figure(value: object) -> str:
    """Write a number with the digits that mean something."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.3g}"


def results_table(title: str, results: Sequence[Mapping[str, Any]]) -> Table:
    """Lay the results out with one row per case and one column per implementation."""
    impls = list(dict.fromkeys(str(row["impl"]) for row in results))
    cases = list(dict.fromkeys((str(row["case"]), str(row["unit"])) for row in results))
    cells = {(str(row["case"]), str(row["unit"]), str(row["impl"])): row["value"] for row in results}
    table = Table(title=title)
    table.add_column("case")
    for impl in impls:
        table.add_column(impl, justify="right")
    table.add_column("unit")
    for case, unit in cases:
        row = [_figure(cells[case, unit, impl]) if (case, unit, impl) in cells else "-" for impl in impls]
        table.add_row(case, *row, unit)
    return table


def show(name: str, found: Mapping[str, Any], console: Console) -> None:
    """Print a benchmark's object for a person."""
    if found.get("results"):
        console.print(results_table(f"bench {name}", found["results"]))
    if found.get("ratios"):
        ratios = Table(title="ratios")
        ratios.add_column("ratio")
        ratios.add_column("value", justify="right")
        for key, value in found["ratios"].items():
            ratios.add_row(key, _figure(value))
        console.print(ratios)
    rest = {key: value for key, value in found.items() if key not in ("bench", "results", "ratios")}
    if rest:
        console.print(rest)


def main() -> int:
    """Parse the command line, run, print; 2 for a name that is not a benchmark."""
    parser = argparse.ArgumentParser(prog="bench", description="Benchmarks, peers in the same run.")
    parser.add_argument("name", nargs="?", help=f"one of: {', '.join(known())}")
    parser.add_argument("--quick", action="store_true", help="a few seconds; rougher figures")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    name = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    if name not in known():
        parser.parse_known_args()  # --help ends here
        print(f"bench: no benchmark {name!r}; there are: {', '.join(known())}", file=sys.stderr)
        return 2
    bench = importlib.import_module(f"benches.{name}")
    own = hasattr(bench, "add_arguments")
    if own:
        bench.add_arguments(parser)
    args = parser.parse_args()
    found = bench.run(args.quick, args) if own else bench.run(args.quick)
    if args.json:
        print(json.dumps(found))
    else:
        show(str(name), found, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
