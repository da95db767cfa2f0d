"""What is never tried is left out, and nothing else: the engine finds the same with what is left."""

import re
from re import _compiler, _parser  # type: ignore[attr-defined]
from re import _constants as sre  # type: ignore[attr-defined]
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outfeed.ingress.regex_settled import AGAIN, LAST, PAID, settled
from outfeed.ingress.regex_tree import inner_pieces

from .patterns import drawn


def left_of(pattern: str) -> Any:
    """Parse a pattern, settle it, and say what is our own in words that the engine's compiler knows."""
    body = settled(_parser.parse(pattern), LAST)
    waiting = [body]
    while waiting:
        piece = waiting.pop()
        plain = [
            (sre.MAX_REPEAT, (1, 1, item[1][2])) if item[0] is AGAIN else item
            for item in piece.data
            if item[0] is not PAID
        ]
        piece.data = plain
        for op, av in piece.data:
            waiting += inner_pieces(op, av)
    return body


@pytest.mark.parametrize(
    ("pattern", "plain"),
    [
        ("ab*?", "ab{0}"), ("ab+?", "ab{1}?"), ("a(?:b|c)??", "a(?:b|c){0}?"), ("a(?=b+)", "ab+"),
        ("a(?>b*?)", "ab{0}"), ("(?>a*?)b", "a{0}b"), ("a(?!b*?c*?)", "a(?!b{0}c{0})"),
        ("a(?:b{2,}?c??)", "a(?:b{2}?c{0}?)"), (r"(?=(a(?=b)))\1c", r"(?=(a(?=b)))\1c"),
        ("a*?b", "a*?b"), ("(?=a)b", "(?=a)b"), ("(?>a+)b", "a++b"), ("(?>a+b?c)d", "(?>a+b?c)d"),
        ("(?>a+b?)c", "a++b?+c"), ("(?:ab+|c)++d", "(?:ab++|c)++d"), ("(?<=a(?=b))", "(?<=a(?=b))"),
    ],
)  # fmt: skip
def test_what_is_left(pattern: str, plain: str) -> None:
    def shape(body: Any) -> str:
        return re.sub(r"MIN_REPEAT, \((\d+), \1,", r"MAX_REPEAT, (\1, \1,", str(body.data))

    assert shape(left_of(pattern)) == shape(_parser.parse(plain))


@pytest.mark.parametrize(
    ("pattern", "alternatives"),
    [("a|b*|c", 2), ("(?:a||b)c", 3), ("(?>a|b*|c)d", 2), ("a|(?=)|c", 2), ("a|bc|d", 3)],
)
def test_no_alternative_after_one_that_cannot_fail_is_tried(pattern: str, alternatives: int) -> None:
    waiting, found = [left_of(pattern)], []
    while waiting:
        for op, av in waiting.pop().data:
            found += [len(av[1])] if op is sre.BRANCH else []
            waiting += inner_pieces(op, av)
    assert found == [alternatives]


def test_a_group_that_is_asked_for_again_is_kept() -> None:
    assert left_of(r"(?=(a*?)b)\1").data[0][1][1].data[0][1][0] == 1


PATTERNS = drawn(
    ["a", "b", "ab", ".", r"\w", "[ab]", r"\b", r"\B", "$", "(?<=a)", "(?!b)", "^", r"\s"],
    ["", "?", "*", "+", "{1,3}", "*?", "+?", "??", "{1,2}?", "*+", "?+", "{1,3}+", "{0}"],
    ["(?:%s)", "(%s)", "(?=%s)", "(?>%s)", "(?!%s)"],
    leaves=8,
)


@settings(max_examples=600)
@given(PATTERNS, st.text(alphabet="ab1 \n", max_size=8))
def test_a_search_finds_a_match_at_the_same_place(pattern: str, text: str) -> None:
    try:
        regex = re.compile(pattern)
    except re.error:
        return
    match, again = regex.search(text), _compiler.compile(left_of(pattern)).search(text)
    assert (match is None) == (again is None)
    assert match is None or again is None or match.start() == again.start()
