"""Bytes to requests: what a client sent is what is answered, in whatever pieces it came, nothing else."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from outfeed.gateway.app import Options
from outfeed.gateway.exchange import Request
from outfeed.gateway.limits import Limits
from outfeed.gateway.parsing import Refusal, RequestParser

from .conftest import Serve

Told = tuple[str, str, dict[bytes, bytes], bytes, bool]

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
BODY = b'{"text": "x"}'


def told(pieces: Iterator[bytes] | list[bytes], limits: Limits | None = None) -> list[Told]:
    """What the parser makes of these pieces."""
    came: list[Told] = []

    def take(request: Request) -> None:
        headers = {name: value for name, value in request.headers.items() if name != b"upgrade"}
        came.append((request.method, request.path, headers, bytes(request.body), request.keep_alive))

    parser = RequestParser(limits or Limits(), lambda: None, lambda: None, take)
    for piece in pieces:
        parser.feed(piece)
    return came


def refusal(pieces: Iterator[bytes] | list[bytes], limits: Limits | None = None) -> int:
    """The status of what the parser refuses."""
    with pytest.raises(Refusal) as refused:
        told(pieces, limits)
    return refused.value.status


def every_cut(data: bytes) -> Iterator[list[bytes]]:
    """The data whole, byte by byte, and in two at every place."""
    yield [data]
    yield [data[at : at + 1] for at in range(len(data))]
    for at in range(1, len(data)):
        yield [data[:at], data[at:]]


def with_length(offer: bytes) -> bytes:
    return b"POST /generate?q=1 HTTP/1.1\r\nhost: x\r\n%bcontent-length: 13\r\n\r\n%b" % (offer, BODY)


def chunked(offer: bytes) -> bytes:
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n%b\r\n" % offer
    return head + b"5\r\n%b\r\n8\r\n%b\r\n0\r\n\r\n" % (BODY[:5], BODY[5:])


def without_body(offer: bytes) -> bytes:
    return b"GET /health HTTP/1.1\r\n%bhost: x\r\nx: 1\r\nX: 2\r\n\r\n" % offer


@pytest.mark.parametrize(
    "make",
    [
        with_length,
        chunked,
        without_body,
        lambda offer: with_length(offer) + chunked(offer) + without_body(offer) + with_length(b""),
    ],
)
def test_an_offered_upgrade_changes_nothing_of_a_request(make: Callable[[bytes], bytes]) -> None:
    plain = told([make(OFFER.replace(b"Upgrade: h2c\r\n", b""))])
    assert plain
    for pieces in every_cut(make(OFFER)):
        assert told(pieces) == plain


def test_a_thousand_offers_in_one_piece_are_as_many_requests() -> None:
    assert len(told([without_body(OFFER) * 1000])) == 1000


def test_limits_hold_for_a_request_that_offers_an_upgrade() -> None:
    for limits, status in (
        (Limits(body_bytes=12), 413),
        (Limits(head_bytes=100), 431),
        (Limits(headers=3), 431),
    ):
        for make in (with_length, chunked):
            for pieces in every_cut(make(OFFER)):
                assert refusal(pieces, limits) == status


def test_headers_are_counted_by_their_lines() -> None:
    limits = Limits(headers=5)
    for names in ([b"a"], [b"a", b"b"], [b"Same", b"same", b"SAME"]):
        lines = [b"%b: 1\r\n" % names[number % len(names)] for number in range(4)]
        head = b"GET / HTTP/1.1\r\nhost: x\r\n%b%b\r\n"
        assert len(told([head % (b"".join(lines), b"")], limits)) == 1
        assert refusal([head % (b"".join(lines), lines[0])], limits) == 431


def test_a_repeated_headers_values_are_joined_in_their_order() -> None:
    ((_, _, headers, _, _),) = told([b"GET / HTTP/1.1\r\nX: 1\r\nhost: h\r\nx: 2\r\nX:3\r\n\r\n"])
    assert headers == {b"x": b"1, 2, 3", b"host": b"h"}


@pytest.mark.parametrize("space", [b" ", b"\t", b" \t "])
def test_space_around_a_headers_value_is_no_part_of_it(space: bytes) -> None:
    head = b"GET / HTTP/1.1\r\nhost:%bx%b\r\ncontent-encoding:%bidentity%b\r\nx:%b\r\n\r\n"
    for pieces in every_cut(head % ((space,) * 5)):
        ((_, _, headers, _, _),) = told(pieces)
        assert headers == {b"host": b"x", b"content-encoding": b"identity", b"x": b""}


def test_a_trailer_is_no_header_of_its_request_nor_of_the_next() -> None:
    trailers = b"authorization: Bearer k\r\nhost: y\r\nx: 1\r\nexpect: 100-continue\r\nupgrade: h2c\r\n"
    plain = chunked(b"") + without_body(b"")
    trailed = plain.replace(b"\r\n0\r\n\r\n", b"\r\n0\r\n%b\r\n" % trailers)
    assert trailed != plain
    for pieces in every_cut(trailed):
        assert told(pieces) == told([plain])


@pytest.mark.parametrize("endless", [b"x;", b"x\r\nx: ", b"x\r\n" + b"x: 1\r\n" * 50])
def test_what_is_around_chunks_is_bounded_in_whatever_pieces_it_comes(endless: bytes) -> None:
    start = chunked(b"").removesuffix(b"0\r\n\r\n") + endless.replace(b"x", b"0", 1)
    for size in (1, 7, 4096):
        assert refusal([start, *[b"b" * size] * (8192 // size)], Limits(head_bytes=1000)) == 431


def test_a_body_in_the_smallest_chunks_is_taken() -> None:
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY * 100) + b"0\r\n\r\n"
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    for size in (1, 11, 5000):
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        assert [request[3] for request in told([head, *pieces], Limits(head_bytes=200))] == [BODY * 100]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nHost: x\r\nhost: y\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"GET / HTTP/0.9\r\nhost: x\r\n\r\n", 505),
        (b"GET / HTTP/2.0\r\nhost: x\r\n\r\n", 505),
        (b"GET /\r\n\r\n", 505),
        (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\n%btransfer-encoding: chunked\r\n\r\n0\r\n\r\n" % OFFER, 400),
        (b"GET / HTTP/1.1\r\n%b\r\n" % OFFER, 400),
        (b"GET http:///health HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET http://x:99999999/health HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    ],
)
def test_what_is_not_http_1_0_or_1_1_by_the_letter_is_refused(data: bytes, status: int) -> None:
    for pieces in every_cut(data):
        assert refusal(pieces) == status


@pytest.mark.parametrize(
    "behind", [b"\r\n", b"\r\n" * 200, b"garbage", b"\r\n\r\n\x00", without_body(b""), with_length(OFFER)]
)
@pytest.mark.parametrize(
    "offer", [b"", OFFER.replace(b"Connection: Upgrade, ", b"Connection: close, upgrade, ")]
)
def test_what_follows_a_connections_last_request_is_passed_over(behind: bytes, offer: bytes) -> None:
    close = offer or b"connection: close\r\n"
    last = told([with_length(close)])
    assert [request[-1] for request in last] == [False]
    for pieces in every_cut(with_length(close) + behind):
        assert told(pieces, Limits(head_bytes=250)) == last


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/generate?q=1", "/generate"),
        (b"http://x/generate?q=http://y", "/generate"),
        (b"http://me:secret@x:80/v1/models", "/v1/models"),
        (b"http://[::1]:80/a%2Fb", "/a%2Fb"),
        (b"http://x", "/"),
        (b"*", "*"),
    ],
)
def test_a_targets_path_is_found_in_each_of_its_forms(target: bytes, path: str) -> None:
    for pieces in every_cut(b"OPTIONS %b HTTP/1.1\r\nhost: x\r\n\r\n" % target):
        assert [request[1] for request in told(pieces)] == [path]


def test_a_length_may_have_any_number_of_zeros_in_front() -> None:
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %b13\r\n\r\n" % (b"0" * 5000)
    assert [request[3] for request in told([head, BODY])] == [BODY]


def test_http_1_0_needs_no_host() -> None:
    assert len(told([b"GET / HTTP/1.0\r\n\r\n"])) == 1


HIDDEN = (
    b"POST /abort_request HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\ncontent-length: 17\r\n\r\n"
    b'{"rid": "victim"}'
)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET /health", 200),
        (b"GET /v1/models", 401),
        (b"GET /nothing", 404),
        (b"POST /health", 405),
        (b"POST /generate", 401),
    ],
)
def test_no_request_hides_in_the_body_of_one_that_offers_an_upgrade(
    serve: Serve, line: bytes, status: int
) -> None:
    running = serve(options=Options(api_key="k"))
    client = running.raw()
    client.send(b"%b HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n" % (line, OFFER, len(HIDDEN)))
    client.send(HIDDEN)
    client.send(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    got = client.rest()
    assert [int(answer[:3]) for answer in got.split(b"HTTP/1.1 ")[1:]] == [status, 200]
    assert running.backend.aborted == []


def test_a_post_that_offers_an_upgrade_is_answered(serve: Serve) -> None:
    running = serve(lambda played: played.end("fine"))
    offer: dict[str, Any] = {
        "Connection": "Upgrade, HTTP2-Settings",
        "Upgrade": "h2c",
        "HTTP2-Settings": "AAE",
    }
    assert running.ask("POST", "/generate", {"text": "x"}, offer).json["text"] == "fine"


def test_a_tunnel_is_refused_and_what_comes_through_it_is_no_request(serve: Serve) -> None:
    running = serve(options=Options(api_key="k"))
    client = running.raw()
    client.send(b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n" + HIDDEN)
    got = client.rest()
    assert got.count(b"HTTP/1.1 ") == 1
    assert b"HTTP/1.1 501 Not Implemented\r\n" in got
    assert running.backend.aborted == []


def test_a_request_that_is_well_formed_and_cannot_be_kept_is_no_fault_of_its_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def no_memory(request: Request) -> None:
        raise MemoryError

    parser = RequestParser(Limits(), lambda: None, lambda: None, no_memory)
    with pytest.raises(Refusal) as refused:
        parser.feed(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert refused.value.status == 500
    assert "MemoryError" in caplog.text
