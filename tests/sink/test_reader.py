"""The reader's promises: in order, exactly once, one ending each. Aborts have test_aborts.py."""

import asyncio
import threading

import numpy as np
import pytest
from outfeed.ring.families import Kind
from outfeed.ring.frames import ErrorFrame, Restored, Result, Tag, Takeover, encode
from outfeed.ring.route import make_route
from outfeed.sink import Control, Done, Error, Frame, Reader, open_sink

from .front import END, Front, row, step, waiting
from .material import Row, Step

A, B, C = (make_route(0, shard, slot, 1) for slot, shard in ((1, 0), (2, 1), (3, 0)))


def test_rows_reach_their_own_sink() -> None:
    front = Front()
    a, b = front.open(A), front.open(B)
    front.arrive(step(row(A, 0, "a0"), row(B, 0, "b0")), step(row(B, 1, "b1", END), row(A, 1, "a1", END)))
    (done_a,), (done_b,) = waiting(a), waiting(b)
    assert isinstance(done_a, Done)
    assert isinstance(done_b, Done)
    assert (done_a.event.text, done_b.event.text) == ("a0a1", "b0b1")
    assert (front.ends, front.aborts) == ([B, A], [])
    assert front.egress.released > 0
    statistics = front.reader.statistics()
    assert (statistics.rows, statistics.delivered, statistics.live) == (4, 4, 0)


def test_several_rows_of_a_request_in_one_frame_come_in_order() -> None:
    """A shard that has a backlog writes what one row cannot hold as several."""
    front = Front()
    a, b = front.open(A), front.open(B)
    front.arrive(
        step(
            row(A, 0, "a0"), row(A, 1, "a1"), row(A, 1, "a1"), row(A, 2, "a2", END), row(A, 3), row(B, 0, "b")
        )
    )
    (done,) = waiting(a)
    assert isinstance(done, Done)
    assert (done.event.text, done.event.ids.tolist()) == ("a0a1a2", [0, 1, 2])
    assert len(waiting(b)) == 1
    statistics = front.reader.statistics()
    assert (statistics.doubled, statistics.stale_rows, front.aborts) == (1, 1, [])
    assert (statistics.rows, statistics.delivered, statistics.live) == (6, 4, 1)


def test_a_double_is_dropped() -> None:
    front = Front()
    a = front.open(A)
    front.arrive(
        step(row(A, 0)), step(row(A, 1)), step(row(A, 0)), step(row(A, 1)), step(row(A, 2, "y", END))
    )
    (done,) = waiting(a)
    assert isinstance(done, Done)
    assert done.event.text == "xxy"
    assert front.reader.statistics().doubled == 2


@pytest.mark.parametrize("first", [1, 7])
def test_a_gap_fails_the_request_and_aborts_it_once(first: int) -> None:
    front = Front()
    a = front.open(A)
    front.arrive(step(row(A, first)), step(row(A, first + 1)), step(row(A, first + 2, "x", END)))
    (error,) = waiting(a)
    assert isinstance(error, Error)
    assert (error.status, error.type) == (500, "gap")
    assert f"from token {first} on came where one from 0 on was expected" in error.message
    assert front.aborts == [(A, f"rid-{A}")]
    assert front.ends == [A]
    assert front.reader.statistics().stale_rows == 2
    assert front.reader.statistics().gaps == 1


def test_a_row_that_overlaps_is_a_gap_too() -> None:
    front = Front()
    a = front.open(A)
    overlapping = Row(A, 0, [1, 2], 2, 9, "yz", None)
    front.arrive(step(row(A, 0)), step(overlapping))
    assert isinstance(waiting(a)[-1], Error)
    assert len(front.aborts) == 1


def test_late_rows_of_an_ended_request_are_counted_and_dropped() -> None:
    front = Front()
    a = front.open(A)
    front.arrive(step(row(A, 0, "x", END)), step(row(A, 1)), step(row(A, 1)))
    assert len(waiting(a)) == 1
    assert front.reader.statistics().stale_rows == 2
    assert front.aborts == []
    assert front.ends == [A]


def test_the_next_request_in_a_slot_never_gets_the_last_ones_rows() -> None:
    front = Front()
    reused = make_route(0, 0, 1, 2)
    front.open(A)
    front.arrive(step(row(A, 0, "old", END)))
    new = front.open(reused)
    front.arrive(step(row(A, 0, "late"), row(reused, 0, "new")))
    (frame,) = waiting(new)
    assert isinstance(frame, Frame)
    assert frame.event.text == "new"


def test_a_result_is_delivered_as_it_is() -> None:
    front = Front()
    a = front.open(A)
    body = bytes(range(256)) * 4000
    front.arrive(encode(Result(A, body)), tag=Tag.RESULT)
    assert waiting(a) == [Control(body)]
    assert (front.ends, front.aborts) == ([A], [])


def test_messages_of_an_ended_request_are_counted_apart_from_its_rows() -> None:
    front = Front()
    a = front.open(A)
    front.arrive(step(row(A, 0, "x", END)), step(row(A, 1)))
    front.arrive(encode(Result(A, b"answer")), tag=Tag.RESULT)
    front.arrive(encode(ErrorFrame(A, 503, "gone", "no scheduler")), tag=Tag.ERROR)
    assert len(waiting(a)) == 1
    statistics = front.reader.statistics()
    assert (statistics.stale_rows, statistics.stale_messages, front.aborts) == (1, 2, [])


def test_order_between_kinds_is_kept() -> None:
    front = Front()
    a = front.open(A)
    front.egress.frames = [
        (0, Tag.BATCH, memoryview(step(row(A, 0, "one")))),
        (0, Tag.ERROR, memoryview(encode(ErrorFrame(A, 500, "x", "y")))),
        (0, Tag.BATCH, memoryview(step(row(A, 1, "never")))),
    ]
    assert front.reader.drain() == 3
    frame, error = waiting(a)
    assert isinstance(frame, Frame)
    assert frame.event.text == "one"
    assert isinstance(error, Error)


@pytest.mark.parametrize("tag", [Tag.RESULT, Tag.ERROR, Tag.GENERATE, Tag.FORGET, 0, 99, 255])
def test_a_bad_message_ends_nobody(tag: int) -> None:
    front = Front()
    front.open(A)
    front.arrive(encode(Result(A, b"x")) + b"\xc1", tag=tag)
    front.arrive(b"", tag=tag)
    stats = front.reader.statistics()
    assert stats.bad_frames == 2
    assert (front.aborts, front.ends) == ([], [])


def test_a_shard_takes_nothing_over_but_its_own_place() -> None:
    front, told = Front(), []
    front.reader = Reader(
        front.egress,  # type: ignore[arg-type]
        front.on_abort,
        front.ends.append,
        lambda shard, epoch: told.append((shard, epoch)),
    )
    front.arrive(encode(Takeover(1, 5)), tag=Tag.TAKEOVER)
    front.arrive(encode(Takeover(0, 7)), tag=Tag.TAKEOVER)
    front.arrive(encode(Restored(0, 0, 7)), tag=Tag.RESTORED)  # what a gateway says to a shard
    assert told == [(0, 7)]
    assert front.reader.statistics().bad_frames == 2


def test_a_step_without_text_does_not_belong_here(caplog: pytest.LogCaptureFixture) -> None:
    front = Front()
    a = front.open(A)
    front.arrive(Step(1, [row(A, 0)], egress=False).encode())
    assert "rejected a frame from shard 0: a BATCH without text" in caplog.text
    assert waiting(a) == []
    assert front.reader.statistics().bad_frames == 1


def test_two_requests_cannot_share_a_route() -> None:
    front = Front()
    front.open(A)
    with pytest.raises(ValueError, match="r0/s0/1#1 is registered already"):
        front.reader.register(A, "again", open_sink(10)[0])


def test_progress_is_what_a_restore_needs() -> None:
    front = Front()
    front.open(A)
    front.open(B)
    front.arrive(step(row(A, 0, "é"), row(B, 0, "b")))
    front.arrive(step(row(A, 1, "漢")))
    (mine,) = front.reader.progress(0)
    assert (mine.route, mine.rid, mine.text_bytes) == (A, f"rid-{A}", 5)
    assert np.frombuffer(mine.ids, "<i4").tolist() == [0, 1]


def test_progress_counts_what_only_an_empty_sink_could_take() -> None:
    front = Front()
    a = front.open(A, capacity=1)
    logprobs = {Kind.OUTPUT_LOGPROBS: ([-0.5], [0])}
    front.arrive(step(Row(A, 0, [7], 1, 9, "é", None, logprobs)))
    assert len(waiting(a)) == 1
    front.arrive(step(row(A, 1, "漢")))
    (mine,) = front.reader.progress(0)
    assert (mine.text_bytes, np.frombuffer(mine.ids, "<i4").tolist()) == (5, [7, 1])


@pytest.mark.parametrize(
    ("tag", "last"),
    [
        (Tag.BATCH, step(row(A, 0, "x", END))),
        (Tag.RESULT, encode(Result(A, b"answer"))),
        (Tag.ERROR, encode(ErrorFrame(A, 500, "x", "y"))),
        (Tag.BATCH, step(row(A, 1))),
        (Tag.BATCH, step(Row(A, 0, [7], 1, 9, "more than it has room for", None))),
    ],
    ids=["the last row", "a result", "an error", "a gap", "what only an empty sink can take"],
)
def test_whatever_comes_wakes_who_waits(tag: Tag, last: bytes) -> None:
    front = Front()
    a = front.open(A, capacity=20)

    async def story() -> None:
        reading = asyncio.ensure_future(a.receive())
        await asyncio.sleep(0)
        front.arrive(last, tag=tag)
        await asyncio.wait_for(reading, 30)

    asyncio.run(story())


def test_a_callback_that_fails_does_not_stop_the_reader(caplog: pytest.LogCaptureFixture) -> None:
    front = Front()

    def bad_end(route: int) -> None:
        raise ZeroDivisionError

    front.reader = Reader(front.egress, front.on_abort, bad_end)  # type: ignore[arg-type]
    a, b = front.open(A), front.open(B)
    front.reader.call(lambda: 1 / 0)  # type: ignore[arg-type]
    front.arrive(step(row(A, 0, "x", END), row(B, 0, "x", END)))
    assert isinstance(waiting(a)[0], Done)
    assert isinstance(waiting(b)[0], Done)
    assert "on_end" in caplog.text


def test_a_frame_that_cannot_be_handled_is_counted_and_costs_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    front = Front()

    def cannot_restore(shard: int, epoch: int) -> None:
        raise ZeroDivisionError

    front.reader = Reader(front.egress, front.on_abort, front.ends.append, cannot_restore)  # type: ignore[arg-type]
    a = front.open(A)
    front.egress.frames.append((0, Tag.TAKEOVER, memoryview(encode(Takeover(0, 1)))))
    front.arrive(step(row(A, 0, "x", END)))
    assert [type(item) for item in waiting(a)] == [Done]
    assert front.reader.statistics().bad_frames == 1
    assert "ZeroDivisionError" in caplog.text


def test_a_call_that_asks_to_be_called_again_holds_nobody_up() -> None:
    front = Front()
    a, calls = front.open(A), []

    def again() -> None:
        calls.append(1)
        front.reader.call(again)

    front.reader.call(again)
    front.arrive(step(row(A, 0)))
    assert isinstance(waiting(a)[0], Frame)
    assert len(calls) == 1


def test_one_call_into_the_loop_for_a_whole_drain() -> None:
    front = Front()
    sources = [front.open(make_route(0, 0, slot, 1)) for slot in range(50)]
    calls = 0

    async def story() -> None:
        nonlocal calls
        loop = asyncio.get_running_loop()
        tasks = [asyncio.ensure_future(source.receive()) for source in sources]
        await asyncio.sleep(0)
        original = loop.call_soon_threadsafe

        def counted(*args: object) -> object:
            nonlocal calls
            calls += 1
            return original(*args)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign,assignment]
        body = step(*[row(make_route(0, 0, slot, 1), 0) for slot in range(50)])
        thread = threading.Thread(target=front.arrive, args=(body,))
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0.001)
        loop.call_soon_threadsafe = original  # type: ignore[method-assign]
        assert all(isinstance(item, Frame) for item in await asyncio.wait_for(asyncio.gather(*tasks), 30))

    asyncio.run(story())
    assert calls == 1
