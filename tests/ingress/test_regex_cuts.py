"""Ways that cannot have been: they are taken away only where the engine was not.

A way too few, and an explosion may hide behind it. So a plain engine searches texts and tells what it reads:
there must be a way for each character of it.
"""

import random
from re import _parser  # type: ignore[attr-defined]

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outfeed.ingress.regex_cells import Beyond, Cells
from outfeed.ingress.regex_cuts import sure_tails
from outfeed.ingress.regex_places import Explosive, TooComplex
from outfeed.ingress.regex_settled import LAST, settled
from outfeed.ingress.stop_regex import analyse

from .engine import Engine, TooLong
from .patterns import graph_of
from .walk import Walk

UNITS = ["a", "b", "ab", ".", "[ab]", "[^a]", "aa"]
LOOPS = ["*", "*?", "+", "+?", "{2,}", "{2,}?"]


def around_a_loop(draw: st.DrawFn, depth: int = 0) -> str:
    """Draw what comes before a loop, the loop and what comes after it."""
    unit, some = st.sampled_from(UNITS), st.sampled_from(["", "", "?", "{2}", "{1,2}", "{0,2}", "+", "{2,}"])
    before = "".join(f"(?:{draw(unit)}){draw(some)}" for _ in range(draw(st.integers(0, 2))))
    for _ in range(draw(st.integers(0, 2))):
        before += f"(?:{draw(unit)}|{draw(unit)})"
    loop = draw(st.sampled_from([".", "[ab]", "[^a]", "a", r"[\s\S]"])) + draw(st.sampled_from(LOOPS))
    after = "".join(draw(unit) for _ in range(draw(st.integers(1, 2)))) + draw(
        st.sampled_from(["", "", "{2,}"])
    )
    # What is asked after the loop holds off some ways; another way may come to the end all the same.
    asked = draw(st.sampled_from(["", "", "", r"\b", r"\B", "(?=b?a)", "(?!b?a)", "(?>ab|a)"]))
    if draw(st.integers(0, 2)) == 0:
        whole = f"(?:{before}{loop}{asked}|{draw(st.sampled_from(['b', '[ab]', 'ba', before]))}){after}"
    else:
        whole = before + loop + asked + after
    if depth == 0 and draw(st.integers(0, 3)) == 0:
        whole = f"(?:{whole}|{around_a_loop(draw, 1)})"
    if draw(st.integers(0, 4)) == 0:
        whole = f"(?:{whole}){draw(st.sampled_from(['+', '{2}', '{1,2}?', '?']))}"
    return whole


@st.composite
def patterns(draw: st.DrawFn) -> str:
    return around_a_loop(draw)


def is_followed(pattern: str, text: str) -> bool:
    """Say whether there is a way for all that the engine reads; it holds also where nothing is cut."""
    try:
        graph = graph_of(pattern)
        tails = sure_tails(graph)
        walk = Walk(Cells(graph, tails))
    except (Explosive, TooComplex, Beyond):
        return False
    engine = Engine(settled(_parser.parse(pattern), LAST), text)
    try:
        engine.search()
    except TooLong:
        return False
    kinds = [
        next(i for i, kind in enumerate(walk.kinds.masks) if kind & graph.alphabet.atom(ord(character)))
        for character in text
    ]
    cells = walk.cells
    for place, ways in enumerate(walk.ways(kinds, engine.last_start)):
        assert ways is not None, (pattern, text, place)
        read = sum(count for cell, count in ways.items() if cell and cells.may[cell])
        assert engine.reads[place] <= read + 1e-6, (pattern, text, place, engine.reads[place], read)
    return bool(tails)


@settings(max_examples=250)
@given(patterns(), st.randoms(use_true_random=False))
def test_there_is_a_way_for_each_character_that_the_engine_reads(pattern: str, rng: random.Random) -> None:
    for _ in range(4):
        word = "".join(rng.choice("aab.\n") for _ in range(rng.randint(1, 5)))
        end = "".join(rng.choice("aab\n") for _ in range(rng.randint(0, 4)))
        is_followed(pattern, (word * 9)[: rng.randint(1, 24)] + end)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(?:ab[^c]+?(?!a)|b)aa", "abababaabab"), (r".(?:[ab]+\b|ba)b", "ccccaccccababcab."),
        ("(?:a.+?(?=[ab])|[ab])ca", ".abc.abbcabac."), (r"(?:a.+\b|b)ba", "accaccacc.b.bba"),
        ("(?:(?:a.*?(?>a*)|ab)ab|[ab]c)", "baababc"), ("(?:.[^c]*?(?=b?a)|b)bb", "a...aa...aa.abbbb"),
        ("(?:.[ab]+?(?>a*)|b)ab", "bbbbbbbbab"),
    ],
)  # fmt: skip
def test_ways_that_are_held_off_at_the_end_of_a_loop_are_still_in_it(pattern: str, text: str) -> None:
    # Another way comes to the end of the match, past what is asked after the loop.
    is_followed(pattern, text)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(?:(?:[ab]|[ab]).+|[ab])a", "aa"), ("(?:(?:[ab]|[ab]).{2,}|[ab])a", "aaa"),
        ("(?:(?:ab|a[b])(?:ab|a[b])a+?(?:b.*c)?|(?:ab){2})a", "ababab"),
        ("(?:(?:ab|a[b])(?:ab|a[b])a*?c|(?:ab){2})a", "ababa"),
    ],
)  # fmt: skip
def test_one_search_may_come_to_a_loop_in_several_ways(pattern: str, text: str) -> None:
    # They are all tried before the way past the loop that completes the match.
    is_followed(pattern, text)


def test_patterns_have_loops_before_a_sure_end() -> None:
    # What the test above is about: most of the likes of what it draws.
    assert is_followed("aa.*?aa", "aaaaaabaaab")
    assert is_followed("(?:a|ab).+?ba", "aababaabbab")
    assert not is_followed("a.{2,4}?b", "aab")


@pytest.mark.parametrize(
    "pattern",
    [
        "```.*?```", r"```[\s\S]*?```", r"```[\s\S]*```", "---.*?---", r"(?s)\*\*.+?\*\*", "~~.+?~~",
        r'"""[\s\S]*?"""', r"(?:y|(?i:y{2,}){2})",
    ],
)  # fmt: skip
def test_what_stands_between_two_equal_marks_is_admitted(pattern: str) -> None:
    assert analyse(pattern).refusal(32_000) is None
