"""What an endpoint says of an exchange that is over reaches nobody, and spoils no other answer."""

from collections.abc import Callable
from math import inf

import pytest
from outfeed.gateway import connection
from outfeed.gateway.exchange import Exchange

from .conftest import Running, Serve, eventually

GET = b"GET /mine HTTP/1.1\r\nhost: x\r\n\r\n"
LATER: list[Callable[[Exchange], None]] = [
    lambda exchange: exchange.respond(500, b"later"),
    lambda exchange: exchange.begin(b"later"),
    lambda exchange: exchange.begin(),
    lambda exchange: exchange.send(b"later"),
    lambda exchange: exchange.finish(b"later"),
    lambda exchange: exchange.finish(),
    lambda exchange: exchange.cut(),
]


def kept(running: Running) -> tuple[list[Exchange], list[int]]:
    """Have the exchanges that come left to the test, and how each is over."""
    exchanges: list[Exchange] = []
    over: list[int] = []

    def keep(exchange: Exchange) -> None:
        exchange.on_over = over.append
        exchanges.append(exchange)

    running.server.connections.handler = keep
    return exchanges, over


def do(running: Running, *calls: Callable[[], None]) -> None:
    """Make calls in one turn of the server's loop."""

    async def all_of_them() -> None:
        for call in calls:
            call()

    running.call(all_of_them())


@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("streamed", [False, True])
def test_nothing_follows_an_answer_that_is_complete(
    serve: Serve, streamed: bool, later: Callable[[Exchange], None]
) -> None:
    running = serve()
    exchanges, over = kept(running)
    client = running.raw()
    client.send(GET)
    eventually(lambda: exchanges, "the request")
    first = exchanges[0]
    if streamed:
        do(running, first.begin, lambda: first.finish(b"first"), lambda: later(first))
        client.until(b"first\r\n0\r\n\r\n")
    else:
        do(running, lambda: first.respond(200, b"first"), lambda: later(first))
        client.until(b"\r\n\r\nfirst")
    assert first.status == 200
    client.send(GET)
    eventually(lambda: len(exchanges) == 2, "the next request")
    do(running, lambda: later(first), lambda: exchanges[1].respond(200, b"second"), lambda: later(first))
    answer = client.until(b"second")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\nsecond")
    assert over == [200, 200]


@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("begun", [False, True])
def test_nothing_is_kept_for_a_client_that_is_gone(
    serve: Serve, begun: bool, later: Callable[[Exchange], None]
) -> None:
    running = serve()
    exchanges, over = kept(running)
    gone: list[bool] = []
    client = running.raw()
    client.send(GET)
    eventually(lambda: exchanges, "the request")
    (exchange,), (connection,) = exchanges, running.server.connections.open
    exchange.on_gone = lambda: gone.append(exchange.gone)
    if begun:
        do(running, lambda: exchange.begin(b"first"))
        client.until(b"first")
    client.close()
    eventually(lambda: not running.server.connections.open, "its end")
    do(running, lambda: later(exchange))
    assert (gone, over) == ([True], [499])
    assert exchange.status == (200 if begun else 0)
    assert not exchange.done
    assert (connection.unsent, connection.deadline) == (0, inf)


@pytest.mark.parametrize(
    ("request_line", "draining"),
    [
        (b"GET /mine HTTP/1.0\r\nconnection: keep-alive", False),  # it knows no chunks: only the end ends it
        (b"GET /mine HTTP/1.1\r\nhost: x", True),
        (b"GET /mine HTTP/1.1\r\nhost: x\r\nconnection: close", False),
    ],
)
def test_a_stream_that_ends_with_its_connection_says_so_in_its_head(
    serve: Serve, request_line: bytes, draining: bool
) -> None:
    running = serve()
    exchanges, _ = kept(running)
    client = running.raw()
    client.send(request_line + b"\r\n\r\n")
    eventually(lambda: exchanges, "the request")
    running.server.connections.closing = draining
    do(running, lambda: exchanges[0].begin(b"first"), lambda: exchanges[0].finish(b"last"))
    head, _, body = client.rest().partition(b"\r\n\r\n")
    assert head.lower().count(b"\r\nconnection: close") == 1
    chunked = b"transfer-encoding: chunked" in head.lower()
    assert chunked == (b"1.1" in request_line)
    assert body == (b"5\r\nfirst\r\n4\r\nlast\r\n0\r\n\r\n" if chunked else b"firstlast")


def test_a_head_waits_for_its_own_first_event_however_long_others_wait(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = serve()
    exchanges, _ = kept(running)
    monkeypatch.setattr(connection, "LATE_S", 3600.0)
    early, late = running.raw(), running.raw()
    early.send(GET)
    eventually(lambda: len(exchanges) == 1, "the first request")
    late.send(GET)
    eventually(lambda: len(exchanges) == 2, "the second request")
    connections = running.server.connections

    def first_is_due() -> None:
        exchanges[0].begin()
        connections._late[exchanges[0]._connection] = 0.0
        exchanges[1].begin()
        connections._flush_late()

    do(running, first_is_due)
    assert early.until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK")
    assert (exchanges[0]._connection.unsent, exchanges[1]._connection.unsent > 0) == (0, True)
    do(running, lambda: exchanges[1].send(b"first"))
    assert late.until(b"first\r\n").startswith(b"HTTP/1.1 200 OK")
    assert not connections._late


def test_a_head_goes_out_by_itself_when_no_event_comes(serve: Serve) -> None:
    running = serve()
    exchanges, _ = kept(running)
    for _ in range(2):  # also when none waited for a while
        exchanges.clear()
        client = running.raw()
        client.send(GET)
        eventually(lambda: exchanges, "the request")
        do(running, exchanges[0].begin)
        assert client.until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK")
        eventually(lambda: not running.server.connections._late_looked_at, "nobody looks any more")
