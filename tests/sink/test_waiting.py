"""How a source sleeps and is woken: in a thread, in a task, by a callback."""

import asyncio
import threading
import time
from functools import partial

import pytest
from outfeed.sink import Done, Frame, SinkBusy, SinkClosed, open_sink
from outfeed.sink.waiting import ThreadWaiter, wake

from .front import LAST, chunk


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


def test_what_comes_before_the_timeout_is_received() -> None:
    sender, source = open_sink(1000)

    async def story() -> None:
        reader = asyncio.ensure_future(source.receive(60))
        for _ in range(5):
            await asyncio.sleep(0)
        sender.try_send(Frame(chunk("a")))
        assert await reader == Frame(chunk("a"))

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
    assert not waiter.marked
    assert not waiter.wait(0)
    wake([waiter])
    waiter.fire()
    assert waiter.wait(0)
    assert not waiter.wait(0)


def test_a_callback_that_another_took_the_place_of_is_not_called_though_it_was_fired() -> None:
    sender, source = open_sink(1000)
    called: list[str] = []

    async def story() -> None:
        loop = asyncio.get_running_loop()
        source.call_when_ready(loop, partial(called.append, "first"))
        sender.try_send(Frame(chunk("a")))
        source.call_when_ready(loop, partial(called.append, "second"))
        await asyncio.sleep(0)
        assert called == ["second"]
        sender.try_send(Frame(chunk("b", 1)))
        source.close()
        await asyncio.sleep(0)

    asyncio.run(story())
    assert called == ["second"], "a source that is closed has nothing to take"


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


@pytest.mark.parametrize("before", [False, True], ids=["then", "before"])
@pytest.mark.parametrize("how", ["its last item is taken", "it is closed", "it fails"])
def test_a_stream_that_is_over_lets_go_of_its_callback(how: str, before: bool) -> None:
    """The callback has the source: together they would wait for the garbage collector."""
    sender, source = open_sink(1000)

    def take() -> None:
        source.receive_nowait()

    async def story() -> None:
        if not before:
            source.call_when_ready(asyncio.get_running_loop(), take)
        match how:
            case "it is closed":
                source.close()
            case "it fails":
                sender.close()
            case _:
                sender.try_send(Done(chunk("a", 0, LAST)))
        if before:
            if how != "it is closed":
                take()
            source.call_when_ready(asyncio.get_running_loop(), take)
        await asyncio.sleep(0)

    asyncio.run(story())
    assert sender.channel.waiter is None


def test_a_cancelled_reader_of_the_stream_is_gone() -> None:
    sender, source = open_sink(1000)

    async def story() -> None:
        task = asyncio.ensure_future(anext(source))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(story())
    assert sender.statistics().closed


def test_a_closed_loop_does_not_hurt_the_sender() -> None:
    sender, source = open_sink(1000)
    loop = asyncio.new_event_loop()
    source.call_when_ready(loop, lambda: None)
    loop.close()
    sender.try_send(Frame(chunk("a")))
