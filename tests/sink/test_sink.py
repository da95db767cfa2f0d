"""The life of one sink: opened, filled, read, lagging, full, closed, dropped. Waiting has test_waiting.py."""

import asyncio
import gc
import sys
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outfeed.sink import (
    ChunkEvent,
    Columns,
    Control,
    Done,
    Error,
    Flat,
    Frame,
    Hidden,
    SinkClosed,
    SinkEnded,
    SinkFull,
    open_sink,
)

from .front import LAST, chunk


def test_capacity_is_a_decision() -> None:
    with pytest.raises(TypeError):
        open_sink()  # type: ignore[call-arg]
    for capacity in (0, -1, (1 << 40) + 1, sys.maxsize, 1 << 80):
        with pytest.raises(ValueError, match=f"capacity of {capacity} bytes: give 1 to 1099511627776"):
            open_sink(capacity)
    sender, source = open_sink(1 << 40)
    for first in range(2):
        sender.try_send(Frame(chunk("a", first)))
    assert source.receive_sync() == Frame(
        ChunkEvent(b"aa", chunk("").ids_raw + chunk("", 1).ids_raw, 0, 2, 9, 1)
    )


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
    assert (source.statistics().sent, source.statistics().waiting_bytes) == (100, 500)
    item = source.receive_sync()
    assert isinstance(item, Frame)
    assert item.event.text == "".join(chr(97 + first % 26) for first in range(100))
    assert item.event.ids.tolist() == list(range(100))
    assert (item.event.first, item.event.generated, item.event.stamp_ns) == (0, 100, 99)
    stats = source.statistics()
    assert (stats.sent, stats.received, stats.merged, stats.waiting_bytes) == (100, 1, 99, 0)


@given(
    # How many events wait each time, and which of them, by their place in the stream, have columns.
    st.lists(st.integers(0, 30), max_size=8),
    st.sets(st.integers(0, 60)),
    st.sampled_from([Error(500, "x", "y"), Control(b"x"), None]),
)
def test_whatever_waits_comes_as_one_with_all_that_it_was(
    runs: list[int], with_columns: set[int], last: Error | Control | None
) -> None:
    sender, source = open_sink(100_000)
    at = taken = 0
    for run in runs:
        events = []
        for first in range(at, at + run):
            columns = Columns(output_logprobs=Flat(b"\0" * 4, first.to_bytes(4, "little")))
            text = "" if first % 5 == 0 else f"é{first}"
            events.append(chunk(text, first, columns=columns if first in with_columns else None))
            sender.try_send(Frame(events[-1]))
        at += run
        item = source.receive_nowait()
        if not events:
            assert item is None
            continue
        taken += 1
        assert isinstance(item, Frame)
        whole = item.event
        assert whole.text == "".join(event.text for event in events)
        assert whole.ids.tolist() == [number for event in events for number in event.ids.tolist()]
        assert (whole.first, whole.generated) == (at - run, run)
        assert (whole.prompt_tokens, whole.stamp_ns) == (events[-1].prompt_tokens, events[-1].stamp_ns)
        asked = [first for first in range(at - run, at) if first in with_columns]
        sums = whole.columns and whole.columns.output_logprobs
        assert (sums.ids.tolist() if sums else []) == asked
        assert whole.size == sum(event.size for event in events)
        assert source.receive_nowait() is None
    stats = source.statistics()
    assert (stats.sent, stats.received, stats.merged, stats.waiting_bytes) == (at, taken, at - taken, 0)
    if last is not None:
        sender.try_send(Frame(chunk("a", at)))
        sender.try_send(last)
        assert list(source) == [Frame(chunk("a", at)), last]


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


def test_one_byte_is_enough_to_be_full() -> None:
    sender, source = open_sink(1)
    byte = Frame(ChunkEvent(b"a", b"", 0, 1, 9, 0))
    for _ in range(2):
        sender.try_send(byte)
        with pytest.raises(SinkFull, match="1 bytes wait and 1 more do not fit"):
            sender.try_send(byte)
        assert source.receive_nowait() == byte


def test_a_limit_that_is_a_moment_old_refuses_nothing_that_fits() -> None:
    """The source moves the limit; a sender that still sees the one before looks at what really waits."""
    sender, source = open_sink(10)
    sender.try_send(Frame(chunk("taken")))
    assert source.receive_nowait() == Frame(chunk("taken"))
    for first in range(2):
        sender.channel.limit = 0
        sender.try_send(Frame(chunk("a", first)))
    with pytest.raises(SinkFull, match="10 bytes wait"):
        sender.try_send(Frame(chunk("a", 2)))
    assert source.statistics().waiting_bytes == 10


def test_what_a_sink_has_counted_cannot_be_changed() -> None:
    sender, source = open_sink(1000)
    event = chunk("a")
    sender.try_send(Frame(event))
    for name in (
        "text_utf8",
        "ids_raw",
        "first",
        "generated",
        "prompt_tokens",
        "stamp_ns",
        "columns",
        "size",
    ):
        with pytest.raises(AttributeError):
            setattr(event, name, None)
        with pytest.raises((AttributeError, TypeError)):
            delattr(event, name)
    assert source.receive_sync() == Frame(chunk("a"))
    with pytest.raises(TypeError):
        ChunkEvent.__new__(ChunkEvent)  # type: ignore[call-arg]


def test_events_are_equal_when_all_they_say_is() -> None:
    said: list[Any] = [b"text", b"\0" * 4, 0, 1, 9, 5, None, None]
    others = [b"", b"", 1, 2, 8, 6, LAST, Columns()]
    assert ChunkEvent(*said) == ChunkEvent(*said)
    for place, other in enumerate(others):
        assert ChunkEvent(*said) != ChunkEvent(*said[:place], other, *said[place + 1 :])  # type: ignore[call-arg]
    assert ChunkEvent(*said) != b"text"


@pytest.mark.parametrize("size", [-2, (1 << 40) + 1, 1 << 63])
def test_columns_of_an_impossible_size_make_no_event(size: int) -> None:
    columns = Columns()
    columns.size = size
    with pytest.raises((ValueError, OverflowError)):
        chunk("a", columns=columns)


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
    assert (sender.channel.fresh, sender.channel.folded) == ([], None), "its memory is free at once"
    with pytest.raises(SinkClosed, match="this source was closed"):
        source.receive_nowait()


def test_async_with_closes_on_the_way_out() -> None:
    sender, source = open_sink(1000)

    async def story() -> None:
        with pytest.raises(ZeroDivisionError):
            async with source:
                raise ZeroDivisionError

    asyncio.run(story())
    assert sender.statistics().closed


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
