"""Stops: cut at the first occurrence wherever rows were cut; hold back what can become one, and no more."""

import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import DecodeOptions
from outfeed.shards.pipeline import byte_level
from outfeed.shards.table import TokenTable
from tokenizers import Tokenizer

from .driver import Driver, every_cut

Tables = Callable[[str], TokenTable]
Tokenizers = Callable[[str], Tokenizer]
Spell = Callable[[str], list[int]]


@pytest.fixture(scope="session")
def spell(tokenizer_of: Tokenizers) -> Spell:
    """Return text as ids of the byte-level tokenizer, one id per UTF-8 byte."""
    vocab = tokenizer_of("bytelevel_added").get_vocab(with_added_tokens=False)
    of_byte = {piece[0]: token for content, token in vocab.items() if len(piece := byte_level(content)) == 1}
    return lambda text: [of_byte[byte] for byte in text.encode()]


@pytest.fixture
def driver(table_of: Tables) -> Driver:
    return Driver(table_of("bytelevel_added"))


def pieces(driver: Driver, spell: Spell, text: str, stops: list[str]) -> list[str]:
    """What goes out per byte of a text that flows on."""
    route = driver.start(DecodeOptions(stop=stops))
    for token in spell(text):
        driver.step([(route, [token])])
    return driver.heard[route].pieces


@pytest.mark.parametrize(
    ("text", "stops", "matched", "want"),
    [
        ("hello END", ["END"], "END", "hello "),
        ("END", ["END"], "END", ""),
        ("ENEND", ["END"], "END", "EN"),
        ("aaab", ["aab"], "aab", "a"),
        ("ab, aba, abab!", ["abab!"], "abab!", "ab, aba, "),
        ("xxstop", ["top", "stop"], "stop", "xx"),
        ("xxstop", ["top", "stop"], "top", "xxs"),
        ("이것은 끝", ["끝"], "끝", "이것은 "),
        ("emoji 👨‍👩‍👧", ["\u200d👧"], "\u200d👧", "emoji 👨‍👩"),
        ("never there", ["zzz"], "zzz", "never there"),
        ("not in the list: STOP", [], "STOP", "not in the list: "),
    ],
)
def test_a_stop_string_is_cut_wherever_rows_are(
    driver: Driver, spell: Spell, text: str, stops: list[str], matched: str, want: str
) -> None:
    ids = spell(text)
    for cuts in every_cut(len(ids)):
        if not stops and cuts:
            continue  # nobody said that it would be one: what went out is out
        heard = driver.stream(ids, cuts, FinishReason.stop(matched), DecodeOptions(stop=stops))
        assert heard.text.decode() == want, cuts
        assert heard.ids == ids
        assert heard.generated == len(ids)


def test_of_two_occurrences_in_the_last_row_the_first_is_cut(driver: Driver, spell: Spell) -> None:
    heard = driver.stream(spell("one. two. three"), [3], FinishReason.stop(". "), DecodeOptions(stop=[". "]))
    assert heard.text == b"one"


def test_only_what_can_still_become_a_stop_is_held(driver: Driver, spell: Spell) -> None:
    assert pieces(driver, spell, "abcabx", ["abcd"]) == ["", "", "", "abc", "", "abx"]
    # "aa" is a whole stop that nobody acted on: it flows, but its second half can begin another.
    assert pieces(driver, spell, "aab", ["aa"]) == ["", "a", "ab"]
    # "ab" may still become "abc".
    assert pieces(driver, spell, "abx", ["ab", "abc"]) == ["", "", "abx"]
    assert pieces(driver, spell, "hello", ["xyz"]) == list("hello")


def test_what_is_held_comes_out_at_the_end(driver: Driver, spell: Spell) -> None:
    ids = spell("so EN")
    for reason in (FinishReason.length(5), FinishReason.abort("gone"), FinishReason({"type": "new"})):
        heard = driver.stream(ids, [1, 3, 4], reason, DecodeOptions(stop=["END"]))
        assert heard.text == b"so EN"


def test_an_ending_row_without_ids_flushes(driver: Driver, spell: Spell) -> None:
    route = driver.start(DecodeOptions(stop=["END"]))
    driver.step([(route, spell("so EN"))])
    assert driver.heard[route].text == b"so "
    driver.step([(route, [])], {route: FinishReason.length(5)})
    assert driver.heard[route].text == b"so EN"


def test_no_stop_trim_keeps_the_stop(driver: Driver, spell: Spell) -> None:
    options = DecodeOptions(stop=["END"], no_stop_trim=True)
    ids = spell("so END")
    for cuts in every_cut(len(ids)):
        assert driver.stream(ids, cuts, FinishReason.stop("END"), options).text == b"so END"
    heard = driver.stream(ids, [2], FinishReason.stop(ids[-1]), options)
    assert (heard.text, heard.ids) == (b"so END", ids)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("END", "all is END"), ("a+", "a+ and aa"), (".*", "a.*b"), ("[.]", "see [.].")],
)
def test_a_pattern_that_the_scheduler_found_stays_in_the_text(
    driver: Driver, spell: Spell, pattern: str, text: str
) -> None:
    """Also where the text has the pattern's own letters in it, wherever rows are cut, whoever goes on."""
    ids, reason = spell(text), FinishReason.stop(pattern)
    for stops in ([], ["zzz"], ["see you"]):
        options = DecodeOptions(stop=stops, stop_regex=["zzz", pattern])
        for cuts in every_cut(len(ids)):
            assert driver.stream(ids, cuts, reason, options).text.decode() == text
        route = driver.start(options)
        driver.step([(route, ids[:3])])
        successor = driver.restore_into(driver.table, route, options)
        successor.step([(route, ids[3:])], {route: reason})
        assert successor.heard[route].text.decode() == text


def test_a_pattern_that_is_a_stop_string_too_is_cut(driver: Driver, spell: Spell) -> None:
    options = DecodeOptions(stop=["END"], stop_regex=["END"])
    for cuts in every_cut(10):
        assert driver.stream(spell("all is END"), cuts, FinishReason.stop("END"), options).text == b"all is "


def test_a_stop_that_starts_inside_a_token(
    driver: Driver, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    tokenizer = tokenizer_of("deepseek")
    ids = tokenizer.encode("done.\n\nNext", add_special_tokens=False).ids
    assert any("\n" in tokenizer.decode([token]) and tokenizer.decode([token]) != "\n" for token in ids)
    driver = Driver(table_of("deepseek"))
    for cuts in every_cut(len(ids)):
        heard = driver.stream(ids, cuts, FinishReason.stop("\nN"), DecodeOptions(stop=["\nN"]))
        assert heard.text == b"done.\n"


# ---- stop tokens


def test_a_matched_stop_token_is_dropped_but_counted(driver: Driver, spell: Spell) -> None:
    ids = spell("abc")
    heard = driver.stream(ids, [1], FinishReason.stop(ids[-1]))
    assert (heard.text, heard.ids, heard.generated) == (b"ab", ids[:2], 3)


def test_matched_token_zero_trims_nothing(table_of: Tables) -> None:
    driver = Driver(table_of("bytelevel_added"))
    heard = driver.stream([5, 0], [], FinishReason.stop(0), DecodeOptions(skip_special_tokens=False))
    assert heard.ids == [5, 0]
    assert heard.text.endswith(b"<|end|>")


def test_a_list_of_matched_tokens_is_dropped_as_far_as_it_lies_in_the_row(
    driver: Driver, spell: Spell
) -> None:
    ids = spell("abcd")
    heard = driver.stream(ids, [], FinishReason.stop(ids[2:]))
    assert (heard.text, heard.ids, heard.generated) == (b"ab", ids[:2], 4)
    heard = driver.stream(ids, [3], FinishReason.stop(ids[2:]))
    assert (heard.text, heard.ids) == (b"abc", ids[:3])


@pytest.mark.parametrize("matched", [10**12, [2**40], -(2**40), [], "", None, True, 1.5, {"a": 1}])
def test_a_match_that_is_no_token_trims_nothing(driver: Driver, spell: Spell, matched: object) -> None:
    heard = driver.stream(spell("abc"), [], FinishReason({"type": "stop", "matched": matched}))
    assert heard.text == b"abc"


def test_a_matched_token_that_is_not_the_last_one_trims_nothing(driver: Driver, spell: Spell) -> None:
    assert driver.stream(spell("abc"), [], FinishReason.stop(spell("a")[0])).text == b"abc"


def test_a_stop_token_behind_an_unfinished_character(driver: Driver, spell: Spell) -> None:
    ids = [*spell("é")[:1], 0, *spell("z")]
    heard = driver.stream(ids, [1, 2], FinishReason.stop(ids[-1]))
    assert heard.text.decode() == "\ufffd"


# ---- detect_stops: the shard finds them itself

DETECT = DecodeOptions(stop=["END", "\n\n"], detect_stops=True)


def test_the_shard_ends_a_stream_at_a_stop_string(driver: Driver, spell: Spell) -> None:
    text = "some text END and more\n\nthan that"
    ids = spell(text)
    for cuts in every_cut(len(ids)):
        heard = driver.stream(ids, cuts, options=DETECT)
        assert heard.text == b"some text "
        assert heard.finish == FinishReason.stop("END")
        assert heard.ids == spell("some text END")
        assert heard.generated == len(heard.ids)


def test_the_scheduler_is_told_only_when_it_does_not_know(driver: Driver, spell: Spell) -> None:
    route = driver.start(DETECT)
    driver.step([(route, spell("so END"))])
    assert driver.heard[route].ended_here
    route = driver.start(DETECT)
    driver.step([(route, spell("so END"))], {route: FinishReason.length(6)})
    assert not driver.heard[route].ended_here
    assert driver.heard[route].finish == FinishReason.stop("END")


def test_nothing_comes_after_a_stop_that_the_shard_found(driver: Driver, spell: Spell) -> None:
    route = driver.start(DETECT)
    driver.step([(route, spell("a END b"))])
    driver.step([(route, spell("more"))], first={route: 7})
    driver.step([(route, [])], {route: FinishReason.abort("aborted")}, first={route: 11})
    assert driver.heard[route].text == b"a "
    assert driver.decoder.statistics.doubled == 2
    assert driver.failures == []


def test_detected_stops_are_kept_when_asked(driver: Driver, spell: Spell) -> None:
    options = DecodeOptions(stop=["END"], detect_stops=True, no_stop_trim=True)
    ids = spell("a END b")
    for cuts in every_cut(len(ids)):
        assert driver.stream(ids, cuts, options=options).text == b"a END"


@pytest.mark.parametrize(
    ("pattern", "text", "want"),
    [
        (r"\d{3}", "room 12, room 1234", "room 12, room 123"),
        (r"[.!?]\s*$", "Well. Yes", "Well."),
        (r"END(ING)?", "the END is near", "the END"),
        (r"a(b|c)d", "abc acd abd", "abc acd"),
        (r"(?i)stop", "please sToP now", "please sToP"),
        (r"END(?=\n)", "END, END\nx", "END, END"),
        (r"끝+", "이것은 끝끝", "이것은 끝"),
        (r"\bword\b", "swords word x", "swords word"),
    ],
)
def test_the_shard_ends_a_stream_at_a_stop_pattern(
    driver: Driver, spell: Spell, pattern: str, text: str, want: str
) -> None:
    """It looks after each token, as a scheduler would; the text ends where the match ends."""
    ids = spell(text)
    options = DecodeOptions(stop_regex=[pattern], detect_stops=True)
    texts = set()
    for cuts in every_cut(len(ids)):
        heard = driver.stream(ids, cuts, options=options)
        assert heard.finish == FinishReason.stop(pattern), text
        texts.add(heard.text.decode())
    assert len(texts) == 1
    (got,) = texts
    assert got == want


def test_a_pattern_that_never_matches_costs_nothing_but_time(driver: Driver, spell: Spell) -> None:
    options = DecodeOptions(stop_regex=["x{5}"], detect_stops=True)
    heard = driver.stream(spell("no five x here: xxxx"), [4, 9], options=options)
    assert heard.text == b"no five x here: xxxx"
    assert heard.finish == FinishReason.length(20)


# ---- any stops, any cuts


@pytest.mark.parametrize("pattern", [None, "EN?D", "(?<=E)N+D(?= |$)"])
def test_a_stop_before_the_least_number_of_tokens_is_text(
    driver: Driver, spell: Spell, pattern: str | None
) -> None:
    """Wherever rows are cut, and whoever goes on: only one that is complete with a later token ends it."""
    text = "an ENEND b END END"
    ends = [found.end() for found in re.finditer("END", text)]
    ids = spell(text)
    for least in range(len(text) + 2):
        stops = {"stop": ["END"]} if pattern is None else {"stop_regex": [pattern]}
        options = DecodeOptions(**stops, detect_stops=True, min_new_tokens=least)  # type: ignore[arg-type]
        at = next((end for end in ends if end >= least), None)
        kept = text if at is None else text[: at - 3 if pattern is None else at]
        finish = FinishReason.length(len(ids)) if at is None else FinishReason.stop(pattern or "END")
        for cuts in ([], [4], [9], list(range(1, len(ids)))):
            heard = driver.stream(ids, cuts, options=options)
            assert (heard.text.decode(), heard.finish) == (kept, finish), (least, cuts)
        for cut in (3, 7, 8, 9, 12, 14):
            route = driver.start(options)
            driver.step([(route, ids[:cut])])
            successor = driver.restore_into(driver.table, route, options)
            if not driver.heard[route].ended_here:
                successor.step([(route, ids[cut:])], {route: FinishReason.length(len(ids))})
            assert (driver.heard[route].text.decode(), driver.heard[route].finish) == (kept, finish)


@pytest.mark.parametrize("trimmed", [False, True])
def test_a_stop_that_the_end_of_the_text_completes_comes_with_the_last_token_that_is_kept(
    driver: Driver, spell: Spell, trimmed: bool
) -> None:
    """An open character becomes U+FFFD at the end, and that is what stops."""
    ids = [*spell("a"), spell("é")[0], *(spell("z") if trimmed else [])]
    finish = FinishReason.stop(ids[-1]) if trimmed else FinishReason.length(2)
    for least, text, found in ((2, b"a", FinishReason.stop("\ufffd")), (3, "a\ufffd".encode(), finish)):
        options = DecodeOptions(stop=["\ufffd"], detect_stops=True, min_new_tokens=least)
        for cuts in ([], [1]):
            heard = driver.stream(ids, cuts, finish, options)
            assert (heard.text, heard.finish) == (text, found)


def expected(text: str, stops: list[str]) -> tuple[str, str] | None:
    """The plain way: the stop that is complete first, the longest of those complete at once."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return None


@settings(max_examples=150)
@given(
    text=st.text("ab\u00e9\U0001f600", min_size=1, max_size=24),
    stops=st.lists(st.text("ab\u00e9\U0001f600", min_size=1, max_size=5), min_size=1, max_size=4),
    seed=st.integers(0, 2**16),
)
def test_any_stops_and_any_cuts(
    table_of: Tables, spell: Spell, text: str, stops: list[str], seed: int
) -> None:
    driver, ids = Driver(table_of("bytelevel_added")), spell(text)
    cuts = [at for at in range(1, len(ids)) if random.Random(seed + at).random() < 0.4]
    found = expected(text, stops)
    heard = driver.stream(ids, cuts, options=DecodeOptions(stop=stops, detect_stops=True))
    if found is None:
        assert heard.text.decode() == text
        return
    assert heard.text.decode() == found[0]
    assert heard.finish == FinishReason.stop(found[1])
    # A scheduler that looks itself, and ends the row there, gets the same text cut.
    upto = spell(found[0] + found[1])
    options = DecodeOptions(stop=stops)
    again = driver.stream(upto, [at for at in cuts if at < len(upto)], FinishReason.stop(found[1]), options)
    assert again.text.decode() == found[0]
