"""stop_regex admission against a generated family of patterns, each searched in texts made to be bad for it.

Every figure is for texts of 32,000 characters. A pattern is *hostile* when a search took over 60 ms, had to
be killed, or made the engine fail; it is *linear* when its worst search took at most 5 ms and no more than
doubled (2.6 times, for noise) with the length. A pattern that is refused is searched only until it is known
not to be linear. `linear_refused` is the share of all linear ones; `linear_refused_<ms>` that of those whose
worst search took so long at most, for one that takes nearly 5 ms here takes more on another machine.
`request_worst_ms` is what checking one request took with the 32 patterns that took the analysis longest.
Times are CPU time of the thread, the least of a few repeats; the slowest of the admitted ones are measured
again at the end.
"""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from outfeed.ring.process import readable

SCRIPTS = Path(__file__).resolve().parent.parent
SEED = 20
COUNT, QUICK_COUNT = 5200, 400
WATCHDOG_S = 10.0
LINEAR_MS, LINEAR_GROWTH = 5.0, 2.6
HOSTILE_MS = 60.0
PER_REQUEST = 32
AGAIN, PASSES = 40, 4
"""How many of the slowest that were admitted are measured again, and how often."""


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
        if readable(process.stdout, WATCHDOG_S):
            line = process.stdout.readline()
            if line:
                found: dict[str, Any] = json.loads(line)
                return found
            if process.wait() >= 0:
                raise RuntimeError(f"the measuring process failed on {pattern!r}: its traceback is above")
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
        measure_again(worker, rows)
    finally:
        worker.close()
    slowest = sorted(rows, key=lambda row: -row.get("analysis_ms", 0.0))[:PER_REQUEST]
    return summary(rows, time.monotonic() - started, request_ms([row["pattern"] for row in slowest]))


def measure_again(worker: Worker, rows: list[dict[str, Any]]) -> None:
    """Measure what took longest of the admitted ones again, some passes later each time: a neighbour on the
    same core can make a search half as long again for a while. The least counts."""
    slow = sorted((row for row in rows if row["admitted"]), key=lambda row: -(row.get("worst_ms") or 0.0))[
        :AGAIN
    ]
    for turn in range(PASSES):
        for row in slow:
            found = worker.measure(row["pattern"], SEED + turn)
            if found.get("worst_ms") is not None:
                row["worst_ms"] = min(row["worst_ms"], found["worst_ms"])


def request_ms(patterns: list[str]) -> float:
    """Return what checking a request with these patterns takes, none of them known, refused or not."""
    from outfeed.ingress.errors import BadRequest
    from outfeed.ingress.sampling import SamplingParams
    from outfeed.ingress.stop_regex import CACHE

    took = []
    while patterns:
        best = math.inf
        for _ in range(3):
            CACHE.clear()
            start = time.thread_time_ns()
            try:
                SamplingParams.parse({"stop_regex": patterns, "max_new_tokens": 1}, vocab_size=1000)
                refused = -1
            except BadRequest as error:
                refused = int(error.field.split("[")[1].split("]")[0])
                together = "together" in error.message
            best = min(best, (time.thread_time_ns() - start) / 1e6)
        took.append(best)
        if refused < 0 or together:
            break
        # One that is refused whatever else is there ends the request: the rest is what is looked for.
        del patterns[refused]
    return max(took)


def _share(linear: list[dict[str, Any]], most_ms: float) -> float:
    """Return which share is refused of those that took so long at most."""
    those = [row for row in linear if row["worst_ms"] <= most_ms]
    return sum(not row["admitted"] for row in those) / max(1, len(those))


def summary(rows: list[dict[str, Any]], seconds: float, request_worst_ms: float) -> dict[str, Any]:
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
        "linear_refused": _share(linear, LINEAR_MS),
        **{f"linear_refused_{ms:g}ms": _share(linear, ms) for ms in (1.0, 2.5, 4.0)},
        "uncompilable_admitted": sum(1 for row in took if "uncompilable" in row),
        "bound_too_small": sum(1 for row in rows if row.get("bound_too_small")),
        "analysis_worst_ms": max(row.get("analysis_ms", 0.0) for row in rows),
        "request_worst_ms": request_worst_ms,
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
