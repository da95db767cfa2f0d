"""The gateways of one instance among each other: an abort, or a scrape, reaches whichever it concerns.

Clients reach one of several processes on a port, and not the one they mean. So each process listens on a
datagram socket of its own (a name in the kernel, no file that could be left behind), passes on aborts of
requests it does not have, and asks the others for their counts when it is scraped. Only processes of the
same user are listened to. A lost message costs an abort or a count, never a wait without end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Annotated, Final

import msgspec

log = logging.getLogger(__name__)

WAIT_S: Final = 0.25
"""How long a scrape waits for the others."""
MAX_MESSAGE: Final = 128 << 10
MAX_TURN: Final = 64
"""Messages handled before the loop gets its turn."""
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid: man 7 unix, SCM_CREDENTIALS

_Rid = Annotated[str, msgspec.Meta(max_length=1024)]


class _Message(msgspec.Struct, array_like=True, tag=True):
    sender: int


class _Abort(_Message):
    rid: _Rid


class _Ask(_Message):
    number: int


class _Tell(_Message):
    number: int
    state: bytes


_decode: Final = msgspec.msgpack.Decoder(_Abort | _Ask | _Tell).decode
_encode: Final = msgspec.msgpack.Encoder().encode


class _Scrape:
    """Counts asked for, and who has not answered yet."""

    def __init__(self, complete: asyncio.Future[None], missing: set[int]) -> None:
        self.complete = complete
        self.missing = missing

    def answered(self, sender: int) -> None:
        """Note that a gateway has answered; the last one completes it."""
        self.missing.discard(sender)
        if not self.missing and not self.complete.done():
            self.complete.set_result(None)


class Siblings:
    """Gateway `me` of an instance that has `count` of them. For the loop's thread.

    on_abort(rid) aborts a request of this gateway's; state() is this gateway's counts, in bytes.
    """

    def __init__(
        self,
        instance: str,
        me: int,
        count: int,
        on_abort: Callable[[str], object],
        state: Callable[[], bytes],
    ) -> None:
        self._instance = instance
        self._me = me
        self._others = [other for other in range(count) if other != me]
        self._on_abort = on_abort
        self._state = state
        self._numbers = itertools.count(1)
        self._scrapes: dict[int, _Scrape] = {}
        self._last: dict[int, bytes] = {}
        """What each of the others told last: a count must not fall because its gateway is late once."""
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def start(self) -> None:
        """Listen, in the running loop.

        Raises:
            OSError: another process has this gateway's number, or sockets have run out.
        """
        self._socket.bind(self._address(self._me))
        asyncio.get_running_loop().add_reader(self._socket, self._readable)

    def close(self) -> None:
        """Listen no more."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def abort(self, rid: str) -> None:
        """Have the others abort the request of that rid, if one of them has it."""
        self._send(_Abort(self._me, rid), self._others)

    async def states(self) -> list[bytes]:
        """Return the counts of the others that run: now, or when they last told them if they are late."""
        number = next(self._numbers)
        # Who cannot be reached is not waited for; who does not answer is, for a moment.
        absent = self._send(_Ask(self._me, number), self._others)
        if missing := set(self._others).difference(absent):
            scrape = self._scrapes[number] = _Scrape(asyncio.get_running_loop().create_future(), missing)
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(scrape.complete, WAIT_S)
            finally:
                del self._scrapes[number]
        for other in absent:
            self._last.pop(other, None)
        return [self._last[other] for other in sorted(self._last)]

    def _send(self, message: _Message, to: Iterable[int]) -> list[int]:
        """Send to each; return those who do not run. Who is too far behind to take it is late."""
        data, absent = _encode(message), []
        for other in to:
            try:
                self._socket.sendto(data, self._address(other))
            except BlockingIOError:
                continue
            except OSError:
                absent.append(other)
        return absent

    def _readable(self) -> None:
        for _ in range(MAX_TURN):
            try:
                data, ancillary, _, _ = self._socket.recvmsg(
                    MAX_MESSAGE, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except BlockingIOError:
                return
            if not _is_ours(ancillary):
                log.warning("dropped a message of another user's process")
                continue
            try:
                self._handle(_decode(data))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                log.warning("dropped a message that is none of a gateway's: %s", error)

    def _handle(self, message: _Abort | _Ask | _Tell) -> None:
        match message:
            case _Abort(rid=rid):
                self._on_abort(rid)
            case _Ask(sender=sender, number=number) if sender in self._others:
                self._send(_Tell(self._me, number, self._state()), [sender])
            case _Tell(sender=sender, number=number, state=state) if sender in self._others:
                self._last[sender] = state
                if (scrape := self._scrapes.get(number)) is not None:
                    scrape.answered(sender)

    def _address(self, gateway: int) -> bytes:
        return f"\0outfeed-{self._instance}.gateway{gateway}".encode()


def _is_ours(ancillary: list[tuple[int, int, bytes]]) -> bool:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= _CREDENTIALS.size:
            _, uid, _ = _CREDENTIALS.unpack_from(data)
            return bool(uid == os.getuid())
    return False
