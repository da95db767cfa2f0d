"""The cells of a pattern: whatever the engine matches, some way through them reads, and what they say that it
surely matches it does.

A way that is lost is the worst fault there is here, for what stands behind it is never weighed; the next is a
match that never was, for what a text goes on with is then never weighed.
"""

import random
import re

import pytest
from outfeed.ingress.regex_cells import NOWHERE, Beyond, Cells
from outfeed.ingress.regex_classes import Alphabet, Mask
from outfeed.ingress.regex_places import EXACT, PLAIN, Explosive, Places, TooComplex
from outfeed.ingress.regex_tree import both_of

from .patterns import graph_of, matches_amiss
from .test_regex_properties import family
from .walk import Walk


def cells_of(pattern: str) -> Cells:
    return Cells(graph_of(pattern))


def ends_of_ways(cells: Cells, text: str, begin: int) -> set[int]:
    """Return where a match that begins at a place of a text may end."""
    alphabet = cells.graph.alphabet
    finals = cells._edges(NOWHERE, cells.graph.final)

    def beside(at: int) -> Mask:
        return alphabet.atom(ord(text[at])) if 0 <= at < len(text) else alphabet.edge

    def comes(at: int) -> Mask:
        # Before the last newline is taken for the end.
        return beside(at) | (alphabet.edge if text[at:] == "\n" else 0)

    here, ends = {0}, set()
    for at in range(begin, len(text) + 1):
        before, after = beside(at - 1), comes(at)
        for hub, into in cells.hubs:
            if any(edge.source in here and edge.before & before for edge in into):
                here.add(hub)
        if any(
            edge.source in here and edge.before & before and cells._asked(edge.after) & after
            for edge in finals
        ):
            ends.add(at)
        here = {
            edge.target
            for edge in cells.edges
            if edge.source in here
            and edge.before & before
            and edge.after & after
            and cells.may[edge.target] & after
        }
    return ends


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_engine_matches_some_way_reads(seed: int) -> None:
    texts = random.Random(seed)
    patterns = family.Patterns(texts)
    matches = 0
    for _ in range(1500):
        pattern = patterns.draw()
        if matches_amiss(pattern):
            continue
        try:
            regex = re.compile(pattern)
            cells = cells_of(pattern)
        except (re.error, ValueError, Explosive, TooComplex, Beyond):
            continue
        for _ in range(12):
            text = "".join(texts.choice("aabbx1 A_\n!") for _ in range(texts.randint(1, 9)))
            match = regex.search(text)
            if match is None:
                continue
            matches += 1
            # Where a match ends does not matter at the end of a pattern, so it may end elsewhere here.
            assert ends_of_ways(cells, text, match.start()), (pattern, text, match.span())
    assert matches > 3000


def test_a_way_that_leaves_the_run_of_a_possessive_repeat_goes_on() -> None:
    assert ends_of_ways(cells_of(r"x.++\na"), "xb\nab", 0) == {4}


def test_the_text_of_a_group_comes_again_without_what_the_group_asked_for() -> None:
    assert ends_of_ways(cells_of(r"(\ba)x\1b"), "axabb", 0) == {4}
    assert ends_of_ways(cells_of(r"(a*+)b\1a"), "abaab", 0) >= {4}


def test_the_last_newline_may_be_read_and_ends_what_may_follow() -> None:
    assert ends_of_ways(cells_of(r"x$\nb?"), "x\n", 0) == {2}
    assert ends_of_ways(cells_of(r"(?:x.*+){1,2}$[^a]+"), "xb\n", 0) == {3}


BESIDE = [
    "$",
    "$",
    r"\n",
    r"\n",
    r"(?m:$)",
    r"(?=\n)",
    r"(?=\s)",
    r"(?!x)",
    "x?+",
    r"\Z",
    r"(?<!a)",
    "[^a]",
    r"\b",
]


def matched_after(walk: Walk, text: str) -> int | None:
    """Return after how many characters of a text a search has surely matched, if one has."""
    alphabet, masks = walk.cells.graph.alphabet, walk.kinds.masks
    kinds = [next(i for i, mask in enumerate(masks) if mask & alphabet.atom(ord(char))) for char in text]
    return next((at for at, ways in enumerate(walk.ways(kinds, len(kinds))) if ways is None), None)


def followed(pattern: str) -> tuple[re.Pattern[str], Walk] | None:
    """Return the engine's pattern and what follows texts through its cells; None where one cannot."""
    if matches_amiss(pattern):
        return None
    try:
        return re.compile(pattern), Walk(cells_of(pattern))
    except (re.error, ValueError, Explosive, TooComplex, Beyond):
        return None


@pytest.mark.parametrize("seed", range(4))
def test_where_a_text_is_followed_no_further_the_engine_has_matched(seed: int) -> None:
    draws = random.Random(seed)
    patterns = family.Patterns(draws)
    matches = 0
    for _ in range(1000):
        near = "".join(draws.choice(BESIDE) for _ in range(draws.randint(0, 3)))
        pattern = draws.choice(["%s%s", "%s(?:%s)"]) % ((patterns.draw(), near)[:: draws.choice((1, -1))])
        found = followed(pattern)
        if found is None:
            continue
        regex, walk = found
        if walk.cells.matches_nothing:
            continue
        for _ in range(6):
            text = "".join(draws.choice("abx1 A_\n\n!") for _ in range(draws.randint(1, 7)))
            read = matched_after(walk, text)
            if read is None:
                continue
            matches += 1
            for more in ("", text[read:], "x", "\n", "\nx"):
                assert regex.search(text[:read] + more), (pattern, text[:read], more)
    assert matches > 300


COUNTED = [
    "*+",
    "++",
    "?+",
    "*",
    "+",
    "?",
    "*?",
    "",
    "",
    "{2}",
    "{1,3}",
    "{0,3}+",
    "{13}",
    "{3,14}",
    "{26}",
    "{0,30}+",
]


def counted(draws: random.Random, depth: int) -> str:
    """Draw a row of pieces; many are repeated longer than each round is kept apart."""
    row = ""
    for _ in range(draws.randint(1, 3)):
        if depth and draws.random() < 0.5:
            row += f"{draws.choice(['(?:', '(?:', '(?>'])}{counted(draws, depth - 1)})"
        else:
            row += draws.choice(["a", "b", "[ab]", ".", "[^a]", r"\s", "(?:ab)", "(?:a|)"])
        row += draws.choice(COUNTED)
    return row if depth or draws.random() < 0.7 else f"{row}|a"


@pytest.mark.parametrize("seed", range(3))
def test_nor_is_it_before_a_long_count_is_reached(seed: int) -> None:
    draws, matches = random.Random(seed), 0
    for _ in range(500):
        pattern = counted(draws, 2)
        found = followed(pattern)
        if found is None:
            continue
        regex, walk = found
        for _ in range(0 if walk.cells.matches_nothing else 5):
            word = "".join(draws.choice("aabb x\n") for _ in range(draws.randint(1, 3)))
            text = (word * 34)[: draws.choice((1, 2, 4, 8, 16, 34))]
            read = matched_after(walk, text)
            matches += read is not None
            for more in () if read is None else ("", "x", "a", "\n"):
                assert regex.search(text[:read] + more), (pattern, text[:read], more)
    assert matches > 100


@pytest.mark.parametrize("pairs", [1, 8, 9, 40])
def test_a_guard_that_joins_too_many_pairs_lets_more_pass_and_promises_nothing(pairs: int) -> None:
    first = tuple((1 << i, 1 << i) for i in range(pairs))
    second = ((1 << pairs) - 1, (1 << pairs) - 1), (1 << pairs, 1 << pairs)
    both = both_of(first, second)
    assert both is not None
    for i in range(pairs):
        assert any(before >> i & after >> i & 1 for before, after in both)
    ((_, _, guard, trust),) = Places(Alphabet(set(), folds=False))._guarded([(0, 1.0, first, PLAIN)], second)
    assert guard == both
    assert trust == (EXACT if pairs <= 8 else 0)


def paid_in_cells(cells: Cells) -> float:
    """Add up what is paid at each cell, once each and before the dearest character."""
    total = sum(cells.cost)
    for trial in cells.trials:
        dearest = 0.0 if trial.test is None else max(ns for _, ns in trial.test.pieces)
        total += trial.ways * (trial.besides + dearest)
    return total


def paid_in_graph(cells: Cells) -> float:
    """Add up what is paid at each node that a way comes to, once each, and all of a look-behind where it is
    tried."""
    graph, total = cells.graph, 0.0
    left = list(graph.spent)
    for (node, _), cost in graph.spent_after.items():
        left[node] += cost
    for node, high in enumerate(graph.high):
        ways = cells._aside.get(node, 1.0 if cells._leave[node] else 0.0)
        most = graph.most[node] if node in cells._aside else 1
        total += ways * left[node] * max(1, most - max(graph.least[node], 1) + 1)
        if high > 0:
            total += ways * graph.scan[node] * most
            total += ways * sum(test.test for test in graph.run_tests.get(node, ()))
    return total


LOOKING_BACK = [
    *(r"(?<=\w{3})x", r"(?<=ab[^c]{2}\b)x", r"x(?<=(?:a|b)c)x", r"x(?<=(?=ab)a\Bx)", r"x(?<=a{40}\b)x"),
    *(r"x(?<=[^a]{3}x)", r"(?:x|y)(?<!abc)", r"x(?<=(?=[ab]{1,30}\b)\w)"),
    *(r"x(?<=(?:a|a|b)(?:a|b)x\b)", r"x(?<=(?:a|[ab]|b)[ab]{9}\b)", r"x(?<=(?=(?:|a?|b?){3}\b)\w)"),
]


@pytest.mark.parametrize("seed", range(3))
def test_cells_pay_for_all_that_the_graph_does(seed: int) -> None:
    draws, paid = random.Random(seed), 0
    patterns = family.Patterns(draws)
    drawn = [draws.choice([patterns.draw, lambda: family._joined(draws)])() for _ in range(600)]
    for pattern in [*LOOKING_BACK, *drawn]:
        try:
            re.compile(pattern)
            cells = cells_of(pattern)
        except (re.error, ValueError, Explosive, TooComplex, Beyond):
            continue
        paid += 1
        assert paid_in_cells(cells) >= paid_in_graph(cells) * (1 - 1e-6), pattern
    assert paid > 200
