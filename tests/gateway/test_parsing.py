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
                with pytest.raises(Refusal) as refused:
                    told(pieces, limits)
                assert refused.value.status == status


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
