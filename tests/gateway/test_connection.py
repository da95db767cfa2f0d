"""One connection: what it takes, in what order, for how long; and clients that mean no good."""

import asyncio
import socket
import struct
import time
from math import inf

import pytest
from outfeed.gateway.app import Options
from outfeed.gateway.backend import Stream
from outfeed.gateway.limits import Limits

from .conftest import LIMIT_S, Raw, Running, Serve, answer_of, eventually, parse_events, past
from .fake import TEMPLATE

SMALL = Limits(body_bytes=1000, head_bytes=2000, headers=20, pipelined=4)


def test_a_connection_is_kept_and_its_requests_answered_in_order(serve: Serve) -> None:
    running = serve(lambda played: played.end(f"<{played.rid}>"))
    client = running.raw()
    for number in range(3):
        client.post("/generate", {"text": "x", "rid": f"r{number}"})
    got = b""
    for number in range(3):
        got += client.until(f"<r{number}>".encode()) if f"<r{number}>".encode() not in got else b""
    assert got.index(b"<r0>") < got.index(b"<r1>") < got.index(b"<r2>")
    assert len(running.server.connections.open) == 1


def test_a_long_pipeline_is_answered_whole(serve: Serve) -> None:
    running = serve(limits=SMALL)
    client = running.raw()
    client.send(
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 999
        + b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    )
    assert client.rest().count(b"HTTP/1.1 200 OK") == 1000


def test_a_request_may_come_byte_by_byte(serve: Serve) -> None:
    running = serve(lambda played: played.end("fine"))
    client = running.raw()
    client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    body = b'{"text": "x"}'
    request = b"POST /generate HTTP/1.1\r\nhost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    for at in range(len(request)):
        client.send(request[at : at + 1])
    assert b"200 OK" in client.until(b"fine")


def test_chunked_bodies_and_expect_are_understood(serve: Serve) -> None:
    running = serve(lambda played: played.end("fine"))
    client = running.raw()
    client.send(
        b"POST /generate HTTP/1.1\r\nhost: x\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
    )
    client.until(b"100 Continue\r\n\r\n")
    client.send(b'5\r\n{"tex\r\n8\r\nt": "x"}\r\n0\r\n\r\n')
    client.until(b"fine")


def test_http_1_0_gets_its_stream_without_chunks(serve: Serve) -> None:
    """As nginx asks, unless it is told to speak HTTP/1.1."""
    running = serve(lambda played: played.end("fine"), template=TEMPLATE)
    for path, body in (
        (b"/generate", b'{"text": "x", "stream": true}'),
        (b"/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "stream": true}'),
    ):
        client = running.raw()
        client.send(b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (path, len(body), body))
        head, _, events = client.rest().partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert parse_events(events)[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("version", "asked", "said"),
    [
        (b"1.1", b"", None),
        (b"1.1", b"close", b"close"),
        (b"1.0", b"", b"close"),
        (b"1.0", b"keep-alive", b"keep-alive"),
    ],
)
def test_an_answer_says_what_becomes_of_its_connection_unless_that_goes_without_saying(
    serve: Serve, version: bytes, asked: bytes, said: bytes | None
) -> None:
    client = serve().raw()
    header = b"connection: %b\r\n" % asked if asked else b""
    client.send(b"GET /health HTTP/%b\r\nhost: x\r\n%b\r\n" % (version, header))
    _, there, rest = client.until(b"\r\n\r\n").partition(b"connection: ")
    assert (rest.partition(b"\r\n")[0] if there else None) == said


def test_a_body_up_to_the_limit_is_taken(serve: Serve) -> None:
    running = serve(lambda played: played.end("fine"), limits=SMALL)
    body = b'{"text": "x"' + b" " * 987 + b"}"
    assert len(body) == 1000
    assert running.ask("POST", "/generate", body).status == 200


def stalled(running: Running) -> None:
    """Let the time to read something pass for every client that has to, since it was last looked at."""

    async def look() -> None:
        for connection in running.server.connections.sending:
            connection._stalls = min(connection._stalls, 0.0)
        running.server.connections.sweep()

    running.call(look())


def test_an_idle_connection_is_closed_without_a_word(serve: Serve) -> None:
    running = serve()
    client = running.raw()
    client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    client.until(b"\r\n\r\n")
    past(running, "idle")
    assert client.rest() == b""
    silent = running.raw()
    eventually(lambda: running.server.connections.open, "open")
    past(running, "silent")
    assert silent.rest() == b""


def test_each_part_of_a_request_has_its_own_time(serve: Serve) -> None:
    running = serve(limits=Limits(head_s=1e3, body_s=1e4, idle_s=1e5))
    client = running.raw()
    eventually(lambda: running.server.connections.open, "open")
    (connection,) = running.server.connections.open

    def has(seconds: float) -> None:
        """Wait until the client has this long, less what the test took."""
        eventually(lambda: 0.9 < (connection.deadline - time.monotonic()) / seconds <= 1, f"{seconds:g} s")

    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 13\r\n\r\n"
    has(1e3)
    for number in range(2):  # the second as the first
        client.send(head[:9])
        has(1e3)
        client.send(head[9:])
        has(1e4)
        client.send(b'{"text": "x"}')
        played = running.stream(number)
        assert connection.deadline == inf
        played.end("done")
        has(1e5)


@pytest.mark.parametrize("between", [b"", b"\r\n", b"\r\n\r\n"])
def test_an_empty_line_between_requests_is_none(serve: Serve, between: bytes) -> None:
    running = serve()
    client = running.raw()
    request = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    client.send(request + between)
    client.until(b"\r\n\r\n")
    client.send(between + request + between)
    client.until(b"\r\n\r\n")
    past(running, "idle")
    assert client.rest() == b""


def test_a_client_that_asks_behind_a_running_request_is_told_to_send_when_it_is_its_turn(
    serve: Serve,
) -> None:
    running = serve()
    client = running.raw()
    client.post("/generate", {"text": "x"})
    running.stream(0)
    client.post("/generate", {"text": "x"})
    client.send(b"POST /generate HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 13\r\n\r\n")
    running.stream(0).end("first")
    client.until(b"first")
    running.stream(1).end("second")
    got = client.until(b"100 Continue\r\n\r\n")
    assert got.index(b"second") < got.index(b"HTTP/1.1 100 Continue")
    client.send(b'{"text": "x"}')
    running.stream(2).end("third")
    assert client.until(b"third").count(b"HTTP/1.1") == 1


def test_a_client_that_asks_in_http_1_0_or_has_sent_the_body_is_told_nothing(serve: Serve) -> None:
    running = serve(lambda played: played.end("fine"))
    for version in (b"1.0", b"1.1"):
        client = running.raw()
        head = b"POST /generate HTTP/%b\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 13\r\n\r\n"
        waiting = b"GET /health_generate HTTP/1.1\r\nhost: x\r\n\r\n" if version == b"1.1" else b""
        client.send(waiting + head % version + b'{"text": "x"}')
        assert b"100 Continue" not in client.until(b'"text":"fine"')


def test_slow_clients_hold_no_one_else_up(serve: Serve) -> None:
    running = serve(lambda played: played.end("fine"))
    slow = [running.raw() for _ in range(300)]
    for client in slow:
        client.send(b"POST /generate HTTP/1.1\r\nx")
    assert running.ask("POST", "/generate", {"text": "x"}).status == 200
    eventually(lambda: len(running.server.connections.open) >= 300, "300 slow clients")
    eventually(lambda: all(one._parser.begun for one in running.server.connections.open), "heads")
    past(running, "all")
    eventually(lambda: all(one._lingering for one in running.server.connections.open), "refused")
    past(running, "lingering")
    eventually(lambda: not running.server.connections.open, "gone")


def test_one_connection_too_many_is_a_503(serve: Serve) -> None:
    running = serve(limits=Limits(connections=2))
    first, second = running.raw(), running.raw()
    eventually(lambda: len(running.server.connections.open) == 2, "two")
    third = running.raw()
    assert answer_of(third)[0] == 503
    first.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    first.until(b"200 OK")
    second.close()
    third.close()
    eventually(lambda: len(running.server.connections.open) == 1, "one")
    assert running.ask("GET", "/health").status == 200


def test_an_answer_that_was_ready_still_reaches_a_client_that_ends_its_half(serve: Serve) -> None:
    running = serve()
    for _ in range(20):
        client = running.raw()
        client.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        client.socket.shutdown(socket.SHUT_WR)
        assert b'"object":"list"' in client.rest()


def reset(client: Raw) -> None:
    """Leave without a goodbye."""
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.socket.close()


@pytest.mark.parametrize("leave", [Raw.close, reset, lambda client: client.socket.shutdown(socket.SHUT_WR)])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_closes_its_streams_at_once(serve: Serve, leave: object, stream: bool) -> None:
    running = serve()
    client = running.raw()
    client.post("/generate", {"text": ["x", "y"], "rid": ["a", "b"], "stream": stream})
    running.stream(1).say("a")
    leave(client)  # type: ignore[operator]
    eventually(lambda: all(played.closed for played in running.backend.streams), "closed")
    eventually(lambda: running.app.metrics.disconnects == 1, "counted")


def test_an_answer_that_finds_no_memory_to_be_sent_is_one_answer_all_the_same(serve: Serve) -> None:
    running = serve()
    connections = running.server.connections
    flush_soon = connections.flush_soon

    def no_memory(connection: object) -> None:
        connections.flush_soon = flush_soon  # type: ignore[method-assign]
        raise MemoryError

    connections.flush_soon = no_memory  # type: ignore[method-assign]
    client = running.raw()
    client.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answer = client.rest()
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_client_that_leaves_before_its_request_is_taken_counts_too(serve: Serve) -> None:
    running = serve()
    taken = asyncio.Event()

    async def slowly(body: object) -> list[Stream]:
        await taken.wait()
        return []

    running.backend.submit = slowly  # type: ignore[method-assign]
    client = running.raw()
    client.post("/generate", {"text": "x"})
    eventually(lambda: running.app.live == 1, "being taken")
    client.close()
    eventually(lambda: running.app.idle, "given up")
    assert running.app.metrics.disconnects == 1


def test_two_hundred_clients_that_drop_close_two_hundred_streams(serve: Serve) -> None:
    running = serve()
    clients = [running.raw() for _ in range(200)]
    for number, client in enumerate(clients):
        client.post("/generate", {"text": "x", "rid": f"r{number}", "stream": True})
    eventually(lambda: len(running.backend.streams) == 200, "200")
    for played in running.backend.streams:
        played.say("token")
    for client in clients:
        client.until(b"token")
    for client in clients:
        client.close()
    eventually(lambda: all(played.closed for played in running.backend.streams), "closed")
    eventually(lambda: running.app.live == 0, "none live")


def test_a_client_that_does_not_read_leaves_its_tokens_merged_in_the_sink(serve: Serve) -> None:
    running = serve(options=Options(incremental=True), limits=Limits(write_bytes=4096))
    client = running.raw()
    client.post("/generate", {"text": "x", "stream": True, "rid": "slow"})
    played = running.stream()
    connection = next(iter(running.server.connections.open))
    sent = 0
    while not connection.paused:
        played.say("x" * 100_000)
        sent += 1
        eventually(lambda: connection.paused or not played.source._channel.fresh, "taken or held")
    for _ in range(200):
        played.say("y")
    running.call(asyncio.sleep(0))  # the server has heard of all of them
    assert played.source.statistics().merged > 100
    assert running.app.metrics.events <= sent
    played.end("z")
    got = client.until(b"[DONE]")
    assert b"y" * 100 in got
    assert b"z" in got


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_batch_leaves_no_more_in_a_connection_than_one_stream_does(serve: Serve, pieces: int) -> None:
    running = serve(options=Options(incremental=True), limits=Limits(write_bytes=4096))
    client = running.raw()
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    prompts, size = 64, 100_000
    client.post("/generate", {"text": ["x"] * prompts, "stream": True})
    running.stream(prompts - 1)
    (connection,) = running.server.connections.open

    def say() -> None:
        for _ in range(pieces):
            for played in running.backend.streams:
                played.say("#" * size)

    running.loop.call_soon_threadsafe(say)
    eventually(lambda: connection.paused, "paused")
    assert connection._transport is not None
    waiting = connection._transport.get_write_buffer_size() + connection.unsent
    # An event may come when there is a byte of room: one goes over the limit here, one in the transport.
    assert waiting < 3 * pieces * size + 8192
    for played in running.backend.streams:
        running.loop.call_soon_threadsafe(played.end, "z")
    got = client.until(b"[DONE]")
    assert got.count(b"#") == prompts * pieces * size
    assert got.count(b'"finish_reason":{') == prompts


def fill(running: Running, stream: bool, more: bytes = b"") -> Raw:
    """Return a client that has read nothing of more than fits, and has sent `more` behind its request."""
    assert running.server._sweeper is not None
    running.loop.call_soon_threadsafe(running.server._sweeper.cancel)  # the test looks, and nobody else
    client = running.raw()
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    client.post("/generate", {"text": "x", "stream": stream})
    client.send(more)
    played = running.stream()
    connection = next(iter(running.server.connections.open))
    if not stream:
        played.end("x" * 20_000_000)
    while not connection.paused:
        if stream:
            played.say("x" * 100_000)
        eventually(lambda: connection.paused or not played.source._channel.fresh, "taken or held")
    return client


NEXT = b'POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 13\r\n\r\n{"text": "x"}'


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("more", "later"),
    [
        (b"", b""),
        (NEXT, b""),
        (b"", NEXT),
        (NEXT, NEXT),
        (b"", NEXT[:20]),
        (b"", NEXT[:-1]),
        (NEXT[:20], NEXT[20:]),
        (NEXT[:-1], NEXT[-1:]),
    ],
)
def test_a_client_that_reads_nothing_for_too_long_is_cut_off(
    serve: Serve, stream: bool, more: bytes, later: bytes
) -> None:
    running = serve(options=Options(incremental=True), limits=Limits(write_bytes=1024), sink_bytes=1 << 26)
    client = fill(running, stream, more)
    client.send(later)

    def cut_off() -> bool:
        stalled(running)
        return not running.server.connections.open

    eventually(cut_off, "cut off")
    eventually(lambda: all(played.closed for played in running.backend.streams), "closed")


def test_a_client_that_ends_its_half_while_it_reads_nothing_is_gone_at_once(serve: Serve) -> None:
    running = serve(options=Options(incremental=True), limits=Limits(write_bytes=1024), sink_bytes=1 << 26)
    client = fill(running, stream=True)
    client.socket.shutdown(socket.SHUT_WR)
    eventually(lambda: running.stream().closed, "closed")
    assert running.server.connections.open, "what had been sent to it is still there to be read"


@pytest.mark.parametrize("half", [True, False])
def test_an_answer_that_nobody_takes_holds_no_closing_connection(serve: Serve, half: bool) -> None:
    running = serve(limits=Limits(write_bytes=1024), sink_bytes=1 << 26)
    client = fill(running, stream=False)
    if half:
        client.socket.shutdown(socket.SHUT_WR)
    else:
        asyncio.run_coroutine_threadsafe(running.server.drain(LIMIT_S), running.loop)
    connection = next(iter(running.server.connections.open))
    eventually(lambda: connection._transport is None or connection._transport.is_closing(), "closing")
    stalled(running)
    stalled(running)
    eventually(lambda: not running.server.connections.open, "cut off")


def test_a_client_that_reads_slowly_gets_all_of_it(serve: Serve) -> None:
    running = serve(limits=Limits(write_bytes=1024), sink_bytes=1 << 26)
    client = fill(running, stream=False)
    connection = next(iter(running.server.connections.open))
    stalled(running)
    got = bytearray()
    while connection in running.server.connections.sending:
        before = connection._count_untaken()
        while before and connection._count_untaken() >= before:
            got += client.socket.recv(1 << 16)
        stalled(running)
    while got.count(b"x") < 20_000_000:
        piece = client.socket.recv(1 << 20)
        assert piece, "cut off"
        got += piece
    assert connection in running.server.connections.open


def test_a_client_is_not_idle_while_it_reads(serve: Serve) -> None:
    running = serve(limits=Limits(write_bytes=1024), sink_bytes=1 << 26)
    client = fill(running, stream=False)
    (connection,) = running.server.connections.open
    past(running, "idle, if it were")
    assert connection.paused
    got = bytearray()
    while got.count(b"x") < 20_000_000:
        piece = client.socket.recv(1 << 20)
        assert piece, "closed"
        got += piece
    client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b"200 OK" in client.until(b"\r\n\r\n")
    past(running, "idle")
    assert client.rest() == b""


def test_an_answer_is_read_while_the_next_request_has_nothing_to_send(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    running = serve(limits=Limits(write_bytes=1024), sink_bytes=1 << 26)
    client = fill(running, stream=False, more=b"GET /health_generate HTTP/1.1\r\nhost: x\r\n\r\n")
    probed = running.stream(1)
    assert b'"finish_reason"' in client.until(b"}}")
    (connection,) = running.server.connections.open
    eventually(lambda: not connection.paused, "room again")
    probed.end("x")
    assert client.until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    assert not [one for one in caplog.records if "resume_writing" in one.getMessage()]


def test_who_was_not_read_for_a_while_is_read_again_when_it_is_answered(serve: Serve) -> None:
    running = serve(limits=SMALL)
    client = running.raw()
    client.post("/generate", {"text": "x"})
    client.send(
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 3 + b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    )
    first = running.stream()
    eventually(lambda: running.server.connections.unread, "not read any more")
    first.end("first")
    client.until(b'"object":"list"')
    assert not running.server.connections.unread
    client.post("/generate", {"text": "x"})
    running.stream(1).end("second")
    client.until(b"second")


@pytest.mark.parametrize("leave", [Raw.close, reset, lambda client: client.socket.shutdown(socket.SHUT_WR)])
@pytest.mark.parametrize("behind", [3, 4, 5, 50])
def test_a_client_that_leaves_with_requests_behind_a_running_one_is_noticed(
    serve: Serve, leave: object, behind: int
) -> None:
    running = serve(limits=SMALL)
    client = running.raw()
    client.post("/generate", {"text": "x"})
    played = running.stream()
    client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * behind)
    connection = next(iter(running.server.connections.open))
    eventually(lambda: len(connection._waiting) == behind, "pipelined")
    leave(client)  # type: ignore[operator]

    def noticed() -> bool:
        running.call(asyncio.sleep(0))
        running.loop.call_soon_threadsafe(running.server.connections.sweep)
        return played.closed and not running.server.connections.open

    eventually(noticed, "noticed")
    eventually(lambda: running.app.metrics.disconnects == 1, "counted")


def test_a_client_whose_machine_vanishes_is_noticed_by_the_kernel(serve: Serve) -> None:
    running = serve()
    running.raw()
    eventually(lambda: running.server.connections.open, "open")
    (connection,) = running.server.connections.open
    assert connection._transport is not None
    there = connection._transport.get_extra_info("socket")
    assert there.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
    assert there.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert there.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="body_bytes"):
        Limits(body_bytes=0)
