"""A gateway's HTTP side in a thread of its own, over a fake backend; and plain clients for it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from outfeed.gateway.app import App, Options
from outfeed.gateway.chat import ChatTemplate
from outfeed.gateway.limits import Limits
from outfeed.gateway.server import Server, listen

from tests.eventually import until

from .fake import TEMPLATE, FakeBackend, Played, three

if TYPE_CHECKING:
    import openai

LIMIT_S = 30.0


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """Wait until a condition holds; its value."""
    return until(what, condition)


@dataclass
class Answer:
    """A whole response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        return parse_events(self.body)


def parse_events(body: bytes) -> list[Any]:
    """Parse a whole stream of events; `[DONE]` stays a string."""
    parts = body.decode().split("\n\n")
    assert parts[-1] == ""
    events = []
    for part in parts[:-1]:
        assert part.startswith("data: ")
        data = part.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


class Raw:
    """A client at the level of bytes."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def post(self, path: str, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send(
            b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(data), data)
        )

    def until(self, mark: bytes) -> bytes:
        """Read up to and with a mark."""
        got = bytearray()
        while got.find(mark, max(0, len(got) - 65536 - len(mark))) < 0:
            piece = self.socket.recv(65536)
            assert piece, f"the connection ended before {mark!r}; got {got[-1000:]!r}"
            got += piece
        return bytes(got)

    def rest(self) -> bytes:
        """Read until the server closes."""
        got = b""
        while piece := self.socket.recv(65536):
            got += piece
        return got

    def close(self) -> None:
        self.socket.close()


@dataclass
class Running:
    """A server that runs, and what is behind it."""

    app: App
    server: Server
    backend: FakeBackend
    loop: asyncio.AbstractEventLoop
    raws: list[Raw] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.server.port

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def raw(self) -> Raw:
        raw = Raw(self.port)
        self.raws.append(raw)
        return raw

    def stream(self, number: int = 0) -> Played:
        """Wait for the backend's stream of that number."""
        eventually(lambda: len(self.backend.streams) > number, f"stream {number}")
        return self.backend.streams[number]

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(LIMIT_S)


def answer_of(client: Raw) -> tuple[int, dict[str, object]]:
    """The refusal a client reads before the server closes."""
    got = client.rest()
    head, _, body = got.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def past(running: Running, what: str) -> None:
    """Let the deadlines of every connection pass: the sweep sees them as a second would."""

    async def sweep() -> None:
        for connection in running.server.connections.open:
            if connection.deadline != inf:
                connection.deadline = 0.0
        running.server.connections.sweep()

    running.call(sweep())


Serve = Callable[..., Running]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server; it is stopped, and found to have let go of everything, afterwards."""
    started: list[tuple[Running, threading.Thread]] = []

    def start(
        script: Any = None,
        *,
        options: Options | None = None,
        limits: Limits | None = None,
        template: str | None = None,
        **backend: Any,
    ) -> Running:
        fake = FakeBackend(script=script, **backend)
        app = App(fake, options, limits, None if template is None else ChatTemplate(template))
        loop = uvloop.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        server = Server(app, listen("127.0.0.1", 0))
        running = Running(app, server, fake, loop)
        running.call(server.start())
        started.append((running, thread))
        return running

    yield start
    for running, thread in started:
        for raw in running.raws:
            raw.close()
        running.call(running.server.stop())
        assert running.app.idle
        assert running.app.live == 0
        connections = running.server.connections
        assert not connections.open | connections.sending | connections.unread
        running.loop.call_soon_threadsafe(running.loop.stop)
        thread.join(LIMIT_S)
        running.loop.close()


@pytest.fixture
def running(serve: Serve) -> Running:
    """A server with a chat template, whose backend says three words."""
    return serve(three, template=TEMPLATE)


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    """Its client, OpenAI's own."""
    import openai

    address = f"http://127.0.0.1:{running.port}/v1"
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        yield client
