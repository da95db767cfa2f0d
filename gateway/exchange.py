"""One request, and the exchange that answers it: what an endpoint holds of a connection.

Must not know any endpoint, nor how bytes come and go; that is the connection's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from .shapes import phrase, wants_openai

if TYPE_CHECKING:
    from .connection import Connection

STREAM_HEAD: Final = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"transfer-encoding", b"chunked"),
)
RETRY_AFTER: Final = b"retry-after: 1\r\n"


class Request:
    """One request, complete. `path` is as it was sent, without the query. Header names are lower case; a
    repeated header's values are joined by commas.
    """

    __slots__ = ("body", "headers", "keep_alive", "method", "path", "version")

    def __init__(self, method: str, path: str, version: str, headers: dict[bytes, bytes]) -> None:
        self.method = method
        self.path = path
        self.version = version
        self.headers = headers
        self.body = bytearray()
        self.keep_alive = True


class Exchange:
    """One request and its answer. For the loop's thread. Once the client is gone every call does nothing.

    on_gone  called once if the client goes away before the answer is complete
    on_room  called when a connection that was not `writable` is again
    on_over  called once with the answer's status when it is complete, with 499 if the client went before
    openai   whether its client expects OpenAI's shape of errors
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "done",
        "gone",
        "on_gone",
        "on_over",
        "on_room",
        "openai",
        "request",
        "started",
        "status",
    )

    def __init__(self, connection: Connection, request: Request) -> None:
        self._connection = connection
        self._chunked = False
        self.openai = wants_openai(request.path)
        self.request = request
        self.started = time.perf_counter()
        self.status = 0
        self.done = False
        self.gone = False
        self.on_gone: Callable[[], object] | None = None
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
            head = self._head(200, STREAM_HEAD if self._chunked else STREAM_HEAD[:-1])
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
        return head(status, connection.owner.date, headers) + close + b"\r\n"

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


def head(status: int, date: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Write a response's head but for `connection` and the empty line. Each 503 says when to try again."""
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    if status == 503:
        lines += RETRY_AFTER
    return b"HTTP/1.1 %d %b\r\ndate: %b\r\n%b" % (status, phrase(status), date, lines)
