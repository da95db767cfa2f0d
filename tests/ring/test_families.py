"""Optional columns: their makers, and what is taken out of them. What is given wrongly: tests/sidecar."""

from typing import Any

import numpy as np
import pytest
from outfeed.ring.columns import BadColumns
from outfeed.ring.families import Family, Kind, encode_family
from outfeed.ring.family_makers import flat_family as flat
from outfeed.ring.family_makers import hidden_family
from outfeed.ring.family_makers import ragged_family as ragged

MAKERS: Any = [flat, ragged, hidden_family]


@pytest.mark.parametrize("make", MAKERS)
def test_of_no_rows_there_is_no_family(make: Any) -> None:
    assert make([]) is None
    assert make(iter(())) is None


def taken(family: Family | None, *rows: int) -> Family:
    """Take those rows, of three, and number them anew."""
    assert family is not None
    place = np.full(3, -1, np.intp)
    place[list(rows)] = np.arange(len(rows))
    part = family.select(place)
    assert part is not None
    return part


def test_a_selection_has_the_rows_own_values_under_their_new_numbers() -> None:
    part = taken(flat([(0, [-1, -2], [5, 6]), (2, [-3], [7])]), 2)
    assert part.ids is not None
    assert (part.rows.tolist(), part.counts.tolist()) == ([0], [1])
    assert (part.values.tolist(), part.ids.tolist()) == ([-3], [7])

    part = taken(ragged([(0, [([-1], [5]), None]), (1, [([-2, -3], [6, 7])])]), 1, 2)
    assert part.ids is not None
    assert part.lengths is not None
    assert (part.rows.tolist(), part.counts.tolist(), part.lengths.tolist()) == ([0], [1], [2])
    assert (part.values.tolist(), part.ids.tolist()) == ([-2, -3], [6, 7])

    part = taken(hidden_family([(0, [[1, 2]]), (1, [[3, 4], [5, 6]])]), 1)
    assert (part.rows.tolist(), part.counts.tolist(), part.width) == ([0], [2], 2)
    assert part.values.tolist() == [3, 4, 5, 6]


def test_hidden_states_have_a_width() -> None:
    with pytest.raises(BadColumns, match=r"row 1 have shape \(2, 0\): expected"):
        hidden_family([(1, np.empty((2, 0)))])
    many, none = np.array([2**31 - 1], "u4"), np.empty(0, "f4")
    with pytest.raises(BadColumns, match="hidden_states: 2147483647 positions of width 0"):
        encode_family(Kind.HIDDEN_STATES, Family(np.array([0], "u4"), many, none), 1)


def test_of_rows_that_have_none_nothing_is_taken() -> None:
    family = flat([(1, [-1], [5])])
    assert family is not None
    assert family.select(np.array([0, -1, 1], np.intp)) is None


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"values": [-1.0]}, "a column is a list, not an array of float32"),
        ({"values": np.array([-1.0])}, r"a column is float64\[1d\], not float32\[1d\]"),
        ({"values": np.array([[-1.0]], "f4")}, r"a column is float32\[2d\], not float32\[1d\]"),
        ({"rows": np.array([0, 1], "u4")}, "rows 2, counts 1"),
        ({"rows": np.array([3], "u4")}, "rows: 3 in a batch of 3 rows"),
        ({"lengths": np.array([1], "u4")}, "the family given is of another kind"),
        ({"ids": None}, "the family given is of another kind"),
        ({"values": np.array([-1, -2], "f4")}, "entries 1, values 2"),
        ({"ids": np.array([5, 6], "i4")}, "entries 1, ids 2"),
    ],
)
def test_a_family_made_by_hand_is_held_to_its_kind(changed: Any, says: str) -> None:
    row, one = np.array([1], "u4"), np.array([1], "u4")
    right: Any = {"rows": row, "counts": one, "values": np.array([-1], "f4"), "ids": np.array([5], "i4")}
    encode_family(Kind.OUTPUT_LOGPROBS, Family(**right), 3)
    with pytest.raises(BadColumns, match=says):
        encode_family(Kind.OUTPUT_LOGPROBS, Family(**{**right, **changed}), 3)


def test_a_ragged_family_made_by_hand_has_a_length_for_each_position() -> None:
    row, one, lengths = np.array([1], "u4"), np.array([1], "u4"), np.array([1, 0], "u4")
    family = Family(row, one, np.array([-1], "f4"), np.array([5], "i4"), lengths)
    with pytest.raises(BadColumns, match="output_top_logprobs: positions 1, lengths 2"):
        encode_family(Kind.OUTPUT_TOP_LOGPROBS, family, 3)
