"""Hunts for stop patterns that are admitted and hurt, random ones of every construct.

What explodes is hidden anywhere in them, and whatever is admitted for a short output is searched in short
texts, and in texts as long as it is admitted for. Those are made worse step by step: the one that took
longest is changed a little.

A search that takes far longer than its bound, that does not come back, or that makes the engine fail is a
fault. Times are the least of some repeats, and what is far longer is generous: a machine that is busy with
something else finds nothing.
"""

import argparse
import multiprocessing
import random
import re
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any

from benches.regex_family import Patterns, texts
from options import between
from outfeed.ingress.stop_regex import Admission, analyse

OUTPUT = 400
"""Characters that a pattern must be admitted for."""
TEXT = 60
FAR_LONGER, SLACK_NS, REPEATS = 2.5, 20_000, 8
HUNG_S = 20.0
CHARACTERS = "aabbx1 A_\n!"
RARE = "ſK😀½é"
LONG, CLIMBED = 32_000, 10
Parts = tuple[str, str, str]
"""How a text begins, what comes again and again, how it ends."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say how many of the rows explode."""
    parser.add_argument(
        "--bombs", type=between(0.0, 1.0), default=0.06, help="share of rows that explode (default 0.06)"
    )


def _texts(pattern: str, rng: random.Random) -> list[str]:
    found = texts(pattern, TEXT, rng, 14)
    for _ in range(14):
        head, word = ("".join(rng.choice(CHARACTERS) for _ in range(rng.randint(n, 4))) for n in (0, 1))
        found.append(head + (word * TEXT)[:TEXT] + rng.choice(["", "!", "\n"]))
    return found


def _changed(parts: Parts, rng: random.Random) -> Parts:
    """Change one character of a text's parts, or leave one out or put one in."""
    at = rng.choice((0, 1, 1, 1, 2))
    part = list(parts[at])
    place = rng.randrange(len(part) + 1)
    part[place : place + rng.randint(0, 1)] = rng.choice(["", *CHARACTERS, *CHARACTERS, *RARE])
    changed = [*parts]
    changed[at] = "".join(part)
    return changed[0], changed[1] or "a", changed[2]


def _of_length(parts: Parts, length: int) -> str:
    head, body, end = parts
    return head + (body * (length // len(body) + 1))[: max(0, length - len(head) - len(end))] + end


def _took(regex: "re.Pattern[str]", text: str) -> int:
    start = time.thread_time_ns()
    regex.search(text)
    return time.thread_time_ns() - start


class _Fault(Exception):
    """Says what is wrong with a search."""


def _checked(regex: "re.Pattern[str]", known: Admission, text: str) -> int:
    """Return what a search took (ns). Raises _Fault when that is far longer than it may."""
    assert known.cost is not None
    limit = known.cost.milliseconds(len(text)) * 1e6 * FAR_LONGER + SLACK_NS
    try:
        took = _took(regex, text)
        if took > limit:
            took = min(took, *(_took(regex, text) for _ in range(REPEATS)))
    except SystemError as error:
        raise _Fault(f"the engine fails: {error}") from None
    if took > limit:
        raise _Fault(f"{took} ns, {FAR_LONGER} x the bound is {limit:.0f}")
    return took


def _search(pattern: str, rng: random.Random) -> dict[str, Any] | None:
    """Search one pattern if it is admitted. Returns what was found; None when it is not admitted."""
    try:
        known = analyse(pattern)
    except ValueError:
        return None
    if known.cost is None or known.refusal(OUTPUT) is not None:
        return None
    regex = re.compile(pattern)
    text = ""
    try:
        for text in _texts(pattern, rng):
            _checked(regex, known, text)
        length = min(known.longest, LONG)
        best, worst = _changed(("", "ab", ""), rng), -1
        for _ in range(CLIMBED):
            parts = _changed(_changed(best, rng), rng)
            text = _of_length(parts, length)
            took = _checked(regex, known, text)
            if took > worst:
                best, worst = parts, took
    except _Fault as fault:
        return {"fault": str(fault), "pattern": pattern, "text": text[:TEXT], "length": len(text)}
    return {}


def _hunt(pipe: Connection, seed: int, bombs: float) -> None:
    """Search pattern after pattern, each told before and after."""
    warnings.simplefilter("ignore")
    patterns = Patterns(random.Random(seed), bombs)
    while True:
        pattern = patterns.draw()
        pipe.send(pattern)
        pipe.send(_search(pattern, patterns.rng))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Hunt for as long as asked; see the module."""
    drawn = admitted = children = 0
    faults: list[dict[str, Any]] = []
    end = time.monotonic() + args.seconds
    while time.monotonic() < end:
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.Process(
            target=_hunt, args=(theirs, args.seed + 1000 * children, args.bombs), daemon=True
        )
        child.start()
        children += 1
        while time.monotonic() < end:
            pattern = ours.recv()
            drawn += 1
            if not ours.poll(HUNG_S):
                faults.append({"fault": f"not back within {HUNG_S} s", "pattern": pattern})
                break
            found = ours.recv()
            admitted += found is not None
            if found:
                faults.append(found)
        child.kill()
        child.join()
    return {
        "ok": not faults,
        "patterns": drawn,
        "admitted": admitted,
        "faults": len(faults),
        "examples": faults[:10],
    }
