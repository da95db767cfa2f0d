"""Connections of a listening socket, taken in as fast as they come.

libuv accepts one connection in each turn of the loop. Where hundreds of streams keep a turn busy for tens of
milliseconds, new clients would wait for seconds in the kernel's queue: here each turn takes all who are
there, up to a limit. Must not know what is said on them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

AT_ONCE: Final = 128
"""Connections taken in one turn of the loop: each costs the streams that wait some 30 us."""
REST_S: Final = 0.1
"""How long nothing is accepted when there was no descriptor or memory for a connection."""


class Acceptor:
    """Takes in what connects to a listening, non-blocking socket, in the running loop.

    protocol   makes the protocol of each connection
    """

    def __init__(self, sock: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        self._sock = sock
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._adopting: set[asyncio.Task[None]] = set()
        self._rest: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock, self._accept)

    def close(self) -> None:
        """Accept nothing more and close the socket; what was accepted stays. Again, it does nothing."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()
        if self._rest is not None:
            self._rest.cancel()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                accepted, _address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # none is left, or one that has gone: the next turn sees whether more wait
            except OSError as error:
                self._pause(error)
                return
            accepted.setblocking(False)
            task = self._loop.create_task(self._adopt(accepted))
            self._adopting.add(task)
            task.add_done_callback(self._adopting.discard)

    def _pause(self, error: OSError) -> None:
        """Leave who comes in the kernel's queue for a while: the loop would spin, for there he is still."""
        log.error("cannot accept connections for %g s: %s", REST_S, error.strerror)
        # First: without memory for it nobody would listen any more, for good. So the next turn tries again.
        self._rest = self._loop.call_later(REST_S, self._loop.add_reader, self._sock, self._accept)
        self._loop.remove_reader(self._sock)

    async def _adopt(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, accepted)
        except OSError as error:  # it went away meanwhile, or there is no memory for it
            log.info("lost a connection while taking it in: %s", error)
            accepted.close()
