"""Stop patterns for hypothesis to draw, and what the analysis makes of one."""

import re
import sys
from re import _parser  # type: ignore[attr-defined]

from hypothesis import strategies as st
from outfeed.ingress.regex_classes import Alphabet
from outfeed.ingress.regex_graph import Builder
from outfeed.ingress.regex_places import Graph
from outfeed.ingress.stop_regex import codes_of


def graph_of(pattern: str) -> Graph:
    """Return a pattern's graph. Raises what the admission refuses it with."""
    parsed = _parser.parse(pattern)
    flags = parsed.state.flags
    codes, folds, _ = codes_of(pattern, parsed, flags)
    return Builder(Alphabet(codes, folds=folds)).build(parsed, flags)


def matches_amiss(pattern: str) -> bool:
    """Say whether this engine may match a pattern amiss: before 3.11.5 it goes on from a wrong place after a
    possessive repeat of more than one class (gh-106052)."""
    return sys.version_info < (3, 11, 5) and re.search(r"\)([*+?]|\{[\d,]+\})\+", pattern) is not None


def drawn(
    pieces: list[str], quantifiers: list[str], groups: list[str], leaves: int
) -> "st.SearchStrategy[str]":
    """Draw patterns of up to so many pieces; `groups` are spelled with a %s for what is in them."""
    repeats = st.sampled_from(quantifiers)

    def grown(inner: "st.SearchStrategy[str]") -> "st.SearchStrategy[str]":
        rows = st.lists(inner, min_size=1, max_size=3)
        return st.one_of(
            rows.map("".join),
            rows.map(lambda row: "(?:" + "|".join(row) + ")"),
            st.tuples(st.sampled_from(groups), inner, repeats).map(lambda it: it[0] % it[1] + it[2]),
            st.tuples(st.sampled_from(["a", r"\w", ".", "[ab]"]), repeats).map("".join),
        )

    return st.recursive(st.sampled_from(pieces), grown, max_leaves=leaves)
