"""How far apart a loop is entered: never said to be farther than some text shows.

Here all short texts are tried. One place too far, and the ways in a loop are too few.
"""

import contextlib
import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outfeed.ingress.regex_cost import _Analysis
from outfeed.ingress.regex_entries import LENGTH, entries_apart
from outfeed.ingress.regex_places import UNLIMITED
from outfeed.ingress.regex_poly import Poly
from outfeed.ingress.regex_settled import LAST, settled
from outfeed.ingress.stop_regex import analyse

from .engine import Engine, TooLong
from .patterns import graph_of


def said(before: str, of: str) -> int:
    graph = graph_of(f"(?m){before}{of}*c")
    loop = max(node for node in range(1, len(graph.most)) if graph.most[node] == UNLIMITED)
    return entries_apart(graph, graph.preds[loop], graph.high[loop])


def seen(before: str, of: str, long: int) -> int:
    """Return how few places there are between two entries into a loop that reads all between, in the texts of
    a length."""
    runs = re.compile(f"(?m){of}+")
    # Entered is a loop where it reads a first character; what is left of the text tells the place.
    regexes = [re.compile(rf"(?m){before}(?={of}[\s\S]{{{left}}}\Z)") for left in range(long)]
    least = UNLIMITED
    for text in map("".join, itertools.product("ab\n", repeat=long)):
        places = [
            end
            for end in range(long)
            if any(regexes[long - 1 - end].match(text, begin) for begin in range(end + 1))
        ]
        for earlier, later in itertools.pairwise(places):
            if later - earlier < least and runs.fullmatch(text, earlier, later):
                least = later - earlier
    return least


@pytest.mark.parametrize(
    ("before", "of", "apart"),
    [
        ("ab", ".", 2),
        ("aba", ".", 2),
        ("aab", ".", 3),
        ("aaa", ".", 1),
        ("abab", "[ab]", 2),
        ("(?:ab|b)", ".", 1),
        ("(?:aab|bab)", ".", 2),
        ("(?:ab|b)b", ".", 1),
        ("a[ab]b", ".", 1),
        ("b[ab](?<!b)", ".", 2),
        ("[ab]\na", r"[\s\S]", 2),
        ("b\na", ".", UNLIMITED),
        ("^a", ".", UNLIMITED),
        ("^a", r"[\s\S]", 2),
        ("a+", ".", 1),
        ("ab?", ".", 1),
        ("", ".", 1),
    ],
)
def test_what_is_read_before_a_loop_says_how_far_apart_it_is_entered(
    before: str, of: str, apart: int
) -> None:
    assert said(before, of) == apart
    assert seen(before, of, 7) == apart


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.lists(
                st.sampled_from(["a", "b", "ab", "ba", "[ab]", ".", r"\n", "[^a]", r"\s", "^", r"\b"]),
                min_size=1,
                max_size=4,
            ).map("".join),
            st.sampled_from(["", "", "", "?", "+", "{2}", "{1,2}", "{2,3}"]),
        ).map(lambda piece: f"(?:{piece[0]}){piece[1]}" if piece[1] else piece[0]),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["|", ""]),
    st.sampled_from(["a", "[ab]", ".", r"[\s\S]", r"\s", "[^a]"]),
)
def test_no_text_shows_entries_that_are_nearer(parts: list[str], joint: str, of: str) -> None:
    before = f"(?:{joint.join(parts)})"
    try:
        apart = said(before, of)
    except ValueError:
        return  # Nothing comes to the loop.
    assert apart <= seen(before, of, 5)


@settings(max_examples=250)
@given(
    st.lists(
        st.sampled_from(
            ["a", "b", "ab", "aab", "aba", "[ab]", r"\b", "(?:ab|c)", "(?:aab|ba)", "a?", "b{2}"]
        ),
        min_size=1,
        max_size=3,
    ).map("".join),
    st.sampled_from(["[abc]", ".", "[ab]", "[^c]"]),
    st.sampled_from(["{0,3}", "{2,6}", "{1,8}", "{3}", "{5}", "{0,6}?", "*", "+", "*?", "{2,}"]),
    st.sampled_from(["!", "c!", "[bc]!", "ab!"]),
    st.text(alphabet="aabc ", min_size=1, max_size=7),
)
def test_ways_are_counted_for_all_that_the_engine_reads(
    before: str, of: str, often: str, after: str, word: str
) -> None:
    pattern = before + of + often + after
    graph = graph_of(pattern)
    counted = _Analysis(graph)
    counted.run()
    engine = Engine(settled(re._parser.parse(pattern), LAST).data, (word * 30)[:30])  # type: ignore[attr-defined]
    with contextlib.suppress(TooLong):
        engine.search()
    for place, reads in engine.reads.items():
        ways = 0.0
        for node in range(1, len(graph.high)):
            row = len(graph.runs.get(node, " "))
            ways += row * ways_at(counted.held[node], place + row - 1)
        assert reads <= ways


def ways_at(poly: Poly, place: int) -> float:
    return sum(count * (math.comb(place + k - 1, k - 1) if k else 1) for k, count in enumerate(poly))


def test_a_longer_row_than_is_looked_at_is_said_to_be_no_farther_than_that() -> None:
    assert said("ab" * LENGTH, ".") == 2
    assert said("a" * LENGTH + "b" * LENGTH, ".") == 1
    assert said("a" + "b" * (LENGTH - 1), ".") == LENGTH


def test_a_gap_behind_a_word_costs_what_so_many_words_in_it_can() -> None:
    apart, near = analyse("Answer:.{0,60}!"), analyse("AAAAAAA.{0,60}!")
    assert apart.cost is not None
    assert near.cost is not None
    assert apart.cost.milliseconds(32_000) < near.cost.milliseconds(32_000) / 4


def test_what_grows_with_the_square_grows_the_slower_the_longer_its_beginning() -> None:
    apart, near = analyse(r"<think>[\s\S]*?</t>"), analyse(r"<[\s\S]*?</t>")
    assert apart.cost is not None
    assert near.cost is not None
    assert apart.cost.degree == near.cost.degree == 2
    assert apart.cost.milliseconds(32_000) < near.cost.milliseconds(32_000) / 4
