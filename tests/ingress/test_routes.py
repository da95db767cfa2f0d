"""The route table: who gets which shard, what a slot's next use looks like, and what is refused."""

import random
import threading
from collections import deque
from heapq import heapify, heapreplace

import pytest
from outfeed.ingress.errors import Unavailable
from outfeed.ingress.routes import RouteTable
from outfeed.ring.route import MAX_GENERATION, generation_of, reader_of, shard_of, slot_of


def test_routes_go_to_the_least_loaded_shard() -> None:
    table = RouteTable(2, shards=3, slots=9)
    routes = [table.acquire() for _ in range(9)]
    assert table.loads() == [3, 3, 3]
    assert {reader_of(route) for route in routes} == {2}
    assert sorted(map(slot_of, routes)) == list(range(9))
    for route in routes:
        if shard_of(route) == 1:
            table.release(route)
    assert [shard_of(table.acquire()) for _ in range(3)] == [1, 1, 1]


def test_short_requests_one_after_the_other_spread_too() -> None:
    table = RouteTable(0, shards=4, slots=8)
    seen = set()
    for _ in range(8):
        route = table.acquire()
        seen.add(shard_of(route))
        table.release(route)
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("shards", [2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_shards_get_even_shares_of_the_tokens_however_skewed_the_lengths(shards: int, seed: int) -> None:
    """A simulated server: 128 running requests, one token a step each, one in ten 50 times as long."""
    rng, steps = random.Random(seed), 4000
    table = RouteTable(0, shards=shards, slots=256)
    running = [
        (_length(rng), table.acquire(), 0) for _ in range(128)
    ]  # each one's last step, its route, its first
    heapify(running)
    tokens = [0] * shards
    while running[0][0] < steps:
        end, route, began = running[0]
        tokens[shard_of(route)] += end - began
        table.release(route)
        heapreplace(running, (end + _length(rng), table.acquire(), end))
    for _, route, began in running:
        tokens[shard_of(route)] += steps - began
    assert max(tokens) < 1.1 * min(tokens), tokens


def _length(rng: random.Random) -> int:
    return rng.randint(1, 40) * (50 if rng.random() < 0.1 else 1)


def test_a_slot_comes_back_with_the_next_generation() -> None:
    table = RouteTable(0, shards=1, slots=1, generation=MAX_GENERATION)
    first = table.acquire()
    assert table.release(first)
    second = table.acquire()
    assert (slot_of(second), generation_of(first), generation_of(second)) == (0, MAX_GENERATION, 1)
    assert not table.release(first)
    assert table.loads() == [1]
    assert table.release(second)


def test_a_slot_rests_as_long_as_it_can() -> None:
    table = RouteTable(0, shards=1, slots=3)
    first = table.acquire()
    table.release(first)
    assert slot_of(first) not in (slot_of(table.acquire()), slot_of(table.acquire()))


def test_two_tables_of_one_reader_start_at_different_generations() -> None:
    assert len({generation_of(RouteTable(0, 1, 1).acquire()) for _ in range(8)}) > 1


def test_when_every_slot_is_taken_the_answer_is_a_503() -> None:
    table = RouteTable(0, shards=2, slots=2)
    route = table.acquire()
    table.acquire()
    with pytest.raises(Unavailable, match="all 2 places") as caught:
        table.acquire()
    assert caught.value.status == 503
    table.release(route)
    table.acquire()


def test_releasing_twice_or_a_foreign_route_changes_nothing() -> None:
    table = RouteTable(1, shards=2, slots=4)
    route = table.acquire()
    other = RouteTable(0, shards=2, slots=8, generation=1)
    foreign = [other.acquire() for _ in range(8)]
    assert table.release(route)
    assert not table.release(route)
    assert not any(table.release(one) for one in foreign)
    assert table.loads() == [0, 0]


def test_what_is_no_route_frees_no_place() -> None:
    """0 names nobody, though reader 0, shard 0 and slot 0 are there."""
    table = RouteTable(0, shards=1, slots=2)
    assert not table.release(0)
    assert sorted(slot_of(table.acquire()) for _ in range(2)) == [0, 1]
    with pytest.raises(Unavailable):
        table.acquire()


@pytest.mark.parametrize(
    ("reader", "shards", "slots"), [(0, 0, 1), (0, 257, 1), (0, 1, 0), (0, 1, (1 << 20) + 1), (256, 1, 1)]
)
def test_sizes_out_of_range_are_refused(reader: int, shards: int, slots: int) -> None:
    with pytest.raises(ValueError, match="not in"):
        RouteTable(reader, shards, slots)


def test_threads_never_share_a_route() -> None:
    table = RouteTable(0, shards=3, slots=64)
    seen: list[int] = []

    def work() -> None:
        for _ in range(500):
            route = table.acquire()
            seen.append(route)
            assert table.release(route)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seen)) == len(seen) == 2000
    assert table.loads() == [0, 0, 0]


def test_a_shard_that_can_deliver_nothing_gets_no_request_while_there_are_others() -> None:
    table = RouteTable(0, shards=3, slots=40)
    table.avoid(frozenset({1}))
    assert {shard_of(table.acquire()) for _ in range(10)} == {0, 2}
    assert shard_of(table.acquire(1)) == 1, "a health check asks for it"
    table.avoid(frozenset({0, 1, 2}))
    assert shard_of(table.acquire()) == 1
    table.avoid(frozenset())
    assert {shard_of(table.acquire()) for _ in range(12)} == {0, 1, 2}


def test_a_route_that_is_not_given_back_for_want_of_memory_can_be_given_back_again() -> None:
    class Full(deque[int]):
        def append(self, slot: int, /) -> None:
            raise MemoryError

    table = RouteTable(0, 1, 2)
    route = table.acquire()
    free, table._free = table._free, Full(table._free)
    with pytest.raises(MemoryError):
        table.release(route)
    table._free = free
    assert table.loads() == [1]
    assert table.release(route)
    assert sorted(slot_of(table.acquire()) for _ in range(2)) == [0, 1]
