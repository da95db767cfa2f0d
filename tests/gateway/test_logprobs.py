"""Log probabilities in OpenAI's shapes, added up event by event."""

import json

import msgspec
import numpy as np
import pytest
from outfeed.gateway.logprobs import CompletionLogprobs, LogprobsSum, chat_logprobs
from outfeed.sink.columns import Columns, ColumnsSum, Flat, Ragged


def packed(kind: str, *values: float) -> bytes:
    return np.array(values, dtype=kind).tobytes()


def share(token: int, text: str | None) -> Columns:
    """One token's, with two at its place."""
    return Columns(
        output_logprobs=Flat(packed("<f4", -0.5 * token), packed("<i4", token)),
        output_top_logprobs=Ragged(packed("<u4", 2), packed("<f4", -0.5, -1.5), packed("<i4", token, 99)),
        texts=None if text is None else {token: text, 99: "other"},
    )


def unknown(token: int) -> None:
    """There is no token table."""


def whole(chat: bool, columns: Columns | None, text: str) -> object:
    """What one event with everything would be."""
    if chat:
        return chat_logprobs(columns, unknown)
    return CompletionLogprobs(unknown, None).render(columns, text, last=True)


@pytest.mark.parametrize("chat", [True, False])
def test_what_is_added_up_is_what_the_whole_would_be(chat: bool) -> None:
    texts = ["a", 'é"', "", "🙂\n", "last"]
    one_by_one, together = LogprobsSum(chat, unknown, None), ColumnsSum()
    for token, text in enumerate(texts):
        one_by_one.add(None, "", last=False)
        one_by_one.add(share(token, text), text, last=token == len(texts) - 1)
        together.add(share(token, text))
    got = msgspec.json.encode(one_by_one.json())
    assert json.loads(got) == json.loads(msgspec.json.encode(whole(chat, together.total(), "".join(texts))))
    assert 0.5 < one_by_one.size / len(got) <= 1
    nothing = LogprobsSum(chat, unknown, None)
    nothing.add(None, "", last=True)
    assert json.loads(msgspec.json.encode(nothing.json())) == whole(chat, None, "")


def test_an_echo_is_told_with_the_first_event_and_asked_for_no_more() -> None:
    prompt = Flat(packed("<f4", float("nan"), -2.0), packed("<i4", 8, 9))
    first = msgspec.structs.replace(share(1, "a"), input_logprobs=prompt)
    one_by_one = LogprobsSum(False, unknown, "hi")
    one_by_one.add(first, "a", last=False)
    one_by_one.add(share(2, "b"), "b", last=False)
    one_by_one.add(None, "", last=True)
    told = json.loads(msgspec.json.encode(one_by_one.json()))
    assert told["tokens"] == ["token_id:8", "token_id:9", "a", "b"]
    assert told["token_logprobs"] == [None, -2.0, -0.5, -1.0]
    assert told["text_offset"][2:] == [2, 3]


def test_a_token_of_which_nobody_knows_the_text_has_its_id_for_a_name_and_no_bytes() -> None:
    (shown,) = chat_logprobs(share(7, None), unknown)["content"]
    assert (shown["token"], shown["bytes"]) == ("token_id:7", None)


def test_nobody_waits_for_the_text_of_a_token_that_is_skipped() -> None:
    """While nothing came behind it, it looked as if it were held back."""
    table = {1: b"a", 2: b"<|x|>", 3: b"\xc3", 4: b"\xa9", 5: b"!"}
    for skipped, want in (({2}, [0, 1, 1, 1, 2]), (set[int](), [0, 1, 6, 6, 7])):
        one_by_one = LogprobsSum(False, table.get, None, skipped.__contains__)
        for token, text in ((1, "a"), (2, "" if skipped else "<|x|>"), (3, ""), (4, "é"), (5, "!")):
            one_by_one.add(share(token, None), text, last=token == 5)
        assert json.loads(msgspec.json.encode(one_by_one.json()))["text_offset"] == want


def test_a_word_is_what_it_adds_to_a_text_and_not_what_it_is_alone() -> None:
    """Decoded alone, a SentencePiece word has lost the space before it; its place and its bytes have not."""
    words = {1: b" a", 2: b" cat"}
    text, ids = " a a cat a", [1, 1, 2, 1]
    columns = Columns(
        output_logprobs=Flat(packed("<f4", *[-0.5] * 4), packed("<i4", *ids)), texts={1: "a", 2: "cat"}
    )
    rendered = CompletionLogprobs(words.get, None).render(columns, text, last=True)
    assert rendered["text_offset"] == [0, 2, 4, 8]
    assert rendered["tokens"] == ["a", "a", "cat", "a"]
    shown = chat_logprobs(columns, words.get)["content"]
    assert b"".join(bytes(token["bytes"]) for token in shown).decode() == text


def test_no_token_of_a_whole_answer_begins_behind_its_end() -> None:
    """While a stop string is coming, its tokens are where their text would be; then all of it is cut off."""
    pieces = {1: ("One", "One"), 2: (" E", " "), 3: ("N", ""), 4: ("D", ""), 5: ("!", "")}
    for echo in (None, "say:"):
        answer = LogprobsSum(False, unknown, echo)
        for token, (text, came) in pieces.items():
            columns = share(token, text)
            if echo is not None and token == 1:
                columns = msgspec.structs.replace(columns, input_logprobs=Flat(b"", b""))
            answer.add(columns, came, last=token == 5)
        told = json.loads(msgspec.json.encode(answer.json()))["text_offset"]
        begun = len(echo or "")
        assert told == [begun + place for place in (0, 3, 4, 4, 4)]
