"""The scheduler's row table: what it counts, what it takes back and what it refuses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outfeed.ring.frames import Standing
from outfeed.ring.route import make_route
from outfeed.sidecar.rows import RowTable, UnknownRoute

A, B, C = (make_route(0, 1, slot, 1) for slot in (3, 4, 5))


def u64(*routes: int) -> np.ndarray:
    return np.array(routes, dtype=np.uint64)


def u32(*counts: int) -> np.ndarray:
    return np.array(counts, dtype=np.uint32)


@pytest.fixture
def table() -> RowTable:
    table = RowTable(readers=2, slots=16)
    table.open(A, 100)
    table.open(B, 7)
    return table


def test_first_counts_the_tokens_before_each_row(table: RowTable) -> None:
    tokens, first, prompt, _ = table.advance(u64(A, B), u32(1, 3))
    assert (tokens, first.tolist(), prompt.tolist()) == (4, [0, 0], [100, 7])
    tokens, first, _, _ = table.advance(u64(B, A), u32(2, 1))
    assert (tokens, first.tolist()) == (3, [3, 1])


def test_two_rows_of_one_request_in_one_step_follow_each_other(table: RowTable) -> None:
    _, first, _, _ = table.advance(u64(A, A, A), u32(2, 0, 5))
    assert first.tolist() == [0, 2, 2]


def test_a_retracted_step_can_be_pushed_again_unchanged(table: RowTable) -> None:
    table.advance(u64(A), u32(4))
    table.advance(u64(A, B, A), u32(1, 2, 3))
    table.retract(u64(A, B, A), u32(1, 2, 3))
    _, first, _, _ = table.advance(u64(A, B), u32(1, 1))
    assert first.tolist() == [4, 0]


def test_a_route_never_received_is_refused_and_nothing_is_counted(table: RowTable) -> None:
    with pytest.raises(UnknownRoute, match=r"row 1: r0/s1/5#1 was never received"):
        table.advance(u64(A, C), u32(1, 1))
    assert table.advance(u64(A), u32(1))[1].tolist() == [0]


@pytest.mark.parametrize(
    "route",
    [0, 3, make_route(2, 0, 0, 1), make_route(0, 0, 16, 1), (1 << 64) - 1],
    ids=["zero", "a row's number for a route", "a reader too far", "a slot too far", "all ones"],
)
def test_a_route_outside_the_instance_is_refused(table: RowTable, route: int) -> None:
    with pytest.raises(UnknownRoute):
        table.advance(u64(route), u32(1))
    with pytest.raises(UnknownRoute):
        table.open(route, 1)


def test_rows_of_an_ended_request_are_let_through_and_counted_as_stale(table: RowTable) -> None:
    table.advance(u64(A), u32(5))
    assert table.end(A)
    assert not table.end(A)
    step = table.advance(u64(A, B), u32(1, 1))
    assert (step.first.tolist(), step.prompt_tokens.tolist(), step.stale_rows) == ([0, 0], [0, 7], 1)
    table.count(step)
    assert (table.pushed, table.stale_rows) == ((1, 2, 2), 1)


def test_a_step_that_is_taken_back_was_never_counted(table: RowTable) -> None:
    assert table.end(A)
    for _ in range(3):
        table.advance(u64(A, B), u32(1, 1))
        table.retract(u64(A, B), u32(1, 1))
    assert (table.pushed, table.stale_rows) == ((0, 0, 0), 0)


def test_a_late_row_cannot_touch_the_next_request_in_its_slot(table: RowTable) -> None:
    table.advance(u64(A), u32(5))
    heir = make_route(0, 0, 3, 2)
    table.open(heir, 11)
    _, first, prompt, _ = table.advance(u64(A, heir), u32(9, 1))
    assert (first.tolist(), prompt.tolist()) == ([0, 0], [0, 11])
    assert table.advance(u64(heir), u32(1))[1].tolist() == [1]


def test_a_step_may_be_without_a_token(table: RowTable) -> None:
    step = table.advance(u64(A, B), u32(0, 0))
    assert (step.tokens, step.first.tolist()) == (0, [0, 0])


def test_who_was_received_is_known_until_its_slot_has_another_one(table: RowTable) -> None:
    other, heir = make_route(1, 0, 3, 1), make_route(1, 0, 3, 2)  # A's slot of another reader
    assert not table.knows(other)
    table.open(other, 1)
    table.end(other)
    assert table.knows(A)
    assert table.knows(other)
    table.open(heir, 1)
    assert not table.knows(other)
    with pytest.raises(UnknownRoute):
        table.knows(make_route(2, 0, 3, 1))


def test_how_requests_stand_is_told_a_part_at_a_time(table: RowTable) -> None:
    table.open_control(C)
    table.advance(u64(A), u32(4))
    table.end(B)
    a, b, c = (A, 4, Standing.RUNNING), (B, 0, Standing.ENDED), (C, 0, Standing.CONTROL)
    assert table.standings(0, 3) == ([a, b, c], None)
    part, rest = table.standings(0, 2)
    assert part == [a, b]
    assert rest is not None
    assert table.standings(rest, 2) == ([c], None)


def test_a_request_received_again_goes_on_where_it_was(table: RowTable) -> None:
    table.advance(u64(A), u32(5))
    table.open(A, 100)
    assert table.advance(u64(A), u32(1))[1].tolist() == [5]


@given(st.lists(st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(0, 9)), min_size=1, max_size=300)))
def test_it_agrees_with_a_dictionary(steps: list[list[tuple[int, int]]]) -> None:
    table, model = RowTable(readers=1, slots=8), {A: 0, B: 0, C: 0}
    for route in model:
        table.open(route, 1)
    for step in steps:
        expected = []
        for route, count in step:
            expected.append(model[route])
            model[route] += count
        tokens, first, _, _ = table.advance(u64(*(r for r, _ in step)), u32(*(c for _, c in step)))
        assert first.tolist() == expected
        assert tokens == sum(count for _, count in step)
