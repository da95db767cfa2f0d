"""Stop patterns that the shard finds: what `re` finds in the whole text, after the token that completes it.

However rows are cut, whoever goes on, whatever is held back for a stop string, and however far the text's
beginning is behind.
"""

import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import DecodeOptions
from outfeed.shards import patterns as under_test
from outfeed.shards.budget import Budget
from outfeed.shards.table import TokenTable
from tokenizers import Tokenizer

from .driver import Driver, Heard, every_cut
from .tokenizers_here import byte_ids

Tables = Callable[[str], TokenTable]
Tokenizers = Callable[[str], Tokenizer]

FILLER = "lorem ipsum dolor sit amet " * 12
WORDS = [
    "foo",
    "word",
    "s",
    "x",
    "y",
    " ",
    "\n",
    ".\n\n",
    "\n\n",
    ".",
    "END",
    "ING",
    "ED",
    "a" * 60,
    "日本",
    "é",
    FILLER,
]
PATTERNS = [
    r"^foo",
    r"\Afoo",
    r"(?m)^word$",
    r"\bword\b",
    r"\Bfoo",
    r"(?<!x)foo",
    r"(?<=é)x",
    r"(?:^|\n\n)foo",
    r"\.$",
    r"END(?!ING)",
    "END",
    "foo",
    r"é.{0,3}日",
    r"x{,3}y",
    "a{40}[^a]?",
    r"(?i)ending",
]
STOPS = [
    [],
    ["\n\nUser"],
    ["ING!"],
    ["ENDED"],
    ["END", "foo\n"],
    ["foo" + "a" * 100],
    ["foo" + "a" * 600],
    ["word x"],
]


def truth(tokenizer: Tokenizer, ids: list[int], options: DecodeOptions) -> tuple[int, str, str | None]:
    """The plain way: look at all the text after each token. (tokens, text, what matched)"""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        stopped = first_stop(text, options.stop)
        begin, end = stopped[:2] if stopped else (len(text), len(text))
        for pattern in options.stop_regex:
            if (match := re.search(pattern, text[:end])) and match.end() <= begin:
                return count, text[: match.end()], pattern
        if stopped:
            return count, text[:begin], stopped[2]
    return len(ids), tokenizer.decode(ids), None


def first_stop(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """The stop string that is complete first, of several the longest: its begin and end."""
    found = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return None
    end, begin, stop = min(found, key=lambda entry: (entry[0], entry[1]))
    return begin, end, stop


def served(table: TokenTable, ids: list[int], options: DecodeOptions, rng: random.Random) -> Heard:
    """Serve ids in rows of any size; now and then another shard takes over."""
    driver, size = Driver(table), rng.choice([1, 3, 40, len(ids)])
    route = driver.start(options)
    heard, at = driver.heard[route], 0
    apart = rng.random() < 0.3  # the last row has no ids
    while heard.finish is None:
        row = ids[at : at + rng.randint(1, size)]
        at += len(row)
        last = not row if apart else at >= len(ids)
        driver.step([(route, row)], {route: FinishReason.length(len(ids))} if last else None)
        if not heard.finish and rng.random() < 0.1:
            driver = driver.restore_into(table, route, options)
    assert driver.failures == []
    return heard


@pytest.mark.parametrize("name", ["bytelevel_added", "deepseek", "bytelevel_replaced"])
@settings(max_examples=40)
@given(
    words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=12),
    patterns=st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2, unique=True),
    stops=st.sampled_from(STOPS),
    seed=st.integers(0, 2**16),
)
@example(["s", " ", "foo", " ", FILLER], [r"^foo"], [], 0)
@example(["s", "word", "s ", FILLER, "word"], [r"\bword\b"], [], 1)
@example(["foo", "a" * 60, "a" * 60, "é"], ["foo"], ["foo" + "a" * 600], 2)
@example(["x", "END", "ED"], ["END"], ["ENDED"], 3)
def test_a_pattern_ends_a_stream_where_it_is_in_the_text(
    name: str,
    table_of: Tables,
    tokenizer_of: Tokenizers,
    words: list[str],
    patterns: list[str],
    stops: list[str],
    seed: int,
) -> None:
    tokenizer, table = tokenizer_of(name), table_of(name)
    ids = [token for word in words for token in tokenizer.encode(word, add_special_tokens=False).ids]
    options = DecodeOptions(stop=stops, stop_regex=patterns, detect_stops=True)
    count, text, matched = truth(tokenizer, ids, options)
    for turn in range(3):
        heard = served(table, ids, options, random.Random(seed + turn))
        assert heard.text.decode() == text
        assert heard.generated == count
        assert heard.finish == (
            FinishReason.length(len(ids)) if matched is None else FinishReason.stop(matched)
        )


@pytest.mark.parametrize("keep", [False, True])
def test_a_pattern_before_a_stop_string_of_the_same_row_wins(
    keep: bool, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    of_byte = byte_ids(tokenizer_of("bytelevel_added"))
    ids = [of_byte[byte] for byte in b"xENDED yes"]
    driver = Driver(table_of("bytelevel_added"))
    for pattern, want in (
        ("xEN", "xEN"),
        ("END", "xEND"),
        ("yes", "xENDED" if keep else "x"),
        ("x(?=ENDED)", "x"),
    ):
        options = DecodeOptions(stop=["ENDED"], stop_regex=[pattern], detect_stops=True, no_stop_trim=keep)
        for cuts in every_cut(len(ids)):
            assert driver.stream(ids, cuts, options=options).text.decode() == want


@pytest.mark.parametrize("name", ["bytelevel_added", "bytelevel_replaced"])
def test_a_successor_knows_which_matches_may_end_the_request(
    name: str, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    """Not one that was complete too early, and is held back; but one that what follows makes a match."""
    of_byte = byte_ids(tokenizer_of(name))
    early = DecodeOptions(stop=["foo\n"], stop_regex=["foo"], detect_stops=True, min_new_tokens=4)
    ahead = [
        DecodeOptions(stop_regex=["foo(?= )"], detect_stops=True, min_new_tokens=least) for least in (0, 1, 3)
    ]
    ended = (b"yfoo", FinishReason.stop("foo(?= )"))
    for options, said, want in (
        (early, b"foo bar", (b"foo bar", FinishReason.length(7))),
        *((options, b"yfoo x", ended) for options in ahead),
    ):
        ids = [of_byte[byte] for byte in said]
        for cut in range(1, len(ids)):
            driver = Driver(table_of(name))
            route = driver.start(options)
            driver.step([(route, ids[:cut])])
            successor = driver.restore_into(driver.table, route, options)
            if not driver.heard[route].ended_here:
                successor.step([(route, ids[cut:])], {route: FinishReason.length(len(ids))})
            assert (driver.heard[route].text, driver.heard[route].finish) == want, (options, cut)


def test_what_comes_out_only_at_the_end_is_searched(table_of: Tables, tokenizer_of: Tokenizers) -> None:
    """A newline that is a byte token is held until its run ends; here the request ends first."""
    tokenizer = tokenizer_of("metaspace_bpe")
    ids = [*tokenizer.encode("the", add_special_tokens=False).ids, byte_ids(tokenizer)[10]]
    options = DecodeOptions(stop_regex=[r"e\n"], detect_stops=True)
    driver = Driver(table_of("metaspace_bpe"))
    for cuts in every_cut(len(ids)):
        heard = driver.stream(ids, cuts, options=options)
        assert (heard.text, heard.finish, heard.ids) == (b"the\n", FinishReason.stop(r"e\n"), ids)
    route = driver.start(options)
    driver.step([(route, ids)])
    driver.step([(route, [])], {route: FinishReason.length(len(ids))})
    heard = driver.heard[route]
    assert (heard.text, heard.finish, heard.ids) == (b"the\n", FinishReason.stop(r"e\n"), ids)


@pytest.mark.parametrize("patterns", [["ba{600}c", "x"], ["x", "ba{600}c"]])
def test_a_match_may_be_long_and_come_in_many_rows(
    patterns: list[str], table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    of_byte = byte_ids(tokenizer_of("bytelevel_added"))
    ids = [of_byte[byte] for byte in b"a" * 300 + b"b" + b"a" * 600 + b"cd"]
    options = DecodeOptions(stop_regex=patterns, detect_stops=True)
    heard = Driver(table_of("bytelevel_added")).stream(ids, range(50, len(ids), 50), options=options)
    assert heard.ids == ids[:-1]
    assert heard.finish == FinishReason.stop("ba{600}c")


class Counted(bytes):
    """Bytes that count how many of them were looked at in slices."""

    read = 0

    def __getitem__(self, part: Any) -> Any:
        found = bytes(self)[part]
        self.read += len(found) if isinstance(found, bytes) else 1
        return found


def test_a_long_row_is_not_decoded_again_for_each_of_its_tokens() -> None:
    """That grew with the square of its length."""
    text = Counted("日本".encode() * 500)
    watch = under_test.PatternWatch(["Q"], under_test.Compiled(Budget()), 0)
    ends = list(range(3, len(text) + 1, 3))
    assert under_test.WatchedRow(0, 1, watch, text, len(text), ends, 0).search(False) is None
    assert text.read <= 3 * len(text)
    later = under_test.WatchedRow(0, 1, watch, "日Q本".encode(), 7, [3, 4, 7], 0).search(False)
    assert later == under_test.Found(1, 2, "Q")


# ---- re2 in the place of re

ATOMS = [
    "a",
    "b",
    "é",
    "👍",
    ".",
    "[ab]",
    "[^a]",
    r"[^\n]",
    r"\n",
    r"\.",
    r"\x61",
    r"[\]a]",
    "[]a]",
    "[a-]",
    "]",
    "}",
]
ODD = ["[[:alpha:]]", "[[:a]", "x{,", "a{", "{,2}", "[:b:]", "-", "#", " ", "/"]
REPEATS = ["*", "+", "?", "*?", "+?", "??", "{2}", "{02}", "{1,2}", "{,2}", "{0,2}?", "{2,}", "{0}", "{1,}?"]


@st.composite
def any_pattern(draw: st.DrawFn, depth: int = 3) -> str:
    kind = draw(st.integers(0, 5)) if depth else 0
    if kind == 0:
        return draw(st.sampled_from(ATOMS + ODD))
    inner = draw(any_pattern(depth=depth - 1))
    if kind == 1:
        return f"(?:{inner}){draw(st.sampled_from(REPEATS))}"
    other = draw(any_pattern(depth=depth - 1))
    return {2: f"(?:{inner}|{other})", 3: f"({inner}|)", 4: f"(?P<n>{inner})" + other}.get(
        kind, inner + other
    )


@settings(max_examples=250)
@given(
    pattern=any_pattern(), texts=st.lists(st.text("aab{,:}]l2é👍\n.-", max_size=9), min_size=4, max_size=8)
)
@example("x{,3}y", ["xxy", "x{,3}y"])
@example("[[:alpha:]]", ["a", "a]"])
@example("o{02}1", ["oo1", "o{02}1"])
@example("(?:|a)+b", ["aab"])
def test_a_pattern_means_what_re_says(pattern: str, texts: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of sets that may mean something else one day
        try:
            plain = re.compile(pattern)
        except re.error:
            return
        compiled = under_test._compile(pattern)
    for text in texts:
        for begin in (0, 1):
            want, got = plain.search(text, begin), compiled.search(text, begin)
            assert (got and got.end()) == (want and want.end()), (pattern, text)


def test_re2_searches_what_means_the_same_there() -> None:
    for pattern in ("END", "(?:a|b)+[^c-é]x{,3}y", "[]a[:]+?", r"日本.\."):
        assert not isinstance(under_test._compile(pattern), re.Pattern), pattern
    for pattern in (
        r"\d",
        r"\bx",
        "^x",
        "x$",
        "(?i)x",
        "(?s:.)",
        "(x)\\1",
        "(?=x)",
        "(?:a?)*",
        "a{1001}",
        "x++",
    ):
        assert isinstance(under_test._compile(pattern), re.Pattern), pattern
