"""What is no request that this server takes: how it is refused, and that its client gets to read it."""

import socket
from math import inf

import pytest
from outfeed.gateway.limits import Limits

from .conftest import Serve, answer_of, eventually, past
from .test_connection import fill, stalled

SMALL = Limits(body_bytes=1000, head_bytes=2000, headers=20, pipelined=4)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n", 413),
        (b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999\r\n\r\n", 413),
        (
            b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001,
            413,
        ),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1 + b"".join(b"h%d: 1\r\n" % i for i in range(21)), 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 2001, 431),
        (b"GET /" + b"b" * 2001, 431),
        (b"GET / HTTP/1.1\r\n" + b"a" * 2001, 431),
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\na b: c\r\n\r\n", 400),
    ],
)
def test_what_breaks_a_limit_or_the_protocol_is_refused_and_closed(
    serve: Serve, request_bytes: bytes, status: int
) -> None:
    running = serve(limits=SMALL)
    client = running.raw()
    client.send(request_bytes)
    got, body = answer_of(client)
    assert got == status
    assert body["error"]["code"] == status  # type: ignore[index]
    client.close()
    eventually(lambda: not running.server.connections.open, "closed")
    assert running.backend.streams == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/x?y=/", "/v1", "http://x/v1/models"])
@pytest.mark.parametrize(
    ("rest", "status"),
    [
        (b"HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n", 413),
        (b"HTTP/1.1\r\nhost: x\r\na: " + b"b" * 2001, 431),
        (b"HTTP/1.1\r\nhost: x\r\na b: c\r\n\r\n", 400),
        (b"HTTP/1.1\r\n\r\n", 400),
        (b"HTTP/2.0\r\nhost: x\r\n\r\n", 505),
    ],
)
def test_what_is_no_request_under_v1_is_refused_in_openais_shape(
    serve: Serve, path: str, rest: bytes, status: int
) -> None:
    client = serve(limits=SMALL).raw()
    client.send(b"POST %b %b" % (path.encode(), rest))
    got, body = answer_of(client)
    assert got == status
    error = body["error"]
    assert error["code"] == status  # type: ignore[index]
    assert error.keys() == {"object", "message", "type", "param", "code"}  # type: ignore[attr-defined]


def test_a_head_and_a_body_that_never_end_are_refused_in_their_endpoints_shape(serve: Serve) -> None:
    running = serve()
    for path, keys in (("/v1/completions", 5), ("/generate", 2)):
        for more in (b"", b"content-length: 10\r\n\r\n{"):
            client = running.raw()
            client.send(b"POST %b HTTP/1.1\r\nhost: x\r\n%b" % (path.encode(), more))
            eventually(lambda: any(one._parser.path for one in running.server.connections.open), "a head")
            past(running, "it")
            got, body = answer_of(client)
            assert got == 408
            assert len(body["error"]) == keys  # type: ignore[arg-type]
            client.close()
            eventually(lambda: not running.server.connections.open, "closed")


@pytest.mark.parametrize(
    ("behind", "status"),
    [
        (b" ", 400),
        (b"GET /health HTTP/1.1\r\nno header\r\n\r\n", 400),
        (b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n", 413),
        (b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"b" * 2001 + b"\r\nc: d\r\n", 431),
    ],
)
@pytest.mark.parametrize("waiting", [0, 2])
def test_what_is_refused_behind_requests_costs_them_no_answer(
    serve: Serve, behind: bytes, status: int, waiting: int
) -> None:
    running = serve(limits=SMALL)
    client = running.raw()
    client.post("/generate", {"text": "x", "stream": True})
    first = running.stream()
    client.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * waiting + behind)
    client.send(b"what comes then is read by nobody")
    eventually(lambda: next(iter(running.server.connections.open))._refusal, "the refusal to wait")
    first.say("it goes ")
    first.end("on")
    got = client.rest()
    assert got.count(b"HTTP/1.1 200 OK") == 1 + waiting
    assert got.index(b'"it goes on"') < got.index(b"[DONE]") < got.rindex(b"HTTP/1.1 %d " % status)
    assert got.count(b'"code":%d' % status) == 1
    assert running.app.metrics.disconnects == 0


def test_a_refusal_waits_for_who_is_still_reading_the_answer_before_it(serve: Serve) -> None:
    running = serve(limits=Limits(write_bytes=1024), sink_bytes=1 << 26)
    client = running.raw()
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    client.post("/generate", {"text": "x"})
    first = running.stream()
    client.send(b" ")
    (connection,) = running.server.connections.open
    eventually(lambda: connection._refusal, "the refusal to wait")
    first.end("x" * 20_000_000)
    eventually(lambda: connection._lingering, "refused")
    past(running, "lingering")
    past(running, "and again")
    got = client.until(b'"code":400}}')
    assert got.count(b"x") >= 20_000_000
    assert client.rest() == b""

    def gone() -> bool:
        past(running, "it has read all of it")
        return not running.server.connections.open

    eventually(gone, "gone")


def test_a_refused_client_that_stops_reading_the_answer_before_is_cut_off(serve: Serve) -> None:
    running = serve(limits=Limits(write_bytes=1024), sink_bytes=1 << 26)
    client = fill(running, stream=False, more=b" ")
    (connection,) = running.server.connections.open
    eventually(lambda: connection._lingering, "refused")
    while connection.paused:
        client.socket.recv(1 << 16)

    def cut_off() -> bool:
        past(running, "lingering")
        stalled(running)
        return not running.server.connections.open

    eventually(cut_off, "cut off")


def test_a_client_that_is_to_be_refused_may_leave_before(serve: Serve) -> None:
    running = serve(limits=SMALL)
    client = running.raw()
    client.post("/generate", {"text": "x"})
    first = running.stream()
    client.send(b" ")
    eventually(lambda: next(iter(running.server.connections.open))._refusal, "the refusal to wait")
    client.close()
    eventually(lambda: first.closed, "the request to be given up")


def test_a_refused_client_that_goes_on_sending_still_reads_why(serve: Serve) -> None:
    running = serve(limits=SMALL)
    client = running.raw()
    client.send(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000\r\n\r\n" + b"x" * 100_000)
    client.send(b"x" * 100_000)
    assert b" 413 " in client.rest().partition(b"\r\n")[0]


def test_a_head_that_never_ends_is_a_408(serve: Serve) -> None:
    running = serve()
    client = running.raw()
    client.send(b"GET / HTTP/1.1\r\nhost: x\r\n")
    eventually(lambda: any(one._parser.begun for one in running.server.connections.open), "head")
    past(running, "head")
    assert answer_of(client)[0] == 408


def test_a_body_that_never_ends_is_a_408(serve: Serve) -> None:
    running = serve()
    client = running.raw()
    client.send(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
    eventually(lambda: any(one._parser.request for one in running.server.connections.open), "body")
    past(running, "body")
    assert answer_of(client)[0] == 408


def test_a_body_that_never_ends_behind_a_running_request_is_a_408_too(serve: Serve) -> None:
    running = serve()
    client = running.raw()
    client.post("/generate", {"text": "x"})
    running.stream()
    client.send(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
    eventually(lambda: any(one._parser.request for one in running.server.connections.open), "body")
    past(running, "nothing: the client waits for its answer")
    running.stream().end("fine")
    client.until(b"fine")
    eventually(lambda: any(one.deadline < inf for one in running.server.connections.open), "its turn")
    past(running, "body")
    assert b"the body was not complete" in client.rest()
