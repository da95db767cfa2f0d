"""A route is four parts in 64 bits and never 0."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outfeed.ring.route import (
    MAX_GENERATION,
    MAX_SLOTS,
    format_route,
    generation_of,
    make_route,
    next_generation,
    reader_of,
    shard_of,
    slot_of,
)

PARTS = st.tuples(
    st.integers(0, 255), st.integers(0, 255), st.integers(0, MAX_SLOTS - 1), st.integers(1, MAX_GENERATION)
)


@given(st.lists(PARTS, min_size=1, max_size=5))
def test_parts_come_out_as_they_went_in(parts: list[tuple[int, int, int, int]]) -> None:
    routes = [make_route(*part) for part in parts]
    for route, part in zip(routes, parts, strict=True):
        assert 0 < route < 2**64
        assert (reader_of(route), shard_of(route), slot_of(route), generation_of(route)) == part
    column = np.array(routes, "u8")
    for index, take in enumerate((reader_of, shard_of, slot_of, generation_of)):
        assert take(column).tolist() == [part[index] for part in parts]
        assert take(column).dtype == np.uint64


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ((256, 0, 0, 1), "reader 256 of a route is not in 0..255"),
        ((0, -1, 0, 1), "shard -1 of a route is not in 0..255"),
        ((0, 0, MAX_SLOTS, 1), "slot 1048576 of a route is not in 0..1048575"),
        ((0, 0, 0, 0), "generation 0 of a route is not in 1..268435455"),
    ],
)
def test_a_part_out_of_range_is_named(parts: tuple[int, int, int, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_route(*parts)


def test_generations_wrap_past_zero() -> None:
    assert next_generation(1) == 2
    assert next_generation(MAX_GENERATION) == 1


def test_a_route_in_a_log_line() -> None:
    assert format_route(make_route(0, 1, 42, 7)) == "r0/s1/42#7"
