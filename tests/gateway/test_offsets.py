"""Text offsets: each token's place in the text that the client got, however text and tokens came."""

import random
import time

import pytest
from outfeed.gateway.offsets import Offsets

TEXT = "The Fluß 강물이 흐른다 👩‍👩‍👧 川は、naïve \ufffd end. " * 3


def truth(cuts: list[bytes], start: int = 0) -> list[int]:
    """Where the character begins that each token's first byte is a part of."""
    places, at = [], 0
    whole = b"".join(cuts)
    for token in cuts:
        begun = at
        while begun and begun < len(whole) and whole[begun] & 0xC0 == 0x80:
            begun -= 1
        places.append(start + len(whole[:begun].decode()))
        at += len(token)
    return places


def random_cuts(rng: random.Random) -> list[bytes]:
    data, cuts = TEXT.encode(), []
    while data:
        size = rng.choice((1, 1, 2, 3, 5, 8))
        cuts.append(data[:size])
        data = data[size:]
    return cuts


@pytest.mark.parametrize("seed", range(20))
def test_every_token_begins_where_its_first_character_is(seed: int) -> None:
    rng = random.Random(seed)
    cuts = random_cuts(rng)
    start = rng.randrange(50)
    assert Offsets(start).places(cuts, TEXT, last=True) == truth(cuts, start)
    # The same in a stream: text comes with its token, when its characters are whole, or later.
    offsets, found, told = Offsets(start), [], 0
    at = 0
    while at < len(cuts):
        some = cuts[at : at + rng.randrange(1, 4)]
        at += len(some)
        ready = len(b"".join(cuts[:at]).decode(errors="ignore"))
        until = len(TEXT) if at == len(cuts) else max(told, ready - rng.choice((0, 0, 0, 4)))
        found += offsets.places(some, TEXT[told:until], last=at == len(cuts))
        told = until
    assert found == truth(cuts, start)


def test_a_token_that_adds_no_text_moves_nobody() -> None:
    """A special token is skipped, and its bytes are in the table all the same."""
    cuts = [b"<s>", b"One", b"<|x|>", b" two", b"<|end|>"]
    assert Offsets().places(cuts, "One two", last=True) == [0, 0, 3, 3, 7]
    offsets = Offsets(10)
    assert offsets.places(cuts[:2], "One", last=False) == [10, 10]
    assert offsets.places(cuts[2:4], " two", last=False) == [13, 13]
    assert offsets.places(cuts[4:], "", last=True) == [17]


def test_the_space_that_a_tokenizer_drops_before_the_first_word_is_not_counted() -> None:
    assert Offsets(5).places([b" One", b" two"], "One two", last=True) == [5, 8]
    assert Offsets().places([b" a", b"a", b" a"], "aa a", last=True) == [0, 1, 2]


def test_a_stop_that_was_cut_off_begins_no_later_than_the_text_ends() -> None:
    assert Offsets().places([b"One", b" EN", b"D now"], "One", last=True) == [0, 3, 3]


def test_text_that_is_held_back_is_where_it_would_be() -> None:
    offsets = Offsets()
    assert offsets.places([b"One"], "One", last=False) == [0]
    assert offsets.places([b" E"], " ", last=False) == [3]
    assert offsets.places([b"N"], "", last=False) == [5]
    assert offsets.places([b"ough"], "ENough", last=False) == [5 + len("N")]
    assert offsets.places([b"!"], "!", last=True) == [10]


def test_bytes_that_are_no_character_have_the_place_of_what_stands_for_them() -> None:
    """A model may end a character before it is whole, or begin with what ends none."""
    text = "a\ufffdb\ufffd!"
    assert Offsets().places([b"a", b"\xe6", b"b", b"\xff", b"!"], text, last=True) == [0, 1, 2, 3, 4]
    cuts = [b"\xe6\xbc", b"\xff", b"\xe6", b"\xbc", b"\xa2"]
    assert Offsets().places(cuts, "\ufffd\ufffd漢", last=True) == [0, 1, 2, 2, 2]


def test_pieces_that_nobody_knows_are_made_up_for_by_the_next_that_is_known() -> None:
    """A tokenizer without a table: a piece of a character has neither text nor bytes."""
    assert Offsets().places([b"a", None, None, None, b" b", b"c"], "a漢 bc", last=True) == [0, 1, 1, 1, 2, 4]
    offsets = Offsets()
    assert offsets.places([b"a", None], "a", last=False) == [0, 1]
    assert offsets.places([None, None], "漢", last=False) == [1, 1]
    assert offsets.places([b" b"], " b", last=True) == [2]
    # Here all their text is late, and the next token says the same once more.
    offsets = Offsets()
    assert offsets.places([None, None, b"b"], "", last=False) == [0, 0, 0]
    assert offsets.places([], "漢b", last=False) == []
    assert offsets.places([b"b"], "b", last=True) == [2]


def test_tokens_that_say_it_otherwise_find_their_places_again() -> None:
    """A word piece's own text is not what it becomes behind others: `ing`, or a word with a space before."""
    said = [("play", "play"), ("##ing", "ing"), ("the", " the"), ("flute", " flute")] * 20
    text = "".join(became for _, became in said)
    tokens = [alone.encode() for alone, _ in said]
    offsets = Offsets()
    streamed = [
        offsets.places([token], became, last=False)[0]
        for token, (_, became) in zip(tokens, said, strict=True)
    ]
    for found in (Offsets().places(tokens, text, last=True), streamed):
        for place, (alone, _) in zip(found, said, strict=True):
            if alone != "##ing":
                assert text[place:].lstrip().startswith(alone)


@pytest.mark.parametrize(
    ("token", "text"),
    [(b"word ", "word " * 200_000), (b"<s>", ""), (b"<s>", "other" * 99_999), (None, "x" * 99_999)],
)
def test_a_long_answer_takes_no_longer_per_token(token: bytes | None, text: str) -> None:
    """Whatever a model emits, the loop that serves everybody walks it.

    200,000 tokens take seconds at worst; time that grew with the square of their number would be minutes.
    """
    offsets = Offsets()
    began = time.process_time()
    places = offsets.places([token] * 200_000, text, last=True)
    assert time.process_time() - began < 20
    assert len(places) == 200_000
    assert places == sorted(places)
