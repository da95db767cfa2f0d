"""The reader: drains one egress ring and hands each row to its request's sink.

It owns the rule that a request ends exactly once. A request is in `live` from `register` until its ending,
and whoever takes it out of there ends it; what still arrives for it later is counted and dropped. Endings
that the scheduler does not know of (handler gone, sink full, bad frame, decode failure, gap) come with
exactly one abort.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from ..ring.batch import Batch, decode_batch
from ..ring.finish import FinishReason
from ..ring.frames import BadFrame, ErrorFrame, Result, Tag, decode
from ..ring.route import format_route, shard_of
from .channel import SinkClosed, SinkFull, SinkSender
from .events import ChunkEvent, Control, Error
from .waiting import Waiter, wake

log = logging.getLogger(__name__)

# How many ended routes are remembered, to tell a late row from a ghost's.
REMEMBERED = 1 << 16
IDLE_WAIT = 1.0


class Egress(Protocol):
    """What a reader needs of its ring's Consumer."""

    def read(self, limit: int = 256) -> Sequence[tuple[int, int, memoryview]]:
        """Return (lane, tag, body) frames."""

    def release(self) -> None:
        """All read frames are handled."""


class ReaderStatistics(msgspec.Struct):
    """What a reader has seen since its start."""

    frames: int = 0
    rows: int = 0
    delivered: int = 0
    """Rows that became events."""
    late: int = 0
    """Rows and messages of requests that had ended; dropped."""
    doubled: int = 0
    """Rows delivered before; dropped."""
    gaps: int = 0
    bad_frames: int = 0
    unnamed_bad_frames: int = 0
    """Of these, those that named no live request."""
    sinks_full: int = 0
    handlers_gone: int = 0
    errors: int = 0
    """ERROR frames."""
    aborts: int = 0
    aborts_waiting: int = 0
    """Aborts that `on_abort` refused so far; tried again each turn."""
    live: int = 0


class Live:
    """One request, from registration to its ending."""

    __slots__ = ("channel", "ids", "next", "rid", "route", "sender", "text_bytes")

    def __init__(self, route: int, rid: str, sender: SinkSender) -> None:
        self.route = route
        self.rid = rid
        self.sender = sender  # held: a sender that is dropped ends its stream
        self.channel = sender.channel
        self.next = 0
        self.ids = bytearray()
        self.text_bytes = 0


class Progress(msgspec.Struct, frozen=True):
    """How far a live request has come: what a RESTORE says."""

    route: int
    rid: str
    ids: bytes
    """Every output id delivered, i32 little-endian."""
    text_bytes: int
    """Bytes of UTF-8 text delivered with them."""


class Reader:
    """Delivers one egress ring.

    on_abort(route, rid, reason)  stop this request at the scheduler. Called once per request, but again when
                                  it raises (a full request ring), each turn, until it returns
    on_end(route)                 the request is over for the reader: its slot may be used again. Called once
                                  for each registered request, after its abort if it has one
    idle(timeout)                 sleep until there may be something to drain, at most that many seconds
    nudge()                       end `idle` early; any thread, also from a garbage collection

    Both callbacks run on the reader's thread and must not block. `register`, `unregister`, `abort` and
    `fail` may be called from any thread, the rest from the one that drains.
    """

    def __init__(
        self,
        egress: Egress,
        on_abort: Callable[[int, str, str], None],
        on_end: Callable[[int], None],
        *,
        idle: Callable[[float], object],
        nudge: Callable[[], None],
    ) -> None:
        self._egress = egress
        self._on_abort = on_abort
        self._on_end = on_end
        self._idle = idle
        self._nudge = nudge
        self._live: dict[int, Live] = {}
        self._ended: dict[int, None] = {}
        self._requests: deque[Callable[[], None]] = deque()
        self._aborts: deque[tuple[int, str, str]] = deque()
        self._wakes: list[Waiter] = []
        self._stats = ReaderStatistics()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def register(self, route: int, rid: str, sender: SinkSender) -> None:
        """Deliver this route's rows to that sink, from before it is submitted on. Any thread.

        Raises ValueError when the route is registered already.
        """
        live = Live(route, rid, sender)
        if self._live.setdefault(route, live) is not live:
            raise ValueError(
                f"route {format_route(route)} is registered already; end it before using it again"
            )
        live.channel.on_gone = lambda: self.abort(route, "handler gone")
        if live.channel.gone:
            self.abort(route, "handler gone")

    def unregister(self, route: int) -> None:
        """Forget a route that was never submitted: no abort, no on_end, no error to its sink. Any thread."""
        live = self._live.pop(route, None)
        if live is not None:
            live.channel.on_gone = None

    def abort(self, route: int, reason: str, error: Error | None = None) -> None:
        """End a live request and abort it at the scheduler. Any thread.

        Its sink gets `error` if there is one. Nothing happens when the request has ended already.
        """
        self._requests.append(lambda: self._abort_now(route, reason, error))
        self._nudge()

    def fail(self, error: Error, *, shard: int | None = None, abort: str | None = None) -> None:
        """End every live request (of one shard, or of all) with `error`. Any thread.

        `abort` is the reason to abort them with, None when the scheduler needs no abort (it is gone itself).
        """
        self._requests.append(lambda: self._fail_now(error, shard, abort))
        self._nudge()

    def progress(self, shard: int) -> list[Progress]:
        """Return what each live request of a shard has been delivered. On the draining thread."""
        return [
            Progress(live.route, live.rid, bytes(live.ids), live.text_bytes)
            for live in list(self._live.values())
            if shard_of(live.route) == shard
        ]

    def drain(self, limit: int = 256) -> int:
        """Handle what was asked from other threads and up to `limit` frames; return how many frames.

        All sinks that were sent to are woken at the end, with one call into each event loop.
        """
        while self._requests:
            self._requests.popleft()()
        frames = self._egress.read(limit)
        for lane, tag, body in frames:
            self._frame(lane, tag, body)
        if frames:
            self._egress.release()
        if self._wakes:
            wakes, self._wakes = self._wakes, []
            wake(wakes)
        if self._aborts:
            self._send_aborts()
        return len(frames)

    def run(self) -> None:
        """Drain until `stop`."""
        while not self._stop.is_set():
            if self.drain() == 0 and not self._requests:
                self._idle(0.05 if self._aborts else IDLE_WAIT)

    def start(self) -> None:
        """Run in a thread of its own."""
        if self._thread is not None:
            raise RuntimeError("this reader runs already")
        self._stop.clear()
        self._thread = threading.Thread(target=self.run, name="outfeed-reader", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, if there is one, and wait for it. Live requests stay as they are."""
        self._stop.set()
        self._nudge()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def statistics(self) -> ReaderStatistics:
        """Return a copy of the counters. Any thread."""
        return msgspec.structs.replace(self._stats, live=len(self._live), aborts_waiting=len(self._aborts))

    def _frame(self, lane: int, tag: int, body: memoryview) -> None:
        self._stats.frames += 1
        try:
            if tag == Tag.BATCH:
                self._batch(decode_batch(body))
                return
            message = decode(tag, body)
        except BadFrame as error:
            self._bad_frame(lane, error)
            return
        if isinstance(message, Result):
            self._result(message)
        elif isinstance(message, ErrorFrame):
            self._error(message)
        else:
            self._bad_frame(lane, BadFrame(f"a {Tag(tag).name} frame does not belong on an egress ring"))

    def _batch(self, batch: Batch) -> None:
        """Deliver each row. The loop is the reader's whole cost: lists once per frame, slices per row."""
        text_lens, text_column = batch.text_lens, batch.text
        if text_lens is None or text_column is None:
            raise BadFrame(
                "a BATCH without text does not belong on an egress ring", tuple(batch.routes.tolist())
            )
        stats, find, wakes, stamp = self._stats, self._live.get, self._wakes, batch.stamp_ns
        text, ids = bytes(text_column), batch.ids.tobytes()
        finishes: dict[int, FinishReason] = dict(batch.finishes)
        index = text_end = ids_end = delivered = 0
        for route, first, generated, prompt_tokens, count, length in zip(
            batch.routes.tolist(),
            batch.first.tolist(),
            batch.generated.tolist(),
            batch.prompt_tokens.tolist(),
            batch.counts.tolist(),
            text_lens.tolist(),
            strict=True,
        ):
            text_start, ids_start = text_end, ids_end
            text_end += length
            ids_end += 4 * count
            live = find(route)
            if live is None:
                self._late(route)
            elif first != live.next:
                self._out_of_order(live, first, generated)
            else:
                row_ids = ids[ids_start:ids_end]
                event = ChunkEvent(text[text_start:text_end], row_ids, first, generated, prompt_tokens, stamp)
                finish = finishes.get(index) if finishes else None
                if finish is not None:
                    event.finish = finish
                try:
                    waiter = live.channel.push(event, length + 4 * count)
                except (SinkFull, SinkClosed) as error:
                    self._refused(live, error)
                else:
                    delivered += 1
                    live.next = first + generated
                    live.ids += row_ids
                    live.text_bytes += length
                    if waiter is not None:
                        wakes.append(waiter)
                    if finish is not None:
                        live.channel.ended = True
                        self._end(live)
            index += 1
        stats.rows += index
        stats.delivered += delivered

    def _result(self, message: Result) -> None:
        live = self._live.get(message.route)
        if live is None:
            self._late(message.route)
            return
        try:
            waiter = live.channel.end(Control(message.body), len(message.body))
        except (SinkFull, SinkClosed) as error:
            self._refused(live, error)
            return
        if waiter is not None:
            self._wakes.append(waiter)
        self._end(live)

    def _error(self, message: ErrorFrame) -> None:
        self._stats.errors += 1
        live = self._live.get(message.route)
        if live is None:
            self._late(message.route)
            return
        abort = message.type if message.running else None
        self._fail_live(live, Error(message.status, message.type, message.message), abort)

    def _bad_frame(self, lane: int, error: BadFrame) -> None:
        """End every live request that a rejected frame names."""
        self._stats.bad_frames += 1
        named = [live for route in dict.fromkeys(error.routes) if (live := self._live.get(route))]
        if not named:
            self._stats.unnamed_bad_frames += 1
        log.error("rejected a frame from shard %d naming %d live requests: %s", lane, len(named), error)
        for live in named:
            self._fail_live(
                live, Error(500, "bad_frame", f"a damaged frame was rejected: {error}"), "bad frame"
            )

    def _out_of_order(self, live: Live, first: int, generated: int) -> None:
        if first < live.next and first + generated <= live.next:
            self._stats.doubled += 1
            return
        self._stats.gaps += 1
        message = f"tokens from {live.next} on were expected, a row of {generated} from {first} on came"
        log.error("gap in %s: %s", format_route(live.route), message)
        self._fail_live(live, Error(500, "gap", message), "gap")

    def _refused(self, live: Live, error: SinkFull | SinkClosed) -> None:
        """The sink took no more."""
        if isinstance(error, SinkFull):
            self._stats.sinks_full += 1
            self._fail_live(live, Error(408, "client_too_slow", str(error)), "sink full")
        else:
            self._abort_now(live.route, "handler gone", None)

    def _late(self, route: int) -> None:
        """A row whose request is not live: dropped. One we never knew is a ghost's, and is aborted once."""
        self._stats.late += 1
        if route and route not in self._ended:
            self._remember(route)
            self._aborts.append((route, "", "unknown route"))

    def _abort_now(self, route: int, reason: str, error: Error | None) -> None:
        live = self._live.get(route)
        if live is None:
            return
        if reason == "handler gone":
            self._stats.handlers_gone += 1
        self._fail_live(live, error, reason)

    def _fail_now(self, error: Error, shard: int | None, abort: str | None) -> None:
        for live in list(self._live.values()):
            if shard is None or shard_of(live.route) == shard:
                self._fail_live(live, error, abort)

    def _fail_live(self, live: Live, error: Error | None, abort: str | None) -> None:
        if error is not None:
            waiter = live.channel.fail(error)
            if waiter is not None:
                self._wakes.append(waiter)
        self._end(live, abort)

    def _end(self, live: Live, abort: str | None = None) -> None:
        """The one place a request ends."""
        if self._live.pop(live.route, None) is None:
            return
        live.channel.on_gone = None
        self._remember(live.route)
        if abort is not None:
            self._aborts.append((live.route, live.rid, abort))
            self._send_aborts()
        try:
            self._on_end(live.route)
        except Exception:
            log.exception("on_end of %s failed", format_route(live.route))

    def _remember(self, route: int) -> None:
        self._ended[route] = None
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _send_aborts(self) -> None:
        """Send what aborts there are, in order, until one is refused."""
        while self._aborts:
            route, rid, reason = self._aborts[0]
            try:
                self._on_abort(route, rid, reason)
            except Exception as error:
                log.warning("abort of %s is tried again: %s", format_route(route), error)
                return
            self._aborts.popleft()
            self._stats.aborts += 1
