"""Two threads in one sink, at every point where Python may switch between them.

A trace function runs one side's call whole before each bytecode instruction of the other's, in turn: all that
two threads can do to each other with one switch forth and back, and the same each time. In C there are no
instructions to come between, but making an object may collect garbage, and a finalizer is Python again.
"""

import asyncio
import dis
import gc
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from outfeed.ring.finish import FinishReason
from outfeed.sink import ChunkEvent, Columns, Done, Error, Frame, SinkClosed, SinkEnded, open_sink
from outfeed.sink.waiting import ThreadWaiter

from tests.finalizer import collected

# How many events wait (to 8: one more is merged), and whether every other has columns, which C does not join.
WAITING = ((0, False), (1, False), (8, False), (8, True))
LAST = FinishReason.length(99)


class Sink:
    """A sink in which some events wait, and what was sent to it and came out of it."""

    def __init__(self, waiting: tuple[int, bool]) -> None:
        events, self.columns = waiting
        self.sender, self.source = open_sink(1000)
        self.sent = self.received = 0
        self.last: list[type] = []
        for _ in range(events):
            self.send()

    def chunk(self, finish: FinishReason | None = None) -> ChunkEvent:
        columns = Columns() if self.columns and self.sent % 2 else None
        return ChunkEvent(b"x", self.sent.to_bytes(4, "little"), self.sent, 1, 9, 0, finish, columns)

    def send(self) -> None:
        self.sender.try_send(Frame(self.chunk()))
        self.sent += 1

    def finish(self) -> None:
        self.sender.try_send(Done(self.chunk(LAST)))
        self.sent += 1

    def fail(self) -> None:
        self.sender.close()

    def receive(self) -> bool:
        """Take one item, which must go on where the one before it ended."""
        item = self.source.receive_nowait()
        if item is None:
            return False
        if isinstance(item, Frame | Done):
            assert item.event.ids.tolist() == [*range(self.received, self.received + item.event.generated)]
            self.received += item.event.generated
        if not isinstance(item, Frame):
            self.last.append(type(item))
        return True

    def sleep(self) -> None:
        assert self.source.receive_sync(60) is not None

    def close(self) -> None:
        self.source.close()

    def see(self) -> None:
        assert 0 <= self.source.statistics().waiting_bytes <= 1000


def preempted(call: Callable[[], object], at: int, other: Callable[[], object]) -> bool:
    """Run `call`, and `other` before its instruction `at` in sink/channel.py; False when it has fewer."""
    left = at

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith("/sink/channel.py"):
            return None
        frame.f_trace = trace  # before the next line: 3.13 asks for it there
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            left -= 1
            if left == 0:
                other()
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # 3.12 takes no frame's wish that came later than the first
    gc.disable()  # what it would finalize is in channel.py too, and no part of the call
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return left <= 0


Between = Callable[[Callable[[], object], int, Callable[[], object]], bool]


def every_switch(
    waiting: tuple[int, bool], one: str, other: str, into: Between = preempted
) -> Iterator[Sink]:
    """Yield a sink after `one` was called and `other` came in between, for each place where it can."""
    for at in range(1, 2000):
        sink = Sink(waiting)

        def between(sink: Sink = sink) -> None:
            if other == "receive" and sink.source._channel.lock.locked():
                return  # it would wait here until the other side has gone on
            getattr(sink, other)()

        if not into(getattr(sink, one), at, between):
            return
        yield sink
    raise AssertionError("it does not end")


PAIRS = [
    *[("receive", other) for other in ("send", "finish", "fail", "see")],
    *[(one, "receive") for one in ("send", "finish", "fail", "see")],
]


@pytest.mark.parametrize("waiting", WAITING)
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_nothing_is_lost_doubled_or_out_of_order(waiting: tuple[int, bool], one: str, other: str) -> None:
    assert whole_at_every_switch(waiting, one, other, preempted) > 5


@pytest.mark.parametrize("waiting", WAITING)
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_nor_is_it_by_a_finalizer(waiting: tuple[int, bool], one: str, other: str) -> None:
    whole_at_every_switch(waiting, one, other, collected)


def whole_at_every_switch(waiting: tuple[int, bool], one: str, other: str, into: Between) -> int:
    switches = 0
    for sink in every_switch(waiting, one, other, into):
        switches += 1
        ends = {"finish": Done, "fail": Error}.keys() & {one, other}
        while (not ends or not sink.last) and sink.receive():
            pass
        assert sink.received == sink.sent
        assert len(sink.last) == len(ends)
        statistics = sink.source.statistics()
        assert (statistics.waiting_bytes, statistics.merged + statistics.received) == (0, statistics.sent)
    return switches


@pytest.mark.parametrize("waiting", WAITING)
@pytest.mark.parametrize("one", ["receive", "send", "finish", "fail", "see"])
@pytest.mark.parametrize("into", [preempted, collected])
def test_a_source_may_be_closed_at_any_moment(waiting: tuple[int, bool], one: str, into: Between) -> None:
    """Who was in the middle of something is told so, and nothing waits any more."""
    for sink in every_switch_closed(waiting, one, into):
        with pytest.raises((SinkClosed, SinkEnded)):
            sink.source.receive_nowait()
        with pytest.raises(SinkClosed):
            sink.send()
        assert sink.source.statistics().waiting_bytes == 0
        assert sink.received <= sink.sent


def every_switch_closed(waiting: tuple[int, bool], one: str, into: Between) -> Iterator[Sink]:
    for at in range(1, 2000):
        sink = Sink(waiting)

        def call(sink: Sink = sink) -> None:
            try:
                getattr(sink, one)()
            except SinkClosed:
                assert sink.sender.statistics().closed

        if not into(call, at, sink.close):
            return
        yield sink
    raise AssertionError("it does not end")


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there Python looks for signals inside a `with`, too")
@pytest.mark.parametrize("waiting", WAITING)
def test_whoever_is_interrupted_while_it_takes_leaves_the_sink_usable(waiting: tuple[int, bool]) -> None:
    """Ctrl-C comes where Python looks for signals: as a call has returned. The lock is free again."""

    def interrupt() -> None:
        at = sys._getframe(2)  # who called is the trace function
        before = [each for each in dis.get_instructions(at.f_code) if each.offset < at.f_lasti]
        if before and before[-1].opname.startswith("CALL"):
            raise KeyboardInterrupt

    interrupted = 0
    for at in range(1, 2000):
        sink = Sink(waiting)
        try:
            if not preempted(sink.receive, at, interrupt):
                break
        except KeyboardInterrupt:
            interrupted += 1
            assert not sink.source._channel.lock.locked()
    assert interrupted > 0


class AsleepForGood(Exception):
    """Whoever reads waits, and nobody is there any more who would wake it."""


@pytest.mark.parametrize("other", ["send", "finish", "fail", "close"])
@pytest.mark.parametrize("reader", ["thread", "task"])
def test_no_wake_up_is_lost_at_any_moment(monkeypatch: pytest.MonkeyPatch, reader: str, other: str) -> None:
    """Who sends or closes before the reader is asleep has fired its waiter, or it does not go to sleep."""
    done: list[str] = []

    def wait(waiter: ThreadWaiter, timeout: float) -> bool:
        if waiter._gate.acquire(blocking=False):
            return True
        assert not done
        raise AsleepForGood

    async def receive(sink: Sink) -> None:
        reading = asyncio.ensure_future(sink.source.receive())
        for _ in range(5):
            await asyncio.sleep(0)
        if not reading.done():
            assert not done
            raise AsleepForGood
        assert await reading is not None

    monkeypatch.setattr(ThreadWaiter, "wait", wait)
    woken = 0
    for at in range(1, 2000):
        done.clear()
        sink = Sink((0, False))

        def between(sink: Sink = sink) -> None:
            done.append(other)
            getattr(sink, other)()

        def sleep(sink: Sink = sink) -> None:
            sink.sleep() if reader == "thread" else asyncio.run(receive(sink))

        try:
            preempted(sleep, at, between)
            assert other != "close"
            woken += 1
        except SinkClosed:
            assert other == "close"
            woken += 1
        except AsleepForGood:
            if not done:
                break  # it had no more instructions before it slept, nor after
    assert woken > 50
