"""OpenAI's endpoints, by hand and through the official client."""

import json

import openai
import pytest
from outfeed.ingress.request import Model

from .conftest import Running, Serve
from .fake import HI, TEMPLATE, VOCABULARY, WordTokenizer, three

LIMITED = {"max_new_tokens": 7}


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
