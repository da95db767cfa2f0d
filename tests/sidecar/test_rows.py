"""The scheduler's row table: what it counts, what it takes back and what it refuses."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from outfeed.ring import Consumer, Doorbell, Ring, RingFull
from outfeed.ring.batch import Batch, decode_batch, encode_endings
from outfeed.ring.families import FAMILIES, Family
from outfeed.ring.family_makers import flat_family
from outfeed.ring.frames import Standing
from outfeed.ring.route import make_route
from outfeed.sidecar.rows import RowTable, UnknownRoute
from outfeed.sidecar.steps import StepWriter

from tests.instances import unique

A, B, C = (make_route(0, 1, slot, 1) for slot in (3, 4, 5))
NOBODY = encode_endings(())


class Table(RowTable):
    """A table whose steps go through a lane of its own, plain or with optional columns."""

    lane: StepWriter
    shard: Consumer

    def push(self, routes: list[int], counts: list[int], *, logprobs: bool = False) -> Batch:
        """Push a step; return it as a shard reads it."""
        columns = np.array(routes, "u8"), np.zeros(sum(counts), "i4"), np.array(counts, "u4")
        if logprobs:
            families: list[Family | None] = [None] * FAMILIES
            families[0] = flat_family([(0, [-0.5] * counts[0], [7] * counts[0])])
            self.lane.push_with_families(*columns, NOBODY, families, 0.0)
        else:
            self.lane.push(*columns, NOBODY, 0.0)
        ((_, _, body),) = self.shard.read()
        batch = decode_batch(bytes(body))
        self.shard.release()
        return batch


@pytest.fixture
def new() -> Iterator[Table]:
    """An empty table."""
    name = f"outfeed-{unique('rows')}"
    table = Table(readers=2, slots=16)
    ring = Ring.create(name, lanes=1, consumers=1, capacity=1 << 18)
    with Doorbell.create(f"{name}.bell") as bell, ring:
        table.shard, writer = ring.consumer(0, bell), ring.writer(0)
        table.lane = StepWriter(writer, table)
        yield table
        ring.unlink()


@pytest.fixture
def table(new: Table) -> Table:
    new.open(A, 100)
    new.open(B, 7)
    return new


def firsts(batch: Batch) -> list[int]:
    return [int(first) for first in batch.first]


@pytest.mark.parametrize("logprobs", [False, True])
def test_first_counts_the_tokens_before_each_row(table: Table, logprobs: bool) -> None:
    batch = table.push([A, B], [1, 3], logprobs=logprobs)
    assert (firsts(batch), batch.prompt_tokens.tolist()) == ([0, 0], [100, 7])
    assert firsts(table.push([B, A], [2, 1], logprobs=logprobs)) == [3, 1]
    assert table.pushed == (2, 4, 7)


def test_two_rows_of_one_request_in_one_step_follow_each_other(table: Table) -> None:
    assert firsts(table.push([A, A, A], [2, 0, 5])) == [0, 2, 2]


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_step_that_is_taken_back_was_never_counted(table: Table, logprobs: bool) -> None:
    table.push([A], [4])
    ended = make_route(0, 0, 6, 1)
    table.open(ended, 0)
    table.end(ended)
    full, steps = False, 0
    while not full:  # nobody reads
        try:
            table.lane.push(np.array([B], "u8"), np.zeros(3000, "i4"), np.array([3000], "u4"), NOBODY, 0.0)
            steps += 1
        except RingFull:
            full = True
    before = table.pushed
    with pytest.raises(RingFull):
        table.push([A, ended, A], [1000, 0, 2000], logprobs=logprobs)
    assert (table.pushed, table.stale_rows) == (before, 0)
    table.shard.read()
    table.shard.release()
    assert firsts(table.push([A, B], [1, 1], logprobs=logprobs)) == [4, 3000 * steps]


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_route_never_received_is_refused_and_nothing_is_counted(table: Table, logprobs: bool) -> None:
    with pytest.raises(UnknownRoute, match=r"row 1: r0/s1/5#1 was never received"):
        table.push([A, C], [1, 1], logprobs=logprobs)
    assert firsts(table.push([A], [1])) == [0]


@pytest.mark.parametrize(
    "route",
    [0, 3, make_route(2, 0, 0, 1), make_route(0, 0, 16, 1), (1 << 64) - 1],
    ids=["zero", "a row's number for a route", "a reader too far", "a slot too far", "all ones"],
)
def test_a_route_outside_the_instance_is_refused(table: Table, route: int) -> None:
    with pytest.raises(UnknownRoute):
        table.push([route], [1])
    with pytest.raises(UnknownRoute):
        table.open(route, 1)


def test_rows_of_an_ended_request_are_let_through_and_counted_as_stale(table: Table) -> None:
    table.push([A], [5])
    assert table.end(A)
    assert not table.end(A)
    batch = table.push([A, B], [1, 1])
    assert (firsts(batch), batch.prompt_tokens.tolist()) == ([0, 0], [0, 7])
    assert (table.pushed, table.stale_rows) == ((2, 3, 7), 1)


def test_a_late_row_cannot_touch_the_next_request_in_its_slot(table: Table) -> None:
    table.push([A], [5])
    heir = make_route(0, 0, 3, 2)
    table.open(heir, 11)
    batch = table.push([A, heir], [9, 1])
    assert (firsts(batch), batch.prompt_tokens.tolist()) == ([0, 0], [0, 11])
    assert firsts(table.push([heir], [1])) == [1]


def test_a_step_may_be_without_a_token(table: Table) -> None:
    batch = table.push([A, B], [0, 0])
    assert (batch.ids.tolist(), firsts(batch)) == ([], [0, 0])


def test_who_was_received_is_known_until_its_slot_has_another_one(table: Table) -> None:
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


def test_who_has_a_slot_that_another_comes_into_is_told(table: Table) -> None:
    heirs = [make_route(0, 1, slot, 2) for slot in (3, 4, 5)]
    table.open_control(C)
    assert [table.before(route) for route in heirs] == [A, B, C]
    for route in (A, B, C):
        assert table.before(route) is None, "itself"
        table.end(route)
    assert [table.before(route) for route in heirs] == [None] * 3
    with pytest.raises(UnknownRoute):
        table.before(make_route(2, 0, 3, 1))


def test_who_is_live_is_counted_whoever_has_the_slot(table: Table) -> None:
    before = table.live_requests
    assert before == len(table.live())
    table.open(A, 1)  # again
    table.open(make_route(0, 1, 4, 2), 1)  # in B's slot, whose end nobody told
    assert table.live_requests == before
    assert not table.end(B)
    table.open_control(make_route(0, 1, 9, 1))
    assert table.live_requests == before + 1
    for route in table.live():
        assert table.end(int(route))
        assert not table.end(int(route))
    assert table.live_requests == 0


def test_how_requests_stand_is_told_a_part_at_a_time(table: Table) -> None:
    table.open_control(C)
    table.push([A], [4])
    table.end(B)
    a, b, c = (A, 4, Standing.RUNNING), (B, 0, Standing.ENDED), (C, 0, Standing.CONTROL)
    assert table.standings(0, 3) == ([a, b, c], None)
    part, rest = table.standings(0, 2)
    assert part == [a, b]
    assert rest is not None
    assert table.standings(rest, 2) == ([c], None)


def test_a_request_received_again_goes_on_where_it_was(table: Table) -> None:
    table.push([A], [5])
    table.open(A, 100)
    assert firsts(table.push([A], [1])) == [5]


STEPS = st.lists(st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(0, 9)), min_size=1, max_size=300))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(STEPS)
def test_it_agrees_with_a_dictionary(new: Table, steps: list[list[tuple[int, int]]]) -> None:
    model = {A: 0, B: 0, C: 0}
    for route in model:
        new.end(route)
        new.open(route, 1)  # from 0 on, whatever the example before had
    for step in steps:
        expected = []
        for route, count in step:
            expected.append(model[route])
            model[route] += count
        routes, counts = zip(*step, strict=True)
        batch = new.push(list(routes), list(counts))
        assert firsts(batch) == expected
        assert batch.counts.tolist() == list(counts)
