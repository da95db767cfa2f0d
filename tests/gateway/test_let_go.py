"""What a request had goes with its answer, and what a connection had with the connection."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.circles import circles

from .conftest import Running, Serve, eventually
from .fake import TEMPLATE, Played
from .test_generate import ask, hello

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
PROMPT = {"model": "fake", "prompt": "hi"}
MESSAGES = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


def over(running: Running) -> None:
    """Wait until the server has done with every connection, and let go of what the fake backend keeps."""
    eventually(lambda: not running.server.connections.open, "the connections to be gone")
    running.backend.streams.clear()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, ask()),
        (GENERATE, ask(stream=True)),
        (GENERATE, ask(stream=True, text=["hi", "ho"], rid=["r1", "r2"])),
        (GENERATE, ask(no_such_field=1)),
        (COMPLETIONS, PROMPT),
        (COMPLETIONS, {**PROMPT, "stream": True}),
        (CHAT, MESSAGES),
        (CHAT, {**MESSAGES, "stream": True}),
        ("/nowhere", {}),
    ],
)
def test_an_answer_leaves_nothing_to_the_garbage_collector(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    running = serve(hello, template=TEMPLATE)
    running.ask("POST", path, body)  # what is made once stays
    over(running)
    with circles() as left:
        for _ in range(3):
            running.ask("POST", path, body)
        over(running)
    assert left == []


def fails(played: Played) -> None:
    played.say("a")
    played.fail(500, "no more")


@pytest.mark.parametrize("script", [None, fails])
def test_nor_does_one_that_is_broken_off(serve: Serve, script: Callable[[Played], None] | None) -> None:
    """By the client that goes away (nothing is played for it), or by an error."""
    running = serve(script)
    with circles() as left:
        for number in range(3):
            raw = running.raw()
            raw.post(GENERATE, ask(stream=True))
            if script is None:
                running.stream(number).say("a")
            raw.until(b'"a"')
            raw.close()
        over(running)
    assert left == []
