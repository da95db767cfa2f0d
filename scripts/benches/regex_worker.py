"""Measures patterns in a process of its own, which a watchdog may kill: nothing interrupts a regex search.

Reads one JSON line per pattern from stdin and answers each with one. The parent kills the process when an
answer takes too long: that pattern then is hostile.
"""

import itertools
import json
import random
import re
import signal
import sys
import time
import warnings
from typing import Any

from benches.regex_adversary import Adversary
from benches.regex_family import texts, words
from outfeed.ingress.stop_regex import UNBOUNDED, Admission, analyse

LENGTH = 32_000
LONG, DRAWS = 4000, 4
GIVE_UP_MS = 60.0
GIVE_UP_SHORT_MS = 2.0
NOT_LINEAR_MS = 6.0
SURELY_FAST_MS = 1.5
SEARCH_ALARM_S = 1.0


def once(compiled: "re.Pattern[str]", text: str) -> float:
    """Return the CPU milliseconds of one search."""
    start = time.thread_time_ns()
    compiled.search(text)
    return (time.thread_time_ns() - start) / 1e6


def least(compiled: "re.Pattern[str]", text: str, repeats: int) -> float:
    """Return the least of some repeats: what the search needs when nothing disturbs it."""
    return min(once(compiled, text) for _ in range(repeats))


def measure(pattern: str, seed: int) -> dict[str, Any]:
    """Analyse one pattern and search the texts that are bad for it."""
    found: dict[str, Any] = {"pattern": pattern, "admitted": False}
    analysis = []
    known = None
    for _ in range(3):
        start = time.thread_time_ns()
        try:
            known = analyse(pattern)
        except ValueError as error:
            found["error"] = str(error)
        analysis.append((time.thread_time_ns() - start) / 1e6)
    found["analysis_ms"] = min(analysis)
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError, RuntimeError) as error:
        found["uncompilable"] = str(error)
        found["admitted"] = known is not None and known.refusal(LENGTH) is None
        return found
    if known is None:
        found["worst_ms"] = None
        return found
    found["admitted"] = known.refusal(LENGTH) is None
    found["bound_ms"] = None if known.cost is None else known.cost.milliseconds(LENGTH)
    found["degree"] = None if known.cost is None else known.cost.degree
    try:
        worst, growth = _search(compiled, pattern, seed, careful=not found["admitted"])
        found["worst_ms"], found["growth"] = worst, growth
        # What is slow is not searched in texts that it may never come back from.
        pieces = [(0, 100), (7, 60), (0, 13)] if worst < GIVE_UP_MS else [(0, 13), (5, 15)]
        signal.setitimer(signal.ITIMER_REAL, SEARCH_ALARM_S)
        found["bound_too_small"] = _bound_fails(compiled, pattern, known, seed, pieces)
    except SystemError:
        found["worst_ms"], found["killed"] = None, True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return found


def bad_texts(
    pattern: str, adversary: Adversary, length: int, seed: int, careful: bool
) -> "itertools.chain[str]":
    """Return texts of a length that are bad for a pattern, many of them when it was not admitted."""
    draws = DRAWS if careful and length >= LONG else 1
    rngs = [random.Random(seed + length + draw) for draw in range(draws)]
    return itertools.chain(
        *(adversary.texts(length, words(pattern, rng, 3)) for rng in rngs[:1]),
        *(texts(pattern, length, rng, 40 if careful else 17) for rng in rngs),
    )


def _search(compiled: "re.Pattern[str]", pattern: str, seed: int, careful: bool) -> tuple[float, float]:
    """Return the worst time at the full length and how much it grew over the last doubling.

    What is not admitted is approached by doubling, each time with other texts, and left when it is slow
    already.
    """
    worst, worst_text = 0.0, ""
    adversary = Adversary(pattern)
    for length in [14, 18, 22, 26, 32, 64, 250, 1000, 4000, LENGTH] if careful else [LENGTH]:
        worst = 0.0
        give_up = GIVE_UP_MS if not careful else NOT_LINEAR_MS if length > 64 else GIVE_UP_SHORT_MS
        for text in bad_texts(pattern, adversary, length, seed, careful):
            # The default action of the alarm ends this process, which nothing else could do during a search.
            signal.setitimer(signal.ITIMER_REAL, SEARCH_ALARM_S)
            took = once(compiled, text)
            if took > max(worst, SURELY_FAST_MS):
                took = min(took, least(compiled, text, 4 if took < give_up else 1))
            if took > worst:
                worst, worst_text = took, text
            if worst > give_up:
                # Slow before the full length: at it, at least linearly slower.
                return worst * LENGTH / length, 4.0
        signal.setitimer(signal.ITIMER_REAL, 0)
    if worst > SURELY_FAST_MS:
        worst = min(worst, least(compiled, worst_text, 12))
    half = least(compiled, worst_text[: LENGTH // 2 - 1] + worst_text[-1:], 5)
    return worst, worst / half if worst > 0.05 and half > 0 else 2.0


def _bound_fails(
    compiled: "re.Pattern[str]", pattern: str, known: Admission, seed: int, pieces: list[tuple[int, int]]
) -> bool:
    """Say whether a match is longer than its bound, or is lost in a text cut to the window."""
    max_len, window = known.max_len, known.window
    for text in texts(pattern, 300, random.Random(seed + 1)):
        for begin, end in pieces:
            piece = text[begin:end]
            match = compiled.search(piece)
            if match is None:
                continue
            if len(match.group()) > max_len:
                return True
            shown = piece[: match.end()]
            again = compiled.search(shown)
            if again is not None and window < UNBOUNDED and again.end() == len(shown):
                cut = shown[-window:]
                if len(cut) < len(shown) and compiled.search(cut) is None:
                    return True
    return False


def main() -> None:
    """Answer lines until there are no more."""
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(measure(job["pattern"], job["seed"])), flush=True)


if __name__ == "__main__":
    main()
