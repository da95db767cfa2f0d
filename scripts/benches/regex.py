"""stop_regex admission against a generated family of patterns, each searched in texts made to be bad for it.

Every figure is for texts of 32,000 characters. A pattern is *hostile* when a search took over 60 ms or had
to be killed; it is *linear* when its worst search took at most 5 ms and no more than doubled (2.6 times,
for noise) with the length. A pattern that is refused is searched only until it is known not to be linear.
Times are CPU time of the searching thread, the least of a few repeats.
"""

import json
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent.parent
SEED = 20
COUNT, QUICK_COUNT = 5200, 400
WATCHDOG_S = 10.0
LINEAR_MS, LINEAR_GROWTH = 5.0, 2.6
HOSTILE_MS = 60.0


class Worker:
    """The measuring process, started again when it had to be killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def measure(self, pattern: str, seed: int) -> dict[str, Any]:
        """Return what the worker found, or that it had to be killed."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benches.regex_worker"],
                cwd=SCRIPTS,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"pattern": pattern, "seed": seed}) + "\n")
        process.stdin.flush()
        if select.select([process.stdout], [], [], WATCHDOG_S)[0]:
            line = process.stdout.readline()
            if line:
                found: dict[str, Any] = json.loads(line)
                return found
        self.close()
        return {"pattern": pattern, "killed": True}

    def close(self) -> None:
        """Kill the process if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def admitted(pattern: str) -> bool:
    """Ask the admission itself: the worker that was killed could not say."""
    from outfeed.ingress.stop_regex import analyse

    try:
        return analyse(pattern).refusal(32_000) is None
    except ValueError:
        return False


def run(quick: bool) -> dict[str, Any]:
    """Measure the family and return the figures, with the patterns behind each fault."""
    from benches.regex_family import patterns

    count = QUICK_COUNT if quick else COUNT
    started = time.monotonic()
    worker = Worker()
    rows = []
    try:
        for index, pattern in enumerate(patterns(count, SEED)):
            row = worker.measure(pattern, SEED + index)
            if row.get("killed"):
                row["admitted"] = admitted(pattern)
            rows.append(row)
            if sys.stderr.isatty():
                print(f"\r{index + 1}/{count} patterns", end="", file=sys.stderr)
    finally:
        worker.close()
    return summary(rows, time.monotonic() - started)


def summary(rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Fold the rows into the bench's object."""
    took = [row for row in rows if row["admitted"]]
    searched = [row for row in rows if row.get("worst_ms") is not None]
    hostile = [row for row in rows if row.get("killed") or (row.get("worst_ms") or 0.0) > HOSTILE_MS]
    linear = [row for row in searched if row["worst_ms"] <= LINEAR_MS and row["growth"] <= LINEAR_GROWTH]
    refused = [row for row in linear if not row["admitted"]]
    slow = sorted((row for row in took if row.get("worst_ms")), key=lambda row: -row["worst_ms"])
    figures = {
        "patterns": len(rows),
        "admitted": len(took),
        "hostile": len(hostile),
        "linear": len(linear),
        "admitted_worst_ms": slow[0]["worst_ms"] if slow else 0.0,
        "hostile_admitted": sum(row["admitted"] for row in hostile),
        "linear_refused": len(refused) / max(1, len(linear)),
        "uncompilable_admitted": sum(1 for row in took if "uncompilable" in row),
        "bound_too_small": sum(1 for row in rows if row.get("bound_too_small")),
        "analysis_worst_ms": max(row.get("analysis_ms", 0.0) for row in rows),
        "seconds": round(seconds, 1),
    }
    return {
        "bench": "regex",
        **figures,
        "results": [
            {"case": name, "impl": "outfeed", "value": value, "unit": "ms" if name.endswith("_ms") else ""}
            for name, value in figures.items()
        ],
        "ratios": {},
        "slowest_admitted": [[row["pattern"], row["worst_ms"], row["bound_ms"]] for row in slow[:5]],
        "under_estimated": [
            [row["pattern"], row["worst_ms"], row["bound_ms"]]
            for row in slow
            if row["worst_ms"] > max(0.3, row["bound_ms"])
        ][:20],
        "linear_but_refused": [
            [row["pattern"], row["worst_ms"], row["bound_ms"], row.get("error", "")] for row in refused[:40]
        ],
        "hostile_but_admitted": [row["pattern"] for row in hostile if row["admitted"]],
        "bounds_that_fail": [row["pattern"] for row in rows if row.get("bound_too_small")],
    }
