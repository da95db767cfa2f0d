"""OpenAI's endpoints, by hand and through the official client."""

import json
from collections.abc import Iterator

import numpy as np
import openai
import pytest
from outfeed.ingress.request import Model
from outfeed.ring.finish import FinishReason
from outfeed.sink.columns import Columns, Flat, Ragged

from .conftest import Running, Serve, eventually
from .fake import TEMPLATE, VOCABULARY, Played, WordTokenizer

LIMITED = {"max_new_tokens": 7}


def three(played: Played) -> None:
    played.say("one ", "two ")
    played.end("three", FinishReason.stop("three"))


@pytest.fixture
def running(serve: Serve) -> Running:
    return serve(three, template=TEMPLATE)


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


def test_the_official_client_completes(client: openai.OpenAI) -> None:
    done = client.completions.create(model="m", prompt="say", max_tokens=5)
    assert done.choices[0].text == "one two three"
    assert done.choices[0].finish_reason == "stop"
    assert done.model == "m"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (3, 3, 6)


def test_the_official_client_streams_a_completion(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="m", prompt="say", stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "one two three"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 6
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_official_client_chats(client: openai.OpenAI, running: Running) -> None:
    done = client.chat.completions.create(
        model="m",
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]},
        ],
    )
    assert done.object == "chat.completion"
    assert done.choices[0].message.role == "assistant"
    assert done.choices[0].message.content == "one two three"
    assert done.choices[0].finish_reason == "stop"
    prompt = "".join(map(chr, running.stream().prompt.ids))
    assert prompt == "<system>be brief\n<user>hi\nthere\n<assistant>"


def test_the_official_client_streams_a_chat(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == "one two three"
    )
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == [
        "stop"
    ]
    assert chunks[-1].usage is not None
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


def test_the_official_client_sees_errors_as_its_own(client: openai.OpenAI, running: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p") as caught:
        client.completions.create(model="m", prompt="x", top_p=7, stream=True)
    assert caught.value.param == "top_p"
    assert caught.value.type == "BadRequestError"
    running.backend.script = lambda played: played.fail(503, "gone")
    with pytest.raises(openai.InternalServerError, match="gone"):
        client.completions.create(model="m", prompt="x")
    with pytest.raises(openai.APIError, match="gone"):
        list(client.completions.create(model="m", prompt="x", stream=True))


def test_parameters_reach_the_sampling_parameters(client: openai.OpenAI, running: Running) -> None:
    client.completions.create(
        model="m",
        prompt="x",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        stop=["END"],
        seed=3,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"5": 1},
        extra_body={"top_k": 4, "min_tokens": 2, "unknown_extension": 1},
    )
    params = running.stream().prompt.params
    assert params.max_new_tokens == 7
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 4)
    assert params.stop_strs == ["END"]
    assert (params.sampling_seed, params.min_new_tokens) == (3, 2)
    assert (params.presence_penalty, params.frequency_penalty) == (0.1, 0.2)
    assert params.logit_bias == {"5": 1.0}
    client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "x"}], max_completion_tokens=9
    )
    assert running.stream(1).prompt.params.max_new_tokens == 9
    client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "x"}], response_format={"type": "json_object"}
    )
    assert json.loads(running.stream(2).prompt.params.json_schema) == {"type": "object"}
    client.completions.create(model="m", prompt="x", extra_body={"response_format": {"type": "json_object"}})
    assert json.loads(running.stream(3).prompt.params.json_schema) == {"type": "object"}


def test_prompts_may_be_many_or_ids_and_echoed(client: openai.OpenAI) -> None:
    many = client.completions.create(model="m", prompt=["a", "b"], echo=True)
    assert [(choice.index, choice.text) for choice in many.choices] == [
        (0, "aone two three"),
        (1, "bone two three"),
    ]
    assert many.usage is not None
    assert many.usage.total_tokens == 12
    ids = client.completions.create(model="m", prompt=[72, 105], echo=True)
    assert ids.choices[0].text == "Hione two three"
    chunks = list(client.completions.create(model="m", prompt=["a", "b"], echo=True, stream=True))
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["aone two three", "bone two three"]


def logprobs(played: Played) -> None:
    def packed(kind: str, *values: float) -> bytes:
        return np.array(values, dtype=kind).tobytes()

    columns = Columns(
        output_logprobs=Flat(packed("<f4", -0.5), packed("<i4", 7)),
        output_top_logprobs=Ragged(packed("<u4", 2), packed("<f4", -0.5, -1.5), packed("<i4", 7, 8)),
        texts={7: "é", 8: "b"},
    )
    played.say("é", columns=columns)
    played.end("")


def test_log_probabilities_come_in_each_endpoints_shape(client: openai.OpenAI, running: Running) -> None:
    running.backend.script = logprobs
    done = client.completions.create(model="m", prompt="x", logprobs=2)
    options = running.stream().prompt.logprobs
    assert (options.return_logprob, options.top_logprobs_num, options.return_text_in_logprobs) == (
        True,
        2,
        True,
    )
    found = done.choices[0].logprobs
    assert found is not None
    assert found.tokens == ["é"]
    assert found.token_logprobs == [-0.5]
    assert found.top_logprobs == [{"é": -0.5, "b": -1.5}]
    assert found.text_offset == [0]
    chat = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    (entry,) = chat.choices[0].logprobs.content
    assert (entry.token, entry.logprob, entry.bytes) == ("é", -0.5, [0xC3, 0xA9])
    assert [top.token for top in entry.top_logprobs] == ["é", "b"]


def pieces(played: Played) -> None:
    """ " é!" in four tokens, the é in two of them, and the prompt's own tokens."""

    def packed(kind: str, *values: float) -> bytes:
        return np.array(values, dtype=kind).tobytes()

    def columns(token: int, text: str, *prompt: int) -> Columns:
        known = {token: text, 20: "h", 21: "i", 1: "<s>"}
        asked = None
        if prompt:
            values = (float("nan"), *(-1.0 for _ in prompt[1:]))
            asked = Flat(packed("<f4", *values), packed("<i4", *prompt))
        return Columns(Flat(packed("<f4", -0.5), packed("<i4", token)), asked, texts=known)

    played.say(" ", columns=columns(6, " ", 1, 20, 21))
    played.say("", columns=columns(7, "\ufffd"))
    played.say("é", columns=columns(8, "\ufffd"))
    played.say("!", columns=columns(9, "!"))
    played.end("")


def test_offsets_are_places_in_the_text_behind_the_echo(client: openai.OpenAI, running: Running) -> None:
    running.backend.script = pieces
    running.backend.table = {7: b"\xc3", 8: b"\xa9"}
    plain = client.completions.create(model="m", prompt="hi", logprobs=0).choices[0]
    assert plain.logprobs is not None
    assert plain.logprobs.text_offset == [0, 1, 1, 2]
    assert running.stream().prompt.logprobs.logprob_start_len == -1
    done = client.completions.create(model="m", prompt="hi", logprobs=0, echo=True).choices[0]
    assert running.stream(1).prompt.logprobs.logprob_start_len == 0
    told = done.logprobs
    assert told is not None
    assert told.text_offset is not None
    assert done.text == "hi é!"
    assert told.tokens == ["<s>", "h", "i", " ", "\ufffd", "\ufffd", "!"]
    assert told.text_offset == [0, 0, 1, 2, 3, 3, 4]
    assert told.token_logprobs == [None, -1.0, -1.0, -0.5, -0.5, -0.5, -0.5]
    tokens, offsets, text = [], [], ""
    for chunk in client.completions.create(model="m", prompt="hi", logprobs=0, echo=True, stream=True):
        for choice in chunk.choices:
            text += choice.text
            if choice.logprobs is not None:
                tokens += choice.logprobs.tokens or []
                offsets += choice.logprobs.text_offset or []
    assert (text, tokens, offsets) == (done.text, told.tokens, told.text_offset)


@pytest.mark.parametrize("skip", [True, False])
def test_a_special_token_takes_place_only_where_it_is_text(
    skip: bool, client: openai.OpenAI, running: Running
) -> None:
    """This one is called what the next token says."""

    def say(played: Played) -> None:
        for token, text in ((6, "a"), (50, "" if skip else "é"), (7, ""), (8, "é"), (9, "!")):
            value = np.array([-0.5], dtype="<f4").tobytes()
            chosen = Flat(value, np.array([token], dtype="<i4").tobytes())
            played.say(text, columns=Columns(chosen, texts={6: "a", 50: "é", 7: "\ufffd", 9: "!"}))
        played.end("")

    running.backend.script = say
    running.backend.table, running.backend.special = {7: b"\xc3", 8: b"\xa9", 50: "é".encode()}, {50}
    done = client.completions.create(
        model="m", prompt="hi", logprobs=0, extra_body={"skip_special_tokens": skip}
    ).choices[0]
    assert done.logprobs is not None
    assert done.logprobs.text_offset == ([0, 1, 1, 1, 2] if skip else [0, 1, 2, 2, 3])


def test_a_piece_of_a_character_shows_its_own_bytes_or_none(client: openai.OpenAI, running: Running) -> None:
    running.backend.script = pieces
    for table, shown in (({7: b"\xc3", 8: b"\xa9"}, [[0xC3], [0xA9]]), ({}, [None, None])):
        running.backend.table = table
        asked = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
        chat = running.ask("POST", "/v1/chat/completions", asked).json
        content = chat["choices"][0]["logprobs"]["content"]
        assert [entry["bytes"] for entry in content] == [[0x20], *shown, [0x21]]
        *events, _ = running.ask("POST", "/v1/chat/completions", {**asked, "stream": True}).events
        streamed = [event["choices"][0]["logprobs"] for event in events]
        assert [entry["bytes"] for one in streamed if one for entry in one["content"]] == [
            [0x20],
            *shown,
            [0x21],
        ]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", {"model": "m"}, "prompt"),
        ("completions", {"prompt": 5}, "prompt"),
        ("completions", {"prompt": "x", "max_tokens": -2}, "max_tokens"),
        ("completions", {"prompt": "x", "n": 2}, "n"),
        ("completions", {"prompt": "x", "logprobs": 1000}, "logprobs"),
        ("completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("completions", {"prompt": "x", "stream": "yes"}, "stream"),
        ("completions", {"prompt": [["x"]], "echo": True}, "echo"),
        ("completions", {"prompt": "x", "echo": "no"}, "echo"),
        ("completions", {"prompt": "x", "best_of": True}, "best_of"),
        ("completions", {"prompt": "x", "stream_options": []}, "stream_options"),
        ("completions", {"prompt": "x", "stream_options": {"include_usage": 1}}, "include_usage"),
        ("completions", {"prompt": "x", "response_format": {"type": "xml"}}, "response_format"),
        ("completions", [], "object"),
        ("chat/completions", {}, "messages"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": ["hi"]}, "messages[0]"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "role"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "content[0]",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "u", "content": "x"}], "response_format": {}},
            "response_format",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "u", "content": "x"}], "chat_template_kwargs": {"messages": 1}},
            "chat_template_kwargs",
        ),
    ],
)
def test_what_is_wrong_is_a_400_in_openais_shape(
    running: Running, path: str, body: object, field: str
) -> None:
    answer = running.ask("POST", f"/v1/{path}", body)
    assert answer.status == 400
    error = answer.json["error"]
    assert set(error) == {"object", "message", "type", "param", "code"}
    assert field in error["message"]
    assert running.backend.streams == []


HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": False}, "top_logprobs"),
        ({"tools": "f"}, "tools"),
        ({"tools": ["f"]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": TOOL}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
)
def test_a_chat_that_asks_for_what_it_would_not_get_is_a_400(
    running: Running, more: dict[str, object], param: str
) -> None:
    answer = running.ask("POST", "/v1/chat/completions", {"messages": HI, **more})
    assert answer.status == 400
    assert answer.json["error"]["param"] == param
    assert running.backend.streams == []


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("given", [None, "mine", 'a "wörd"\n\n\\'])
def test_an_answers_id_is_what_an_abort_takes(serve: Serve, path: str, given: str | None) -> None:
    running = serve(template=TEMPLATE)
    client = running.raw()
    asked = {"stream": True, "rid": given, **({"messages": HI} if "chat" in path else {"prompt": "x"})}
    client.post(f"/v1/{path}", asked)
    running.stream().say("a")
    first = json.loads(client.until(b"}\n\n").partition(b"data: ")[2].partition(b"\n")[0])
    assert given in (None, first["id"])
    assert running.ask("POST", "/abort_request", {"rid": first["id"]}).json["aborted_here"]
    assert b"aborted on request" in client.until(b"[DONE]\n\n")


def test_what_other_servers_take_may_be_declined(running: Running) -> None:
    declined: dict[str, object] = {
        "guided_json": None,
        "continue_final_message": False,
        "lora_path": "",
        "bad_words": [],
    }
    declined |= {"add_generation_prompt": True, "functions": None}
    assert running.ask("POST", "/v1/chat/completions", {"messages": HI, **declined}).status == 200


def test_a_chat_is_as_long_as_the_model_makes_it_unless_somebody_says(serve: Serve) -> None:
    running = serve(three, template=TEMPLATE)
    running.ask("POST", "/v1/chat/completions", {"messages": HI})
    running.ask("POST", "/v1/chat/completions", {"messages": HI, "max_tokens": 5})
    limited = serve(
        three, template=TEMPLATE, model=Model(VOCABULARY, 4096, WordTokenizer(), defaults=LIMITED)
    )
    limited.ask("POST", "/v1/chat/completions", {"messages": HI})
    streams = [running.stream(0), running.stream(1), limited.stream(0)]
    assert [one.prompt.params.max_new_tokens for one in streams] == [None, 5, 7]


def test_a_completion_has_16_tokens_unless_its_client_says(serve: Serve) -> None:
    model = Model(VOCABULARY, 4096, WordTokenizer(), defaults=LIMITED)
    running = serve(three, model=model)
    for asked in ({}, {"max_tokens": None}, {"max_tokens": 5}):
        running.ask("POST", "/v1/completions", {"prompt": "x", **asked})
    assert [one.prompt.params.max_new_tokens for one in running.backend.streams] == [16, 16, 5]


def test_an_echo_with_log_probabilities_has_those_of_the_prompt_or_is_none(
    client: openai.OpenAI, running: Running
) -> None:
    """Who weighs a text by its tokens' sum would read a sum of 0."""
    running.backend.script = logprobs
    for stream in (False, True):
        with pytest.raises(openai.APIError, match="this scheduler sends none"):
            list(client.completions.create(model="m", prompt="x", logprobs=1, echo=True, stream=stream))
    eventually(lambda: all(one.closed for one in running.backend.streams), "both given up")
    running.backend.script = lambda played: played.end("")
    with pytest.raises(openai.BadRequestError, match="this scheduler sends none"):
        client.completions.create(model="m", prompt="x", logprobs=1, echo=True, max_tokens=0)


def test_a_chat_may_bring_tools_and_say_the_defaults(client: openai.OpenAI) -> None:
    for choice in ("none", "auto"):
        done = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
            tool_choice=choice,
            modalities=["text"],
            logprobs=False,
            top_logprobs=0,
        )
        assert done.choices[0].message.content == "one two three"


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("completions", {"prompt": "x", "max_tokens": -2}, "max_tokens", "at least 0"),
        ("completions", {"prompt": "x", "max_tokens": "many"}, "max_tokens", "integer"),
        ("completions", {"prompt": "x", "max_tokens": 9, "min_tokens": 10}, "min_tokens", "[0, max_tokens]"),
        ("completions", {"prompt": "x", "seed": 2**70}, "seed", "64-bit"),
        ("completions", {"prompt": "x", "stop_regex": ["ok", "("]}, "stop_regex[1]", "compile"),
        ("completions", {"prompt": "x", "logit_bias": {"5": "a"}}, "logit_bias[5]", "number"),
        ("completions", {"prompt": True}, "prompt", "a string"),
        ("completions", {"prompt": []}, "prompt", "token ids"),
        ("completions", {"prompt": ["a", 5]}, "prompt[1]", "string"),
        ("completions", {"prompt": [5, "a"]}, "prompt[1]", "token id"),
        ("completions", {"prompt": [[5], [99999]]}, "prompt[1][0]", "token id"),
        ("completions", {"prompt": "x", "regex": "a", "ebnf": "b"}, "ebnf", "at most one of"),
        ("completions", {"prompt": "x", "logprobs": 21}, "logprobs", "[0, 20]"),
        ("chat/completions", {"messages": HI, "max_tokens": -1}, "max_tokens", "at least 0"),
        ("chat/completions", {"messages": HI, "max_completion_tokens": -1}, "max_completion_tokens", "0"),
        (
            "chat/completions",
            {"messages": HI, "max_completion_tokens": 3, "max_tokens": 9, "min_tokens": 4},
            "min_tokens",
            "[0, max_completion_tokens]",
        ),
        ("chat/completions", {"messages": HI, "top_logprobs": 99, "logprobs": True}, "top_logprobs", "20"),
        (
            "chat/completions",
            {"messages": HI, "regex": "a", "response_format": {"type": "json_object"}},
            "regex",
            "response_format, regex",
        ),
    ],
)
def test_an_error_names_the_field_that_the_client_sent(
    running: Running, path: str, body: dict[str, object], param: str, words: str
) -> None:
    error = running.ask("POST", f"/v1/{path}", body).json["error"]
    assert error["code"] == 400
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert words in error["message"]
    unknown = (
        "sampling_params",
        "max_new_tokens",
        "min_new_tokens",
        "sampling_seed",
        "input_ids",
        "top_logprobs_num",
    )
    assert not [name for name in unknown if name in error["message"]]


def test_what_the_client_wrote_is_shown_as_it_wrote_it(running: Running) -> None:
    for wrote in ("max_new_tokens", "it's input_ids (", 'a "sampling_seed" ('):
        answer = running.ask("POST", "/v1/completions", {"prompt": "x", "stop_regex": wrote + "("})
        assert repr(wrote + "(") in answer.json["error"]["message"]


def test_a_limit_below_openais_own_is_told_of_the_clients_field(serve: Serve) -> None:
    running = serve(model=Model(VOCABULARY, 4096, WordTokenizer(), max_top_logprobs=5))
    error = running.ask("POST", "/v1/completions", {"prompt": "x", "logprobs": 6}).json["error"]
    assert error["param"] == "logprobs"
