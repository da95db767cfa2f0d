"""stop_regex admission: both lists of the reference, what is weighed against what, and the cache."""

import contextlib
import re
import threading
import warnings
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import pytest
from outfeed.ingress import regex_worst
from outfeed.ingress.admission_cache import Cache
from outfeed.ingress.errors import BadRequest
from outfeed.ingress.sampling import SamplingParams, parse_each
from outfeed.ingress.stop_regex import CACHE, MAX_EFFORT, UNBOUNDED, Admission, Effort, admit, analyse

VOCAB = 1000

# Each raises, hangs or takes seconds, whatever the text it is searched in.
REFUSED = [
    r"(a+)+b", r"(?:a+)+b", r"(a|a)*b", r"(?:.|.)*Z", r"(?:a*){10}b", r"a*a*a*a*a*a*a*a*b",
    r".*.*.*.*.*.*.*.*Z", r"(?:.?){30}Z", r"(?:.?){255}Z", r"(?:.{0,1}.{0,1}.{0,1}){8}Z",
    r"(?:(?:.?){15}){15}Z", r"(?:.?.?.?.?){60}Z", ".{0,1}" * 20 + "Z", ".{0,4}" * 12 + "Z",
    r"(?:(?:a*){65535}){65535}", r"(?:){1048575}x", r"a{4294967295}", r"a{5000000000}",
    "(", "[z-a]", "a{2,1}", "$*", r"\b{2}", "^+", "a?*", "a(?i)b", "(?-i)a", r"\p{L}", "(?<n>a)",
    r"\x{41}", "(?<=a*)b",
]  # fmt: skip
ADMITTED = [
    r"[.!?]\s*$", "and|or", "colou?r", r"\d{6}", "abc", r"\d+", "Answer: .*", "END(ING)?", "https?://",
    r"(?i)\d{4}-\d{2}", r"\bword\b", "[a-f0-9]{40}", ".{100}", "(?:foo|bar)+", r"END(?=\n)", "(?P<n>a)",
]  # fmt: skip
# What a second dialect refuses for its spelling, and the engine takes.
OVER_REJECTED = ["(?:foo|bar)+", r"END(?=\n)", r"(a)\1", r"a\Z", "a*b*"]


def parse(pattern: object, **params: object) -> SamplingParams:
    return SamplingParams.parse({"stop_regex": pattern, **params}, vocab_size=VOCAB)


@pytest.mark.parametrize("pattern", REFUSED)
def test_refused_however_short_the_output(pattern: str) -> None:
    for limit in (1, 128, None):
        with pytest.raises(BadRequest) as caught:
            parse(pattern, max_new_tokens=limit)
        assert caught.value.status == 400
        assert caught.value.field.startswith("sampling_params.stop_regex[0]")


@pytest.mark.parametrize("wrong", ["(a+)+b", "(", r"\w+.*\d+x"])
@pytest.mark.parametrize(
    "around",
    [(0, 1), (1, 0), (3, 2), (31, 0)],
    ids=lambda empty: f"{empty[0]} empty before, {empty[1]} behind",
)
def test_a_message_names_the_place_in_the_clients_own_list(wrong: str, around: tuple[int, int]) -> None:
    """Empty patterns ask for nothing and are dropped; they count all the same."""
    before, behind = around
    for good in ("", "ok"):
        patterns = [good] * before + [wrong] + [""] * behind
        for _ in range(2):  # the second time its analysis is known
            with pytest.raises(BadRequest) as caught:
                parse(patterns, max_new_tokens=100_000)
            assert caught.value.field == f"sampling_params.stop_regex[{before}]"


@pytest.mark.parametrize("pattern", sorted({*ADMITTED, *OVER_REJECTED}))
def test_admitted_however_long_the_output(pattern: str) -> None:
    for limit in (1, 64, 32_000, None):
        parse(pattern, max_new_tokens=limit)


# Quadratic in the text: what the reference server admits after looking at 88 characters.
@pytest.mark.parametrize("pattern", [r"\s+$", r"\d+x", r"(?i)[a-z]+\d"])
def test_a_quadratic_search_is_weighed_against_the_longest_output(pattern: str) -> None:
    parse(pattern, max_new_tokens=32)
    with pytest.raises(BadRequest) as caught:
        parse(pattern, max_new_tokens=32_000)
    assert "to the power of 2" in caught.value.message
    assert "256000 characters" in caught.value.message
    assert "ms" in caught.value.message


@pytest.mark.parametrize("pattern", [r"\s+$", r"<tool>.{0,200}</tool>"])
def test_a_refusal_says_for_how_long_an_output_it_would_be_admitted(pattern: str) -> None:
    found = analyse(pattern)
    message = found.refusal(32_000)
    assert message is not None
    asked = re.search(r"or lower max_new_tokens: it is admitted for up to (\d+) characters$", message)
    assert asked is not None
    longest = int(asked[1])
    assert found.refusal(longest) is None
    assert found.refusal(longest + 1) is not None


def test_it_asks_for_no_shorter_output_where_none_would_do() -> None:
    message = analyse(r"(?s)(?:.{0,200}x){2}.{0,200}!").refusal(32_000)
    assert message is not None
    assert "max_new_tokens" not in message


def test_trailing_space_is_admitted_for_64_tokens() -> None:
    parse(r"\s+$", max_new_tokens=64)


def test_the_context_limits_the_output_too() -> None:
    params = {"stop_regex": r"\s+$", "max_new_tokens": None}
    SamplingParams.parse(params, vocab_size=VOCAB, max_output_tokens=64)
    with pytest.raises(BadRequest, match="power of 2"):
        SamplingParams.parse(params, vocab_size=VOCAB, max_output_tokens=8000)


# What explodes stands where an analysis may think that no search comes to: after a group's text that no
# longer meets what the group asked for, at the very end of a text, after the run of a possessive repeat,
# where the match is certain already, before a long count is reached, and between classes that overlap only
# as the engine compares far cases.
HIDDEN = [
    r"(\ba)x\1(?:\w+)+!", r"(^a)x\1(?:\w+)+!", r"((?<=b)a)x\1(?:\w+)+!", r"(a(?!x))bx\1x(?:\w+)+!",
    r"(a*+)b\1a(?:\w+)+!", r"\Z(?:|a?|b?){12}c", r"$(?:|a?|b?){12}c", r"\s\Z(?:|a?|b?){11}c",
    r"\w\b\Z(?:|a?|b?){12}c", r"x$\n(?:|a?|b?){12}c", r"x.++\n(?:\w+\s?)+!", r"a(?:(?:|a?|b?){12}c)?",
    r"(?:(?:|a?|b?){12}c)?", r"(?=(?:|a?|b?){12}c)?a", r"(?>(?:|a?|b?){12}c|a)", r"^(?:|a?|b?){9}c",
    r"(?:(?:|a?|b?){12}c){0,3}+a", r"(?:(?:\b|\B|){7}c){2}x", r"(?:(?:\b|\B|){12})?x", r"(?=(?:\b|\B|){12}c)",
    "(?i)(?:[^𐐀x]|(?-i:𐐀))+xb", "(?ia)(?:[ϰ-𐑈]|ɡ(?=[^x]))+xb",
    r"(?:\b)+" * 14 + "!", r"(?:\b){2,}?" * 12 + "c", r"(?:\w{500})+",
    r"(?:x\w{10000})+", r"(?:x\w{9000}|y)+",
]  # fmt: skip


@pytest.mark.parametrize("pattern", HIDDEN)
def test_what_explodes_is_found_wherever_it_stands(pattern: str) -> None:
    assert analyse(pattern).refusal(0) is not None


LINEAR = [
    r"\b[a-z]+:", r"(?<!\d)\d+:", r"(?m)^.*END", r"^.*END", r"\A\s*\S+\s*=", r"(?:\w+\s)*", r"(?:\w+\s?)+",
    r"\{(?:[^{}]|\{[^{}]*\})*\}", r"x(?:ab|cd)*y", r"(?:yes|no|maybe)[.!]?", r"\bfoo(?!bar)", r"(?>abc)",
    r"(\w)\1\1", r"[A-Z][a-z]+ [A-Z][a-z]+\.", r"(?i:stop)", r"(?x) stop \s here", r"(a)?(?(1)b|c)",
    r"\n\n(?=User:)", r"[一-龥]{2,8}。", "🙂+", r"(?:a|b|c)+", r".*", r"(?s).*",
]  # fmt: skip


@pytest.mark.parametrize("pattern", LINEAR)
def test_linear_is_admitted_however_it_is_spelled(pattern: str) -> None:
    found = analyse(pattern)
    assert found.cost is not None
    assert found.cost.degree <= 1
    assert found.refusal(32_000) is None


EXPONENTIAL = [
    r"(?:a|ab|b)*c", r"(?:\w+\s?)+$", r"(?:a?a?)*b", r"((a*)b?)*c", r"(?:(?=a)a|a)*b", r"(x+x+)+y",
    r"^(?:[a-z]+)*$", r"(?:a|a?)+b", r"(.*?,)*x", r"(?:a{1,20}){2,40}b",
    r"(?:a|aa)+b", r"(?:.|\n)*?(?:x|y|.)*z", r"(?:ab?c?|b?c|abc)*d", r"(?:(?:ab|b|c|d|e|fg)(?:|))*x",
]  # fmt: skip


@pytest.mark.parametrize("pattern", EXPONENTIAL)
def test_exponential_is_refused_however_it_is_spelled(pattern: str) -> None:
    # Not for what it would cost as something else: less of the same could be admitted then.
    found = analyse(pattern)
    assert found.refusal(1) is not None
    assert found.cost is None


@pytest.mark.parametrize(
    ("pattern", "max_len", "window"),
    [
        ("abc", 3, 3), (r"\d{2,5}", 5, 5), ("a|bcd", 3, 3), ("a+", UNBOUNDED, UNBOUNDED), (r"(ab)\1", 4, 4),
        (r"END(?=\n\n)", 3, 5), (r"(?<=ab)c", 1, 3), (r"\bword\b", 4, 6), (r"a\Z", 1, 3), ("", 0, 1),
        ("^abc", 3, UNBOUNDED), (r"(?m)^abc", 3, 5), (r"(a)?(?(1)bc|d)", 3, 3), ("(?:ab){3}", 6, 6),
        ("(?>a|bc)d", 3, 3), ("a{0}", 0, 1), ("🙂é", 2, 2), (r"(?:a?){4}", 4, 4),
    ],
)  # fmt: skip
def test_the_length_bound_is_finite_where_it_is(pattern: str, max_len: int, window: int) -> None:
    found = analyse(pattern)
    assert (found.max_len, found.window) == (max_len, window)


def test_what_looks_beside_itself_is_searched_with_what_is_there() -> None:
    """However it is spelled: the running engine says which spellings there are."""
    escapes = [spelled for spelled, (op, _) in _parser.CATEGORIES.items() if op is sre.AT]
    assert {r"\b", r"\Z"} < set(escapes)
    for spelled in (*escapes, "^", "$", "(?=y)", "(?<!y)"):
        assert analyse(f"x{spelled}").window > 1, spelled


def test_what_is_not_modelled_says_so() -> None:
    assert "atomic" in analyse(r"(?:(?>a+|b)c)+d").why
    assert "possessive" in analyse(r"(?:a+b)++c").why


def test_classes_that_take_the_engine_long_to_compile_are_refused() -> None:
    with pytest.raises(BadRequest, match="span"):
        admit("[Ā-\uffff]" * 30, "stop_regex", Effort())
    admit("[一-龥]+", "stop_regex", Effort())


FEW = "[" + "".join(map(chr, range(0x1F300, 0x1F318, 2))) + "]"


@pytest.mark.parametrize(
    ("light", "heavy"),
    [
        (FEW, "[" + "".join(map(chr, range(0x1F300, 0x1F580, 2))) + "]"),
        ("#()(?:a|bc)*x", "#" + "()" * 10 + "(?:a|bc)*x"),
        ("#()(?:a*b)*x", "#" + "()" * 10 + "(?:a*b)*x"),
        ("#()(?:a|bc)*x", "#(?:a|bc" + "()" * 10 + ")*x"),
        ("#(?:ab*c*)*!", "#(?:ab*c*d*e*f*g*)*!"),
        ("#(?:a(?:b)?c*)*!", "#(?:ab*?c*?d*?e*?f*?g*?)*!"),
    ],
)
def test_what_the_engine_looks_through_or_keeps_each_time_is_paid_for(light: str, heavy: str) -> None:
    assert analyse(light).refusal(32_000) is None
    assert analyse(heavy).refusal(32_000) is not None


def test_a_repeat_of_a_group_is_begun_even_where_it_finds_nothing() -> None:
    once, often = analyse("#(a)?(b)?(c)?(d)?z").cost, analyse("#(a)*(b)*(c)*(d)*z").cost
    assert once is not None
    assert often is not None
    assert often.milliseconds(32_000) > 0.8 * once.milliseconds(32_000)


@pytest.mark.parametrize("pattern", [r"(?:(a)b)*+c", r"(?:(?>(a)|b)c)+", r"(?:x(?=(a)))++", r"((a)|b){2}+"])
def test_groups_that_the_engine_loses_track_of_are_refused(pattern: str) -> None:
    found = analyse(pattern)
    assert found.refusal(1) is not None
    assert "capturing group" in found.why


@pytest.mark.parametrize("pattern", [r"(?>(a)|b)c", r"(END)++", r"(a)?+b", r"(?>(\d)(x)?)y"])
def test_groups_that_are_gone_through_once_are_not(pattern: str) -> None:
    assert analyse(pattern).refusal(32_000) is None


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:x(?<=ab)?+)*y",  # CPython 3.11.2 searches "xxxx" for ever
        r"(?:x(?<!ab)*+)+y",
        r"(?:x(?:(?<=ab)c)?+)*?y",
        r"(?:[xz](?<=abc)?+)*+y",
        r"(?>(?:x(?=(?<=b)c)|y){2}+)",
        r"((?:a|(?(1)(?<=bc)d))++)",
    ],
)
def test_what_may_go_back_in_the_text_is_refused(pattern: str) -> None:
    found = analyse(pattern)
    assert found.refusal(1) is not None
    assert "look-behind inside a possessive repeat" in found.why
    assert "(?>(?:...)*)" in found.why


@pytest.mark.parametrize(
    "pattern", [r"(?>(?:x(?<=ab))*)y", r"(?<=ab)(?:xy)*+", r"#(?:x(?=ab))*+y", r"(?<=a)b++", r"(?<=a{2}+)b"]
)
def test_what_only_stands_beside_a_possessive_repeat_is_not(pattern: str) -> None:
    assert analyse(pattern).refusal(1) is None


def heavy(index: int) -> str:
    """A pattern that takes the analysis long."""
    begin = rf"(?:\w{{2}}?\S{index}b|^[^\w]\s{{0,20}}+){{5}}"
    return begin + r"(?:ab+?|1,)(?:\n\b){2,}[ab]{0,9}\d{0,9}[a-c]{0,20}\w"


def test_the_patterns_of_a_request_share_what_their_analysis_may_take() -> None:
    CACHE.clear()
    with pytest.raises(BadRequest, match=r"stop_regex\[\d+\].*take too much to analyse together"):
        SamplingParams.parse(
            {"stop_regex": [heavy(i) for i in range(32)], "max_new_tokens": 8}, vocab_size=VOCAB
        )
    # What was analysed until then is kept, and one at a time all of them are.
    assert len(CACHE) > 0
    for i in range(32):
        parse(heavy(i), max_new_tokens=8)


def test_the_objects_of_a_batch_share_it_too() -> None:
    CACHE.clear()
    entries = [{"stop_regex": heavy(i), "max_new_tokens": 8} for i in range(200)]
    with pytest.raises(BadRequest, match=r"sampling_params\[\d+\].*analyse together"):
        parse_each(entries, 200, vocab_size=VOCAB)


def test_32_plain_patterns_are_far_from_the_limit() -> None:
    effort = Effort()
    CACHE.clear()
    for i in range(32):
        admit(rf"\n\n(?:User|Human|Assistant) {i}:\s*\w{{1,20}}", "stop_regex", effort)
    assert effort.left > MAX_EFFORT / 3


@pytest.mark.parametrize("wide", ["(?i)[\0-\uffff]", "(?>a)[\0-\uffff][ĀĂĄ]"])
def test_what_takes_the_engines_compiler_long_counts(wide: str) -> None:
    """It walks through each character of a class's ranges, and makes a map of all up to U+FFFF."""
    CACHE.clear()
    with pytest.raises(BadRequest, match="together"):
        parse([f"{wide}{i}" for i in range(32)])


def test_an_analysis_that_finds_no_memory_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = r"(?:\d{1,3}\.){3}\d{1,3}"
    CACHE.clear()
    with monkeypatch.context() as scarce:
        scarce.setattr(regex_worst, "lib", WithoutMemory())
        with pytest.raises(MemoryError, match="worst text for a stop pattern"):
            parse(pattern, max_new_tokens=4)
    parse(pattern, max_new_tokens=32_000)


class WithoutMemory:
    """The C core when there is none."""

    OFW_OK, OFW_NO_MEMORY = regex_worst.lib.OFW_OK, regex_worst.lib.OFW_NO_MEMORY
    OFW_TOO_MUCH = regex_worst.lib.OFW_TOO_MUCH

    def ofw_find(self, _pattern: object, found: Any) -> int:
        found.work = 0
        return int(self.OFW_NO_MEMORY)


def test_a_round_that_matches_nothing_is_no_promise_of_a_match() -> None:
    cost = analyse(r"(?=ab|cd)+\w?").cost
    assert cost is not None
    assert cost.degree == 1


@pytest.mark.parametrize("pattern", [r"(\w)\1{3,}", r"(?i)(.)\1{4,}", r"(\w\w)\1{3,}", r"(ab|cd)\1*"])
def test_a_text_that_comes_again_and_again_is_the_match_as_soon_as_it_has(pattern: str) -> None:
    found = analyse(pattern)
    assert found.cost is not None
    assert found.cost.degree == 1
    assert found.refusal(16_000) is None


@pytest.mark.parametrize("pattern", [r"(ab|a)\1+", r"(aba|ba)\1{2,}"])
def test_a_part_of_a_text_that_comes_again_is_no_promise_of_the_rest(pattern: str) -> None:
    cost = analyse(pattern).cost
    assert cost is not None
    assert cost.degree == 2


def test_a_literal_after_a_repeat_is_looked_for_before_what_follows_is_tried() -> None:
    literal, other = analyse("[a-c]{0,20}x").cost, analyse("[a-c]{0,20}[xy]").cost
    assert literal is not None
    assert other is not None
    assert other.milliseconds(1000) > 1.5 * literal.milliseconds(1000)


def test_deep_nesting_is_judged_or_refused_wherever_it_is_asked() -> None:
    def below(depth: int, pattern: str) -> None:
        if depth:
            below(depth - 1, pattern)
        else:
            with contextlib.suppress(BadRequest):
                admit(pattern, "stop_regex", Effort())

    for pattern in ("(" * 85 + "a" + ")*" * 85, "(?:" * 63 + "a" + ")" * 63, "(?=" * 60 + "a" + ")" * 60):
        for depth in range(0, 900, 60):
            with contextlib.suppress(RecursionError):
                below(depth, pattern)
                continue
            assert depth > 500, "only a stack that is nearly full may end so"


def test_the_parsers_warnings_reach_nobody() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        admit("[[a]b", "stop_regex", Effort())
        admit("[+--]x", "stop_regex", Effort())
    assert seen == []


def test_an_admission_is_kept_and_does_not_depend_on_who_asked() -> None:
    CACHE.clear()
    pattern = r"\s+$"
    parse(pattern, max_new_tokens=8)
    kept = CACHE.get(pattern)
    assert kept == analyse(pattern)
    with pytest.raises(BadRequest):
        parse(pattern, max_new_tokens=32_000)
    assert CACHE.get(pattern) is kept
    parse(pattern, max_new_tokens=8)


def test_only_what_can_be_admitted_is_kept() -> None:
    CACHE.clear()
    for pattern in ("(a+)+b", "(", "a{4294967295}"):
        with pytest.raises(BadRequest):
            parse(pattern)
        assert CACHE.get(pattern) is None


def test_the_cache_keeps_what_is_in_use_and_never_more_than_it_may() -> None:
    cache: Cache[str] = Cache(512)
    for turn in range(5000):
        cache.put(f"k{turn}", str(turn))
        assert len(cache) <= 512
        if turn:
            assert cache.get("k0") == "0"
    assert cache.get("k4999") == "4999"
    assert cache.get("k4800") == "4800"
    assert cache.get("k1") is None
    with pytest.raises(ValueError, match="at least 2"):
        Cache(1)


def test_threads_read_and_fill_the_cache_together() -> None:
    cache: Cache[str] = Cache(64)
    wrong: list[str] = []

    def work(seed: int) -> None:
        for turn in range(3000):
            key = str((turn * seed) % 100)
            value = cache.get(key)
            if value is None:
                cache.put(key, key)
            elif value != key:
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 7, 11, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(cache) <= 64 + 4


def test_an_admission_can_be_compared_and_not_changed() -> None:
    found = analyse("abc")
    assert found == analyse("abc")
    assert isinstance(found, Admission)
    with pytest.raises(AttributeError):
        found.max_len = 5  # type: ignore[misc]
