"""OpenAI's log probabilities: their shapes, the bytes and offsets of tokens, and an echo's."""

import numpy as np
import openai
import pytest
from outfeed.sink.columns import Columns, Flat, Ragged

from .conftest import Running, eventually
from .fake import Played


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


def test_a_piece_of_a_character_shows_its_own_bytes_or_none(running: Running) -> None:
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
