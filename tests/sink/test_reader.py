"""The reader's promises: in order, exactly once, one ending each, one abort where the scheduler needs it."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from itertools import count
from os import getpid

import numpy as np
import pytest
from outfeed.ring import Doorbell, Ring, wait
from outfeed.ring.batch import encode_batch
from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import ErrorFrame, Result, Tag, encode, join
from outfeed.ring.route import make_route
from outfeed.sink import Control, Done, Error, Frame, Reader, open_sink

from .front import Front, waiting
from .material import Row, Step

A, B, C = (make_route(0, shard, slot, 1) for slot, shard in ((1, 0), (2, 1), (3, 0)))


def row(route: int, first: int, text: str = "x", finish: dict[str, object] | None = None) -> Row:
    return Row(route, first, [first], 1, 9, text, finish)


def step(*rows: Row) -> bytes:
    return Step(5, list(rows), True).encode()


END = FinishReason.length(3).to_json()


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
    assert front.aborts == [(A, f"rid-{A}", "gap")]
    assert front.ends == [A]
    assert front.reader.statistics().stale_rows == 2


def test_a_row_that_overlaps_is_a_gap_too() -> None:
    front = Front()
    a = front.open(A)
    overlapping = Row(A, 0, [1, 2], 2, 9, "yz", None)
    front.arrive(step(row(A, 0)), step(overlapping))
    assert isinstance(waiting(a)[-1], Error)
    assert [reason for _, _, reason in front.aborts] == ["gap"]


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


def test_a_ghost_is_aborted_once() -> None:
    """Rows of a route this reader never registered: a request of a gateway before it still runs."""
    front = Front()
    front.open(A)
    front.arrive(step(row(C, 5)), step(row(C, 6)), step(row(C, 7)))
    assert front.aborts == [(C, "", "unknown route")]
    assert front.reader.statistics().stale_rows == 3


def test_another_readers_ghost_is_not_ours_to_abort() -> None:
    front = Front()
    front.open(A)
    front.arrive(step(row(make_route(1, 0, 3, 1), 5)))
    assert front.aborts == []


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
    assert front.aborts == [(A, f"rid-{A}", "sink full")]
    assert front.ends == [A]
    assert front.reader.statistics().stale_rows == 5


def test_a_vanished_client_is_aborted_before_its_next_row() -> None:
    front = Front()
    a = front.open(A)
    a.close()
    assert front.egress.doorbell.rung == 1
    front.reader.drain()
    assert front.aborts == [(A, f"rid-{A}", "handler gone")]
    front.arrive(step(row(A, 0)))
    assert len(front.aborts) == len(front.ends) == 1


def test_a_row_that_finds_the_client_gone_aborts_it_once() -> None:
    front = Front()
    a = front.open(A)
    front.egress.frames.append((0, Tag.BATCH, memoryview(step(row(A, 0)))))
    a.close()
    front.reader._requests.clear()  # the row is handled before the news arrives
    front.reader.drain()
    front.reader.drain()
    assert front.aborts == [(A, f"rid-{A}", "handler gone")]
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
    assert front.aborts == [(A, f"rid-{A}", "handler gone")]


def test_a_client_that_is_gone_before_it_is_registered() -> None:
    front = Front()
    sender, source = open_sink(100)
    source.close()
    front.reader.register(A, "a", sender)
    front.reader.drain()
    assert (front.aborts, front.ends) == ([(A, "a", "handler gone")], [A])


def test_an_abort_that_is_refused_is_tried_until_it_is_taken() -> None:
    front = Front()
    front.refuse_aborts = True
    a, b = front.open(A), front.open(B)
    a.close()
    b.close()
    for _ in range(5):
        front.reader.drain()
    assert front.reader.statistics().aborts_waiting == 2
    assert sorted(front.ends) == [A, B]
    front.refuse_aborts = False
    front.reader.drain()
    front.reader.drain()
    assert sorted(front.aborts) == [(A, f"rid-{A}", "handler gone"), (B, f"rid-{B}", "handler gone")]
    assert front.reader.statistics().aborts == 2


def test_a_result_is_delivered_as_it_is() -> None:
    front = Front()
    a = front.open(A)
    body = bytes(range(256)) * 4000
    front.arrive(encode(Result(A, body)), tag=Tag.RESULT)
    assert waiting(a) == [Control(body)]
    assert (front.ends, front.aborts) == ([A], [])


@pytest.mark.parametrize("running", [False, True])
def test_an_error_aborts_only_what_may_still_run(running: bool) -> None:
    front = Front()
    a = front.open(A)
    front.arrive(step(row(A, 0)))
    front.arrive(encode(ErrorFrame(A, 503, "gone", "no scheduler", running)), tag=Tag.ERROR)
    frame, error = waiting(a)
    assert isinstance(frame, Frame)
    assert error == Error(503, "gone", "no scheduler")
    assert front.aborts == ([(A, f"rid-{A}", "gone")] if running else [])
    assert front.ends == [A]


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
    front.reader.drain()
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


def test_a_step_without_text_does_not_belong_here() -> None:
    front = Front()
    a = front.open(A)
    front.arrive(Step(1, [row(A, 0)], egress=False).encode())
    assert waiting(a) == []
    assert front.reader.statistics().bad_frames == 1


def test_two_requests_cannot_share_a_route() -> None:
    front = Front()
    front.open(A)
    with pytest.raises(ValueError, match="r0/s0/1#1 is registered already"):
        front.reader.register(A, "again", open_sink(10)[0])


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
    a = front.open(A)
    front.reader.fail(Error(503, "gone", "no scheduler"), abort="scheduler gone")
    b = front.open(B)
    front.reader.drain()
    assert waiting(a) == [Error(503, "gone", "no scheduler")]
    assert waiting(b) == []
    assert front.aborts == [(A, f"rid-{A}", "scheduler gone")]


def test_progress_is_what_a_restore_needs() -> None:
    front = Front()
    front.open(A)
    front.open(B)
    front.arrive(step(row(A, 0, "é"), row(B, 0, "b")))
    front.arrive(step(row(A, 1, "漢")))
    (mine,) = front.reader.progress(0)
    assert (mine.route, mine.rid, mine.text_bytes) == (A, f"rid-{A}", 5)
    assert np.frombuffer(mine.ids, "<i4").tolist() == [0, 1]


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


_names = count()


@pytest.fixture
def egress() -> Iterator[tuple[Ring, Doorbell]]:
    name = f"outfeed-t{getpid()}-{next(_names)}.egress0"
    with Ring.create(name, lanes=2, consumers=1, capacity=1 << 20) as ring:
        bell = Doorbell.create(f"{name}.bell")
        yield ring, bell
        bell.close()
        ring.unlink()


def test_a_real_ring_a_thread_and_a_task(egress: tuple[Ring, Doorbell]) -> None:
    ring, bell = egress
    aborts: list[tuple[int, str, str]] = []
    ends: list[int] = []
    with ring.writer(0) as writer, ring.consumer(0, bell) as consumer:
        reader = Reader(consumer, lambda route, rid, why: aborts.append((route, rid, why)), ends.append)
        over = threading.Event()

        def drain() -> None:
            while not over.is_set():
                if reader.drain() == 0:
                    wait((consumer,), 1.0)

        thread = threading.Thread(target=drain)
        thread.start()
        sender, source = open_sink(1 << 20)
        reader.register(A, "a", sender)
        gone, _ = open_sink(10)
        reader.register(C, "c", gone)
        del _

        async def story() -> str:
            text = ""
            for first in range(100):
                parts = encode_batch(
                    1,
                    np.array([A], "u8"),
                    np.array([first], "u4"),
                    np.array([1], "u4"),
                    np.array([9], "u4"),
                    np.array([first], "i4"),
                    [(0, FinishReason.length(100))] if first == 99 else (),
                    generated=np.array([1], "u4"),
                    text_lens=np.array([1], "u4"),
                    text=b"x",
                )
                writer.write(Tag.BATCH, join(parts), timeout=10)
                item = await source.receive(30)
                assert isinstance(item, Frame | Done)
                text += item.event.text
            return text

        assert asyncio.run(story()) == "x" * 100
        over.set()
        bell.ring()
        thread.join()
        assert ends == [C, A]
        assert aborts == [(C, "c", "handler gone")]


def test_a_corrupt_lane_costs_its_shard_alone(egress: tuple[Ring, Doorbell]) -> None:
    ring, bell = egress
    aborts: list[tuple[int, str, str]] = []
    with ring.consumer(0, bell) as consumer:
        from outfeed.ring import CorruptLane

        class Corrupt:
            doorbell = bell
            raised = False

            def read(self, limit: int, upto: list[int] | None = None) -> list[tuple[int, int, memoryview]]:
                if not self.raised:
                    self.raised = True
                    raise CorruptLane("egress0", 0, 128)
                return consumer.read(limit)

            def release(self) -> None:
                consumer.release()

        reader = Reader(
            Corrupt(),  # type: ignore[arg-type]
            lambda route, rid, why: aborts.append((route, rid, why)),
            lambda route: None,
        )
        pairs = {route: open_sink(100) for route in (A, B)}
        for route, (sender, _) in pairs.items():
            reader.register(route, str(route), sender)
        reader.drain()
        (error,) = waiting(pairs[A][1])
        assert isinstance(error, Error)
        assert error.type == "corrupt_lane"
        assert waiting(pairs[B][1]) == []
        assert aborts == [(A, str(A), "corrupt lane")]
        sender, source = open_sink(100)
        reader.register(C, "c", sender)
        reader.drain()
        assert isinstance(waiting(source)[0], Error)


def test_reader_and_handlers_race_and_nothing_is_lost() -> None:
    """Threads switched as often as can be: takes, foldings and wake-ups meet everywhere."""
    rows, steps = 8, 1500
    front = Front()
    routes = [make_route(0, 0, slot, 1) for slot in range(rows)]
    sources = [front.open(route) for route in routes]
    received: list[list[int]] = [[] for _ in routes]

    def handle(slot: int) -> None:
        for item in sources[slot]:
            assert isinstance(item, Frame | Done)
            received[slot] += item.event.ids.tolist()

    bodies = [
        step(*[row(route, first, "x", END if first == steps - 1 else None) for route in routes])
        for first in range(steps)
    ]
    threads = [threading.Thread(target=handle, args=(slot,), daemon=True) for slot in range(rows)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for body in bodies:
            front.arrive(body)
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert received == [list(range(steps))] * rows
    assert all(source.statistics().waiting_bytes == 0 for source in sources)
    assert sorted(front.ends) == sorted(routes)
