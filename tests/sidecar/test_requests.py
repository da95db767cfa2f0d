"""Requests by rid: whose a rid is, what a push by rid becomes, and what is forgotten when."""

from array import array
from collections.abc import Iterator

import numpy as np
import pytest
from outfeed.ring.batch import Batch, decode_batch
from outfeed.ring.frames import Abort, Control, Generate, Tag
from outfeed.ring.route import make_route
from outfeed.sidecar import FinishReason, Kind, Requests, SchedulerPort, UnknownRoute, flat_family

from .conftest import Bench

A, B, A_AGAIN = make_route(0, 0, 1, 1), make_route(0, 0, 2, 1), make_route(0, 0, 1, 2)


def generate(route: int, rid: str) -> Generate:
    return Generate(route, rid, array("i", [1, 2]).tobytes(), {"max_new_tokens": 8})


@pytest.fixture
def port(bench: Bench) -> Iterator[SchedulerPort]:
    with SchedulerPort.attach(bench.name) as port:
        yield port


@pytest.fixture
def requests(port: SchedulerPort) -> Requests:
    return Requests(port)


def step(bench: Bench) -> Batch:
    ((_, tag, body),) = bench.shard.read()
    assert tag == Tag.BATCH
    return decode_batch(body)


def test_a_step_by_rid_is_a_step_by_route(bench: Bench, requests: Requests) -> None:
    bench.send(generate(A, "a"), generate(B, "b"))
    assert requests.recv() == [generate(A, "a"), generate(B, "b")]
    requests.push({"b": [1, 2], "a": np.array([3])})
    batch = step(bench)
    assert (batch.routes.tolist(), batch.ids.tolist(), batch.counts.tolist()) == ([B, A], [1, 2, 3], [2, 1])


def test_columns_by_rid(bench: Bench, requests: Requests) -> None:
    bench.send(generate(A, "a"), generate(B, "b"))
    requests.recv()
    with pytest.raises(ValueError, match="finishes names rid 'b' that has no row"):
        requests.push_tokens(["a"], [1], finishes={"b": FinishReason.length(1)})
    requests.push_tokens(["a", "b", "a"], np.array([1, 2, 3], "i4"), finishes={"a": FinishReason.length(2)})
    batch = step(bench)
    assert (batch.routes.tolist(), batch.ids.tolist()) == ([A, B, A], [1, 2, 3])
    assert list(batch.finishes) == [(2, FinishReason.length(2))]


def test_a_request_may_end_with_or_without_a_token(bench: Bench, requests: Requests) -> None:
    bench.send(generate(A, "a"), generate(B, "b"))
    requests.recv()
    requests.push({"b": [7]}, finishes={"a": {"type": "abort", "message": "?"}, "b": FinishReason.stop(7)})
    batch = step(bench)
    assert (batch.routes.tolist(), batch.counts.tolist()) == ([B, A], [1, 0])
    assert [(row, why.type) for row, why in batch.finishes] == [(0, "stop"), (1, "abort")]


def test_families_go_by_row_and_kind(bench: Bench, requests: Requests) -> None:
    bench.send(generate(A, "a"), generate(B, "b"))
    requests.recv()
    requests.push({"a": [1], "b": [2]}, families={Kind.OUTPUT_LOGPROBS: flat_family([(1, [-0.5], [2])])})
    family = step(bench).families[Kind.OUTPUT_LOGPROBS]
    assert family is not None
    assert (family.rows.tolist(), family.values.tolist()) == ([1], [-0.5])


def test_two_live_requests_of_one_rid_have_two_names(bench: Bench, requests: Requests) -> None:
    bench.send(generate(A, "x"), generate(B, "x"))
    first, second = requests.recv()
    assert (first.rid, second.rid) == ("x", "x@r0/s0/2#1")
    requests.push({second.rid: [2], first.rid: [1]})
    assert step(bench).routes.tolist() == [B, A]
    bench.shard.release()
    bench.send(Abort(B, "x"), Abort(A))
    assert [message.rid for message in requests.recv()] == ["x@r0/s0/2#1", "x"]


def test_a_client_cannot_take_a_name_by_guessing_it(bench: Bench, requests: Requests) -> None:
    bench.send(generate(A, "x"), generate(make_route(0, 0, 3, 1), "x@r0/s0/2#1"), generate(B, "x"))
    names = [message.rid for message in requests.recv()]
    assert len(set(names)) == 3
    assert requests.route_of(names[2]) == B


def test_a_late_row_never_reaches_the_next_request_of_its_rid(
    bench: Bench, port: SchedulerPort, requests: Requests
) -> None:
    bench.send(generate(A, "x"), Abort(A, "x"), generate(A_AGAIN, "x"))
    _, _, again = requests.recv()
    requests.push({"x": [1]})  # a step that was under way when the abort came
    assert step(bench).routes.tolist() == [A]
    bench.shard.release()
    assert port.stale_rows == 1
    requests.push({again.rid: [2]})
    assert step(bench).routes.tolist() == [A_AGAIN]


def test_control_requests_are_answered_by_their_route(
    bench: Bench, port: SchedulerPort, requests: Requests
) -> None:
    bench.send(Control(A, "c", "health"))
    (control,) = requests.recv()
    port.push_result(requests.route_of(control.rid), b"{}")
    assert not port.is_live(A)


def test_a_rid_nobody_sent_is_refused_and_nothing_is_pushed(bench: Bench, requests: Requests) -> None:
    bench.send(generate(A, "a"))
    requests.recv()
    with pytest.raises(UnknownRoute, match="rid 'b' was never received"):
        requests.push({"a": [1], "b": [2]})
    assert bench.shard.read() == []


def test_what_ended_is_forgotten_in_time_and_what_lives_is_not(bench: Bench, port: SchedulerPort) -> None:
    requests = Requests(port, remember=4)
    bench.send(generate(make_route(0, 0, 60, 1), "long-lived"))
    for generation in range(1, 30):
        route = make_route(0, 0, 1, generation)
        bench.send(generate(route, f"r{generation}"), Abort(route))
    requests.recv()
    assert requests.route_of("long-lived") == make_route(0, 0, 60, 1)
    assert requests.route_of("r29") == make_route(0, 0, 1, 29)
    with pytest.raises(UnknownRoute):
        requests.route_of("r1")


def test_as_many_are_remembered_as_was_said(bench: Bench, port: SchedulerPort) -> None:
    requests = Requests(port, remember=3)
    for slot in range(1, 5):
        bench.send(generate(make_route(0, 0, slot, 1), f"r{slot}"), Abort(make_route(0, 0, slot, 1)))
        requests.recv()
        assert requests.route_of("r1" if slot < 4 else "r2")
    with pytest.raises(UnknownRoute):
        requests.route_of("r1")


def test_more_that_live_than_are_remembered_all_keep_their_names(bench: Bench, port: SchedulerPort) -> None:
    requests = Requests(port, remember=2)
    bench.send(*(generate(make_route(0, 0, slot, 1), f"r{slot}") for slot in range(5)))
    requests.recv()
    assert [requests.route_of(f"r{slot}") for slot in range(5)] == [
        make_route(0, 0, slot, 1) for slot in range(5)
    ]


def test_what_lives_long_does_not_let_the_rest_pile_up(bench: Bench, port: SchedulerPort) -> None:
    requests = Requests(port, remember=8)
    bench.send(*(generate(make_route(0, 0, 40 + slot, 1), f"long-lived {slot}") for slot in range(4)))
    for generation in range(1, 400):
        route = make_route(0, 0, 1, generation)
        bench.send(generate(route, f"r{generation}"), Abort(route))
        requests.recv()
    assert len(requests._routes) == len(requests._rids) <= 8 + 4


def test_another_rank_pushes_what_it_adopted_by_rid(bench: Bench, port: SchedulerPort) -> None:
    bench.send(generate(make_route(0, 0, 1, 1), "a"))
    (request,) = Requests(port).recv()
    assert isinstance(request, Generate)
    with SchedulerPort.attach(bench.name, rank=1) as other:
        requests = Requests(other)
        assert requests.adopt(request) == "a"
        requests.push({"a": [7]})
        twin = generate(make_route(0, 0, 2, 1), "a")
        assert requests.adopt(twin) == "a@r0/s0/2#1"
        requests.push({"a@r0/s0/2#1": [8], "a": [9]})
        seen = [(lane, decode_batch(body)) for lane, tag, body in bench.shard.read() if tag == Tag.BATCH]
    assert [(lane, step.first.tolist(), step.ids.tolist()) for lane, step in seen] == [
        (1, [0], [7]),
        (1, [0, 1], [8, 9]),
    ]
