"""What a look at a character costs: prices for every character, of every class the dialect has."""

import re
from re import _compiler, _parser  # type: ignore[attr-defined]
from re import _constants as sre  # type: ignore[attr-defined]

import pytest
from outfeed.ingress.regex_checks import Check, check_of, derived
from outfeed.ingress.regex_classes import Alphabet
from outfeed.ingress.regex_units import DIGIT_NS, SCAN_LITERAL_NS, WORD_LETTER_NS, WORD_OTHER_NS

CLASSES = [
    "a", "[^a]", ".", "(?s:.)", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "[abc]", "[a-c]", "[^a-c]",
    "[a-f0-9]", "[aeiou]", r"[\w.+-]", r"[^\s\d]", "[é-ü]", "[一-龥x]", "[a-zé中]", r"[\d\s_]",
    "[^\\x00-\\x7f]", "[🙂a]",
]  # fmt: skip


def of(spelled: str) -> tuple[Check, Alphabet]:
    parsed = _parser.parse(spelled)
    flags = parsed.state.flags
    op, av = parsed[0]
    if str(op) == "SUBPATTERN":
        flags |= av[1]
        op, av = av[3][0]
    alphabet = Alphabet({ord(char) for char in spelled if ord(char) > 127}, folds="(?i)" in spelled)
    return check_of(op, av, flags, alphabet), alphabet


@pytest.mark.parametrize(
    "spelled", [*CLASSES, *("(?i)" + one for one in CLASSES), *("(?a)" + one for one in CLASSES)]
)
def test_every_character_has_one_price(spelled: str) -> None:
    test, alphabet = of(spelled)
    seen = 0
    for mask, ns in test.pieces:
        assert mask & seen == 0
        assert 0 < ns < 60
        seen |= mask
    assert seen & alphabet.all == alphabet.all
    assert test.low & ~test.high == 0
    assert test.test >= max(ns for _, ns in test.pieces)


def price(test: Check, alphabet: Alphabet, char: str) -> float:
    return next(ns for mask, ns in test.pieces if mask & alphabet.atom(ord(char)))


def test_a_category_takes_a_letter_cheaply_and_looks_long_at_what_is_none() -> None:
    test, alphabet = of(r"\w")
    assert price(test, alphabet, "a") == WORD_LETTER_NS
    assert price(test, alphabet, "!") > WORD_OTHER_NS
    assert price(test, alphabet, "½") == WORD_OTHER_NS
    test, alphabet = of(r"\d")
    assert price(test, alphabet, "7") == DIGIT_NS


EMOJI = "".join(map(chr, range(0x1F300, 0x1F5F0, 3)))


@pytest.mark.parametrize("ignore", ["", "(?i)"])
@pytest.mark.parametrize(
    "spelled",
    [
        "[🙂😀🎉]", f"[{EMOJI}]", f"[a-f{EMOJI[:40]}]", rf"[\w{EMOJI[:40]}]", rf"[{EMOJI[:9]}\s{EMOJI[9:]}]",
        "[^🙂😀🎉]", "[𐐀-𐐧𝔸-𝕐🙂]", "[一-🙂]", "[aeiou]", "[a-f0-9é]", r"[\s\d]", "[一中国人]", r"[^\s中🙂]",
    ],
)  # fmt: skip
def test_a_price_is_for_each_step_that_the_engines_own_compiler_makes(spelled: str, ignore: str) -> None:
    test, alphabet = of(ignore + spelled)
    items = _parser.parse(ignore + spelled)[0][1]
    folding = (_compiler._sre.unicode_iscased, _compiler._sre.unicode_tolower, _compiler._EXTRA_CASES)
    steps, folds = _compiler._optimize_charset(items, *(folding if ignore else ()))
    regex = re.compile(ignore + spelled)
    negated = steps[0][0] is sre.NEGATE
    missed = [char for char in "~\u0378\U0003fffe" if (regex.match(char) is None) != negated]
    assert missed
    for char in missed:
        # None of the steps takes it, so the engine tries them all.
        assert price(test, alphabet, char) >= 1.4 * len(steps) + (6.0 if folds else 0.0)


def test_a_letter_with_more_than_two_forms_is_a_set_to_the_engine() -> None:
    assert [of(f"(?i){letter}")[0].test > of("(?i)t")[0].test for letter in "skqiµ"] == [
        True, False, False, True, True,
    ]  # fmt: skip
    assert of("(?ia)s")[0].test == of("(?ia)t")[0].test


def test_ranges_are_tried_in_turn_until_they_are_a_map() -> None:
    test, alphabet = of("[a-f0-9]")
    assert price(test, alphabet, "a") < price(test, alphabet, "5") < price(test, alphabet, "z")
    test, alphabet = of("[aeiou]")
    assert price(test, alphabet, "a") == price(test, alphabet, "u") < price(test, alphabet, "z")


def test_a_literal_costs_the_same_whatever_comes() -> None:
    test, alphabet = of("a")
    assert {price(test, alphabet, char) for char in "a!é中"} == {SCAN_LITERAL_NS}
    test, alphabet = of("(?i)1")
    assert price(test, alphabet, "1") == SCAN_LITERAL_NS
    test, alphabet = of("(?i)a")
    assert price(test, alphabet, "1") > SCAN_LITERAL_NS


def test_derived_prices_are_costs_alone() -> None:
    test = derived(0b1111, 0b0110, 7.0, 2.0)
    assert sorted(test.pieces) == [(0b0110, 7.0), (0b1001, 2.0)]
    assert (test.step, test.test) == (0.0, 7.0)
    assert derived(0b1111, 0b1111, 7.0, 2.0).pieces == [(0b1111, 7.0)]
