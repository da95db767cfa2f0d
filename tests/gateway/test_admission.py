"""How many prompts may run: never more than the limit, and never fewer because of one that is gone."""

import asyncio

import pytest
from outfeed.gateway.limits import Limits
from outfeed.ingress.errors import Unavailable

from .conftest import Serve, eventually


def test_one_prompt_too_many_is_a_503(serve: Serve) -> None:
    running = serve(limits=Limits(requests=2))
    clients = [running.raw() for _ in range(2)]
    for client in clients:
        client.post("/generate", {"text": "x", "stream": True})
    eventually(lambda: running.app.live == 2, "two")
    answer = running.ask("POST", "/generate", {"text": "x"})
    assert answer.status == 503
    assert answer.headers["retry-after"] == "1"
    running.stream(0).end("x")
    clients[0].until(b"[DONE]")
    running.backend.script = lambda played: played.end("y")
    assert running.ask("POST", "/generate", {"text": "x"}).status == 200
    running.stream(1).end("x")


@pytest.mark.parametrize(
    ("path", "one", "two", "many"),
    [
        ("/generate", {"text": "x"}, {"text": ["x", "y"]}, {"text": ["x"] * 9}),
        ("/generate", {"input_ids": [1]}, {"input_ids": [[1], [2]]}, {"input_ids": [[1]] * 9}),
        ("/v1/completions", {"prompt": "x"}, {"prompt": ["x", "y"]}, {"prompt": ["x"] * 9}),
        (
            "/v1/completions",
            {"prompt": [1], "echo": True},
            {"prompt": [[1], [2]], "echo": True},
            {"prompt": [[1]] * 9, "echo": True},
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, None, None),
    ],
)
def test_no_more_prompts_run_than_may_however_they_come(
    serve: Serve, path: str, one: object, two: object, many: object
) -> None:
    running = serve(limits=Limits(requests=3), template="{{ messages[0].content }}")
    backend, submit = running.backend, running.backend.submit
    go_on = asyncio.Event()

    async def slow(body: object) -> object:
        await go_on.wait()
        return await submit(body)

    backend.submit = slow  # type: ignore[method-assign, assignment]
    if many is not None:
        assert "at most 3" in running.ask("POST", path, many).json["error"]["message"]
    clients = [running.raw() for _ in range(50)]
    for number, client in enumerate(clients):
        client.post(path, (two if number % 2 and two else one))
    eventually(lambda: len(running.server.connections.open) == 50, "all here")
    eventually(lambda: running.app.metrics.responses.get((path, 503), 0) >= 47, "the rest is refused")
    running.loop.call_soon_threadsafe(go_on.set)
    eventually(lambda: len(backend.streams) == running.app.live, "submitted")
    assert 2 <= len(backend.streams) <= 3
    for played in backend.streams:
        played.end("fine")
    eventually(lambda: running.app.live == 0, "all answered")
    backend.refuse = Unavailable("a ring is full")
    for _ in range(5):
        assert "a ring is full" in running.ask("POST", path, one).json["error"]["message"]
    backend.refuse = None
    backend.script = lambda played: played.end("fine")
    assert running.ask("POST", path, two or one).status == 200


def test_a_client_that_leaves_while_its_prompts_are_taken_leaves_their_room(serve: Serve) -> None:
    running = serve(limits=Limits(requests=3))

    async def never(body: object) -> None:
        await asyncio.Event().wait()

    running.backend.submit = never  # type: ignore[method-assign, assignment]
    client = running.raw()
    client.post("/generate", {"text": ["x", "y", "z"]})
    eventually(lambda: running.app.live == 3, "taken")
    assert running.ask("POST", "/generate", {"text": "x"}).status == 503
    client.close()
    eventually(lambda: running.app.live == 0, "left")
