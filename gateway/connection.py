"""HTTP/1.1 on one connection: requests in, answers out, and every limit that keeps a client in its bounds.

A connection handles one request at a time and keeps pipelined ones in order. A client that closes, even
only its sending half, is gone, and whoever answers it is told at once. Deadlines are kept as one number per
connection and looked at once a second (`Connections.sweep`), so that thousands of idle streams cost nothing.
Must not know any endpoint, nor what is being answered.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from email.utils import formatdate
from math import inf
from typing import Final, cast

import httptools

from .limits import Limits
from .shapes import error_json, phrase

log = logging.getLogger(__name__)

LATE_S: Final = 0.05
"""How long the head of a stream waits for the first event, to go out with it."""
LINGER_S: Final = 2.0
"""How long what a refused client still sends is read and dropped, so that it gets to read the refusal."""
VANISHED_MS: Final = 60_000
"""Sent bytes unacknowledged for this long: the client's machine is gone."""


_STREAM_HEAD: Final = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"transfer-encoding", b"chunked"),
)


class Request:
    """One request, complete. Header names are lower case; a repeated header's values are joined by commas."""

    __slots__ = ("body", "headers", "keep_alive", "method", "path", "query", "version")

    def __init__(self, method: str, url: bytes, version: str, headers: dict[bytes, bytes]) -> None:
        path, _, query = url.partition(b"?")
        self.method = method
        self.path = path.decode("latin-1")
        self.query = query
        self.version = version
        self.headers = headers
        self.body = bytearray()
        self.keep_alive = True


class Exchange:
    """One request and its answer. For the loop's thread. Once the client is gone every call does nothing.

    on_gone  called once if the client goes away before the answer is complete
    on_room  called when a connection that was not `writable` is again
    on_over  called once with the answer's status when it is complete, with 499 if the client went before
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "done",
        "gone",
        "on_gone",
        "on_over",
        "on_room",
        "request",
        "started",
        "status",
    )

    def __init__(self, connection: Connection, request: Request) -> None:
        self._connection = connection
        self._chunked = False
        self.request = request
        self.started = time.perf_counter()
        self.status = 0
        self.done = False
        self.gone = False
        self.on_gone: Callable[[], None] | None = None
        self.on_room: Callable[[], None] | None = None
        self.on_over: Callable[[int], None] | None = None

    @property
    def writable(self) -> bool:
        """Whether the client takes what is sent; if not, wait for `on_room`."""
        connection = self._connection
        # What this turn of the loop has written already counts: the transport only hears of it at its end.
        return not connection.paused and connection.unsent <= connection.owner.limits.write_bytes

    def respond(
        self,
        status: int,
        body: bytes = b"",
        content_type: bytes = b"application/json",
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        """Send a whole answer."""
        if self.gone or self.done:
            return
        self.status = status
        head = [*headers, (b"content-length", b"%d" % len(body))]
        if body:
            head.append((b"content-type", content_type))
        sent = b"" if self.request.method == "HEAD" else body
        self._connection.write(self._head(status, head) + sent)
        self._end()

    def begin(self, data: bytes = b"") -> None:
        """Send the head of a stream of events, and its first piece if there is one already."""
        if self.gone or self.done:
            return
        self.status = 200
        request, owner = self.request, self._connection.owner
        if request.version == "1.0":
            request.keep_alive = False
        else:
            self._chunked = True
        if self._chunked and request.keep_alive and not owner.closing:
            head = owner.stream_head  # the usual one, made once a second
        else:
            head = self._head(200, _STREAM_HEAD if self._chunked else _STREAM_HEAD[:-1])
        if data:
            data = b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
            self._connection.write(head + data)
        else:
            # It goes out with the first event, unless that is long in coming.
            self._connection.write_late(head)

    def send(self, data: bytes) -> None:
        """Send a piece. Pieces of one turn of the loop go out together."""
        if data and not (self.gone or self.done):
            self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def finish(self, data: bytes = b"") -> None:
        """Send the last piece and the end."""
        if self.gone or self.done:
            return
        if not self._chunked:
            self._connection.write(data)
        elif data:
            self._connection.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        else:
            self._connection.write(b"0\r\n\r\n")
        self._end()

    def cut(self) -> None:
        """Close the connection in the middle of an answer: the client sees that it is not complete."""
        if not (self.gone or self.done):
            self._connection.abort()

    def _head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        connection = self._connection
        keep = self.request.keep_alive and not connection.owner.closing
        self.request.keep_alive = keep
        close = (
            b""
            if keep and self.request.version == "1.1"
            else b"connection: %b\r\n" % (b"keep-alive" if keep else b"close")
        )
        return _head(status, connection.owner.date, headers) + close + b"\r\n"

    def _end(self) -> None:
        self.done = True
        self.on_gone = self.on_room = None
        self._over(self.status)
        self._connection.ended(self)

    def lost(self) -> None:
        """The client is gone before the answer was complete."""
        self.gone = True
        on_gone, self.on_gone, self.on_room = self.on_gone, None, None
        if on_gone is not None:
            on_gone()
        self._over(499)

    def _over(self, status: int) -> None:
        on_over, self.on_over = self.on_over, None
        if on_over is not None:
            on_over(status)


Handler = Callable[[Exchange], None]


class Connections:
    """Every connection of one process, and what they share."""

    def __init__(self, handler: Handler, limits: Limits) -> None:
        self.handler = handler
        self.limits = limits
        self.open: set[Connection] = set()
        self.closing = False
        """Draining: each answer is its connection's last."""
        self.refused = 0
        self._soon: list[Connection] = []
        self._late: list[Connection] = []
        self.date = b""
        self.stream_head = b""
        self.sweep()

    def __call__(self) -> Connection:
        """Make the protocol of an accepted connection."""
        return Connection(self)

    def sweep(self) -> None:
        """Cut off who is past a deadline. Call once a second."""
        self.date = formatdate(usegmt=True).encode()
        self.stream_head = _head(200, self.date, _STREAM_HEAD) + b"\r\n"
        now = time.monotonic()
        for connection in [one for one in self.open if one.deadline < now]:
            connection.overdue()

    def flush_soon(self, connection: Connection) -> None:
        """Send what the connection has when this turn of the loop is over."""
        if not self._soon:
            asyncio.get_running_loop().call_soon(self._flush_soon)
        self._soon.append(connection)

    def flush_late(self, connection: Connection) -> None:
        """Send what the connection has after a moment, if it has not gone out by then."""
        if not self._late:
            asyncio.get_running_loop().call_later(LATE_S, self._flush_late)
        self._late.append(connection)

    def _flush_soon(self) -> None:
        soon, self._soon = self._soon, []
        for connection in soon:
            connection.flush()

    def _flush_late(self) -> None:
        late, self._late = self._late, []
        for connection in late:
            connection.flush()

    def drain(self) -> None:
        """Close idle connections, and every other one after its answer."""
        self.closing = True
        for connection in list(self.open):
            connection.close_if_idle()

    def abort(self) -> None:
        """Cut off everybody."""
        for connection in list(self.open):
            connection.abort()


class _Refusal(Exception):
    """A request broke a limit or the protocol: answered from here, its connection closed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Connection(asyncio.Protocol):
    """One client's connection; made for it by `Connections`."""

    def __init__(self, owner: Connections) -> None:
        self.owner = owner
        self.deadline = inf
        self.paused = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._current: Exchange | None = None
        self._waiting: deque[Request] = deque()
        self._out: list[bytes] = []
        self.unsent = 0
        self._marked = False
        self._lingering = False
        self._refusal: _Refusal | None = None
        self._fed = 0  # bytes since the last whole head or request: those of an unfinished head, at most
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._request: Request | None = None

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is here."""
        self._transport = cast(asyncio.Transport, transport)
        limits = self.owner.limits
        self._transport.set_write_buffer_limits(limits.write_bytes)
        _tune(transport.get_extra_info("socket"))
        full = len(self.owner.open) >= limits.connections
        self.owner.open.add(self)
        self.deadline = time.monotonic() + limits.head_s
        if full:
            self.owner.refused += 1
            self._refuse(_Refusal(503, f"this server holds {limits.connections} connections; try again soon"))

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._lingering:
            return
        self._fed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Nothing here can be upgraded to. The request is complete, what follows it is not HTTP/1.1.
            if self._current is not None:
                self._current.request.keep_alive = False
        except httptools.HttpParserError as error:
            refusal, self._refusal = self._refusal, None
            self._refuse(refusal or _Refusal(400, f"this is not HTTP/1.1 as this server reads it: {error}"))
            return
        if self._request is None and self._fed > self.owner.limits.head_bytes:
            self._refuse(self._head_too_large())

    def eof_received(self) -> None:
        """The client will send no more: it is gone. The transport sends what it has and closes after this."""
        self._gone()
        self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is no more."""
        self.owner.open.discard(self)
        self.deadline = inf
        self._transport = None
        self._waiting.clear()
        self._gone()

    def pause_writing(self) -> None:
        """The client reads too slowly for what is sent."""
        self.paused = True
        self.deadline = time.monotonic() + self.owner.limits.stall_s

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.paused = False
        current = self._current
        if current is None:
            self._idle()
            return
        self.deadline = inf
        if current.on_room is not None:
            current.on_room()

    # What the parser calls.

    def on_message_begin(self) -> None:
        """A request's first byte."""
        self._url, self._headers, self._head_bytes, self._request = b"", {}, 0, None
        if self._current is None:
            self.deadline = time.monotonic() + self.owner.limits.head_s

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._count(len(name) + len(value) + 4)
        name = name.lower()
        known = self._headers.get(name)
        self._headers[name] = value if known is None else known + b", " + value
        if len(self._headers) > self.owner.limits.headers:
            raise self._stop(431, f"more than {self.owner.limits.headers} headers; send fewer")

    def on_headers_complete(self) -> None:
        """The head is complete."""
        parser, limits = self._parser, self.owner.limits
        headers = self._headers
        method = parser.get_method().decode("latin-1")
        request = Request(method, self._url, parser.get_http_version(), headers)
        request.keep_alive = parser.should_keep_alive()
        length = headers.get(b"content-length")
        if length is not None and int(length) > limits.body_bytes:
            raise self._stop(413, self._body_too_large(f"{int(length)} bytes"))
        if self._current is None:
            self.deadline = time.monotonic() + limits.body_s
            if headers.get(b"expect", b"").lower() == b"100-continue":
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._request = request
        self._fed = 0

    def on_body(self, piece: bytes) -> None:
        """A piece of the body."""
        request = self._request
        assert request is not None
        request.body += piece
        if len(request.body) > self.owner.limits.body_bytes:
            raise self._stop(413, self._body_too_large("more"))

    def on_message_complete(self) -> None:
        """A request is complete: answer it, or let it wait for the one before it."""
        request, self._request = self._request, None
        assert request is not None
        self._fed = 0
        if self._current is None and not self._waiting:
            self._handle(request)
            return
        self._waiting.append(request)
        if len(self._waiting) == self.owner.limits.pipelined and self._transport is not None:
            self._transport.pause_reading()

    # What an exchange calls.

    def write(self, data: bytes) -> None:
        """Send bytes at the end of this turn; nothing when the connection is gone."""
        self._out.append(data)
        self.unsent += len(data)
        if not self._marked:
            self._marked = True
            self.owner.flush_soon(self)

    def write_late(self, data: bytes) -> None:
        """Send bytes with what follows them, or by themselves when nothing does for a moment."""
        self._out.append(data)
        self.unsent += len(data)
        if not self._marked:
            self.owner.flush_late(self)

    def flush(self) -> None:
        """Send what is there, in one system call."""
        self._marked = False
        if out := self._out:
            data = out[0] if len(out) == 1 else b"".join(out)
            out.clear()
            full, self.unsent = self.unsent > self.owner.limits.write_bytes, 0
            if self._transport is not None:
                self._transport.write(data)
            current = self._current
            if full and not self.paused and current is not None and current.on_room is not None:
                current.on_room()  # the client took it all; what is written now goes out in the next turn

    def ended(self, exchange: Exchange) -> None:
        """An answer is complete: close, or go on to the next request."""
        self._current = None
        if not exchange.request.keep_alive:
            self._close()
        elif self._waiting:
            # Not from here: a pipeline of thousands must not become a recursion of thousands.
            asyncio.get_running_loop().call_soon(self._next)
        else:
            self._idle()

    def abort(self) -> None:
        """Cut the connection off at once."""
        if self._transport is not None:
            self._transport.abort()

    def close_if_idle(self) -> None:
        """Close unless a request is being answered or read."""
        if self._current is None and self._request is None and not self._fed and not self._waiting:
            self._close()

    def overdue(self) -> None:
        """The deadline has passed."""
        if self._current is not None or self.paused or self._lingering:
            self.abort()
        elif self._request is not None:
            self._refuse(_Refusal(408, f"the body was not complete within {self.owner.limits.body_s:g} s"))
        elif self._fed:
            self._refuse(_Refusal(408, f"the head was not complete within {self.owner.limits.head_s:g} s"))
        else:
            self._close()

    def _next(self) -> None:
        if self._transport is None or self._current is not None or not self._waiting:
            return
        request = self._waiting.popleft()
        if len(self._waiting) < self.owner.limits.pipelined:
            self._transport.resume_reading()
        self._handle(request)

    def _handle(self, request: Request) -> None:
        if not request.path.startswith("/") and request.path != "*":
            # A proxy's form of the target, scheme and host and all.
            try:
                request.path = (httptools.parse_url(request.path.encode("latin-1")).path or b"/").decode(
                    "latin-1"
                )
            except httptools.HttpParserInvalidURLError:
                request.path = "/?"
        exchange = self._current = Exchange(self, request)
        self.deadline = inf
        try:
            self.owner.handler(exchange)
        except Exception:
            log.exception("answering %s %s failed", request.method, request.path[:100])
            exchange.respond(500, error_json(500, "the server failed on this request; its log says why"))

    def _idle(self) -> None:
        self.deadline = time.monotonic() + self.owner.limits.idle_s

    def _gone(self) -> None:
        current, self._current = self._current, None
        if current is not None and not current.done:
            current.lost()

    def _close(self) -> None:
        self.deadline = time.monotonic() + self.owner.limits.stall_s
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def _refuse(self, refusal: _Refusal) -> None:
        """Answer what is no request and close, but let the client read the answer before a reset."""
        if self._transport is None or self._lingering:
            return
        if self._current is not None or self._waiting:
            # An answer is under way and the bytes behind its request are bad: there is no place to say so.
            self.abort()
            return
        body = error_json(refusal.status, refusal.message)
        self.write(
            b"HTTP/1.1 %d %b\r\ndate: %b\r\nconnection: close\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b"
            % (refusal.status, phrase(refusal.status), self.owner.date, len(body), body)
        )
        self._lingering = True
        self._request = None
        self.deadline = time.monotonic() + LINGER_S
        self.flush()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.owner.limits.head_bytes:
            raise self._stop(431, self._head_too_large().message)

    def _stop(self, status: int, message: str) -> _Refusal:
        """Make the parser stop here; it only passes on that a callback failed, so keep why."""
        self._refusal = _Refusal(status, message)
        return self._refusal

    def _head_too_large(self) -> _Refusal:
        limit = self.owner.limits.head_bytes
        return _Refusal(431, f"the request line and headers take more than {limit} bytes; send less")

    def _body_too_large(self, size: str) -> str:
        return f"the body has {size}; at most {self.owner.limits.body_bytes} bytes are taken"


def _head(status: int, date: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    return b"HTTP/1.1 %d %b\r\ndate: %b\r\n%b" % (status, phrase(status), date, lines)


def _tune(sock: socket.socket | None) -> None:
    """Send at once, and notice a client whose machine is gone without a word."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, VANISHED_MS)
