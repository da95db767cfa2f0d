"""Memory that runs out: a row is delivered whole or not at all, a stream is whole or ends with an error."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
from outfeed.sink import ChunkEvent, Columns, Done, Error, Frame, SinkClosed, open_sink, reader
from outfeed.sink._deliver import deliver
from outfeed.sink.live import Live
from outfeed.sink.waiting import Waiter, wake

from tests.limits import failing_at

from .front import LAST, Front, chunk, row, step, waiting
from .material import Row

ROUTE = 1 << 36


@pytest.mark.parametrize("usual", [True, False], ids=["usual", "looked at by Python"])
def test_whichever_allocation_fails_ids_and_event_stay_together(
    monkeypatch: pytest.MonkeyPatch, usual: bool
) -> None:
    failed = at = 0

    def counted(live: Live) -> tuple[int, int, int]:
        waiting = [event for event in live.channel.fresh if isinstance(event, ChunkEvent)]
        return live.next, len(live.ids) // 4, sum(event.generated for event in waiting)

    def failing(*arguments: object) -> int:
        nonlocal failed
        try:
            with failing_at(at):
                return deliver(*arguments)  # type: ignore[arg-type]
        except MemoryError:
            failed += 1
            return 0

    monkeypatch.setattr(reader, "deliver", failing)
    for at in range(1, 40):  # noqa: B007  # `failing` reads it
        front = Front()
        front.open(ROUTE)
        live = front.reader._live[ROUTE]
        if not usual:
            live.channel.limit = 0
        front.arrive(step(Row(ROUTE, 0, [7] * 100, 100, 9, "é" * 100, None)))
        assert counted(live) in ((0, 0, 0), (100, 100, 100))
        assert live.text_bytes == 2 * live.next
    assert 3 < failed < 39, "some of them are the core's, the last ones come after it"


@pytest.mark.parametrize("who", ["sender", "source"])
@pytest.mark.parametrize("columns", [False, True], ids=["text", "columns"])
def test_whichever_allocation_fails_nothing_is_missing_in_a_stream_that_goes_on(
    who: str, columns: bool
) -> None:
    """Eight events wait: one more, or who takes them, has them merged."""
    torn = 0
    for at in range(1, 150):
        sender, source = open_sink(10_000)
        events = [
            Frame(chunk("a", first, columns=Columns() if columns and first % 2 else None))
            for first in range(9)
        ]
        for event in events[:8]:
            sender.try_send(event)
        item = None
        with suppress(MemoryError), failing_at(at):
            if who == "sender":
                sender.try_send(events[8])
            else:
                item = source.receive_nowait()
        if sender.channel.folded is None and not sender.channel.folding:
            waits = sum(item.size for item in sender.channel.fresh if isinstance(item, ChunkEvent))
            assert source.statistics().waiting_bytes == waits, "what was not sent is not counted"
        if who == "source":
            with suppress(SinkClosed):
                sender.try_send(events[8])
        with suppress(SinkClosed):
            sender.try_send(Done(chunk("", 9, LAST)))
        items = [item, *waiting(source)]
        ids = [id for item in items if isinstance(item, Frame | Done) for id in item.event.ids.tolist()]
        if isinstance(items[-1], Error):
            torn += 1
            assert (items[-1].status, items[-1].type) == (503, "no_memory")
            assert ids == []
        else:
            skipped = [8] if who == "sender" and len(ids) == 9 else []
            assert ids == [each for each in range(10) if each not in skipped]
    assert torn > 0 or (who, columns) == ("source", False), "those are joined in C: all, or none"


def test_whichever_allocation_fails_who_waits_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are marked: nobody else would wake them again."""

    def wake_without(at: int) -> Callable[[list[Waiter]], None]:
        def without_memory(waiters: list[Waiter]) -> None:
            with failing_at(at):
                wake(waiters)

        return without_memory

    async def fails(at: int) -> bool:
        front = Front()
        woken: set[int] = set()
        sources = [front.open(route) for route in (ROUTE, ROUTE + 1)]
        for number, source in enumerate(sources):
            source.call_when_ready(asyncio.get_running_loop(), partial(woken.add, number))
        failed = False
        with monkeypatch.context() as patched:
            patched.setattr(reader, "wake", wake_without(at))
            try:
                front.arrive(step(row(ROUTE, 0), row(ROUTE + 1, 0)))
            except MemoryError:
                failed = True
        front.reader.drain()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert woken == {0, 1}
        return failed

    assert True in [asyncio.run(fails(at)) for at in range(12)]


def test_whichever_allocation_fails_all_end_that_are_to() -> None:
    """Their scheduler is gone, and nothing more comes for them."""
    gone = Error(503, "scheduler_gone", "gone")

    def fails(at: int) -> bool:
        front = Front()
        routes = [ROUTE, ROUTE + 1, ROUTE + 2]
        sources = [front.open(route) for route in routes]
        front.reader._on_end = lambda route: None  # what it does without memory is its own affair
        front.reader.fail(gone, abort=True)
        with suppress(MemoryError), failing_at(at):
            front.reader.drain()
        missed = bool(front.reader._live)
        front.reader.drain()
        assert [waiting(source) for source in sources] == [[gone]] * 3
        assert sorted(route for route, _ in front.aborts) == routes
        return missed

    assert True in [fails(at) for at in range(40)]
