"""Run one benchmark by name and show what it measured.

A benchmark is `scripts/benches/NAME.py` with a `run(quick: bool) -> dict` whose dict holds
`bench`, `results` (a list of {case, impl, value, unit}) and `ratios`; one with options of its own has
`add_arguments(parser)` too, and then `run(quick, args)`. The method of each is in its own docstring.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from named import Shelf
from rich.console import Console
from rich.table import Table


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


def show(name: str, found: Mapping[str, Any]) -> None:
    """Print a benchmark's object for a person."""
    console = Console()
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of every benchmark."""
    parser.add_argument("--quick", action="store_true", help="a few seconds; rougher figures")


def run(bench: ModuleType, args: argparse.Namespace) -> dict[str, Any]:
    """Run one benchmark."""
    own = hasattr(bench, "add_arguments")
    found: dict[str, Any] = bench.run(args.quick, args) if own else bench.run(args.quick)
    return found


BENCHES = Shelf(
    prog="bench",
    folder="benches",
    description="Benchmarks, peers in the same run.",
    add_arguments=add_arguments,
    run=run,
    show=show,
    ok=lambda found: True,
)

if __name__ == "__main__":
    sys.exit(BENCHES.main())
