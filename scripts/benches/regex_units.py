"""What the engine's steps take, beside the prices in `regex_units`: run it to fit them to another CPython.

Each row is a search in a text in which one kind of step is nearly all there is, less the same search without
it, per repetition of what the text repeats. `set` adds up the prices that the row is about. All searches are
made in turns and the least time of each counts, so a busy machine only needs longer. Prices are from above:
what was measured to be more is in `above_the_price`.
"""

import re
import time
from typing import Any

from outfeed.ingress import regex_units as units

CHARACTERS = 16_000
SECONDS, QUICK_SECONDS = 30.0, 2.0
ROWS = [
    # (what is priced, pattern, the same without it, what the text repeats)
    ("SCAN_LITERAL", "#a*+!", None, "a"),
    ("SCAN_ANY", "#.*+!", None, "a"),
    ("SCAN_FOLDED", "(?i)#t*+!", None, "t"),
    ("SCAN_FOLDED_SET", "(?i)#s*+!", None, "s"),
    ("RANGE", "#[a-f]*+!", None, "a"),
    ("MAP", "#[acegi]*+!", None, "i"),
    ("BIG_MAP", "#[acegiя]*+!", None, "я"),
    ("NEGATE RANGE FAILURE", "#[^b-f]*+!", None, "a"),
    ("FOLD MAP", "(?i)#[acegi]*+!", None, "i"),
    ("CATEGORY_ASCII", r"(?a)#\w*+!", None, "a"),
    ("SPACE", r"#\s*+!", None, " "),
    ("SPACE_FAR", r"#\s*+!", None, "\u3000"),
    ("DIGIT", r"#\d*+!", None, "7"),
    ("WORD_LETTER", r"#\w*+!", None, "a"),
    ("WORD_DIGIT", r"#\w*+!", None, "7"),
    ("WORD_OTHER", r"#\w*+!", None, "½"),
    ("LITERAL_TAIL", "#a*x", "#a*+x", "a"),
    ("EXIT OP RANGE RANGE FAILURE", "#a*[xz]", "#a*+[xz]", "a"),
    ("LAZY OP SCAN_LITERAL OP RANGE RANGE FAILURE", "#a*?[xz]", None, "a"),
    ("REPEAT_ONE OP SCAN_LITERAL", "[ab]c*[xz]", "[ab][xz]", "a"),
    ("REPEAT MORE UNTIL OP SCAN_LITERAL", "[ab](?:cd)?[xz]", "[ab][xz]", "a"),
    ("REPEAT ROUND MORE UNTIL UNTIL OP SCAN_LITERAL", "[ab](?:bc|[ab]){1,2}[xz]", "[ab](?:bc|[ab])[xz]", "a"),
    ("MORE UNTIL OP SCAN_LITERAL OP SCAN_LITERAL", "#(?:ab)*!", None, "ab"),
    ("BRANCH ALTERNATIVE ALTERNATIVE", "[ab](?:[ab]c|[^q]d)[xz]", "[ab][xz]", "a"),
    ("MARK MARK", "[ab]()[xz]", "[ab][xz]", "a"),
    ("LOOK OP SCAN_LITERAL", "[ab](?!q)[xz]", "[ab][xz]", "a"),
    ("START OP RANGE FAILURE", "(?=[b-f])[x-z]", None, "a"),
    ("SKIP RANGE FAILURE", "[x-z]", None, "a"),
    ("PREFIX", "ax", None, "a"),
    ("REFERENCE COPIED", "(a)#(?:\\1)*+!", "(a)#(?:a)*+!", "a"),
]


def _price(name: str) -> float:
    return (
        units.COPIED_BYTE_NS * units.KEPT_GROUP if name == "COPIED" else float(getattr(units, name + "_NS"))
    )


def _measured(quick: bool) -> dict[tuple[str, str], float]:
    """Return the nanoseconds per repetition of each search, by pattern and text."""
    cases = {(pattern, body) for _, *those, body in ROWS for pattern in those if pattern is not None}
    searches = {case: (re.compile(case[0]), "a#" + case[1] * CHARACTERS) for case in cases}
    least = dict.fromkeys(searches, float("inf"))
    end = time.monotonic() + (QUICK_SECONDS if quick else SECONDS)
    while time.monotonic() < end:
        for case, (regex, text) in searches.items():
            start = time.thread_time_ns()
            regex.search(text)
            least[case] = min(least[case], (time.thread_time_ns() - start) / CHARACTERS)
    return least


def run(quick: bool) -> dict[str, Any]:
    """Measure every row; see the module."""
    measured = _measured(quick)
    results: list[dict[str, Any]] = []
    for names, pattern, without, body in ROWS:
        took = measured[pattern, body] - (0.0 if without is None else measured[without, body])
        for impl, value in (("measured", took), ("set", sum(map(_price, names.split())))):
            results.append({"case": names, "impl": impl, "value": round(value, 2), "unit": "ns"})
    pairs = zip(results[::2], results[1::2], strict=True)
    above = {
        one["case"]: one["value"] / other["value"] for one, other in pairs if one["value"] > other["value"]
    }
    return {"bench": "regex_units", "results": results, "ratios": {}, "above_the_price": above}
