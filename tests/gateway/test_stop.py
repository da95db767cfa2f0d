"""Drain and stop: nobody who is connected is left without an answer."""

import asyncio
from typing import Any

import pytest

from .conftest import LIMIT_S, Running, Serve, eventually
from .fake import Played


def test_a_drain_finishes_what_runs_and_refuses_what_is_new(serve: Serve) -> None:
    running = serve()
    streaming, idle, late = running.raw(), running.raw(), running.raw()
    streaming.post("/generate", {"text": "x", "stream": True})
    played: Played = running.stream()
    played.say("before")
    streaming.until(b"before")
    idle.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    idle.until(b"\r\n\r\n")
    late.send(b"POST /gen")
    eventually(lambda: any(one._parser.begun for one in running.server.connections.open), "late")
    drained = asyncio.run_coroutine_threadsafe(running.server.drain(LIMIT_S), running.loop)
    assert idle.rest() == b""
    eventually(lambda: running.app.draining, "draining")
    assert running.ask("GET", "/health").status == 503
    refused = running.ask("POST", "/generate", {"text": "x"})
    assert refused.status == 503
    assert refused.headers["connection"] == "close"
    assert "draining" in refused.json["error"]["message"]
    late.send(b'erate HTTP/1.1\r\nhost: x\r\ncontent-length: 13\r\n\r\n{"text": "x"}')
    assert b" 503 " in late.rest()
    assert not drained.done()
    played.end("after")
    assert b"after" in streaming.rest(), "and its connection is closed"
    assert drained.result(LIMIT_S) is True


def test_a_drain_waits_for_who_is_still_reading_an_answer(serve: Serve) -> None:
    text = "x" * (16 << 20)  # more than the kernel keeps for a client that reads nothing
    running = serve(lambda played: played.end(text), sink_bytes=2 * len(text))
    client = running.raw()
    client.post("/generate", {"text": "x"})
    got = client.until(b"\r\n\r\n")
    eventually(lambda: running.app.idle, "answered")
    drained = asyncio.run_coroutine_threadsafe(running.server.drain(LIMIT_S), running.loop)
    eventually(lambda: running.app.draining, "draining")
    running.call(asyncio.sleep(0))
    assert not drained.done()
    assert len(got + client.rest()) > len(text)
    assert drained.result(LIMIT_S) is True


def stop(running: Running) -> None:
    running.call(running.server.drain(0.0))
    running.call(running.server.stop())


def statuses(got: bytes) -> list[int]:
    return [int(answer[:3]) for answer in got.split(b"HTTP/1.1 ")[1:]]


CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize("drained", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x"}),
        ("/generate", {"text": ["x", "y", "z"]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", CHAT),
        ("/health_generate", None),
    ],
)
def test_a_stop_answers_whoever_waits_for_a_whole_answer(
    serve: Serve, path: str, body: Any, drained: bool
) -> None:
    running = serve(template="{{ messages[0].content }}")
    client, quick = running.raw(), running.raw()
    if body is None:
        client.send(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode())
    else:
        client.post(path, body)
    running.stream()
    client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    connections = running.server.connections
    eventually(lambda: any(one._waiting for one in connections.open), "a request behind it")
    quick.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    quick.until(b"200 OK")
    if drained:
        stop(running)
    else:
        running.call(running.server.stop())
    got = client.rest()
    assert statuses(got) == [503]
    assert b"connection: close" in got
    assert b"the server is stopping" in got
    assert (b'"type":"InternalServerError"' in got) == path.startswith("/v1")
    assert quick.rest().partition(b"\r\n\r\n")[2] == b""
    assert all(played.closed for played in running.backend.streams)


@pytest.mark.parametrize(
    ("path", "body", "prompts"),
    [
        ("/generate", {"text": "x"}, 1),
        ("/generate", {"text": ["x", "y", "z"]}, 3),
        ("/v1/completions", {"prompt": ["x", "y"]}, 2),
        ("/v1/chat/completions", CHAT, 1),
    ],
)
def test_a_stop_ends_each_stream_with_an_event(serve: Serve, path: str, body: Any, prompts: int) -> None:
    running = serve(template="{{ messages[0].content }}")
    client, silent = running.raw(), running.raw()
    client.post(path, body | {"stream": True})
    for number in range(prompts):
        running.stream(number).say(f"token{number}")
    client.until(b"token%d" % (prompts - 1))
    silent.post(path, body | {"stream": True})
    running.stream(2 * prompts - 1)
    running.stream(prompts).end("ended")
    eventually(lambda: running.app.metrics.events == prompts + 1, "taken")
    stop(running)
    for one, left in ((client, prompts), (silent, prompts - 1)):
        got = one.rest()
        assert got.count(b'"code":503') == left
        assert got.count(b"the server is stopping") == left
        assert got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert all(played.closed for played in running.backend.streams)


def test_a_stop_answers_a_request_that_is_being_taken(serve: Serve) -> None:
    running = serve()
    taking: list[Any] = []

    async def slow(body: Any) -> Any:
        taking.append(body)
        await asyncio.Event().wait()

    running.backend.submit = slow  # type: ignore[method-assign]
    clients = [running.raw() for _ in range(20)]
    for client in clients:
        client.post("/generate", {"text": "x"})
    eventually(lambda: len(taking) == 20, "taken")
    stop(running)
    assert [statuses(client.rest()) for client in clients] == [[503]] * 20


def test_a_request_that_comes_as_the_server_stops_is_answered(serve: Serve) -> None:
    running = serve()
    client = running.raw()
    eventually(lambda: running.server.connections.open, "connected")
    request = b'POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 13\r\n\r\n{"text": "x"}'

    async def both() -> None:
        (connection,) = running.server.connections.open
        connection.data_received(request)
        await running.server.stop()

    running.call(both())
    assert statuses(client.rest()) == [503]
    assert running.backend.streams == []


def test_what_is_behind_a_connections_last_answer_in_a_drain_is_not_done(serve: Serve) -> None:
    running = serve()
    client = running.raw()
    client.send(b"GET /hea")
    eventually(lambda: any(one._parser.begun for one in running.server.connections.open), "begun")
    drained = running.call(running.server.drain(LIMIT_S))
    assert drained is True
    abort = b'POST /abort_request HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n{"rid": "mine"}'
    client.send(b"lth HTTP/1.1\r\nhost: x\r\n\r\n" + abort * 20)
    assert statuses(client.rest()) == [503]
    assert running.backend.aborted == []
