"""`/generate`: the reference's shapes, whole and streamed, single and batched, right and wrong."""

import itertools
import json
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outfeed.gateway import generate
from outfeed.gateway.app import Options
from outfeed.gateway.generate import GenerateStream, ResponseStream, WholeResponse, render_whole
from outfeed.gateway.limits import Limits
from outfeed.ring.finish import FinishReason
from outfeed.sink import ChunkEvent, Done, Response
from outfeed.sink.accumulate import render_columns
from outfeed.sink.columns import Columns, Flat, Hidden, Ragged

from .conftest import Serve, eventually, parse_events
from .fake import Played, event


def hello(played: Played) -> None:
    played.say("Hel", 'lo "wörld"\n', "🙂")
    played.end("!", FinishReason.stop("!"))


def ask(**more: object) -> dict[str, object]:
    return {"text": "hi", "rid": "r1", "sampling_params": {"max_new_tokens": 4}, **more}


def test_a_whole_answer_has_the_reference_shape(serve: Serve) -> None:
    answer = serve(hello).ask("POST", "/generate", ask())
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    body = answer.json
    assert body["text"] == 'Hello "wörld"\n🙂!'
    assert body["output_ids"] == [100, 101, 102, 103]
    meta = body["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "r1",
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "finish_reason": {"type": "stop", "matched": "!"},
    }


def test_a_last_event_without_a_token_ends_an_answer_like_any_other(serve: Serve) -> None:
    running = serve()
    for number, stream in enumerate((False, True)):
        client = running.raw()
        client.post("/generate", ask(stream=stream))
        played = running.stream(number)
        played.say("Hel")
        eventually(lambda: running.app.metrics.output_tokens > number, "taken")  # noqa: B023
        played.over = True
        played.send(Done(ChunkEvent(b"lo", b"", 1, 0, 3, 0, FinishReason.length(1))))
        assert b'"completion_tokens":1,"finish_reason":{"type"' in client.until(b'"length":1}')


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_a_stream_says_how_it_is_framed_whether_its_connection_is_kept_or_not(
    serve: Serve, connection: str
) -> None:
    answer = serve(hello).ask("POST", "/generate", ask(stream=True), {"Connection": connection})
    assert answer.headers["transfer-encoding"] == "chunked"
    assert answer.headers.get("connection", "keep-alive") == connection
    assert answer.events[-1] == "[DONE]"


def test_the_head_of_a_stream_does_not_wait_for_its_first_token(serve: Serve) -> None:
    running = serve()
    client = running.raw()
    client.post("/generate", ask(stream=True))
    assert b"200 OK" in client.until(b"\r\n\r\n")
    running.stream().end("now")
    assert b"now" in client.until(b"[DONE]")


def test_a_stream_is_cumulative_unless_the_server_is_incremental(serve: Serve) -> None:
    cumulative = serve(hello).ask("POST", "/generate", ask(stream=True))
    assert cumulative.headers["content-type"] == "text/event-stream"
    *events, done = cumulative.events
    assert done == "[DONE]"
    assert events[-1]["text"] == 'Hello "wörld"\n🙂!'
    assert events[-1]["output_ids"] == [100, 101, 102, 103]
    for before, after in itertools.pairwise(events):
        assert after["text"].startswith(before["text"])
    *events, done = (
        serve(hello, options=Options(incremental=True)).ask("POST", "/generate", ask(stream=True)).events
    )
    assert "".join(event["text"] for event in events) == 'Hello "wörld"\n🙂!'
    assert [one for event in events for one in event["output_ids"]] == [100, 101, 102, 103]
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "!"}
    assert events[-1]["meta_info"]["completion_tokens"] == 4
    assert events[-1]["meta_info"]["e2e_latency"] > 0


def test_each_token_is_its_own_event_for_a_client_that_keeps_up(serve: Serve) -> None:
    running = serve()
    client = running.raw()
    client.post("/generate", ask(stream=True))
    played = running.stream()
    for number in range(5):
        played.say(f"t{number}")
        assert f'"completion_tokens":{number + 1},'.encode() in client.until(b"}\n\n")
    played.end("")
    client.until(b"[DONE]")


def test_a_batch_is_answered_in_its_order_or_by_index(serve: Serve) -> None:
    running = serve()
    running.backend.script = lambda played: played.end(f"answer to {played.prompt.text}")
    body = {"text": ["one", "two", "three"], "rid": ["a", "b", "c"]}
    answers = running.ask("POST", "/generate", body).json
    assert [one["text"] for one in answers] == ["answer to one", "answer to two", "answer to three"]
    assert [one["meta_info"]["id"] for one in answers] == ["a", "b", "c"]
    *events, done = running.ask("POST", "/generate", {**body, "stream": True}).events
    assert done == "[DONE]"
    assert {event["index"]: event["text"] for event in events} == {
        0: "answer to one",
        1: "answer to two",
        2: "answer to three",
    }


def test_a_batch_of_one_is_still_a_list(serve: Serve) -> None:
    running = serve(lambda played: played.end("x"))
    for ids in ([1, 2], [1]):
        assert [one["text"] for one in running.ask("POST", "/generate", {"input_ids": [ids]}).json] == ["x"]
    assert running.ask("POST", "/generate", {"input_ids": [1, 2]}).json["text"] == "x"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{", "JSON"),
        (b'{"text": "x", "bogus": 1}', "bogus"),
        (b'{"text": "x", "sampling_params": {"top_p": 5}}', "top_p"),
        (b'{"text": "x", "sampling_params": {"temperature": NaN}}', "temperature"),
        (b'{"text": "x", "stream": "yes"}', "stream"),
        (b"[1, 2]", "object"),
        (b'"' + b"[" * 100_000, "JSON"),
        (b"\xff\xfe", "JSON"),
        (b"", "JSON"),
    ],
)
def test_a_bad_request_is_a_400_that_names_what_is_wrong(serve: Serve, body: bytes, field: str) -> None:
    answer = serve(hello).ask("POST", "/generate", body)
    assert answer.status == 400
    assert set(answer.json) == {"error"}
    assert set(answer.json["error"]) == {"message", "code"}
    assert answer.json["error"]["code"] == 400
    assert field in answer.json["error"]["message"]


def test_a_rid_in_use_is_a_409(serve: Serve) -> None:
    running = serve()
    client = running.raw()
    client.post("/generate", ask(stream=True))
    played = running.stream()
    assert running.ask("POST", "/generate", ask()).status == 409
    played.end("x")
    client.until(b"[DONE]")


def test_a_failure_is_the_status_of_a_whole_answer(serve: Serve) -> None:
    def fails(played: Played) -> None:
        played.say("half")
        played.fail(503, "the scheduler is gone")

    answer = serve(fails).ask("POST", "/generate", ask())
    assert answer.status == 503
    assert answer.json == {"error": {"message": "the scheduler is gone", "code": 503}}


def test_a_failure_in_a_stream_is_one_event_and_the_end(serve: Serve) -> None:
    def fails(played: Played) -> None:
        played.say("half")
        played.fail(500, "lost")

    first, *rest = serve(fails).ask("POST", "/generate", ask(stream=True)).events
    assert first["text"] == "half"
    assert rest == [{"error": {"message": "lost", "code": 500}}, "[DONE]"]


def test_an_abort_with_a_status_is_an_error_and_one_without_is_an_end(serve: Serve) -> None:
    with_status = FinishReason.abort("too long", 422, "BadRequest")
    running = serve(lambda played: played.end("", with_status))
    assert running.ask("POST", "/generate", ask()).json == {"error": {"message": "too long", "code": 422}}
    assert running.ask("POST", "/generate", ask(stream=True)).events[-2:] == [
        {"error": {"message": "too long", "code": 422}},
        "[DONE]",
    ]
    running.backend.script = lambda played: played.end("so far", FinishReason.abort("stopped"))
    answer = running.ask("POST", "/generate", ask())
    assert answer.status == 200
    assert answer.json["meta_info"]["finish_reason"] == {
        "type": "abort",
        "message": "stopped",
        "status_code": None,
        "err_type": None,
    }


def test_a_failed_prompt_fails_a_whole_batch_and_aborts_the_rest(serve: Serve) -> None:
    def first_fails(played: Played) -> None:
        if played.rid == "a":
            played.fail(400, "no")

    running = serve(first_fails)
    answer = running.ask("POST", "/generate", {"text": ["x", "y"], "rid": ["a", "b"]})
    assert answer.status == 400
    assert all(played.closed for played in running.backend.streams)


def test_in_a_streamed_batch_a_failed_prompt_leaves_the_others_be(serve: Serve) -> None:
    def first_fails(played: Played) -> None:
        if played.rid == "a":
            played.fail(500, "no")
        else:
            played.end("fine")

    events = (
        serve(first_fails)
        .ask("POST", "/generate", {"text": ["x", "y"], "rid": ["a", "b"], "stream": True})
        .events
    )
    assert events[-1] == "[DONE]"
    assert {event["index"] for event in events[:-1]} == {0, 1}
    assert [event["text"] for event in events[:-1] if "text" in event] == ["fine"]
    assert [event["error"]["code"] for event in events[:-1] if "error" in event] == [500]


def test_what_fails_inside_is_a_500_without_a_trace(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    running = serve(hello, refuse=RuntimeError("secret detail"))
    answer = running.ask("POST", "/generate", ask())
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert b"Traceback" not in answer.body
    assert "secret detail" in caplog.text


def packed(kind: str, *values: float) -> bytes:
    return np.array(values, dtype=kind).tobytes()


def flat(*values: float) -> Flat:
    return Flat(packed("<f4", *values), packed("<i4", *range(7, 7 + len(values))))


def ragged(*lengths: int) -> Ragged:
    count = sum(lengths)
    return Ragged(
        packed("<u4", *lengths),
        packed("<f4", *(-0.25 * n for n in range(count))),
        packed("<i4", *range(count)),
    )


NAMED = {0: 'é"', 1: "b", 7: "seven"}
SHARES: list[Columns | None] = [
    None,
    Columns(output_logprobs=flat(-0.5), input_logprobs=flat(float("nan"), -1.5, float("-inf"))),
    Columns(output_top_logprobs=ragged(2), input_top_logprobs=ragged(0, 3)),
    Columns(
        output_logprobs=flat(-0.125, -2.0),
        output_top_logprobs=ragged(0, 1),
        output_ids_logprobs=ragged(1, 1),
    ),
    Columns(hidden_states=Hidden(packed("<f4", 1.5, -2.5, 3.0, 4.0), 2, 2)),
    Columns(output_logprobs=flat(), input_ids_logprobs=ragged(), hidden_states=Hidden(b"", 0, 2)),
    Columns(output_logprobs=flat(-3.0), hidden_states=Hidden(packed("<f4", 0.5), 1, 1)),
]


def told(named: bool) -> list[ChunkEvent]:
    """A request's events, with every kind of text and of columns; `named`: with the tokens' texts."""
    texts = ["plain", "", '"\\\n\t\x00\x1f\x7f', "é\u2028🙂", "</script>", "\ufffd"]
    shares = [
        msgspec.structs.replace(one, texts=NAMED) if named and one is not None else one for one in SHARES * 2
    ]
    return [
        event(
            texts[first % len(texts)],
            first,
            finish=FinishReason.stop("é") if first == len(shares) - 1 else None,
            columns=columns,
        )
        for first, columns in enumerate(shares)
    ]


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    want = json.loads(msgspec.json.encode(want))  # f32 numbers and keys as JSON has them
    assert abs(got["meta_info"].pop("e2e_latency", 0) - want["meta_info"].pop("e2e_latency", 0)) < 5
    assert got == want


@pytest.mark.parametrize("kind", [GenerateStream, ResponseStream])
@pytest.mark.parametrize("cumulative", [True, False])
@pytest.mark.parametrize("index", [None, 3])
@pytest.mark.parametrize("named", [True, False])
def test_a_stream_is_rendered_as_the_sink_renders_it(
    kind: type[GenerateStream], cumulative: bool, index: int | None, named: bool
) -> None:
    """The quick one is bytes put together; the other is the sink's own rendering."""
    quick, response = kind('r"1', 0.0, cumulative, index), Response('r"1')
    for one in told(named):
        if kind is GenerateStream:
            one = event(one.text, one.first, finish=one.finish)
        response.add(one)
        seconds = None if one.finish is None else time.perf_counter()
        want = response.cumulative(seconds) if cumulative else response.incremental(seconds)
        if index is not None:
            want["index"] = index
        (got,) = parse_events(quick.delta(one))
        same(got, want)


@pytest.mark.parametrize("named", [True, False])
def test_a_whole_answer_is_rendered_as_the_sink_renders_it(named: bool) -> None:
    whole, response = WholeResponse('r"1', 0.0), Response('r"1')
    for one in told(named):
        size = whole.add(one)
        response.add(one)
    same(json.loads(render_whole([whole], batch=False)), response.cumulative(time.perf_counter()))
    assert 0.5 < size / len(whole.render()) <= 1.1
    one, two = json.loads(render_whole([whole, whole], batch=True))
    assert one["output_ids"] == two["output_ids"] == response.whole().ids.tolist()


@pytest.mark.parametrize("stream", [ResponseStream("r", 0.0, True, None), WholeResponse("r", 0.0)])
def test_each_log_probability_is_rendered_once(
    stream: ResponseStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[int] = []

    def counted(columns: Columns) -> dict[str, Any]:
        found = render_columns(columns)
        rendered.append(sum(map(len, found.values())))
        return found

    monkeypatch.setattr(generate, "render_columns", counted)
    for first in range(100):
        one = event("x", first, columns=Columns(output_logprobs=flat(-1.0), output_top_logprobs=ragged(5)))
        if isinstance(stream, WholeResponse):
            stream.add(one)
        else:
            stream.delta(one)
    assert sum(rendered) == 2 * 100


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x"}),
        ("/generate", {"text": ["x", "y", "z"]}),
        ("/generate", {"text": "x", "return_logprob": True}),
        ("/generate", {"text": "x", "return_hidden_states": True}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": ["x", "y"], "logprobs": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True}),
    ],
)
def test_an_answer_that_grows_too_large_to_be_sent_whole_is_a_400_and_aborted(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    running = serve(limits=Limits(answer_bytes=20_000), template="{{ messages[0].content }}")
    client = running.raw()
    client.post(path, body)
    wanted = len(body.get("text", body.get("prompt", "x")))
    running.stream(wanted - 1)
    columns = None
    if set(body) & {"return_logprob", "logprobs"}:
        columns = Columns(output_logprobs=flat(-1.0), output_top_logprobs=ragged(50))
    elif "return_hidden_states" in body:
        columns = Columns(hidden_states=Hidden(packed("<f4", *[1.0] * 5000), 1, 5000))
    text = "" if columns is not None else "long " * 500

    def say() -> None:
        for played in running.backend.streams:
            if not played.closed:
                played.say(text, columns=columns)

    def closed() -> bool:
        running.loop.call_soon_threadsafe(say)
        return all(played.closed for played in running.backend.streams)

    eventually(closed, "aborted")
    refused = client.until(b"}}")
    assert refused.startswith(b"HTTP/1.1 400 ")
    assert b"more than 20000 bytes" in refused
    assert b"stream it" in refused


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_cumulative_stream_whose_events_grow_too_large_fails_alone(
    serve: Serve, prompts: int, last: bool
) -> None:
    running = serve(limits=Limits(answer_bytes=20_000))
    client = running.raw()
    client.post("/generate", {"text": ["x"] * prompts, "stream": True})
    large, *others = (running.stream(number) for number in range(prompts))
    running.loop.call_soon_threadsafe(large.say, "long " * 3000)
    got = client.until(b"}\n\n")
    running.loop.call_soon_threadsafe(large.end if last else large.say, "long " * 3000)
    if not last:
        eventually(lambda: large.closed, "aborted")
    for played in others:
        running.loop.call_soon_threadsafe(played.end, "fine")
    got += client.until(b"data: [DONE]\n\n")
    assert b"--incremental" in got
    assert b'"code":400' in got
    assert got.count(b'"text":"fine"') == len(others)


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"])), st.lists(st.integers(-(2**31), 2**31 - 1))
        )
    ),
    st.booleans(),
)
def test_any_text_and_ids_survive_the_quick_rendering(
    parts: list[tuple[str, list[int]]], cumulative: bool
) -> None:
    stream, text, ids = GenerateStream("r", 0.0, cumulative, None), "", list[int]()
    for piece, more in parts:
        packed = np.array(more, dtype="<i4").tobytes()
        one = ChunkEvent(piece.encode(), packed, len(ids), len(more), 1, 0)
        (got,) = parse_events(stream.delta(one))
        text, ids = text + piece, ids + more
        assert got["text"] == (text if cumulative else piece)
        assert got["output_ids"] == (ids if cumulative else more)


def test_log_probabilities_are_rendered_when_asked_for(serve: Serve) -> None:
    def script(played: Played) -> None:
        values, ids = np.array([-0.5], dtype="<f4").tobytes(), np.array([7], dtype="<i4").tobytes()
        played.say("a", columns=Columns(output_logprobs=Flat(values, ids), texts={7: "a"}))
        played.end("")

    running = serve(script)
    whole = running.ask("POST", "/generate", ask(return_logprob=True)).json
    assert whole["meta_info"]["output_token_logprobs"] == [[-0.5, 7, "a"]]
    first, *_ = running.ask("POST", "/generate", ask(return_logprob=True, stream=True, rid="r2")).events
    assert first["meta_info"]["output_token_logprobs"] == [[-0.5, 7, "a"]]


def test_a_stream_has_the_hidden_states_that_were_asked_for(serve: Serve) -> None:
    def script(played: Played) -> None:
        played.say("a", columns=Columns(hidden_states=Hidden(packed("<f4", 0.5, 2.0), 1, 2)))
        played.end("")

    first, *_ = serve(script).ask("POST", "/generate", ask(return_hidden_states=True, stream=True)).events
    assert first["meta_info"]["hidden_states"] == [[0.5, 2.0]]
