"""How the ranks of a replay scheduler share requests: rank 0 hands them on over a socket.

The socket's name is abstract, so that it goes with its process. A rank that went away is found by its closed
end: before anyone can see on the board that it is gone. Must not know how requests are decoded.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

from ..ring.frames import TAG_OF, Abort, Control, Generate, Tag, decode, encode
from ..ring.process import readable
from ..ring.route import reader_of, slot_of
from .port import SchedulerPort

Received = Generate | Abort | Control

_HEAD: Final = struct.Struct("<II")  # tag, bytes of the body
_READ: Final = 1 << 16
RETRY_S: Final = 0.05
"""How soon a rank that is not connected tries again, and rank 0 what a full socket did not take."""


class Sharing(Protocol):
    """One rank's side."""

    def share(self, port: SchedulerPort, received: Sequence[Received]) -> list[Received]:
        """Return what is this rank's to handle, of what its port received and what others handed on."""

    def wait(self, port: SchedulerPort, timeout: float) -> None:
        """Sleep until there may be something, at most `timeout` seconds."""

    def close(self) -> None:
        """Hang up: before the port is closed, or what was just handed on would wait for nobody."""


def sharing(port: SchedulerPort, rank: int) -> Sharing | None:
    """Return a rank's side; None for one that is alone.

    Raises OSError when there is no socket to be had.
    """
    if port.config.ranks == 1:
        return None
    name = f"\0outfeed-{port.config.instance}.replay"
    return Taking(name) if rank else Handing(name)


class Handing:
    """Rank 0's: it gives each request in turn to itself and to every rank that is there and not behind."""

    def __init__(self, name: str) -> None:
        self._listener = _unix()
        self._listener.bind(name)
        self._listener.listen()
        self._others: list[_Peer] = []  # who is next comes first
        self._given = 0

    def share(self, port: SchedulerPort, received: Sequence[Received]) -> list[Received]:
        """Hand on what is not rank 0's own."""
        self._look()
        return [message for message in received if not self._hand_on(port, message)]

    def wait(self, port: SchedulerPort, timeout: float) -> None:
        """Sleep until a gateway says something, or a full socket may have room."""
        port.wait(RETRY_S if any(other.is_behind for other in self._others) else timeout)

    def close(self) -> None:
        """Let nobody connect any more, and hang up."""
        for peer in (self._listener, *(other.link for other in self._others)):
            peer.close()

    def _hand_on(self, port: SchedulerPort, message: Received) -> bool:
        """Whether another rank has it now, and it alone."""
        if isinstance(message, Control):
            return False
        if isinstance(message, Abort):  # whose it is, is not noted: it ends nothing where there is nothing
            self._others = [other for other in self._others if other.abort(message.route)]
            return False
        self._given += 1
        while self._others and self._given % (1 + len(self._others)):
            other = self._others.pop(0)
            if other.is_behind:  # or it hangs: it gets no more until it has taken that
                self._others.append(other)
                break
            if other.give(message):
                self._others.append(other)
                return True
        port.adopt(message)
        return False

    def _look(self) -> None:
        with suppress(BlockingIOError):
            while True:
                link, _ = self._listener.accept()
                if _is_ours(link):
                    self._others.append(_Peer(link))
        self._others = [other for other in self._others if other.is_there()]


class _Peer:
    """Another rank, as rank 0 has it. Nothing waits for it: what its socket does not take is kept.

    That is one request at most, and aborts: one for each slot of a gateway. While anything is kept no request
    is given, so what a slot's second abort is of cannot be this rank's.
    """

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self.link = link
        self.unsent = bytearray()
        self.aborts: dict[tuple[int, int], int] = {}
        """By reader and slot, the route to abort once all else is sent."""

    @property
    def is_behind(self) -> bool:
        """Whether anything is kept for it."""
        return bool(self.unsent or self.aborts)

    def give(self, request: Generate) -> bool:
        """Send a request, now or later; False when the rank is gone."""
        self._pack(request)
        return self.is_there()

    def abort(self, route: int) -> bool:
        """Send an abort, now or later; False when the rank is gone."""
        self.aborts.setdefault((reader_of(route), slot_of(route)), route)
        return self.is_there()

    def is_there(self) -> bool:
        """Send what is left; False when it is gone."""
        try:
            if not self.link.recv(1):
                raise ConnectionResetError
        except BlockingIOError:
            pass
        except OSError:
            self.link.close()
            return False
        try:
            while self.is_behind:
                if not self.unsent:
                    for route in self.aborts.values():
                        self._pack(Abort(route))
                    self.aborts.clear()
                del self.unsent[: self.link.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.link.close()
            return False
        return True

    def _pack(self, message: Generate | Abort) -> None:
        body = encode(message)
        self.unsent += _HEAD.pack(TAG_OF[type(message)], len(body)) + body


class Taking:
    """Another rank's: it takes what rank 0 hands on, and finds the next rank 0 when that one is gone."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._link: socket.socket | None = None
        self._read = bytearray()
        self._due = 0.0

    def share(self, port: SchedulerPort, received: Sequence[Received]) -> list[Received]:
        """Take what was handed on, behind what the port says itself.

        What comes from a rank 0 that is gone ends: gateways end it, if they live, and the next rank 0 knows
        nothing of it. Whether that one lives is looked at behind `adopt`: what dies later the port sees.
        """
        taken = self._taken()
        for message in taken:
            port.adopt(message)
        if taken and not self._is_linked():
            for message in taken:
                port.adopt(Abort(message.route))
            taken = []
        return [*received, *taken]

    def wait(self, port: SchedulerPort, timeout: float) -> None:
        """Sleep until rank 0 hands something on."""
        if self._link is None:
            time.sleep(min(RETRY_S, timeout))
        else:
            readable(self._link, timeout)

    def close(self) -> None:
        """Hang up."""
        if self._link is not None:
            self._link.close()
        self._link = None
        self._read.clear()  # what is here of a message whose end will not come

    def _taken(self) -> list[Generate | Abort]:
        if self._link is None and time.monotonic() >= self._due:
            self._due = time.monotonic() + RETRY_S
            self._connect()
        try:
            while self._link is not None:
                data = self._link.recv(_READ)
                self._read += data
                if not data:
                    self.close()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        return self._whole()

    def _is_linked(self) -> bool:
        """Whether rank 0 is still there, whatever it has said."""
        if self._link is None:
            return False
        poll = select.poll()
        poll.register(self._link, select.POLLRDHUP)
        return not poll.poll(0)

    def _whole(self) -> list[Generate | Abort]:
        messages: list[Generate | Abort] = []
        while len(self._read) >= _HEAD.size:
            tag, size = _HEAD.unpack_from(self._read)
            if len(self._read) < _HEAD.size + size:
                break
            message = decode(Tag(tag), self._read[_HEAD.size : _HEAD.size + size])
            assert isinstance(message, Generate | Abort)
            messages.append(message)
            del self._read[: _HEAD.size + size]
        return messages

    def _connect(self) -> None:
        link = _unix()
        try:
            link.connect(self._name)
        except OSError:  # no rank 0 yet, or one that is too busy to accept: again in a moment
            link.close()
            return
        if _is_ours(link):
            self._link = link


def _unix() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)


def _is_ours(link: socket.socket) -> bool:
    """Whether the other end is this user's; anyone may take a name that is free. Closes it if not."""
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user == os.getuid():
        return True
    link.close()
    return False
