"""HTTP/1.1 on one connection: requests in, answers out, and every limit that keeps a client in its bounds.

A connection handles one request at a time and keeps pipelined ones in order. A client that closes, even
only its sending half, is gone, and whoever answers it is told at once. Deadlines are kept as one number per
connection and looked at once a second (`Connections.sweep`), so that thousands of idle streams cost nothing.
Whether a client reads what is sent is another matter than what it has to send, and watched beside that.
Must not know any endpoint, nor what is being answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import socket
import sys
import termios
import time
from collections import deque
from email.utils import formatdate
from math import inf
from typing import Final, cast

from .exchange import STREAM_HEAD, Exchange, Handler, Request, head
from .limits import Limits
from .parsing import Refusal, RequestParser
from .shapes import FAILED, error_json, wants_openai

log = logging.getLogger(__name__)

LATE_S: Final = 0.05
"""How long the head of a stream waits for the first event, to go out with it; at most twice that."""
LINGER_S: Final = 2.0
"""How long what a refused client still sends is read and dropped, so that it gets to read the refusal."""
VANISHED_MS: Final = 60_000
"""Sent bytes unacknowledged for this long: the client's machine is gone."""

ENDED: Final = frozenset((7, 8, 9, 11))
"""TCP_CLOSE, TCP_CLOSE_WAIT, TCP_LAST_ACK and TCP_CLOSING of linux/tcp_states.h: nothing comes any more."""


class Connections:
    """Every connection of one process, and what they share."""

    def __init__(self, handler: Handler, limits: Limits) -> None:
        self.handler = handler
        self.limits = limits
        self.open: set[Connection] = set()
        self.closing = False
        """Draining: each answer is its connection's last."""
        self.sending: set[Connection] = set()
        """Those whose client has to read before anything goes on: full, or closing."""
        self.unread: set[Connection] = set()
        """Those that are not read for now."""
        self._soon: list[Connection] = []
        self._late: dict[Connection, float] = {}
        """Those whose stream's head waits for the first event, and until when; oldest first."""
        self._late_looked_at = False
        self.date = b""
        self.stream_head = b""
        self.sweep()

    def __call__(self) -> Connection:
        """Make the protocol of an accepted connection."""
        return Connection(self)

    def sweep(self) -> None:
        """Cut off who is past a deadline, or reads nothing any more. Call once a second."""
        self.date = formatdate(usegmt=True).encode()
        self.stream_head = head(200, self.date, STREAM_HEAD) + b"\r\n"
        now = time.monotonic()
        for connection in [one for one in self.open if one.deadline < now]:
            connection.overdue()
        for connection in list(self.sending):
            connection.look_at_progress(now)
        for connection in list(self.unread):
            connection.look_for_end()

    def flush_soon(self, connection: Connection) -> None:
        """Send what the connection has when this turn of the loop is over."""
        if not self._soon:
            asyncio.get_running_loop().call_soon(self._flush_soon)
        self._soon.append(connection)

    def flush_late(self, connection: Connection) -> None:
        """Send what the connection has after a moment, if it has not gone out by then."""
        self._late.setdefault(connection, time.monotonic() + LATE_S)
        if not self._late_looked_at:
            self._late_looked_at = True
            asyncio.get_running_loop().call_later(LATE_S, self._flush_late)

    def flushed(self, connection: Connection) -> None:
        """Nothing of the connection waits any more."""
        self._late.pop(connection, None)

    def _flush_soon(self) -> None:
        soon, self._soon = self._soon, []
        for connection in soon:
            connection.flush()

    def _flush_late(self) -> None:
        now = time.monotonic()
        # Those who came since wait on: their first event is most likely on its way.
        for connection in [one for one, until in self._late.items() if until <= now]:
            del self._late[connection]
            connection.flush()
        self._late_looked_at = bool(self._late)
        if self._late:
            asyncio.get_running_loop().call_later(LATE_S, self._flush_late)

    def drain(self) -> None:
        """Close idle connections, and every other one after its answer."""
        self.closing = True
        for connection in list(self.open):
            connection.close_if_idle()

    def abort(self) -> None:
        """Cut off everybody."""
        for connection in list(self.open):
            connection.abort()


class Connection(asyncio.Protocol):
    """One client's connection; made for it by `Connections`."""

    def __init__(self, owner: Connections) -> None:
        self.owner = owner
        self.deadline = inf
        self.paused = False
        self._untaken = 0  # bytes that the client had not taken when it was last looked at
        self._stalls = inf  # when it counts as stalled, unless it takes some
        self._transport: asyncio.Transport | None = None
        self._parser = RequestParser(owner.limits, self._listen, self._listen, self._came)
        self._current: Exchange | None = None
        self._waiting: deque[Request] = deque()
        self._out: list[bytes] = []
        self.unsent = 0
        self._marked = False
        self._refusal: Refusal | None = None  # to be said when what came before it has been answered
        self._lingering = False

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
            self._refuse(Refusal(503, f"this server holds {limits.connections} connections; try again soon"))

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._lingering or self._refusal is not None:
            return
        try:
            self._parser.feed(data)
        except Refusal as refusal:
            self._refuse(refusal)

    def eof_received(self) -> None:
        """The client will send no more: it is gone. What is there is still sent."""
        self._gone()
        self._close()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is no more."""
        self.owner.open.discard(self)
        self.owner.sending.discard(self)
        self.owner.unread.discard(self)
        self.deadline = inf
        self._transport = None
        self._parser.close()
        self._gone()

    def pause_writing(self) -> None:
        """The client reads too slowly for what is sent."""
        self.paused = True
        self._watch()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.paused = False
        if self._transport is not None and not self._transport.is_closing():
            self.owner.sending.discard(self)
            if not (self._parser.begun or self._lingering):
                self._listen()  # if it is idle, then from now on
        if self._current is not None and self._current.on_room is not None:
            self._current.on_room()

    # What the parser calls.

    def _listen(self) -> None:
        """Set the deadline of what the client has to do next, if everything before it has been answered."""
        if self._current is not None or self._waiting:
            return
        limits, parser = self.owner.limits, self._parser
        if parser.request is not None:
            seconds = limits.body_s
            if parser.asks:
                parser.asks = False
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        else:
            seconds = limits.head_s if parser.begun else limits.idle_s
        self.deadline = time.monotonic() + seconds

    def _came(self, request: Request) -> None:
        """Answer a request, or let it wait for the one before it; behind the last answer there is none."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._current is None and not self._waiting:
            self._handle(request)
            return
        self._waiting.append(request)
        if len(self._waiting) == self.owner.limits.pipelined:
            self._transport.pause_reading()
            self.owner.unread.add(self)

    # What an exchange calls.

    def write(self, data: bytes) -> None:
        """Send bytes at the end of this turn; nothing when the connection is gone."""
        if not self._marked:
            self.owner.flush_soon(self)  # first: what finds no memory for it is not half sent
            self._marked = True
        self._out.append(data)
        self.unsent += len(data)

    def write_late(self, data: bytes) -> None:
        """Send bytes with what follows them, or by themselves when nothing does for a moment."""
        if not self._marked:
            self.owner.flush_late(self)
        self._out.append(data)
        self.unsent += len(data)

    def flush(self) -> None:
        """Send what is there, in one system call."""
        self._marked = False
        if out := self._out:
            data = out[0] if len(out) == 1 else b"".join(out)
            out.clear()
            self.owner.flushed(self)
            full, self.unsent = self.unsent > self.owner.limits.write_bytes, 0
            if self._transport is not None:
                self._transport.write(data)
            current = self._current
            if full and not self.paused and current is not None and current.on_room is not None:
                current.on_room()  # the client took it all; what is written now goes out in the next turn

    def ended(self, exchange: Exchange) -> None:
        """An answer is complete: close, or go on to the next request."""
        self._current = None
        if not exchange.request.keep_alive or (self.owner.closing and not self._waiting):
            self._close()
        elif self._waiting:
            # Not from here: a pipeline of thousands must not become a recursion of thousands.
            asyncio.get_running_loop().call_soon(self._next)
        elif self._refusal is not None:
            self._refuse(self._refusal)
        else:
            self._listen()

    def abort(self) -> None:
        """Cut the connection off at once."""
        if self._transport is not None:
            self._transport.abort()

    def close_if_idle(self) -> None:
        """Close unless a request is being answered or read."""
        if self._current is None and not self._parser.begun and not self._waiting:
            self._close()

    def overdue(self) -> None:
        """The deadline has passed."""
        if self._lingering:
            if self._count_untaken() == 0:
                self.abort()
            elif self not in self.owner.sending:
                self._watch()  # an answer before the refusal is being read, for as long as that goes on
        elif self._parser.request is not None:
            self._refuse(Refusal(408, f"the body was not complete within {self.owner.limits.body_s:g} s"))
        elif self._parser.begun:
            self._refuse(Refusal(408, f"the head was not complete within {self.owner.limits.head_s:g} s"))
        elif not self.paused:
            self._close()

    def look_at_progress(self, now: float) -> None:
        """Cut the client off if it has read nothing for too long."""
        before, self._untaken = self._untaken, self._count_untaken()
        if self._untaken < before:
            self._stalls = now + self.owner.limits.stall_s
        elif self._stalls < now:
            self.abort()

    def look_for_end(self) -> None:
        """See that the client has closed while the connection is not read: nobody else says so then."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        if sock is not None and _is_tcp(sock):
            with contextlib.suppress(OSError):
                if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in ENDED:
                    self.eof_received()

    def _next(self) -> None:
        if self._transport is None or not self._waiting:
            return  # gone meanwhile
        request = self._waiting.popleft()
        if len(self._waiting) < self.owner.limits.pipelined:
            self._transport.resume_reading()
            self.owner.unread.discard(self)
        self._handle(request)

    def _handle(self, request: Request) -> None:
        exchange = self._current = Exchange(self, request)
        self.deadline = inf
        try:
            self.owner.handler(exchange)
        except Exception:
            log.exception("answering %s %s failed", request.method, request.path[:100])
            exchange.respond(500, error_json(500, FAILED, exchange.openai))

    def _gone(self) -> None:
        self._waiting.clear()
        current, self._current = self._current, None
        if current is not None and not current.done:
            current.lost()

    def _close(self) -> None:
        """Close when the client has taken what there is."""
        self.deadline = inf
        self.flush()
        if self._transport is not None:
            self._transport.close()
            self._watch()

    def _watch(self) -> None:
        """Look once a second whether the client reads."""
        self._untaken = sys.maxsize  # the first look sets the time
        self._stalls = inf
        self.owner.sending.add(self)

    def _count_untaken(self) -> int:
        """Count the bytes that wait here, and those in the kernel that the client's has not acknowledged."""
        if self._transport is None:
            return 0
        waiting = self._transport.get_write_buffer_size()
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            with contextlib.suppress(OSError):
                waiting += int.from_bytes(
                    fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder
                )
        return waiting

    def _refuse(self, refusal: Refusal) -> None:
        """Answer what is no request and close, but let the client read the answer before a reset."""
        if self._transport is None or self._lingering:
            return
        if self._current is not None or self._waiting:
            self._refusal = refusal  # those came before it, and nothing is wrong with them
            return
        body = error_json(refusal.status, refusal.message, wants_openai(self._parser.path))
        headers = (
            (b"connection", b"close"),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        )
        self.write(head(refusal.status, self.owner.date, headers) + b"\r\n" + body)
        self._lingering = True
        self.deadline = time.monotonic() + LINGER_S
        self.flush()
        if self._transport.can_write_eof():
            self._transport.write_eof()


def _tune(sock: socket.socket | None) -> None:
    """Send at once, and notice a client whose machine is gone without a word."""
    if sock is None or not _is_tcp(sock):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, VANISHED_MS)


def _is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6)
