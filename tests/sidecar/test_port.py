"""The scheduler's port: what it receives, what it hands over, and what it refuses."""

import mmap
import os
import time
from array import array
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import numpy as np
import pytest
from outfeed.ring import FrameTooLarge, LaneOwned, RingClosed, RingFull
from outfeed.ring.batch import Batch, decode_batch
from outfeed.ring.board import Role, State
from outfeed.ring.families import Kind
from outfeed.ring.family_makers import flat_family
from outfeed.ring.frames import (
    TAG_OF,
    Abort,
    Attach,
    Control,
    ErrorFrame,
    Generate,
    Message,
    Result,
    Standing,
    Tag,
    Tally,
    decode,
    encode,
)
from outfeed.ring.instance import InstanceGone
from outfeed.ring.names import segment_name
from outfeed.ring.route import make_route
from outfeed.sidecar import FinishReason, SchedulerPort, UnknownRoute

from .conftest import Bench

A, B = make_route(0, 0, 1, 1), make_route(0, 0, 2, 1)
OTHERS = make_route(1, 0, 1, 1)


def generate(route: int, tokens: int = 3) -> Generate:
    return Generate(route, f"rid-{route:x}", array("i", range(tokens)).tobytes(), {"max_new_tokens": 8})


@pytest.fixture
def port(bench: Bench) -> Iterator[SchedulerPort]:
    with SchedulerPort.attach(bench.name) as port:
        yield port


def _pushed(port: SchedulerPort, ids: list[int]) -> bool:
    try:
        port.push_tokens([A], ids, [len(ids)])
    except RingFull:
        return False
    return True


def steps(bench: Bench) -> list[Batch]:
    return [decode_batch(body) for _, tag, body in bench.shard.read() if tag == Tag.BATCH]


def test_requests_arrive_in_order(bench: Bench, port: SchedulerPort) -> None:
    assert port.recv() == []
    assert not port.wait(0)
    sent: list[Message] = [generate(A), generate(B), Control(make_route(0, 0, 3, 1), "c", "health")]
    bench.send(*sent)
    assert port.wait(1)
    assert port.recv() == sent
    assert port.recv() == []


def test_an_abort_arrives_once_and_only_while_its_request_lives(bench: Bench, port: SchedulerPort) -> None:
    bench.send(generate(A), Abort(A, "a"), Abort(A, "a"))
    assert port.recv() == [generate(A), Abort(A, "a")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_abort_of_what_never_came_is_for_another_rank_or_nobody(
    bench: Bench, port: SchedulerPort, ranks: int
) -> None:
    """The rank 0 before this one had received the request and handed it on."""
    bench.send(Abort(B, "never came"))
    assert port.recv() == [Abort(B, "never came")][: ranks - 1]


def test_what_was_received_but_not_handled_comes_again_to_the_next_scheduler(bench: Bench) -> None:
    bench.send(generate(A), generate(B))
    with SchedulerPort.attach(bench.name) as port:
        assert port.recv(limit=1) == [generate(A)]
    with SchedulerPort.attach(bench.name) as port:
        assert port.recv() == [generate(A), generate(B)]


def test_a_step_says_what_came_before_it(bench: Bench, port: SchedulerPort) -> None:
    bench.send(generate(A, 5), generate(B, 7))
    port.recv()
    port.push_tokens([A, B], [10, 20])
    port.push_tokens([B, A], [21, 22, 11], [2, 1], finishes={0: FinishReason.length(3)})
    one, two = steps(bench)
    assert (one.first.tolist(), one.counts.tolist(), one.prompt_tokens.tolist()) == ([0, 0], [1, 1], [5, 7])
    assert (two.first.tolist(), two.counts.tolist(), two.prompt_tokens.tolist()) == ([1, 1], [2, 1], [7, 5])
    assert two.routes.tolist() == [B, A]
    assert two.ids.tolist() == [21, 22, 11]
    assert list(two.finishes) == [(0, FinishReason.length(3))]


@pytest.mark.parametrize(
    "kind",
    [
        list,
        tuple,
        np.array,
        lambda values: array("q", values),
        lambda values: np.array(values, dtype=np.int64)[::1],
        lambda values: np.repeat(np.array(values, dtype=np.uint64), 2)[::2],
    ],
    ids=["list", "tuple", "numpy", "array", "i64", "strided"],
)
def test_rows_come_as_anything_numpy_understands(bench: Bench, port: SchedulerPort, kind: type) -> None:
    bench.send(generate(A), generate(B))
    port.recv()
    port.push_tokens(kind([A, B]), kind([1, 2, 3]), kind([1, 2]))
    (step,) = steps(bench)
    assert (step.routes.tolist(), step.ids.tolist(), step.counts.tolist()) == ([A, B], [1, 2, 3], [1, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], []), "1 to .* rows, not 0"),
        (([A], [1, 2]), "ids has 2 entries, the counts of 1 rows sum to 1"),
        (([A], [1], [1, 1]), "counts has 2 entries for 1 rows"),
        (([A], [1.5]), "ids has dtype float64: expected whole numbers from 0 to 2147483647"),
        (([A], np.array([True])), "ids has dtype bool: expected whole numbers"),
        (([A, A], [1, 1 << 31]), r"ids\[1\] is 2147483648: expected -2147483648 to 2147483647"),
        (([A], np.array([1 << 63], np.uint64)), r"ids\[0\] is 9223372036854775808: expected"),
        (([A], np.array([-1 << 63], np.int64)), r"ids\[0\] is -9223372036854775808: expected"),
        (([-1], [1]), r"routes\[0\] is -1: expected 0 to"),
        # As wide as what the C pass takes, and of the other sign.
        ((np.array([-1], "i8"), np.array([1], "i4")), r"routes\[0\] is -1: expected 0 to"),
        ((np.array([A, A], "u8"), np.array([1, 1 << 31], "u4")), r"ids\[1\] is 2147483648: expected"),
        (
            (np.array([A], "u8"), np.array([1], "i4"), np.array([-1], "i4")),
            r"counts\[0\] is -1: expected 0 to",
        ),
        (([1 << 64], [1]), "routes has dtype object: expected whole numbers from 0 to 18446744073709551615"),
        (([A], [1], [-1]), r"counts\[0\] is -1: expected 0 to"),
        (([A], [1], np.array([1 << 32])), r"counts\[0\] is 4294967296: expected 0 to"),
        (([[A]], [1]), r"routes has shape \(1, 1\): expected a list or an array of one dimension"),
        ((np.array([[A]], "u8"), np.array([1], "i4")), r"routes has shape \(1, 1\): expected"),
        ((np.array([A], "u8"), np.array([[1]], "i4")), r"ids has shape \(1, 1\): expected"),
        (
            (np.array([A], "u8"), np.array([1], "i4"), np.array([[1]], "u4")),
            r"counts has shape \(1, 1\): expected",
        ),
        ((A, [1]), "routes is a int: expected a list"),
        (({A}, [1]), "routes is a set: expected a list"),
        (([A], [[1], [2, 3]]), "ids cannot be read as an array: "),
        (([0], [1]), "never received"),
        (([B], [1]), "never received"),
    ],
)
def test_a_step_that_does_not_fit_together_is_refused_whole(
    bench: Bench, port: SchedulerPort, arguments: tuple[Any, ...], message: str
) -> None:
    bench.send(generate(A))
    port.recv()
    with pytest.raises(ValueError, match=message):
        port.push_tokens(*arguments)
    with pytest.raises(ValueError, match="row 1 of a step of 1 rows"):
        port.push_tokens([A], [1], finishes={1: FinishReason.length(1)})
    assert steps(bench) == []
    port.push_tokens([A], [1])
    assert steps(bench)[0].first.tolist() == [0]


def test_a_full_ring_is_said_at_once_and_the_same_push_works_later(bench: Bench, port: SchedulerPort) -> None:
    bench.send(generate(A))
    port.recv()
    ids, pushed = list(range(1000)), 0
    while _pushed(port, ids):
        pushed += 1
    firsts = [int(step.first[0]) for step in steps(bench)]
    bench.shard.release()
    port.push_tokens([A], ids, [1000], finishes={0: FinishReason.length(1)})
    firsts += [int(step.first[0]) for step in steps(bench)]
    assert firsts == [1000 * k for k in range(pushed + 1)]


def test_a_step_that_found_no_room_is_not_counted_however_often_it_is_tried(
    bench: Bench, port: SchedulerPort
) -> None:
    bench.send(generate(A), generate(B))
    port.recv()
    port.push_tokens([B], [1], finishes={0: FinishReason.length(1)})
    while _pushed(port, list(range(1000))):
        pass
    logprobs = {Kind.OUTPUT_LOGPROBS: flat_family([(0, [-0.5], [7])])}
    for families in (None, logprobs) * 3:
        with pytest.raises(RingFull):
            port.push_tokens([A, B], [0] * 1000, [1, 999], families=families)
    assert port.stale_rows == 0
    steps(bench)
    bench.shard.release()
    port.push_tokens([A, B], [0] * 1000, [1, 999], families=logprobs)
    assert port.stale_rows == 1


@pytest.mark.parametrize(("ranks", "live"), [(1, 1), (2, 0)])
def test_whoever_looks_at_the_instance_sees_what_is_live_and_the_rows_that_came_too_late(
    bench: Bench, port: SchedulerPort, live: int
) -> None:
    bench.send(generate(A), generate(B))
    port.recv()
    port.push_tokens([A], [1], finishes={0: FinishReason.length(1)})
    for _ in range(3):
        port.push_tokens([A], [2])
    assert port.stale_rows == 3
    row = bench.instance.board.row(Role.SCHEDULER)
    deadline = time.monotonic() + 60
    while port.alive and row.get("stale_rows") < 3:  # shown with the heartbeat
        assert time.monotonic() < deadline, "the board never showed them"
        time.sleep(0.01)
    assert (row.get("stale_rows"), row.get("rows")) == (3, 4)
    assert row.get("live") == live, "what other ranks end this one does not hear: it says nothing"


def test_a_step_larger_than_a_frame_is_refused_with_both_sizes(bench: Bench, port: SchedulerPort) -> None:
    bench.send(generate(A))
    port.recv()
    with pytest.raises(FrameTooLarge, match=r"\d+.*\d+"):
        port.push_tokens([A], list(range(10_000)), [10_000])
    port.push_tokens([A], [1])
    assert steps(bench)[0].first.tolist() == [0]


def test_a_corrupt_request_lane_costs_its_gateway_alone(bench: Bench, port: SchedulerPort) -> None:
    bench.send(generate(A))
    bench.other.write(Tag.GENERATE, encode(generate(OTHERS)))
    assert sorted(message.route for message in port.recv()) == [A, OTHERS]
    bench.send(generate(B))
    ring = bench.instance.request()
    with open(f"/dev/shm/{ring.name}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        at = memory.find(encode(generate(B)))
        memory[at - 16 : at] = b"\xff" * 16  # its record's header
    ring.close()
    # The gateway ends what it has, and cannot say so: no abort of its would come any more.
    assert port.recv() == [Abort(A)]
    assert bench.instance.board.row(Role.SCHEDULER).get("bad_frames") == 1
    port.push_tokens([OTHERS], [1])
    assert steps(bench)[0].routes.tolist() == [OTHERS]
    assert port.recv() == []


@pytest.mark.parametrize(
    "stray",
    [
        Attach(1),
        Abort(OTHERS, "o"),
        generate(make_route(1, 0, 2, 1)),
        Control(make_route(1, 0, 2, 1), "c", "health"),
    ],
    ids=lambda stray: type(stray).__name__,
)
def test_what_one_gateways_lane_says_of_another_is_dropped(
    bench: Bench, port: SchedulerPort, stray: Message | Attach
) -> None:
    theirs = generate(OTHERS)
    bench.other.write(Tag.GENERATE, encode(theirs))
    assert port.recv() == [theirs]
    bench.gateway.write(TAG_OF[type(stray)], encode(stray))
    bench.send(generate(A))
    assert port.recv() == [generate(A)]
    assert port.is_live(OTHERS)
    bench.other.write(Tag.ATTACH, encode(Attach(1)))
    assert port.recv() == [Abort(OTHERS)]


def test_a_board_that_was_scribbled_over_costs_no_request(bench: Bench, port: SchedulerPort) -> None:
    """`recv` counts what it drops, and what it returns must not be lost by that."""
    path = f"/dev/shm/{segment_name(bench.name, 'board')}"
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        row = 65536 + 256  # rank 0's, behind the launcher's
        memory[row + 8 : row + 256] = b"\xff" * 248
    bench.gateway.write(250, b"no frame")
    bench.send(generate(A), generate(B), Abort(A, "a"))
    assert port.recv() == [generate(A), generate(B), Abort(A, "a")]


def test_control_requests_get_one_answer(bench: Bench, port: SchedulerPort) -> None:
    other = make_route(0, 0, 3, 1)
    bench.send(Control(A, "c", "health"), generate(B), generate(other))
    port.recv()
    port.push_result(A, b"fine")
    port.push_error(B, 599, "Busy", "no memory")
    port.push_error(other, 400, "Odd", "no such")
    assert [decode(tag, body) for _, tag, body in bench.shard.read()] == [
        Result(A, b"fine"),
        ErrorFrame(B, 599, "Busy", "no memory"),
        ErrorFrame(other, 400, "Odd", "no such"),
    ]
    port.push_result(A, b"again")
    port.push_error(B, 500, "X", "again")
    assert bench.shard.read() == []
    for never in (make_route(0, 0, 4, 1), 0):
        with pytest.raises(UnknownRoute, match="was never received by this port"):
            port.push_result(never, b"")
        with pytest.raises(UnknownRoute, match="was never received by this port"):
            port.push_error(never, 500, "X", "")


def test_an_answer_that_nobody_could_read_is_refused(bench: Bench, port: SchedulerPort) -> None:
    bench.send(Control(A, "c", "health"), generate(B))
    port.recv()
    unread: list[Any] = ["text", None, {"success": True}]
    for body in unread:
        with pytest.raises(ValueError, match=r"body is a .*: give bytes"):
            port.push_result(A, body)
    wrong: list[tuple[Any, Any, Any, str]] = [
        (399, "X", "?", "status 399 is no error"),
        (600, "X", "?", "status 600 is no error"),
        (503, 7, "?", "type is 7: give text"),
        (503, "X", OSError("no memory"), "message is OSError.*: give text"),
    ]
    for status, kind, message, says in wrong:
        with pytest.raises(ValueError, match=says):
            port.push_error(B, status, kind, message)
    assert bench.shard.read() == []
    routes = np.array([A, B], np.uint64)
    port.push_result(routes[0], memoryview(b"fine"))
    port.push_error(routes[1], HTTPStatus.SERVICE_UNAVAILABLE, "X", "?")
    assert [decode(tag, body) for _, tag, body in bench.shard.read()] == [
        Result(A, b"fine"),
        ErrorFrame(B, 503, "X", "?"),
    ]


def test_rows_are_for_requests_and_results_for_operations(bench: Bench, port: SchedulerPort) -> None:
    """Either is a client waiting in vain, or one that gets what it cannot read."""
    bench.send(Control(A, "c", "health"), generate(B))
    port.recv()
    logprobs = {Kind.OUTPUT_LOGPROBS: flat_family([(0, [-0.5], [7])])}
    for families in (None, logprobs):
        with pytest.raises(ValueError, match=r"row 1: .* is a control request: answer it with push_result"):
            port.push_tokens([B, A], [1, 2], families=families)
    with pytest.raises(ValueError, match="is no control request: end it with push_tokens"):
        port.push_result(B, b"fine")
    assert bench.shard.read() == []
    port.push_result(A, b"fine")
    port.push_tokens([B, A], [1, 2])  # answered: what comes late is a stale row like any other
    assert port.stale_rows == 1
    assert decode_batch(bench.shard.read()[1][2]).first.tolist() == [0, 0]


def test_rank_1_pushes_on_its_own_lane_what_it_adopted(bench: Bench, port: SchedulerPort) -> None:
    with SchedulerPort.attach(bench.name, rank=1) as other:
        with pytest.raises(UnknownRoute, match="adopt"):
            other.push_tokens([A], [1])
        other.adopt(generate(A, 9))
        other.push_tokens([A], [1])
        frames = [
            (lane, decode_batch(body).prompt_tokens.tolist() if tag == Tag.BATCH else decode(tag, body))
            for lane, tag, body in bench.shard.read()
        ]
        assert frames == [(1, Tally(1, [(A, 0, Standing.RUNNING)])), (1, [9])]
        assert other.recv() == []
    for closed in (other.recv, lambda: other.adopt(generate(A))):
        with pytest.raises(RingClosed, match="the port is closed"):
            closed()


def test_one_rank_one_scheduler(bench: Bench, port: SchedulerPort) -> None:
    with pytest.raises(LaneOwned, match=r"has a live scheduler of rank 0: end it, .*\(\d+\)"):
        SchedulerPort.attach(bench.name)
    with pytest.raises(IndexError, match=r"2 scheduler process\(es\), no number 2"):
        SchedulerPort.attach(bench.name, rank=2)
    with pytest.raises(InstanceGone, match="no instance 'nobody'"):
        SchedulerPort.attach("nobody", timeout=0)


def test_closing_twice_is_fine_and_a_closed_port_is_not_alive(bench: Bench, port: SchedulerPort) -> None:
    assert port.alive
    port.close()
    port.close()
    port._beat_due = 0
    assert not port.alive
    SchedulerPort.attach(bench.name).close()


def test_a_forked_child_cannot_end_its_parents_scheduler(bench: Bench, port: SchedulerPort) -> None:
    """Engines fork workers, and a child that leaves the `with` block closes the port it has inherited."""
    bench.send(generate(A), generate(B))
    port.recv(limit=1)
    row = bench.instance.board.row(Role.SCHEDULER)
    before = row.heartbeat_ns
    child = os.fork()
    if child == 0:
        outcomes: list[object] = []
        port._beat_due = 0
        for call in (
            lambda: port.alive,
            port.recv,
            lambda: port.wait(0),
            lambda: port.push_tokens([A], [1]),
            port.close,
        ):
            try:
                outcomes.append(call())
            except RingClosed:
                outcomes.append("closed")
        os._exit(0 if outcomes == [False, "closed", "closed", "closed", None] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (row.state, row.heartbeat_ns) == (State.RUNNING, before)
    port.push_tokens([A], [1])
    assert steps(bench)[0].routes.tolist() == [A]
    assert port.recv() == [generate(B)]


def test_a_dead_gateways_aborts_are_not_lost_to_a_call_that_fails(bench: Bench, port: SchedulerPort) -> None:
    bench.other.write(Tag.GENERATE, encode(generate(OTHERS)))
    bench.send(generate(A))
    bench.instance.board.row(Role.READER, 0).claim(State.RUNNING)  # the one that lives
    assert len(port.recv()) == 2
    gateway = os.fork()
    if gateway == 0:
        bench.instance.board.row(Role.READER, 1).claim(State.RUNNING)
        os._exit(0)
    os.waitpid(gateway, 0)
    port._look_due = 0
    with pytest.raises(ValueError, match="limit 0"):
        port.recv(limit=0)
    assert port.recv() == [Abort(OTHERS)]


def test_an_answer_to_what_was_aborted_meanwhile_is_dropped(bench: Bench, port: SchedulerPort) -> None:
    """Who asked gave up while the scheduler was in a step: both are there when it looks."""
    bench.send(Control(A, "c", "health"), Abort(A, "c"), generate(B), Abort(B, "b"))
    assert [type(message) for message in port.recv()] == [Control, Abort, Generate, Abort]
    port.push_result(A, b"fine")
    port.push_error(A, 400, "BadRequest", "too late")
    port.push_error(B, 503, "Busy", "too late")
    assert bench.shard.read() == []
    assert port.stale_rows == 3
