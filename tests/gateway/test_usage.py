"""What OpenAI's clients are told, as a stream goes on, of the tokens that it took."""

import json
from typing import Any

import pytest

from .conftest import Raw, Running, Serve
from .fake import TEMPLATE

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
CHAT_TOKENS = len("<user>hi\n<assistant>")
EACH = {"continuous_usage_stats": True}


@pytest.fixture
def running(serve: Serve) -> Running:
    return serve(template=TEMPLATE)


def stream(running: Running, path: str, options: dict[str, Any], **body: Any) -> Raw:
    client = running.raw()
    client.post(f"/v1/{path}", {**body, "stream": True, "stream_options": options})
    return client


def usage(client: Raw, text: str) -> tuple[int, ...] | str | None:
    """Read the next chunk, which has this text: the tokens of prompt, completion and both that it tells."""
    chunks = client.until(b"\n\n").split(b"data: ")
    (data,) = (chunk for chunk in chunks if f'"{text}"'.encode() in chunk)
    told = json.loads(data.split(b"\n\n")[0]).get("usage", "left out")
    return tuple(told.values()) if isinstance(told, dict) else told


@pytest.mark.parametrize("last", [True, False])
def test_each_chunk_of_a_chat_tells_the_tokens_so_far_to_who_asks(running: Running, last: bool) -> None:
    client = stream(running, "chat/completions", {**EACH, "include_usage": last}, **CHAT)
    assert usage(client, "assistant") == (CHAT_TOKENS, 0, CHAT_TOKENS)
    played = running.stream()
    played.say("one")
    assert usage(client, "one") == (3, 1, 4), "as the scheduler's events say"
    played.say("two")
    assert usage(client, "two") == (3, 2, 5)
    played.end("three")
    rest = client.until(b"data: [DONE]\n\n")
    assert rest.count(b'"usage":{"prompt_tokens":3,"completion_tokens":3,"total_tokens":6}') == 1 + last
    assert (b'"choices":[],' in rest) is last


def test_each_chunk_of_a_completion_tells_those_of_its_own_prompt(running: Running) -> None:
    client = stream(running, "completions", {**EACH, "include_usage": True}, prompt=["x", "y"])
    first, second = running.stream(0), running.stream(1)
    first.say("one")
    assert usage(client, "one") == (3, 1, 4)
    second.say("eins")
    assert usage(client, "eins") == (3, 1, 4)
    first.say("two")
    assert usage(client, "two") == (3, 2, 5)
    second.end("zwei")
    assert usage(client, "zwei") == (3, 2, 5)
    first.end("three")
    rest = client.until(b"data: [DONE]\n\n")
    assert b'"total_tokens":6}' in rest
    assert b'"choices":[],"usage":{"prompt_tokens":6,"completion_tokens":5,"total_tokens":11}' in rest


@pytest.mark.parametrize(
    ("options", "told"),
    [({}, "left out"), ({"continuous_usage_stats": False, "include_usage": True}, None)],
)
def test_no_other_client_is_told_before_the_end(
    running: Running, options: dict[str, Any], told: str | None
) -> None:
    client = stream(running, "completions", options, prompt="x")
    running.stream().say("one")
    assert usage(client, "one") == told
    running.stream().end("two")
    assert usage(client, "two") == told


def test_a_switch_that_is_none_is_told_by_its_name(running: Running) -> None:
    answer = running.ask(
        "POST", "/v1/completions", {"prompt": "x", "stream_options": {"continuous_usage_stats": "yes"}}
    )
    assert answer.status == 400
    assert answer.json["error"]["param"] == "stream_options.continuous_usage_stats"
