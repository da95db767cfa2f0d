"""stop_regex admission against the real engine: whatever is admitted compiles, its bounds hold, it is fast.

Patterns come from the family the benchmark uses (`scripts/benches/regex_family.py`) and from hypothesis.
Nothing is timed here: a search that would take too long is told by its count of steps (`bench regex` times).
"""

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

from .patterns import drawn

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def load(path: str) -> ModuleType:
    name = "tested_" + path.replace("/", "_").removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
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


@settings(max_examples=400, deadline=None)
@given(PATTERNS, TEXTS)
def test_bounds_hold_for_any_pattern_and_text(pattern: str, text: str) -> None:
    found = analysed(pattern)
    if found is not None:
        bounds_hold(found, compiled(pattern), text)


class Steps:
    """A backtracking matcher that counts, for patterns of the few constructs it knows.

    It visits what CPython's engine visits, without its short cuts: an independent count of the ways.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.count = 0

    def search(self, tree: Any) -> bool:
        return any(self.match(tree, at, lambda _: True) for at in range(len(self.text) + 1))

    def match(self, tree: Any, at: int, then: Any) -> bool:
        self.count += 1
        kind = tree[0]
        if kind == "class":
            return at < len(self.text) and self.text[at] in tree[1] and bool(then(at + 1))
        if kind == "row":
            parts = tree[1]
            if not parts:
                return bool(then(at))
            return self.match(parts[0], at, lambda on: self.match(("row", parts[1:]), on, then))
        if kind == "or":
            return any(self.match(one, at, then) for one in tree[1])
        assert kind == "loop"
        _, inner, least, most = tree
        if most and self.match(
            inner,
            at,
            lambda on: on > at and self.match(("loop", inner, max(0, least - 1), most - 1), on, then),
        ):
            return True
        return least == 0 and bool(then(at))


def spelled(tree: Any) -> str:
    kind = tree[0]
    if kind == "class":
        return "[" + "".join(sorted(tree[1])) + "]" if len(tree[1]) > 1 else str(tree[1])
    if kind == "row":
        return "".join(map(spelled, tree[1]))
    if kind == "or":
        return "(?:" + "|".join(map(spelled, tree[1])) + ")"
    _, inner, least, most = tree
    body = spelled(inner) if inner[0] == "class" else f"(?:{spelled(inner)})"
    return body + {(0, 99): "*", (1, 99): "+", (0, 1): "?"}.get((least, most), f"{{{least},{most}}}")


CLASSES = st.sampled_from(["a", "b", "ab", "bc"]).map(lambda chars: ("class", chars))


def trees(inner: Any) -> Any:
    rows = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        rows.map(lambda row: ("row", row)),
        st.lists(inner, min_size=2, max_size=3).map(lambda row: ("or", row)),
        st.tuples(inner, st.sampled_from([(0, 99), (1, 99), (0, 1), (1, 3)])).map(
            lambda it: ("loop", it[0], *it[1])
        ),
    )


@settings(max_examples=300, deadline=None)
@given(st.recursive(CLASSES, trees, max_leaves=6), st.text(alphabet="abc", min_size=1, max_size=12))
def test_the_cost_is_never_below_the_steps_a_backtracking_search_takes(tree: Any, word: str) -> None:
    pattern = spelled(tree)
    found = analysed(pattern)
    if found is None or found.cost is None:
        return
    assert re.compile(pattern)
    text = (word * 12)[:40] + "d"
    steps = Steps(text)
    steps.search(tree)
    # A step of this matcher is a fraction of a visit: a nanosecond each is what the bound must cover.
    assert steps.count <= found.cost.milliseconds(len(text)) * 1e6 + 40 * len(text)


@pytest.mark.parametrize("ignore", ["", "(?i)"])
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
        r"[^\s\w]", "[α-ω]", r"\W",
    ]:  # fmt: skip
        regex = re.compile(ignore + spelled_class)
        parsed: Any = re._parser.parse(ignore + spelled_class)  # type: ignore[attr-defined]
        codes = {code for code in map(ord, spelled_class) if code > 127}
        alphabet = Alphabet(codes | {c for c in sample if c > 127}, folds=bool(ignore))
        op, av = parsed[0]
        flags = parsed.state.flags
        low, high = alphabet.charset(av, flags) if str(op) == "IN" else alphabet.literal(av, flags)
        if str(op) == "NOT_LITERAL":
            low, high = alphabet.all & ~high, alphabet.all & ~low
        for code in rng.sample(sample, 300):
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
