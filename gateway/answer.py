"""Answers in the making: streams' items into one HTTP exchange, as they come or when all have.

Nothing here waits: the reader wakes the loop once for all sinks it filled, and each stream's `ready` takes
what lies in its sink, merged if the client or this process lags. While a client's connection is full its
items stay in the sinks, which merge and bound them. Must not know a request's shape, nor a response's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..sink import ChunkEvent, Control, Done, Error, Frame, SinkClosed, SinkEnded, request_error
from .backend import Stream
from .exchange import Exchange
from .metrics import Metrics
from .shapes import DONE, FAILED, error_json, http_status, sse

log = logging.getLogger(__name__)


class Unanswerable(Exception):
    """What came from the scheduler is not what the client asked for, and would pass for it."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.error = Error(400, kind, message)


class Renderer(Protocol):
    """How one prompt's events look in a stream; each call returns whole `data:` events, or nothing."""

    def opening(self) -> bytes:
        """What comes before any token."""

    def delta(self, event: ChunkEvent) -> bytes:
        """An event, the last one (it has a finish reason) too. Raises Unanswerable."""

    def failure(self, error: Error) -> bytes:
        """The request failed."""


class Answer:
    """What the two kinds of answer share: several streams, one exchange, one end."""

    def __init__(
        self,
        exchange: Exchange,
        streams: Sequence[Stream],
        metrics: Metrics,
        on_end: Callable[[Answer], None],
    ) -> None:
        self.exchange = exchange
        self.metrics = metrics
        self._on_end = on_end
        self._feeds = [Feed(self, index, stream) for index, stream in enumerate(streams)]
        self._left = self.prompts = len(streams)
        self._next = 0

    def start(self) -> None:
        """Begin to take items."""
        self.exchange.on_gone = self.close
        self.exchange.on_room = self._room
        loop = asyncio.get_running_loop()
        for feed in self._feeds:
            feed.stream.source.call_when_ready(loop, feed.ready)

    def takes(self) -> bool:
        """Whether items should be taken now."""
        return True

    def event(self, index: int, event: ChunkEvent) -> None:
        """Stream `index` has more, or its last."""
        raise NotImplementedError

    def failure(self, index: int, error: Error) -> None:
        """Stream `index` failed."""
        raise NotImplementedError

    def complete(self) -> None:
        """Every stream has ended."""
        raise NotImplementedError

    def ended(self) -> None:
        """One stream has ended."""
        self._left -= 1
        if self._left == 0 and self._feeds:
            self.complete()
            self.close()

    def live_rids(self) -> list[str]:
        """Return the rids of the streams that still run."""
        return [feed.stream.rid for feed in self._feeds if not feed.over]

    def fail(self, error: Error) -> None:
        """End every stream that still runs with this."""
        for feed in list(self._feeds):
            if not feed.over:
                feed.over = True
                self.failure(feed.index, error)
                self.ended()

    def give_up(self) -> None:
        """End what cannot be written: with a 500, or in the middle when it has begun."""
        exchange = self.exchange
        if exchange.status:
            exchange.cut()
            return
        exchange.respond(500, error_json(500, FAILED, exchange.openai))
        self.close()

    def close(self) -> None:
        """Let go of every stream; those that still run are aborted. Twice is fine."""
        feeds, self._feeds = self._feeds, []
        for feed in feeds:
            feed.over = True
            feed.stream.close()
        if feeds:
            self._on_end(self)

    def _room(self) -> None:
        """Let held streams go on, from the one that found no room the last time: all get their turn."""
        feeds = self._feeds
        for feed in feeds[self._next :] + feeds[: self._next]:
            if not self.takes():
                self._next = feed.index
                return
            if feed.held:
                feed.ready()


class Feed:
    """One stream's way into an answer, and its timing."""

    __slots__ = ("answer", "held", "index", "last", "over", "stream")

    def __init__(self, answer: Answer, index: int, stream: Stream) -> None:
        self.answer = answer
        self.index = index
        self.stream = stream
        self.last = 0.0
        self.held = False
        self.over = False

    def ready(self) -> None:
        """Take what the sink holds. Called in the loop when there is something."""
        answer, receive = self.answer, self.stream.source.receive_nowait
        try:
            while not self.over:
                if not answer.takes():
                    self.held = True
                    return
                self.held = False
                item = receive()
                if item is None:
                    return
                if type(item) is Frame:
                    self._count(item.event)
                    answer.event(self.index, item.event)
                    continue
                self.over = True
                if type(item) is Done:
                    self._last(item.event)
                else:
                    answer.failure(self.index, _as_error(item))
                answer.ended()
        except (SinkEnded, SinkClosed):
            self.over = True
        except Exception:
            log.exception("request %s: its answer could not be written", self.stream.rid)
            answer.give_up()

    def _last(self, event: ChunkEvent) -> None:
        self._count(event)
        answer = self.answer
        answer.metrics.request.observe(self.last - answer.exchange.started)
        error = request_error(event)
        if error is None:
            answer.event(self.index, event)
        else:
            answer.failure(self.index, error)

    def _count(self, event: ChunkEvent) -> None:
        now, metrics, tokens = time.perf_counter(), self.answer.metrics, event.generated
        metrics.events += 1
        metrics.output_tokens += tokens
        if self.last:
            if tokens:
                metrics.between_tokens.observe((now - self.last) / tokens, tokens)
        else:
            metrics.first_token.observe(now - self.answer.exchange.started)
            metrics.prompt_tokens += event.prompt_tokens
        self.last = now


class StreamAnswer(Answer):
    """Server-sent events, each as soon as the client takes it.

    closing() is called after the last stream's end, if none failed, for what comes before `[DONE]`. A stream
    whose event has more than `most` bytes, as one that says everything so far may in the end, fails.
    """

    def __init__(
        self,
        exchange: Exchange,
        streams: Sequence[Stream],
        metrics: Metrics,
        on_end: Callable[[Answer], None],
        renderers: Sequence[Renderer],
        most: int,
        closing: Callable[[], bytes] | None = None,
    ) -> None:
        super().__init__(exchange, streams, metrics, on_end)
        self._renderers = renderers
        self._most = most
        self._closing = closing
        self._pending = b""

    def start(self) -> None:
        """Send the head, then take items."""
        self.exchange.begin(b"".join([renderer.opening() for renderer in self._renderers]))
        super().start()

    def takes(self) -> bool:
        """Whether the client does."""
        return self.exchange.writable

    def event(self, index: int, event: ChunkEvent) -> None:
        """Send it; the very last goes out with the stream's end."""
        try:
            data = self._renderers[index].delta(event)
        except Unanswerable as why:
            self._refuse(index, event, why.error)
            return
        if len(data) > self._most:
            message = (
                f"an event of the stream has more than {self._most} bytes, the most that is sent in one "
                "piece: ask for fewer tokens or log probabilities, or run the server with --incremental"
            )
            self._refuse(index, event, Error(400, "answer_too_large", message))
        elif event.finish is not None and self._left == 1:
            self._pending = data
        else:
            self.exchange.send(data)

    def failure(self, index: int, error: Error) -> None:
        """Send it as an event."""
        self._closing = None  # it would speak of all streams
        self.exchange.send(self._renderers[index].failure(error))

    def _refuse(self, index: int, event: ChunkEvent, error: Error) -> None:
        """End the stream that this event is of with an error instead of it."""
        self.failure(index, error)
        if event.finish is None:
            feed = self._feeds[index]
            feed.over = True
            feed.stream.close()
            self.ended()

    def complete(self) -> None:
        """End the stream."""
        closing = b"" if self._closing is None else self._closing()
        self.exchange.finish(self._pending + closing + DONE)


class Collector(Protocol):
    """One prompt's whole answer in the making."""

    def add(self, event: ChunkEvent) -> int:
        """Add an event; return how many bytes of answer there are now, about. Raises Unanswerable."""


class WholeAnswer(Answer):
    """One response when every stream has ended; the first failure is the whole answer's.

    Each stream's events go to its collector as they come; render() makes the body of what they collected. An
    answer that grows beyond `most` bytes fails: it would have to be kept, and sent, in one piece.
    """

    def __init__(
        self,
        exchange: Exchange,
        streams: Sequence[Stream],
        metrics: Metrics,
        on_end: Callable[[Answer], None],
        collectors: Sequence[Collector],
        render: Callable[[], bytes],
        most: int,
    ) -> None:
        super().__init__(exchange, streams, metrics, on_end)
        self._collectors = collectors
        self._sizes = [0] * len(streams)
        self._size = 0
        self._render = render
        self._most = most

    def event(self, index: int, event: ChunkEvent) -> None:
        """Add it up."""
        try:
            size = self._collectors[index].add(event)
        except Unanswerable as why:
            self.failure(index, why.error)
            return
        self._size += size - self._sizes[index]
        self._sizes[index] = size
        if self._size > self._most:
            message = (
                f"the answer has more than {self._most} bytes, the most that is sent in one piece: stream "
                "it, or ask for fewer tokens, log probabilities or prompts"
            )
            self.failure(index, Error(400, "answer_too_large", message))

    def failure(self, index: int, error: Error) -> None:
        """Answer with it, and give the other streams up."""
        status = http_status(error.status)
        self.exchange.respond(status, error_json(status, error.message, self.exchange.openai))
        self.close()

    def complete(self) -> None:
        """Answer."""
        self.exchange.respond(200, self._render())


def failure_event(error: Error, openai: bool = False, index: int | None = None) -> bytes:
    """Render a failure as an event of a stream."""
    return sse(error_json(http_status(error.status), error.message, openai, index))


def _as_error(item: Any) -> Error:
    if isinstance(item, Error):
        return item
    what = "a control answer" if isinstance(item, Control) else type(item).__name__
    log.error("a prompt's stream carried %s", what)
    return Error(500, "internal_error", "the server mixed up an answer; its log says more")
