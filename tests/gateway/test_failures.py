"""Whatever is wrong with a request, or goes wrong in answering it, its client hears of it."""

import json
from typing import Any

import pytest
from outfeed.gateway.shapes import error_json
from outfeed.ring.finish import FinishReason
from outfeed.sink import ChunkEvent, Done, Frame

from .conftest import Serve, eventually
from .fake import Played

TEMPLATE = (
    "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
CHAT = '{"messages": [{"role": "user", "content": "x"}], %s}'
HALVES = [
    ("/generate", '{"text": "\\ud800", "x": NaN}'),
    ("/generate", '{"text": "x", "\\ud800": NaN}'),
    ("/generate", '{"text": "x", "rid": "\\ud800", "sampling_params": {"temperature": NaN}}'),
    ("/abort_request", '{"rid": "\\ud800", "x": NaN}'),
    ("/v1/completions", '{"prompt": "x", "model": "\\ud800", "x": NaN}'),
    ("/v1/completions", '{"prompt": "x", "model": "\\ud800", "x": NaN, "stream": true}'),
    ("/v1/completions", '{"prompt": "\\ud800", "echo": true, "x": NaN}'),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "NaN \\ud800"}]}'),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "\\ud800"}], "x": NaN}'),
    ("/v1/chat/completions", '{"messages": [{"role": "\\ud800", "content": "x"}], "x": NaN}'),
    ("/v1/chat/completions", CHAT % '"chat_template_kwargs": {"\\ud800": NaN}'),
    ("/v1/chat/completions", CHAT % '"tools": ["\\udfff", -Infinity]'),
    (
        "/v1/chat/completions",
        CHAT
        % '"response_format": {"type": "json_schema", "json_schema": {"schema": {"t": "\\ud800", "u": NaN}}}',
    ),
]


@pytest.mark.parametrize(("path", "body"), HALVES)
def test_half_a_surrogate_pair_is_a_400_on_every_way_in(serve: Serve, path: str, body: str) -> None:
    running = serve(lambda played: played.end("fine"), template=TEMPLATE)
    for sent in (body, body.replace("NaN", "0").replace("-Infinity", "0")):
        answer = running.ask("POST", path, sent.encode())
        assert answer.status == 400
        assert answer.json["error"]["message"]
    assert running.backend.streams == []


@pytest.mark.parametrize("message", ["\ud800", "é \udfff 😀", "\x00", "plain"])
@pytest.mark.parametrize("openai", [False, True])
def test_an_error_can_be_written_whatever_it_quotes(message: str, openai: bool) -> None:
    error = json.loads(error_json(400, message, openai, param=message))["error"]
    written = message.encode("utf-8", "backslashreplace").decode()
    assert error["message"] == written
    assert not openai or error["param"] == written


def test_a_client_is_cut_off_when_not_even_its_refusal_can_be_written(serve: Serve) -> None:
    running = serve()

    def broken(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("no refusals today")

    for name in ("_refuse", "_fail"):
        setattr(running.app, name, broken)
    client = running.raw()
    client.post("/generate", {"text": 5})
    assert client.rest() == b""
    eventually(lambda: running.app.idle, "the exchange is over")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x"}),
        ("/generate", {"text": ["x", "y"]}),
        ("/v1/completions", {"prompt": "x", "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_an_answer_that_cannot_be_put_together_is_a_500(
    serve: Serve, path: str, body: dict[str, Any], last: bool
) -> None:
    """Of which nothing has been sent: its client can be told, and its connection goes on."""

    def torn(played: Played) -> None:
        half = b"half a character: \xe6"
        if last:
            played.send(Done(ChunkEvent(half, b"", 0, 0, 3, 0, FinishReason.stop())))
        else:
            played.send(Frame(ChunkEvent(half, b"", 0, 0, 3, 0)))
            played.end("")

    running = serve(torn, template=TEMPLATE)
    client = running.raw()
    client.post(path, body)
    answer = client.until(b"}}")
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert (b'"object":"error"' in answer) == path.startswith("/v1")
    eventually(lambda: running.app.idle, "the answer is over")
    assert all(played.closed for played in running.backend.streams)
    assert running.app.metrics.disconnects == 0
    client.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b"200 OK" in client.until(b"\r\n\r\n")


def test_an_answer_that_has_begun_is_cut_off_when_it_fails_and_gets_no_second_head(serve: Serve) -> None:
    running = serve()

    class Deaf(Played):
        """A stream that cannot be listened to."""

        @property
        def source(self) -> Any:
            raise RuntimeError("nobody is there")

        @source.setter
        def source(self, _: Any) -> None:
            pass

        def close(self) -> None:
            self.closed = True

    async def submit(_body: Any) -> list[Any]:
        running.backend.streams.append(Deaf("r", None, None, None))  # type: ignore[arg-type]
        return [running.backend.streams[0]]

    running.backend.submit = submit  # type: ignore[assignment, method-assign]
    client = running.raw()
    client.post("/generate", {"text": "x", "stream": True})
    assert client.rest().count(b"HTTP/1.1") <= 1
    eventually(lambda: running.app.idle, "the answer is over")
    assert running.stream().closed


@pytest.mark.parametrize("prompts", [1, 2])
def test_a_stream_that_failed_ends_with_its_error_and_counts_nothing(serve: Serve, prompts: int) -> None:
    """Usage would be that of the prompts that did not fail, and pass for all there was."""
    running = serve()
    client = running.raw()
    asked = {"prompt": ["x"] * prompts, "stream": True, "stream_options": {"include_usage": True}}
    client.post("/v1/completions", asked)
    failing, *others = (running.stream(number) for number in range(prompts))
    failing.say("some ")
    failing.fail(500, "its shard died")
    for played in others:
        played.end("fine")
    *told, done = client.until(b"data: [DONE]\n\n").split(b"data: ")[1:]
    assert done.startswith(b"[DONE]")
    assert sum(b'"its shard died"' in one for one in told) == 1
    assert not any(b"total_tokens" in one for one in told)
