"""One connection's bytes as requests, which llhttp (httptools) reads; and what of them is refused.

Must not know the connection: it is fed bytes, and calls back as requests come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import httptools

from .exchange import Request
from .limits import Limits
from .shapes import FAILED

log = logging.getLogger(__name__)

Pair = tuple[bytes, bytes]


class Refusal(Exception):
    """What came is no request that this server takes: it is answered with this, and its connection closed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class RequestParser:
    """Makes a connection's requests.

    on_begin    called at a request's first byte
    on_head     called when its head is complete; it is in `request` until its body is complete, too
    on_request  called with it when all of it is there
    """

    def __init__(
        self,
        limits: Limits,
        on_begin: Callable[[], None],
        on_head: Callable[[], None],
        on_request: Callable[[Request], None],
    ) -> None:
        self.begun = False
        """Whether a request has begun that is not complete."""
        self.request: Request | None = None
        self.asks = False
        """Whether the client waits to be told to send the body (`Expect: 100-continue`)."""
        self._limits = limits
        self._on_begin = on_begin
        self._on_head = on_head
        self._on_request = on_request
        self._parser = httptools.HttpRequestParser(self)
        self._refusal: Refusal | None = None
        self._fed = 0  # bytes since a request or its head was complete, or a piece of its body came
        self._url = b""
        self._lines: list[Pair] = []
        self._head_bytes = 0
        self._last = False  # the client has said that it sends no further request
        self._offered = b""  # the request line of a request that offers an upgrade

    def feed(self, data: bytes) -> None:
        """Take bytes.

        Raises:
            Refusal: they break a limit or the protocol. Nothing may be fed any more.

        What follows a request that its client called the connection's last is passed over (RFC 9112 9.6).
        """
        self._fed += len(data)
        pieces: list[bytes | memoryview] = [data]
        while pieces:
            piece = pieces.pop()
            try:
                self._parser.feed_data(piece)
            except httptools.HttpParserUpgrade as offer:
                # httptools takes an offer as accepted and leaves off behind the head, the body unread. There
                # is nothing to upgrade to here: the same head goes in again without it, then the rest.
                self._parser = httptools.HttpRequestParser(self)
                pieces += (memoryview(piece)[offer.args[0] :], self._without_offer())
            except httptools.HttpParserError as error:
                if self._last:
                    return
                refusal, self._refusal = self._refusal, None
                if refusal is None and isinstance(error, httptools.HttpParserCallbackError):
                    # Its bytes are well-formed: what they were handed to failed, for want of memory say.
                    log.error("a request could not be read", exc_info=error)
                    refusal = Refusal(500, FAILED)
                raise refusal or Refusal(
                    400, f"this is not HTTP/1.1 as this server reads it: {error}"
                ) from None
        if self._fed > self._limits.head_bytes and not self._last:
            raise self._head_too_large() if self.request is None else self._no_body()

    def close(self) -> None:
        """Let go of who is called back and of llhttp: both have this, in a circle. Feed nothing any more."""
        del self._on_begin, self._on_head, self._on_request, self._parser

    @property
    def path(self) -> str:
        """The path of the request that is being read, or was last, as far as it has come; "" for none."""
        return _path(self._url) or ""

    # What llhttp calls.

    def on_message_begin(self) -> None:
        """A request's first byte."""
        self._url, self._lines, self._head_bytes = b"", [], 0
        self._offered = b""
        self.request, self.begun, self.asks = None, True, False
        self._on_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; or a trailer, which RFC 9110 6.5.1 forbids to take as one, and nobody here wants."""
        self._count(len(name) + len(value) + 4)
        if self.request is not None:
            return
        self._lines.append((name.lower(), value.rstrip(b" \t")))  # llhttp leaves the space behind it
        if len(self._lines) > self._limits.headers:
            raise self._stop(431, f"more than {self._limits.headers} headers; send fewer")

    def on_headers_complete(self) -> None:
        """The head is complete."""
        parser, limits = self._parser, self._limits
        version = parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise self._stop(505, f"this server speaks HTTP/1.1, not HTTP/{version}")
        method = parser.get_method().decode("latin-1")
        if method == "CONNECT":
            raise self._stop(501, "this server is no proxy: ask it for one of its own paths")
        if parser.should_upgrade():
            self._offered = b"%b %b HTTP/%b\r\n" % (parser.get_method(), self._url, version.encode())
            return
        if (path := _path(self._url)) is None:
            raise self._stop(400, "the request's target is neither a path nor an address; send a path")
        headers = self._headers(version)
        request = Request(method, path, version, headers)
        request.keep_alive = parser.should_keep_alive()
        # llhttp has seen that these are digits, and a number of 64 bits: but for zeros in front.
        length = int(headers.get(b"content-length", b"").lstrip(b"0") or b"0")
        if length > limits.body_bytes:
            raise self._stop(413, self._body_too_large(f"{length} bytes"))
        self.asks = version == "1.1" and headers.get(b"expect", b"").lower() == b"100-continue"
        self.request = request
        self._fed = 0
        self._on_head()

    def on_body(self, piece: bytes) -> None:
        """A piece of the body."""
        request = self.request
        assert request is not None
        request.body += piece
        self.asks = False
        self._fed = 0
        if len(request.body) > self._limits.body_bytes:
            raise self._stop(413, self._body_too_large("more"))

    def on_message_complete(self) -> None:
        """A request is complete."""
        if self._offered:
            return  # only its head, which comes again
        request, self.request = self.request, None
        assert request is not None
        self._fed = 0
        self.begun = self.asks = False
        self._last = not request.keep_alive
        self._on_request(request)

    def _headers(self, version: str) -> dict[bytes, bytes]:
        """Return the headers by name; the lines of a repeated one are joined."""
        headers: dict[bytes, bytes] = {}
        hosts = 0
        for name, value in self._lines:
            known = headers.get(name)
            headers[name] = value if known is None else known + b", " + value
            hosts += name == b"host"
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            raise self._stop(400, f"a request has one Host header, this one has {hosts or 'none'}")
        if (coding := headers.get(b"transfer-encoding")) is not None:
            if version == "1.0":
                raise self._stop(400, "HTTP/1.0 has no Transfer-Encoding; send Content-Length, or HTTP/1.1")
            if coding.lower() != b"chunked":
                raise self._stop(501, "the only Transfer-Encoding that is read here is chunked")
        return headers

    def _without_offer(self) -> bytes:
        """Write the head as it was read, but for what offers another protocol."""
        headers = [b"%b: %b\r\n" % pair for pair in self._lines if pair[0] != b"upgrade"]
        return self._offered + b"".join(headers) + b"\r\n"

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._limits.head_bytes:
            raise self._stop(431, self._head_too_large().message)

    def _stop(self, status: int, message: str) -> Refusal:
        """Make llhttp stop here; it only passes on that a callback failed, so keep why."""
        self._refusal = Refusal(status, message)
        return self._refusal

    def _head_too_large(self) -> Refusal:
        limit = self._limits.head_bytes
        return Refusal(431, f"the request line and headers take more than {limit} bytes; send less")

    def _no_body(self) -> Refusal:
        limit = self._limits.head_bytes
        return Refusal(431, f"the body's chunks have more than {limit} bytes around them; send less")

    def _body_too_large(self, size: str) -> str:
        return f"the body has {size}; at most {self._limits.body_bytes} bytes are taken"


def _path(target: bytes) -> str | None:
    """Return the path of a request's target, without the query; None if it has none."""
    if target[:1] not in (b"/", b"*"):
        # A proxy's form of it, scheme and host and all.
        try:
            target = httptools.parse_url(target).path or b"/"
        except httptools.HttpParserInvalidURLError:
            return None
    return target.partition(b"?")[0].decode("latin-1")
