"""Who is stopped at the scheduler, and that it is told so once: the reader's abort rule."""

import pytest
from outfeed.ring.frames import ErrorFrame, Result, Tag, encode
from outfeed.ring.route import make_route
from outfeed.sink import Error, Frame, open_sink, reader

from .front import END, Front, row, step, waiting

A, B, C = (make_route(0, shard, slot, 1) for slot, shard in ((1, 0), (2, 1), (3, 0)))


def test_a_ghost_is_aborted_once() -> None:
    """Rows of a route this reader never registered: a request of a gateway before it still runs."""
    front = Front()
    front.open(A)
    front.arrive(step(row(C, 5)), step(row(C, 6)), step(row(C, 7)))
    assert front.aborts == [(C, "")]
    assert front.reader.statistics().stale_rows == 3


@pytest.mark.parametrize(
    ("tag", "message"), [(Tag.RESULT, Result(C, b"answer")), (Tag.ERROR, ErrorFrame(C, 500, "x", "y"))]
)
def test_a_ghost_may_show_itself_by_a_message(tag: Tag, message: Result | ErrorFrame) -> None:
    front = Front()
    front.open(A)
    for _ in range(2):
        front.arrive(encode(message), tag=tag)
    assert front.aborts == [(C, "")]


def test_a_reader_remembers_who_ended_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "REMEMBERED", 4)
    front = Front()
    routes = [make_route(0, 0, slot, 1) for slot in range(10, 20)]
    for route in routes:
        front.open(route)
        front.arrive(step(row(route, 0, "x", END)))
    assert list(front.reader._ended) == routes[6:]


def test_another_readers_ghost_is_not_ours_to_abort() -> None:
    front = Front()
    front.open(A)
    front.arrive(step(row(make_route(1, 0, 3, 1), 5)))
    assert front.aborts == []


def test_ghosts_that_cannot_be_aborted_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame may name any number of routes. Who finds no room is aborted when its next row comes."""
    monkeypatch.setattr(reader, "REMEMBERED", 4)
    front = Front()
    front.open(A)
    front.refuse_aborts = True
    ghosts = [make_route(0, 0, slot, 1) for slot in range(10, 20)]
    front.arrive(step(*(row(route, 5) for route in ghosts)))
    assert front.reader.statistics().aborts_waiting == 4
    front.refuse_aborts = False
    front.reader.drain()
    front.arrive(step(*(row(route, 6) for route in ghosts[4:8])))
    assert [route for route, _ in front.aborts] == ghosts[:8]


def test_a_slow_client_is_cut_off_and_aborted_once() -> None:
    front = Front()
    slow, quick = front.open(A, capacity=20), front.open(B, capacity=20)
    for first in range(10):
        front.arrive(step(row(A, first), row(B, first)))
        waiting(quick)
    frame, error = waiting(slow)
    assert isinstance(frame, Frame)
    assert frame.event.text == "xxxx"
    assert isinstance(error, Error)
    assert (error.status, error.type) == (408, "client_too_slow")
    assert "the client reads too slowly" in error.message
    assert front.aborts == [(A, f"rid-{A}")]
    assert front.ends == [A]
    assert front.reader.statistics().sinks_full == 1
    assert front.reader.statistics().stale_rows == 5


def test_an_answer_that_finds_no_room_is_a_slow_client_too() -> None:
    front = Front()
    a = front.open(A, capacity=20)
    front.arrive(step(row(A, 0)))
    front.arrive(encode(Result(A, b"an answer of its size")), tag=Tag.RESULT)
    frame, error = waiting(a)
    assert isinstance(frame, Frame)
    assert isinstance(error, Error)
    assert error.type == "client_too_slow"
    assert front.aborts == [(A, f"rid-{A}")]


def test_a_vanished_client_is_aborted_before_its_next_row() -> None:
    front = Front()
    a = front.open(A)
    a.close()
    assert front.egress.doorbell.rung == 1
    front.reader.drain()
    assert front.aborts == [(A, f"rid-{A}")]
    front.arrive(step(row(A, 0)))
    assert len(front.aborts) == len(front.ends) == 1


def test_an_abort_tells_the_handler_what_it_is_given_and_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    front = Front()
    a, b = front.open(A), front.open(B)
    for _ in range(2):
        front.reader.abort(A)
        front.reader.abort(B, Error(500, "told", "to"))
    front.reader.drain()
    assert waiting(a) == [Error(500, "closed", "the stream was closed before the request ended")]
    assert waiting(b) == [Error(500, "told", "to")]
    assert front.aborts == [(A, f"rid-{A}"), (B, f"rid-{B}")]
    assert caplog.text == ""


def test_a_row_that_finds_the_client_gone_aborts_it_once() -> None:
    front = Front()
    a = front.open(A)
    front.egress.frames.append((0, Tag.BATCH, memoryview(step(row(A, 0)))))
    a.close()
    front.reader._requests.clear()  # the row is handled before the news arrives
    front.reader.drain()
    front.reader.drain()
    assert front.aborts == [(A, f"rid-{A}")]
    assert front.ends == [A]


def test_a_client_that_vanishes_between_done_and_reading_it() -> None:
    front = Front()
    a = front.open(A)
    front.arrive(step(row(A, 0, "x", END)))
    a.close()
    front.reader.drain()
    assert (front.ends, front.aborts) == ([A], [])
    assert front.reader.statistics().live == 0


def test_a_dropped_source_is_a_vanished_client() -> None:
    front = Front()
    source = front.open(A, keep=False)
    del source
    front.reader.drain()
    assert front.aborts == [(A, f"rid-{A}")]


def test_a_client_that_is_gone_before_it_is_registered() -> None:
    front = Front()
    sender, source = open_sink(100)
    source.close()
    front.reader.register(A, "a", sender)
    front.reader.drain()
    assert (front.aborts, front.ends) == ([(A, "a")], [A])


def test_an_abort_that_is_refused_is_tried_until_it_is_taken() -> None:
    front = Front()
    front.refuse_aborts = True
    a, b = front.open(A), front.open(B)
    a.close()
    b.close()
    for _ in range(5):
        front.reader.drain()
    front.open(C)
    front.arrive(step(row(C, 0, "x", END)))
    assert front.reader.statistics().aborts_waiting == 2
    assert front.ends == [C], "a slot is free when its abort is sent: that of the next one in it is behind it"
    front.refuse_aborts = False
    front.reader.drain()
    front.reader.drain()
    assert sorted(front.ends) == sorted([A, B, C])
    assert sorted(front.aborts) == [(A, f"rid-{A}"), (B, f"rid-{B}")]
    assert front.reader.statistics().aborts == 2


@pytest.mark.parametrize("running", [False, True])
def test_an_error_aborts_only_what_may_still_run(running: bool) -> None:
    front = Front()
    a = front.open(A)
    front.arrive(step(row(A, 0)))
    front.arrive(encode(ErrorFrame(A, 503, "gone", "no scheduler", running)), tag=Tag.ERROR)
    frame, error = waiting(a)
    assert isinstance(frame, Frame)
    assert error == Error(503, "gone", "no scheduler")
    assert front.reader.statistics().errors == 1
    assert front.aborts == ([(A, f"rid-{A}")] if running else [])
    assert front.ends == [A]


def test_unregister_forgets_without_a_word() -> None:
    front = Front()
    a = front.open(A)
    assert front.reader.unregister(A)
    assert not front.reader.unregister(A)
    a.close()
    front.reader.drain()
    assert (front.ends, front.aborts) == ([], [])


def test_failing_all_ends_those_that_were_live_then_and_no_later_one() -> None:
    front = Front()
    over, a = front.open(C), front.open(A)
    front.reader.fail(Error(503, "gone", "no scheduler"), abort=True)
    front.reader.abort(C)
    front.reader._requests.rotate()  # as if that had been asked before
    b = front.open(B)
    front.reader.drain()
    assert [type(item) for item in waiting(over)] == [Error]
    assert waiting(a) == [Error(503, "gone", "no scheduler")]
    assert waiting(b) == []
    assert front.aborts == [(C, f"rid-{C}"), (A, f"rid-{A}")]
