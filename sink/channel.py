"""The sink: an in-memory channel from the reader to one request's handler.

`open_sink(capacity)` returns the pair. The sender never waits: it raises SinkFull when the client is too
slow and SinkClosed when it is gone, and either ends the stream. What waits is merged, so that a lagging
client costs its bytes and not its number of events.

Who touches what: only the sender's thread appends to `fresh` and grows `sent`; only the source's thread
grows `taken`. Both may fold `fresh` into `folded` (and grow `freed`, what folding replaced), under `lock`;
the sender only tries the lock, so it never waits for a handler.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Self

import msgspec

from ._deliver import ChannelFields
from .events import ChunkEvent, Control, Done, Error, Frame, Item, Merger
from .waiting import CallbackWaiter, TaskWaiter, ThreadWaiter, Waiter, wake

# Events that may wait unmerged. More would cost memory per event, fewer would merge for nothing.
FOLD_AT = 8
# More than any machine has; what the counters add up stays far from the end of their 64 bits.
MAX_CAPACITY = 1 << 40
MAX_WAIT = 1.0
TORN = Error(
    503, "no_memory", "the gateway could not keep what waits for this client; send the request again"
)
CLOSED = Error(500, "closed", "the stream was closed before the request ended")


class SinkFull(Exception):
    """More waits than the sink's capacity: the client is too slow. The stream is over."""


class SinkClosed(Exception):
    """The other side is gone: nothing can be sent, or nothing more will come."""


class SinkEnded(Exception):
    """The stream's last item was received before: there is nothing after it."""


class SinkBusy(Exception):
    """Somebody else waits on this source: it has one reader, which waits once at a time."""


class SinkStatistics(msgspec.Struct, frozen=True):
    """A sink at one moment. Reading it stops nobody, so the numbers may be a moment apart."""

    capacity: int
    """Bytes that may wait."""
    waiting_bytes: int
    """Bytes that wait."""
    sent: int
    """Items sent so far, less those that a closing source dropped."""
    received: int
    """Items received so far; less than `sent` by what waits and what was merged."""
    merged: int
    """Events that were merged into the one before them."""
    closed: bool
    """The source is gone."""
    ended: bool
    """The last item was sent."""


class Channel(ChannelFields):
    """What both ends share; the reader uses it directly, everybody else through the two ends.

    fresh     items, oldest first: the sender appends, the source takes
    folded    a Merger: what was merged out of `fresh`, before all that is in it now
    sent      bytes of content sent, taken by the source, and replaced in folding (`freed`)
    limit     what `sent` may grow to; -1 once the source is gone or the stream torn: the one thing a sender
              has to look at
    folding   `fresh` is being moved to `folded`: the C core leaves both alone. Whoever finds it set with the
              lock in hand sees a stream that is torn: an event was lost in folding, and TORN is what comes
    """

    __slots__ = ("lock",)

    fresh: list[ChunkEvent | Control | Error]
    folded: Merger | None
    waiter: Waiter | None
    on_gone: Callable[[], None] | None

    def __init__(self, capacity: int) -> None:
        self.lock = threading.Lock()
        self.capacity = self.limit = capacity

    def push(self, item: ChunkEvent | Control, size: int) -> Waiter | None:
        """Append; return the waiter to wake, marked, if there is one that is not marked yet.

        Raises SinkFull or SinkClosed. The reader's loop has the same lines in it for the usual case.
        """
        sent = self.sent + size
        if sent > self.limit:
            self.check(size)
        if self.ended:
            raise SinkClosed("the stream is over: its last item was sent before")
        self.fresh.append(item)
        self.sent = sent  # behind it: without memory for the one there is not the other
        if len(self.fresh) > FOLD_AT:
            self.try_fold()
        waiter = self.waiter
        if waiter is None or waiter.marked:
            return None
        waiter.marked = True
        return waiter

    def check(self, size: int) -> None:
        """Say why `size` bytes exceed the limit; return when they may be sent all the same."""
        if self.gone:
            raise SinkClosed("the handler is gone: its source was closed, cancelled or dropped")
        if self.limit < 0:
            raise SinkClosed(TORN.message)
        waiting = self.sent - self.taken - self.freed
        # `limit` may be a moment old, and knows of what folding freed with the next take only. This is what
        # counts. An empty sink takes anything.
        if waiting > 0 and waiting + size > self.capacity:
            raise SinkFull(
                f"{waiting} bytes wait and {size} more do not fit the sink's capacity of {self.capacity}: "
                "the client reads too slowly"
            )

    def end(self, item: ChunkEvent | Control, size: int) -> Waiter | None:
        """Append the last item."""
        waiter = self.push(item, size)
        self.ended = True
        return waiter

    def fail(self, error: Error) -> Waiter | None:
        """Append an Error as the last item, whatever waits; nothing when the stream is over already."""
        if self.gone or self.ended:
            return None
        self.fresh.append(error)
        self.ended = True  # behind it: without memory for the one there is not the other
        return self.waiter  # marked or not: nothing more comes that could mark it

    def try_fold(self) -> None:
        """Merge what waits, unless the source is taking it right now."""
        if self.lock.acquire(blocking=False):
            try:
                # Out of memory, it is this stream's end alone, which its two ends see next.
                with contextlib.suppress(MemoryError):
                    self._fold()
            finally:
                self.lock.release()

    def _fold(self) -> None:
        """Merge the events at the front of `fresh` into `folded`. With the lock held.

        An exception, of memory that runs out or of a signal, may lose an event: the stream is torn then.
        """
        fresh, folded = self.fresh, self.folded
        self.folding = True
        try:
            while fresh and type(fresh[0]) is ChunkEvent:
                event = self.pop_plain()
                if event is None:
                    event = fresh.pop(0)  # it has columns
                if folded is None:
                    folded = self.folded = Merger(event)
                else:
                    self.freed += folded.add(event)
                    self.merged += 1
        except BaseException:
            self.limit = -1
            raise
        self.folding = False

    def take(self) -> Item | None:
        """Return the next item, merged from all that waits; None when nothing does.

        `take_quick` (the C core) does the same for one event or several without columns, else it says False.
        """
        with self.lock:
            if self.folding:
                return TORN
            fresh = self.fresh
            if not fresh and self.folded is None:
                return None  # closed in another thread since `take_quick` looked
            alone = self.folded is None and len(fresh) == 1  # as an ending is: nothing comes after it
            event = fresh[0] if alone else self._whole()
            if type(event) is not ChunkEvent:
                self.received += 1
                if type(event) is Control:
                    self.taken += len(event.body)
                return fresh.pop(0)  # type: ignore[return-value]  # no ChunkEvent: that is tested above
            # All that takes memory comes first: what could not be made into an item waits on.
            item = Frame(event) if event.finish is None else Done(event)
            taken, received = self.taken + event.size, self.received + 1
            limit = self.capacity + taken + self.freed
            if alone:
                del fresh[0]
            else:
                self.folded = None
            self.taken, self.received, self.limit = taken, received, limit
            if self.gone:  # looked at last: who closes meanwhile says so after this
                self.limit = -1
        return item

    def _whole(self) -> ChunkEvent:
        """Return all waiting events as one. With the lock held."""
        self._fold()
        assert self.folded is not None
        return self.folded.event()

    def close(self) -> None:
        """The source is gone: drop what waits, tell the reader once."""
        if self.gone:
            return
        self.gone = True
        # Never wait here: a garbage collection may call this in the very thread that holds the lock.
        if self.lock.acquire(blocking=False):
            self.fresh.clear()
            self.folded = None
            self.lock.release()
        self.limit = -1
        self.drop_callback()
        waiter = self.waiter
        if waiter is not None:
            wake((waiter,))  # who waits elsewhere is told
        on_gone, self.on_gone = self.on_gone, None
        if on_gone is not None and not self.ended:
            on_gone()

    def drop_callback(self) -> None:
        """Let go of a callback when another takes its place, or nothing comes any more: it has its source,
        and so this, in a circle that only the garbage collector would undo, with all that the request had.
        """
        waiter = self.waiter
        if isinstance(waiter, CallbackWaiter):
            self.waiter = None
            waiter.drop()

    def statistics(self) -> SinkStatistics:
        """Return the counters as they are now."""
        return SinkStatistics(
            self.capacity,
            0 if self.gone else max(0, self.sent - self.taken - self.freed),
            self.received + self.merged + len(self.fresh) + (self.folded is not None),
            self.received,
            self.merged,
            self.gone,
            self.ended,
        )


class SinkSender:
    """The reader's end. For one thread at a time."""

    __slots__ = ("channel",)

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def try_send(self, item: Item) -> None:
        """Send without waiting, and wake the source.

        Raises SinkFull when what waits and the item are more than the capacity (an item into an empty sink
        always fits), SinkClosed when the source is gone or the stream's last item was sent before. After
        either, `close()` is all that is left to do.
        """
        channel = self.channel
        waiter: Waiter | None
        match item:
            case Frame(event):
                if event.finish is not None:
                    raise ValueError("an event with a finish reason ends its stream: send it as Done")
                waiter = channel.push(event, event.size)
            case Done(event):
                if event.finish is None:
                    raise ValueError("a Done's event has a finish reason; this one has none")
                waiter = channel.end(event, event.size)
            case Control(body):
                waiter = channel.end(item, len(body))
            case Error():
                if channel.gone or channel.ended:
                    raise SinkClosed("the stream is over")
                waiter = channel.fail(item)
            case _:
                raise TypeError(f"a sink takes Frame, Done, Control and Error, not {type(item).__name__}")
        if waiter is not None:
            wake((waiter,))

    def close(self) -> None:
        """End the stream. If its last item was not sent, the source receives an Error: never nothing."""
        waiter = self.channel.fail(CLOSED)
        if waiter is not None:
            wake((waiter,))

    def statistics(self) -> SinkStatistics:
        """Return the sink's counters."""
        return self.channel.statistics()

    def __del__(self) -> None:
        self.close()


class SinkSource:
    """The handler's end: iterate it, from a task or from a thread.

    One reader waits on it at a time: a second one gets SinkBusy. Iteration ends after the item that ends the
    request (Done, Control or Error). Leaving a `with` or `async with` block, `close()`, cancelling a task
    that waits here, and dropping the last reference all mean the same: the handler is gone, and its request,
    if it still runs, is aborted at the scheduler.
    """

    __slots__ = ("__weakref__", "_channel", "_ended")

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ended = False

    def receive_nowait(self) -> Item | None:
        """Return the next item, or None when nothing waits.

        Raises SinkEnded after the last item, SinkClosed after `close()`.
        """
        quick = self._channel.take_quick()
        item: Item | None = self._channel.take() if quick is False else quick
        if item is None:
            if self._ended:
                raise SinkEnded("the stream's last item was received before")
            if self._channel.gone:
                raise SinkClosed("this source was closed")
            return None
        if type(item) is not Frame:
            self._ended = True
            self._channel.drop_callback()
        return item

    async def receive(self, timeout: float | None = None) -> Item:
        """Wait for the next item, at most `timeout` seconds (then TimeoutError; the stream goes on).

        Being cancelled here counts as gone and closes the source; wait with `timeout`, not with
        `asyncio.wait_for`, to do something else in between. Raises as `receive_nowait`, also when the source
        is closed elsewhere meanwhile, and SinkBusy.
        """
        item = self.receive_nowait()
        if item is not None:
            return item
        channel, loop = self._channel, asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            waiter = TaskWaiter(loop)
            timer = None
            self._wait_by(waiter)
            try:
                item = self.receive_nowait()
                if item is not None:
                    return item
                if deadline is not None:
                    timer = loop.call_at(deadline, waiter.fire)
                await waiter.future
            except asyncio.CancelledError:
                self.close()
                raise
            finally:
                channel.waiter = None
                if timer is not None:
                    timer.cancel()
            item = self.receive_nowait()
            if item is not None:
                return item
            if deadline is not None and loop.time() >= deadline:
                raise TimeoutError(f"nothing arrived within {timeout} s")

    def receive_sync(self, timeout: float | None = None) -> Item:
        """The same from a thread: wait for the next item, at most `timeout` seconds (then TimeoutError)."""
        channel = self._channel
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            item = self.receive_nowait()
            if item is not None:
                return item
            left = MAX_WAIT if deadline is None else min(MAX_WAIT, deadline - time.monotonic())
            if left <= 0:
                raise TimeoutError(f"nothing arrived within {timeout} s")
            waiter = ThreadWaiter()
            self._wait_by(waiter)
            try:
                item = self.receive_nowait()
                if item is not None:
                    return item
                waiter.wait(left)
            finally:
                channel.waiter = None

    def call_when_ready(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Call `callback` in `loop` whenever something waits, instead of waiting here: no task, no future.

        The callback takes what it wants with `receive_nowait`; it is called again only for what is sent
        after it was called, perhaps taken by then, and not once it has taken the last item or the source was
        closed. What it raises goes to the loop's exception handler. Call this in `loop`. The callback keeps
        its source alive until it has taken the last item: close the source explicitly. Another callback takes
        its place at once; SinkBusy while a task or a thread waits.
        """
        channel = self._channel
        channel.drop_callback()
        waiter = CallbackWaiter(loop, callback)
        self._wait_by(waiter)
        if channel.gone or self._ended:  # looked at last: who closes meanwhile lets go of it, or this does
            channel.drop_callback()
        elif channel.fresh or channel.folding or channel.folded is not None:
            waiter.marked = True
            loop.call_soon(waiter.fire)

    def _wait_by(self, waiter: Waiter) -> None:
        there = self._channel.waiter
        if there is not None:
            who = {ThreadWaiter: "a thread", TaskWaiter: "a task", CallbackWaiter: "a callback"}[type(there)]
            raise SinkBusy(f"{who} waits on this source already: let one reader pass the items on")
        self._channel.waiter = waiter

    def close(self) -> None:
        """The handler is gone. What waits is dropped; the request, if it still runs, is aborted."""
        self._channel.close()

    def statistics(self) -> SinkStatistics:
        """Return the sink's counters."""
        return self._channel.statistics()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._ended:
            raise StopIteration
        return self.receive_sync()

    def __aiter__(self) -> AsyncIterator[Item]:
        return self

    async def __anext__(self) -> Item:
        if self._ended:
            raise StopAsyncIteration
        return await self.receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def open_sink(capacity: int) -> tuple[SinkSender, SinkSource]:
    """Open a sink that lets `capacity` bytes of content (text, ids, numbers) wait.

    There is no default, because it is a decision: how far a client may fall behind before its request is
    aborted. One token of text is about 8 bytes, so 65,536 lets a client lag 8,000 tokens. An item into an
    empty sink always fits.

    Raises ValueError for a capacity that is not within 1 and 2^40 bytes.
    """
    if not 1 <= capacity <= MAX_CAPACITY:
        raise ValueError(f"a sink's capacity of {capacity} bytes: give 1 to {MAX_CAPACITY}")
    channel = Channel(capacity)
    return SinkSender(channel), SinkSource(channel)
