"""stop_regex admission against the real engine: whatever is admitted compiles, its bounds hold, it is fast.

Patterns come from the family the benchmark uses (`scripts/benches/regex_family.py`) and from hypothesis.
Nothing is timed here: a search that would take too long is told by its count of steps (`bench regex` times).
"""

import contextlib
import importlib.util
import random
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outfeed.ingress.regex_classes import Alphabet
from outfeed.ingress.stop_regex import UNBOUNDED, Admission, analyse

from .engine import Engine, TooLong
from .patterns import drawn

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def load(path: str) -> ModuleType:
    name = "tested_" + path.replace("/", "_").removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))  # as when it is run: for what it imports from beside it
        spec.loader.exec_module(module)
    return module


family = load("benches/regex_family.py")


def analysed(pattern: str) -> Admission | None:
    try:
        return analyse(pattern)
    except ValueError:
        return None


def compiled(pattern: str) -> "re.Pattern[str]":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return re.compile(pattern)


def bounds_hold(found: Admission, regex: "re.Pattern[str]", text: str) -> None:
    match = regex.search(text)
    if match is None:
        return
    assert len(match.group()) <= found.max_len
    assert found.max_len <= found.window
    shown = text[: match.end()]
    again = regex.search(shown)
    if again is not None and found.window < UNBOUNDED and again.end() == len(shown):
        assert regex.search(shown[-found.window :]) is not None


def test_whatever_is_admitted_compiles_and_its_bounds_hold() -> None:
    seen = 0
    for index, pattern in enumerate(family.patterns(700, seed=7)):
        found = analysed(pattern)
        if found is None:
            continue
        regex = compiled(pattern)
        if found.refusal(1000) is not None:
            continue
        seen += 1
        for text in family.texts(pattern, 60, random.Random(index)):
            bounds_hold(found, regex, text)
    assert seen > 200


def test_what_the_engine_refuses_is_refused() -> None:
    for pattern in family.patterns(700, seed=8):
        try:
            compiled(pattern)
        except (re.error, OverflowError):
            assert analysed(pattern) is None


PATTERNS = drawn(
    ["a", "b", "ab", ".", r"\d", r"\w", r"\s", r"\S", "[ab]", "[^a]", "é", "中", r"\b", "^", "$", r"\Z"],
    ["", "", "?", "*", "+", "{2}", "{1,3}", "{2,}", "*?", "+?", "++", "?+"],
    ["(?:%s)", "(%s)", "(?=%s)", "(?!%s)", "(?>%s)", "(?i:%s)", "(%s)x\\1"],
    leaves=8,
)
TEXTS = st.text(alphabet="ab1 \né中A", max_size=14)


@settings(max_examples=400)
@given(PATTERNS, TEXTS)
def test_bounds_hold_for_any_pattern_and_text(pattern: str, text: str) -> None:
    found = analysed(pattern)
    if found is not None:
        bounds_hold(found, compiled(pattern), text)


COUNTED = drawn(
    ["a", "b", "[ab]", "[bc]", "ab"],
    ["", "", "?", "*", "+", "{1,3}", "{2,}", "*?", "{0,2}?"],
    ["(?:%s)", "(%s)", "(?=%s)", "(?!%s)", "(?>%s)"],
    leaves=7,
)


@settings(max_examples=300)
@given(COUNTED, st.text(alphabet="abc", min_size=1, max_size=12))
def test_the_cost_is_never_below_the_steps_a_backtracking_search_takes(pattern: str, word: str) -> None:
    found = analysed(pattern)
    if found is None or found.cost is None:
        return
    text = (word * 12)[:40] + "d"
    engine = Engine(re._parser.parse(pattern), text)  # type: ignore[attr-defined]
    with contextlib.suppress(TooLong):
        engine.search()
    # A step of this matcher is a fraction of a visit: a nanosecond each is what the bound must cover.
    assert engine.steps <= found.cost.milliseconds(len(text)) * 1e6 + 40 * len(text)


# Capitals, small letters and others beyond what the engine has a map for, and letters with cases among them.
FAR = [0x10400, 0x10427, 0x10428, 0x1E900, 0x1E922, 0x1F642, 0x261, 0x26B, 0x265, 0x10FFFF]


@pytest.mark.parametrize("ignore", ["", "(?i)", "(?a)", "(?ia)"])
def test_classes_hold_the_characters_that_the_engine_matches(ignore: str) -> None:
    rng = random.Random(5)
    sample = [
        *range(0x250),
        0x130,
        0x131,
        0x17F,
        0x1E9E,
        0x212A,
        0x2126,
        0x3B1,
        0x391,
        0x4E2D,
        0x660,
        0x1F642,
    ]
    for spelled_class in [
        "[a-c]", "[^a-c]", r"\w", r"[\d_]", "[é-ü]", "[^é]", "k", "s", "i", "é", "中", "[A-Z]",
        r"[^\s\w]", "[α-ω]", r"\W", "[𐐀x]", "[^𐐀x]", "[𐐨🙂]", "[^𐐨🙂]", "[ϰ-𐑈]", "[^ϰ-𐑈]", "𐐀", "[^𐐀]",
    ]:  # fmt: skip
        regex = re.compile(ignore + spelled_class)
        parsed: Any = re._parser.parse(ignore + spelled_class)  # type: ignore[attr-defined]
        codes = {code for code in map(ord, spelled_class) if code > 127}
        alphabet = Alphabet(codes | {c for c in [*sample, *FAR] if c > 127}, folds=bool(ignore))
        op, av = parsed[0]
        flags = parsed.state.flags
        low, high = alphabet.charset(av, flags) if str(op) == "IN" else alphabet.literal(av, flags)
        if str(op) == "NOT_LITERAL":
            low, high = alphabet.all & ~high, alphabet.all & ~low
        for code in [*rng.sample(sample, 300), *FAR]:
            matched = regex.match(chr(code)) is not None
            mask = alphabet.span(code, code)
            if matched:
                assert mask & high, (spelled_class, hex(code))
            if mask & low == mask:
                assert matched, (spelled_class, hex(code))


def test_random_json_is_admitted_or_refused_and_nothing_else() -> None:
    found = load("stresses/sampling.py").hunt(3000, seed=11)
    assert found["faults"] == []
    assert found["admitted"] > 100
    assert found["refused"] > 1000
