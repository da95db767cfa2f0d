"""Who connects is taken in at once, however busy the loop is and whatever the system runs out of."""

import asyncio
import errno
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop
from outfeed.gateway.accepting import Acceptor
from outfeed.gateway.server import listen

from .conftest import LIMIT_S, Serve, eventually


@pytest.mark.parametrize(("at_once", "least", "most"), [(128, 0, 10), (5, 5, 50)])
def test_all_who_came_during_a_long_turn_are_taken_in_by_the_next(
    serve: Serve, at_once: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or by the next ones, where they are so many that the streams that run would wait for it."""
    monkeypatch.setattr("outfeed.gateway.accepting.AT_ONCE", at_once)
    running = serve(lambda played: played.end("fine"))
    busy = threading.Event()
    running.loop.call_soon_threadsafe(busy.wait)
    clients = [running.raw() for _ in range(50)]
    for client in clients:
        client.post("/generate", {"text": "x"})

    async def turns_until_all_are_in() -> int:
        turns = 0
        while len(running.server.connections.open) < len(clients):
            await asyncio.sleep(0)
            turns += 1
        return turns

    counted = asyncio.run_coroutine_threadsafe(turns_until_all_are_in(), running.loop)
    busy.set()
    assert least <= counted.result(LIMIT_S) < most, "one in each turn would take 50"
    for client in clients:
        client.until(b"fine")
    acceptor = running.server._acceptor
    assert acceptor is not None
    eventually(lambda: not acceptor._adopting, "nothing is kept of who is in")


class Failing(socket.socket):
    """A listening socket whose next calls of accept() fail."""

    failures: list[int]

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            number = self.failures.pop()
            raise OSError(number, os.strerror(number))
        return super().accept()


class Greeting(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        writing = cast(asyncio.WriteTransport, transport)
        writing.write(b"hello")
        writing.close()


@contextmanager
def accepting(failures: list[int]) -> Iterator[tuple[Acceptor, Failing, asyncio.AbstractEventLoop]]:
    plain = listen("127.0.0.1", 0)
    sock = Failing(fileno=plain.detach())
    sock.failures = failures
    sock.setblocking(False)
    sock.listen(8)
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def make() -> Acceptor:
        return Acceptor(sock, Greeting)

    acceptor = asyncio.run_coroutine_threadsafe(make(), loop).result(LIMIT_S)
    yield acceptor, sock, loop
    loop.call_soon_threadsafe(acceptor.close)
    loop.call_soon_threadsafe(acceptor.close)  # again: it does nothing
    loop.call_soon_threadsafe(loop.stop)
    thread.join(LIMIT_S)
    assert sock.fileno() == -1
    loop.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EPROTO])
def test_who_comes_while_there_is_no_descriptor_for_him_waits_and_is_served(
    number: int, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        accepting([number] * 3) as (_, sock, _),
        closing(socket.create_connection(sock.getsockname())) as client,
    ):
        client.settimeout(LIMIT_S)
        assert client.recv(5) == b"hello"
        assert not sock.failures
    said = [record.message for record in caplog.records]
    assert said == [f"cannot accept connections for 0.1 s: {os.strerror(number)}"] * 3, (
        "once a rest, not all along"
    )


def test_nothing_is_tried_while_it_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """He who could not be taken in waits in the queue, so that each turn of the loop would try again."""
    monkeypatch.setattr("outfeed.gateway.accepting.REST_S", 3600.0)
    with (
        accepting([errno.EMFILE] * 1000) as (_, sock, loop),
        closing(socket.create_connection(sock.getsockname())),
    ):
        eventually(lambda: len(sock.failures) < 1000, "a failure")

        async def turns() -> None:
            for _ in range(50):
                await asyncio.sleep(0.001)

        asyncio.run_coroutine_threadsafe(turns(), loop).result(LIMIT_S)
        assert len(sock.failures) == 999


def test_one_that_cannot_be_taken_in_is_let_go(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with accepting([]) as (acceptor, sock, loop):

        async def refuse(*_: object) -> None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        acceptor._loop = cast(
            Any, SimpleNamespace(create_task=loop.create_task, connect_accepted_socket=refuse)
        )
        with closing(socket.create_connection(sock.getsockname())) as client:
            client.settimeout(LIMIT_S)
            assert client.recv(5) == b""
        acceptor._loop = loop
        with closing(socket.create_connection(sock.getsockname())) as client:
            client.settimeout(LIMIT_S)
            assert client.recv(5) == b"hello"
    (said,) = (record.message for record in caplog.records if record.name == "outfeed.gateway.accepting")
    assert said.startswith("lost a connection while taking it in: ")


def test_who_finds_no_memory_for_a_rest_goes_on_without_one() -> None:
    with accepting([]) as (acceptor, sock, loop):

        def no_memory(*_: object) -> None:
            raise MemoryError

        without_timers = {
            name: getattr(loop, name)
            for name in ("add_reader", "remove_reader", "create_task", "connect_accepted_socket")
        }
        acceptor._loop = cast(Any, SimpleNamespace(**without_timers, call_later=no_memory))
        sock.failures = [errno.ENOMEM]
        with closing(socket.create_connection(sock.getsockname())) as client:
            client.settimeout(LIMIT_S)
            assert client.recv(5) == b"hello"
        assert not sock.failures


def test_one_that_went_away_again_holds_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with (
        accepting([errno.ECONNABORTED, errno.EINTR]) as (_, sock, _),
        closing(socket.create_connection(sock.getsockname())) as client,
    ):
        client.settimeout(LIMIT_S)
        assert client.recv(5) == b"hello"
    assert not caplog.records


def test_it_may_be_closed_while_it_rests() -> None:
    with accepting([errno.EMFILE] * 1000) as (acceptor, sock, loop):
        with closing(socket.create_connection(sock.getsockname())):
            eventually(lambda: len(sock.failures) < 1000, "a failure")
            loop.call_soon_threadsafe(acceptor.close)
            eventually(lambda: sock.fileno() == -1, "its end")
            eventually(lambda: acceptor._rest is not None and acceptor._rest.cancelled(), "no more tries")
        left = len(sock.failures)
    assert len(sock.failures) == left
