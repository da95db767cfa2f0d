"""The worst text: no text costs more than what is found, the text that is found costs about as much, and the
C core takes nothing it cannot follow."""

import contextlib
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outfeed.ingress import regex_worst
from outfeed.ingress.regex_cells import NO_TAILS, Beyond, Cells, Kinds
from outfeed.ingress.regex_cost import cost_of
from outfeed.ingress.regex_cuts import Cut, sure_tails
from outfeed.ingress.regex_places import Explosive, TooComplex
from outfeed.ingress.regex_worst import Worst, worst_of
from outfeed.ingress.stop_regex import analyse

from .patterns import drawn, graph_of
from .test_regex_properties import family
from .walk import Walk

LENGTH = 32_000
# Every place of a text is bounded by too much for these; the worst text is not that bad.
TIGHT = [
    r"(?:\d{1,3}\.){3}\d{1,3}", r"(?<=\n)\s{0,8}}", r"(?:[é-ü]+\S)", r"(?i)[^\w]{5}", r"cc.\S{0,2}1\w{1,3}",
    r"z{0,20}1,\w1x{5}", r"(?:(?:yes|no|maybe|unknown|none|other)\b)*1", r"(?:and|or){2,}", "(?:ab){2,}ab",
    r"(?:END\W{2,}\S{5}|foo?)", r"\b[A-Z]\*\b\.",
]  # fmt: skip
# What piles up with the length of the text has no mean, however it is hidden.
GROWING = [
    r"\s+$", r"\d+x", r"[ab]+c", r"(?:\d{2,}c |[^a-c])*", r"x.*y", r"(?:a|b)+c", r"(?:a{2})+b",
    r"\w+\s*\w+$", r"(a+)\1b", r"(?:a|ab|b)*c", r"^.*.*x", r"\n+$\n", r"\n+(?=\n)$", r"\n+(?!x)$",
    r"\n+$(?=\n)", r"\n+x?+$", r"b(?:b*+)+b", r"(?:b+b){2}+", r"(?i:[aé])+.",
    r"[ü-ÿ]{1,3}(?i:[aé])*.?[ü-ÿ]+",
]  # fmt: skip


PATTERNS = drawn(
    [
        "a",
        "b",
        "ab",
        ".",
        r"\d",
        r"\w",
        r"\s",
        "[ab]",
        "[^a]",
        "é",
        r"\b",
        r"\B",
        "$",
        "(?<=a)",
        "(?!b)",
        "^",
    ],
    ["", "", "?", "{2}", "{1,3}", "{0,5}", "*?", "+", "++", "?+", "{1,3}+"],
    ["(?:%s)", "(%s)", "(?=%s)", "(?>%s)", "(?<=b)(?:%s)"],
    leaves=7,
)


def found_for(pattern: str) -> tuple[Worst, Walk] | None:
    try:
        re.compile(pattern)
        graph = graph_of(pattern)
        walk = Walk(Cells(graph))
    except (re.error, ValueError, Explosive, TooComplex, Beyond):
        return None
    worst = worst_of(graph, 0.0, LENGTH)
    return None if worst is None else (worst, walk)


@settings(max_examples=400)
@given(PATTERNS, st.randoms(use_true_random=False))
def test_no_text_costs_more_than_the_worst(pattern: str, rng: random.Random) -> None:
    found = found_for(pattern)
    if found is None:
        return
    worst, walk = found
    graph = walk.cells.graph
    walks = [walk, Walk(Cells(graph, sure_tails(graph)))]
    kinds = range(len(walk.kinds.masks))
    for _ in range(6):
        # Blocks that come again: ways pile up in what is regular.
        word = [rng.choice(kinds) for _ in range(rng.randint(1, 5))]
        text = (word * 60)[: rng.randint(1, 60)] + [rng.choice(kinds) for _ in range(3)]
        last = 0 if walk.cells.matches_nothing else rng.choice([0, len(text) // 2, len(text)])
        costs = [walk.costs(text, last) for walk in walks]
        if None not in costs:
            # Whichever is less is what the core had to find at least.
            terms, cost = worst.cost.terms, min(filter(None, costs))
            assert cost <= terms[0] + terms[1] * len(text) + 1e-3 * cost


def bounds_of(walk: Walk) -> Iterator[tuple[bool, str, float, float]]:
    """Yield what the core finds in each setting: whether the last search is followed, the setting's name,
    nanoseconds once and for each character."""
    core, _kept = regex_worst.core_pattern(walk.cells, walk.kinds)
    core.max_work = 100_000
    rests, rest = [regex_worst.ffi.NULL], walk.cells.rest()
    if rest is not None:
        rests.append(regex_worst.ffi.new("float[]", rest))
    found = regex_worst.ffi.new("ofw_worst *")
    for core.rest in rests:
        for core.depth, core.digits in ((1 << 16, 0), (1 << 16, 3), (2, 0)):
            if regex_worst.lib.ofw_find(core, found) == regex_worst.lib.OFW_OK:
                name = f"{core.depth} deep to {core.digits} digits, {core.rest}"
                yield core.rest == regex_worst.ffi.NULL, name, found.first, found.each


# What is wrong with one of these goes wrong where little else does: what the one last way costs, the end of a
# text, which search has surely matched and which has not, what goes on when no more begin.
DEAR = [
    "x*", "é?", "a.*", "(?i:(?<=ab))*?", r"(?s)(?m:^)^.(?m:^)", "(?:[^\\n]{0,2}a{1,2}+(?i:ſ)){2,3}(?!a)",
    "(?:b*aa|[^a])", "(?:(?:aa)b{2,}[ab].|a)", "(?:a*ab[ab]|(?:[^a]*[^a]|[ab]))",
    "(?:(?:c)[ab]{2,}cb|(?:b*a|[^a]))",
]  # fmt: skip


def looked_through(pattern: str, rng: random.Random, length: int) -> int:
    """Look for texts that cost more than is found; return how often something was found."""
    graph, settings = graph_of(pattern), 0
    for tails in (NO_TAILS, sure_tails(graph)):
        walk = Walk(Cells(graph, tails))
        bounds = list(bounds_of(walk))
        settings += len(bounds)
        dearest = walk.dearest(length, 4) if bounds else []
        for one in dearest:
            cost = one.cost + walk.price(one.ways, one.before, None)
            for _, setting, first, each in bounds:
                assert cost <= (first + each * len(one.text)) * (1 + 1e-3), (pattern, setting, one.text)
            # What comes again and again pays nothing of what is paid for once.
            words = [[*one.text[-length:]] for length in (1, 2, 3) if one.text]
            for word in [*words, rng.choices(range(len(walk.kinds.masks)), k=rng.randint(1, 4))]:
                mean = walk.mean(one, word)
                for followed, setting, _, each in bounds:
                    if mean is not None and (followed or one.begins):
                        assert mean <= each * (1 + 1e-3), (pattern, setting, one.text, word)
    return settings


@pytest.mark.parametrize("pattern", [*TIGHT, *DEAR])
def test_no_text_that_is_looked_for_costs_more_than_is_found_in_any_setting(pattern: str) -> None:
    assert looked_through(pattern, random.Random(1), 24) > 1


@pytest.mark.parametrize("seed", range(3))
def test_nor_does_one_for_any_pattern(seed: int) -> None:
    draws = random.Random(seed)
    patterns, settings = family.Patterns(draws), 0
    for _ in range(100):
        pattern = draws.choice([patterns.draw, lambda: family._joined(draws)])()
        with contextlib.suppress(re.error, ValueError, Explosive, TooComplex, Beyond):
            re.compile(pattern)
            settings += looked_through(pattern, draws, 10)
    assert settings > 100


@pytest.mark.parametrize("pattern", TIGHT)
def test_the_text_that_is_found_costs_about_what_is_found(pattern: str) -> None:
    graph = graph_of(pattern)
    worst = worst_of(graph, 0.0, LENGTH)
    assert worst is not None
    walk = Walk(Cells(graph))
    text = [walk.kinds.masks.index(mask) for mask in worst.text]
    cost = walk.costs(text, len(text))
    if cost is None:
        # It is worst after the last search has begun.
        cost = max(filter(None, (walk.costs(text, last) for last in range(len(text)))))
    assert cost > 0.7 * worst.cost.terms[1] * len(text)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize(
    "pattern",
    [
        *TIGHT, r"[^\w]{0,20}+1(?>[a-zA-Z]\s{5}[^a-c])", r"(?m)(?:[abx]{5}|\W{5}?[a-c]|1,[^\w])",
        r"\d\w*([^\n]{1,3}?){5}+", r"[^\n]{0,20}b{3}?[a-c0-9_]{1,3}?",
    ],
)  # fmt: skip
def test_states_taken_together_still_bound_the_worst_text_of_each(pattern: str, depth: int) -> None:
    # What is certain in one of them only is not certain: the search that matches there may go on in another.
    graph = graph_of(pattern)
    walk = Walk(Cells(graph))
    core, _kept = regex_worst.core_pattern(walk.cells, walk.kinds)
    core.max_work, core.depth, core.digits = 3_000_000, 1 << 16, 3
    fine, coarse = regex_worst.ffi.new("ofw_worst *"), regex_worst.ffi.new("ofw_worst *")
    assert regex_worst.lib.ofw_find(core, fine) == regex_worst.lib.OFW_OK
    core.depth, core.digits = depth, 0
    if regex_worst.lib.ofw_find(core, coarse) == regex_worst.lib.OFW_OK:
        text = [fine.text[i] for i in range(fine.length)]
        cost = walk.costs(text, len(text))
        assert cost is None or cost <= (coarse.first + coarse.each * len(text)) * (1 + 1e-3)


@pytest.mark.parametrize("pattern", TIGHT)
def test_linear_patterns_are_admitted_by_the_worst_text_and_not_by_the_worst_of_each_place(
    pattern: str,
) -> None:
    assert analyse(pattern).refusal(32_000) is None


def test_the_worst_text_is_looked_for_where_each_place_alone_says_too_much() -> None:
    beyond = 0
    for pattern in TIGHT:
        try:
            beyond += cost_of(graph_of(pattern)).milliseconds(32_000) > 4.75
        except (Explosive, TooComplex):
            beyond += 1
    assert beyond >= len(TIGHT) // 2


@pytest.mark.parametrize("pattern", GROWING)
def test_what_grows_with_the_text_has_no_mean(pattern: str) -> None:
    assert worst_of(graph_of(pattern), 0.0, LENGTH) is None


def test_finer_states_are_told_apart_only_where_it_matters() -> None:
    graph = graph_of(r"(?:\d{1,3}\.){3}\d{1,3}")
    easy, hard = worst_of(graph, 1e12, LENGTH), worst_of(graph, 0.0, LENGTH)
    assert easy is not None
    assert hard is not None
    assert hard.cost.terms[1] < easy.cost.terms[1]
    assert hard.work > easy.work


def test_the_work_has_a_limit() -> None:
    graph = graph_of(r"x[^\n]{0,200}y[^\n]{0,200}z")
    assert worst_of(graph, 0.0, LENGTH) is None
    taken = graph.work
    worst_of(graph, 0.0, LENGTH, max_work=1000)
    assert graph.work - taken < taken


@pytest.mark.parametrize(("one", "other"), ["ab", "ba"])
def test_ways_are_cut_where_their_own_end_was_come_to_and_nowhere_else(one: str, other: str) -> None:
    cells = Cells(graph_of(f"{one}|{other}|{other}c*d"))
    kinds = Kinds(cells)
    first, second = (
        next(
            cell
            for cell, may in enumerate(cells.may)
            if cells.ends[cell] and may & cells.graph.alphabet.atom(ord(a))
        )
        for a in (one, other)
    )
    begun = next(
        edge.target for edge in cells.edges if edge.source == 0 and edge.target not in (first, second)
    )

    def found(*cuts: Cut) -> tuple[float, float]:
        cells.cuts = list(cuts)
        core, _kept = regex_worst.core_pattern(cells, kinds)
        core.max_work, core.depth = 100_000, 9
        worst = regex_worst.ffi.new("ofw_worst *")
        assert regex_worst.lib.ofw_find(core, worst) == regex_worst.lib.OFW_OK
        return worst.first, worst.each

    # Who has read `other` is in the loop however many searches read `one` before, in that text or in another.
    assert found(Cut(first, begun, 0.0)) == found()
    cells.edges = [edge._replace(ways=3.0) if edge.target == begun else edge for edge in cells.edges]
    assert found(Cut(second, begun, 0.0)) < found(Cut(second, begun, 1.0)) < found()


def given_pattern(pattern: str = r"a[bc]{2,5}d|ab\b|xx.*?xx") -> tuple[Any, list[Any]]:
    graph = graph_of(pattern)
    cells = Cells(graph, sure_tails(graph))
    return regex_worst.core_pattern(cells, Kinds(cells))


@pytest.mark.parametrize(
    ("field", "index", "value"),
    [
        ("edge_source", 0, 999), ("edge_target", 1, 999), ("edge_source", 0, 3), ("join_source", 0, 999),
        ("join_target", 0, 999), ("join_target", 0, 1), ("trial_cell", 0, 999), ("trial_test", 0, 999),
        ("trial_cell", 0, 5), ("final_source", 0, 999), ("cut_end", 0, 999),
        ("cut_cell", 0, 999),
    ],
)  # fmt: skip
def test_the_core_refuses_what_points_outside(field: str, index: int, value: int) -> None:
    pattern, _kept = given_pattern()
    pattern.max_work, pattern.depth = 100_000, 9
    found = regex_worst.ffi.new("ofw_worst *")
    assert regex_worst.lib.ofw_find(pattern, found) == regex_worst.lib.OFW_OK
    _kept[NAMES.index(field)][index] = value
    assert regex_worst.lib.ofw_find(pattern, found) == regex_worst.lib.OFW_BAD_INPUT


@pytest.mark.parametrize(
    ("field", "value"), [("cells", 0), ("cells", 100_000), ("kinds", 0), ("kinds", 64), ("tests", 0)]
)
def test_the_core_refuses_sizes_it_has_no_room_for(field: str, value: int) -> None:
    pattern, _kept = given_pattern()
    pattern.max_work, pattern.depth = 100_000, 9
    setattr(pattern, field, value)
    found = regex_worst.ffi.new("ofw_worst *")
    assert regex_worst.lib.ofw_find(pattern, found) == regex_worst.lib.OFW_BAD_INPUT


NAMES = [
    "may", "surely", "cost", "ends", "edge_source", "edge_target", "edge_ways", "edge_before", "edge_sharp",
    "join_source", "join_target", "join_ways", "join_before", "join_sharp", "edge_after", "final_source",
    "final_before", "final_after", "cut_end", "cut_cell", "cut_most", "trial_cell", "trial_ways",
    "trial_before", "trial_after", "trial_besides", "trial_test", "prices", "alike",
]  # fmt: skip
