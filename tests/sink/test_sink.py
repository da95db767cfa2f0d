"""The life of one sink: opened, filled, read, lagging, full, closed, dropped."""

import asyncio
import gc
import threading
import time
import tracemalloc
from functools import partial

import pytest
from outfeed.ring.finish import FinishReason
from outfeed.sink import (
    ChunkEvent,
    Columns,
    Control,
    Done,
    Error,
    Flat,
    Frame,
    Hidden,
    SinkBusy,
    SinkClosed,
    SinkEnded,
    SinkFull,
    open_sink,
)
from outfeed.sink.waiting import ThreadWaiter, wake


def chunk(
    text: str, first: int = 0, finish: FinishReason | None = None, columns: Columns | None = None
) -> ChunkEvent:
    return ChunkEvent(text.encode(), first.to_bytes(4, "little"), first, 1, 9, first, finish, columns)


LAST = FinishReason.length(3)


def test_capacity_is_a_decision() -> None:
    with pytest.raises(TypeError):
        open_sink()  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="capacity of 0 bytes is not positive"):
        open_sink(0)


def test_items_come_in_order_and_the_last_one_ends_it() -> None:
    sender, source = open_sink(1000)
    sender.try_send(Frame(chunk("a")))
    assert source.receive_sync() == Frame(chunk("a"))
    assert source.receive_nowait() is None
    sender.try_send(Done(chunk("b", 1, LAST)))
    assert source.receive_sync() == Done(chunk("b", 1, LAST))
    with pytest.raises(SinkEnded, match="last item was received before"):
        source.receive_sync()
    assert list(source) == []
    with pytest.raises(SinkClosed, match="last item was sent before"):
        sender.try_send(Frame(chunk("c", 2)))


def test_what_waits_is_merged_into_one_event() -> None:
    sender, source = open_sink(100_000)
    for first in range(100):
        sender.try_send(Frame(chunk(chr(97 + first % 26), first)))
    assert source.statistics().waiting_bytes == 500
    item = source.receive_sync()
    assert isinstance(item, Frame)
    assert item.event.text == "".join(chr(97 + first % 26) for first in range(100))
    assert item.event.ids.tolist() == list(range(100))
    assert (item.event.first, item.event.generated, item.event.stamp_ns) == (0, 100, 99)
    stats = source.statistics()
    assert (stats.sent, stats.received, stats.merged, stats.waiting_bytes) == (100, 1, 99, 0)


def test_the_last_event_takes_what_waits_with_it() -> None:
    sender, source = open_sink(1000)
    sender.try_send(Frame(chunk("a", 0)))
    sender.try_send(Done(chunk("b", 1, LAST)))
    items = list(source)
    assert len(items) == 1
    assert isinstance(items[0], Done)
    assert (items[0].event.text, items[0].event.finish) == ("ab", LAST)


def test_an_error_comes_after_what_waits() -> None:
    sender, source = open_sink(1000)
    sender.try_send(Frame(chunk("a", 0)))
    sender.try_send(Frame(chunk("b", 1)))
    sender.try_send(Error(500, "x", "y"))
    first, last = list(source)
    assert isinstance(first, Frame)
    assert first.event.text == "ab"
    assert last == Error(500, "x", "y")


def test_full_counts_bytes_and_says_so() -> None:
    sender, source = open_sink(10)
    sender.try_send(Frame(chunk("abcdef")))
    with pytest.raises(SinkFull, match="10 bytes wait and 5 more do not fit the sink's capacity of 10"):
        sender.try_send(Frame(chunk("g", 1)))
    source.receive_sync()
    sender.try_send(Frame(chunk("g", 1)))


def test_a_limit_that_is_a_moment_old_refuses_nothing_that_fits() -> None:
    """The source moves the limit; a sender that still sees the one before looks at what really waits."""
    sender, source = open_sink(10)
    for first in range(2):
        sender.channel.limit = 0
        sender.try_send(Frame(chunk("a", first)))
    with pytest.raises(SinkFull, match="10 bytes wait"):
        sender.try_send(Frame(chunk("a", 2)))
    assert source.statistics().waiting_bytes == 10


def test_a_stream_is_ended_once() -> None:
    sender, source = open_sink(1000)
    sender.try_send(Error(500, "x", "y"))
    sender.close()
    with pytest.raises(SinkClosed, match="the stream is over"):
        sender.try_send(Error(500, "x", "y"))
    assert (source.statistics().sent, source.statistics().ended) == (1, True)
    assert list(source) == [Error(500, "x", "y")]
    late, gone = open_sink(1000)
    gone.close()
    late.close()
    assert not late.statistics().ended, "nobody was there to send it to"


def test_who_is_to_be_woken_is_told_of_once() -> None:
    sender, source = open_sink(1000)

    async def story() -> None:
        source.call_when_ready(asyncio.get_running_loop(), lambda: None)
        waiter = sender.channel.push(chunk("a"), 5)
        assert waiter is not None
        assert sender.channel.push(chunk("b", 1), 5) is None
        waiter.fire()
        assert sender.channel.push(chunk("c", 2), 5) is waiter

    asyncio.run(story())


def test_an_empty_sink_takes_any_one_item() -> None:
    sender, source = open_sink(1)
    sender.try_send(Control(b"x" * 10_000))
    assert source.statistics().waiting_bytes == 10_000
    assert source.receive_sync() == Control(b"x" * 10_000)
    assert source.statistics().waiting_bytes == 0


@pytest.mark.parametrize("stale", [False, True], ids=["", "the limit is a moment old"])
def test_replaced_hidden_states_free_their_room(stale: bool) -> None:
    sender, source = open_sink(2000)
    for first in range(200):
        columns = Columns(
            output_logprobs=Flat(b"\0" * 4, first.to_bytes(4, "little")),
            hidden_states=Hidden(b"\0" * 100, 1, 25),
        )
        event = ChunkEvent(b"", b"", first, 1, 9, first, None, columns)
        if source.statistics().waiting_bytes + event.size > 2000:
            break
        if stale:
            sender.channel.limit = 0
        sender.try_send(Frame(event))
    # Hidden states alone would have been full after 18: only the last ones of a run that was folded wait.
    assert first > 50
    item = source.receive_sync()
    assert isinstance(item, Frame)
    assert item.event.columns is not None
    assert item.event.columns.hidden_states == Hidden(b"\0" * 100, 1, 25)
    assert item.event.columns.output_logprobs is not None
    assert item.event.columns.output_logprobs.ids.tolist() == list(range(first))
    assert source.statistics().waiting_bytes == 0


@pytest.mark.parametrize("leave", ["close", "with", "del"])
def test_gone_is_gone_however(leave: str) -> None:
    sender, source = open_sink(1000)
    sender.try_send(Frame(chunk("a")))
    if leave == "close":
        source.close()
        source.close()
        with pytest.raises(SinkClosed, match="this source was closed"):
            source.receive_sync()
    elif leave == "with":
        with source:
            pass
    else:
        del source
    with pytest.raises(SinkClosed, match="handler is gone"):
        sender.try_send(Frame(chunk("b", 1)))
    assert sender.statistics().closed


def test_a_dropped_sender_ends_its_stream_with_an_error() -> None:
    sender, source = open_sink(1000)
    sender.try_send(Frame(chunk("a")))
    del sender
    first, last = list(source)
    assert isinstance(first, Frame)
    assert isinstance(last, Error)
    assert (last.status, last.type) == (500, "closed")


def test_a_thread_sleeps_until_something_comes() -> None:
    sender, source = open_sink(1000)
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.extend(source))
    thread.start()
    sender.try_send(Frame(chunk("a")))
    deadline = time.monotonic() + 30
    while not got and time.monotonic() < deadline:
        time.sleep(0.001)
    sender.try_send(Done(chunk("b", 1, LAST)))
    thread.join(30)
    assert got == [Frame(chunk("a")), Done(chunk("b", 1, LAST))]


def test_a_timeout_leaves_the_stream_as_it_is() -> None:
    sender, source = open_sink(1000)
    with pytest.raises(TimeoutError, match=r"nothing arrived within 0\.01 s"):
        source.receive_sync(0.01)

    async def story() -> None:
        with pytest.raises(TimeoutError):
            await source.receive(0.01)
        sender.try_send(Frame(chunk("a")))
        assert await source.receive(0.01) == Frame(chunk("a"))

    asyncio.run(story())


def test_no_event_is_lost_between_a_fast_thread_and_a_task() -> None:
    """Every wake-up counts: one lost and this hangs."""
    count = 20_000
    sender, source = open_sink(1 << 30)

    async def read() -> list[int]:
        ids: list[int] = []
        async for item in source:
            assert isinstance(item, Frame | Done)
            ids += item.event.ids.tolist()
        return ids

    def send() -> None:
        for first in range(count):
            sender.try_send(Frame(chunk("x", first)))
            if first % 97 == 0:
                time.sleep(0)
        sender.try_send(Done(chunk("", count, LAST)))

    thread = threading.Thread(target=send)
    thread.start()
    assert asyncio.run(asyncio.wait_for(read(), 60)) == list(range(count + 1))
    thread.join()


def test_a_callback_is_called_once_per_batch_of_items() -> None:
    sender, source = open_sink(1000)
    calls: list[int] = []

    async def story() -> None:
        done = asyncio.Event()
        sender.try_send(Frame(chunk("a")))

        def ready() -> None:
            while (item := source.receive_nowait()) is not None:
                calls.append(1)
                if isinstance(item, Done):
                    done.set()
                    return

        source.call_when_ready(asyncio.get_running_loop(), ready)
        await asyncio.sleep(0)
        assert calls == [1]
        await asyncio.to_thread(sender.try_send, Done(chunk("b", 1, LAST)))
        await asyncio.wait_for(done.wait(), 30)

    asyncio.run(story())
    assert calls == [1, 1]


def test_a_callback_is_not_called_for_a_last_item_that_it_has_taken() -> None:
    sender, source = open_sink(1000)
    calls: list[int] = []

    async def story() -> None:
        failed: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failed.append(context))

        def ready() -> None:
            calls.append(1)
            if len(calls) == 1:
                # What a sender on another thread does while this runs: it is marked anew for the last item.
                sender.try_send(Done(chunk("b", 1, LAST)))
            while (item := source.receive_nowait()) is not None:
                if isinstance(item, Done):
                    return

        source.call_when_ready(loop, ready)
        sender.try_send(Frame(chunk("a")))
        for _ in range(5):
            await asyncio.sleep(0)
        assert failed == []

    asyncio.run(story())
    assert calls == [1]


def test_a_callback_that_fails_leaves_the_others_their_calls() -> None:
    sinks = [open_sink(1000) for _ in range(3)]
    called: list[int] = []

    async def story() -> None:
        failed: list[dict[str, object]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failed.append(context))

        def ready(index: int) -> None:
            called.append(index)
            if index == 0:
                raise ZeroDivisionError

        for index, (_, source) in enumerate(sinks):
            source.call_when_ready(loop, partial(ready, index))
        waiters = [sender.channel.push(chunk("a"), 1) for sender, _ in sinks]
        wake([waiter for waiter in waiters if waiter is not None])
        for _ in range(5):
            await asyncio.sleep(0)
        assert [type(context["exception"]) for context in failed] == [ZeroDivisionError]

    asyncio.run(story())
    assert called == [0, 1, 2]


@pytest.mark.parametrize("waiting_in", ["task", "thread"])
def test_whoever_waits_when_the_source_is_closed_elsewhere_is_told(waiting_in: str) -> None:
    sender, source = open_sink(1000)

    async def story() -> None:
        if waiting_in == "task":
            reader = asyncio.ensure_future(source.receive())
        else:
            reader = asyncio.ensure_future(asyncio.to_thread(source.receive_sync))
        while sender.channel.waiter is None:
            await asyncio.sleep(0)
        source.close()
        with pytest.raises(SinkClosed, match="this source was closed"):
            await asyncio.wait_for(reader, 30)

    asyncio.run(story())


def test_a_second_reader_is_refused_and_takes_nothing_from_the_first() -> None:
    sender, source = open_sink(1000)

    async def story() -> None:
        loop = asyncio.get_running_loop()
        first = asyncio.ensure_future(source.receive())
        await asyncio.sleep(0)
        with pytest.raises(SinkBusy, match="a task waits on this source already"):
            await source.receive(30)
        with pytest.raises(SinkBusy, match="a task waits"):
            source.receive_sync(30)
        with pytest.raises(SinkBusy, match="a task waits"):
            source.call_when_ready(loop, lambda: None)
        sender.try_send(Frame(chunk("a")))
        assert await asyncio.wait_for(first, 30) == Frame(chunk("a"))

        called: list[str] = []
        source.call_when_ready(loop, partial(called.append, "replaced"))
        source.call_when_ready(loop, partial(called.append, "there"))
        with pytest.raises(SinkBusy, match="a callback waits"):
            await source.receive(30)
        sender.try_send(Frame(chunk("b", 1)))
        await asyncio.sleep(0)
        assert called == ["there"]

    asyncio.run(story())


def test_a_thread_that_is_woken_twice_goes_on_once() -> None:
    waiter = ThreadWaiter()
    waiter.fire()
    waiter.fire()
    assert waiter.wait(0)
    assert not waiter.wait(0)


def test_what_is_no_item_is_refused() -> None:
    sender, source = open_sink(1000)
    with pytest.raises(TypeError, match="takes Frame, Done, Control and Error, not ChunkEvent"):
        sender.try_send(chunk("a"))  # type: ignore[arg-type]
    assert source.receive_nowait() is None


def test_what_goes_on_has_no_finish_reason_and_what_ends_has_one() -> None:
    sender, source = open_sink(1000)
    with pytest.raises(ValueError, match="send it as Done"):
        sender.try_send(Frame(chunk("a", 0, LAST)))
    with pytest.raises(ValueError, match="this one has none"):
        sender.try_send(Done(chunk("a")))
    assert source.receive_nowait() is None


@pytest.mark.parametrize("events", [1, 20], ids=["one", "merged ones"])
def test_a_closed_source_has_nothing_waiting(events: int) -> None:
    sender, source = open_sink(1000)
    for first in range(events):
        sender.try_send(Frame(chunk("a", first)))
    assert source.statistics().waiting_bytes == 5 * events
    source.close()
    assert source.statistics().waiting_bytes == 0
    with pytest.raises(SinkClosed, match="this source was closed"):
        source.receive_nowait()


def test_closing_calls_no_callback_and_tells_of_no_stream_that_is_over() -> None:
    sender, source = open_sink(1000)
    called: list[str] = []
    sender.channel.on_gone = partial(called.append, "gone")

    async def story() -> None:
        source.call_when_ready(asyncio.get_running_loop(), partial(called.append, "ready"))
        sender.channel.end(chunk("a", 0, LAST), 5)  # told to nobody yet
        source.close()
        await asyncio.sleep(0)

    asyncio.run(story())
    assert called == []


def test_a_cancelled_reader_of_the_stream_is_gone() -> None:
    sender, source = open_sink(1000)

    async def story() -> None:
        task = asyncio.ensure_future(anext(source))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(story())
    assert sender.statistics().closed


def test_async_with_closes_on_the_way_out() -> None:
    sender, source = open_sink(1000)

    async def story() -> None:
        with pytest.raises(ZeroDivisionError):
            async with source:
                raise ZeroDivisionError

    asyncio.run(story())
    assert sender.statistics().closed


def test_a_closed_loop_does_not_hurt_the_sender() -> None:
    sender, source = open_sink(1000)
    loop = asyncio.new_event_loop()
    source.call_when_ready(loop, lambda: None)
    loop.close()
    sender.try_send(Frame(chunk("a")))


def test_ten_thousand_sinks_leave_nothing_behind() -> None:
    def a_thousand() -> None:
        for _ in range(1000):
            sender, source = open_sink(1000)
            sender.try_send(Frame(chunk("a")))
            sender.try_send(Frame(chunk("b", 1)))
            source.receive_nowait()

    a_thousand()
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(10):
        a_thousand()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 200_000  # a leaked sink is more than 500 bytes, ten thousand more than 5 MB


def test_sinks_need_no_garbage_collector() -> None:
    """No cycle holds them: they are freed, and their handler counted as gone, with the last reference."""
    gc.collect()
    gc.disable()
    try:
        pairs = [open_sink(1000) for _ in range(100)]
        for sender, _ in pairs:
            sender.try_send(Frame(chunk("a")))
        senders = [sender for sender, _ in pairs]
        del pairs, _
        assert all(sender.statistics().closed for sender in senders)
    finally:
        gc.enable()
