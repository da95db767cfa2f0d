"""Counting a body's entries without reading it."""

import json
import random
from typing import Any

import pytest
from outfeed.ingress.entries import KEY_ENTRIES, count_entries
from outfeed.ingress.errors import BadRequest
from outfeed.ingress.request import decode_body

PIECES = ['"', "\\", ",", "[", "{", "}", "]", ":", "a", "é", "😀", "\n", "\x00", "\ud800", '\\"', "\\\\"]


def drawn(rng: random.Random, depth: int) -> Any:
    kind = rng.random()
    if depth and kind < 0.35:
        return [drawn(rng, depth - 1) for _ in range(rng.randrange(5))]
    if depth and kind < 0.6:
        return {f"{text(rng)}{n}": drawn(rng, depth - 1) for n in range(rng.randrange(4))}
    return text(rng) if kind < 0.9 else rng.choice([1, -2.5, None, True, float("nan")])


def text(rng: random.Random) -> str:
    return "".join(rng.choices(PIECES, k=rng.randrange(9)))


def entries(value: Any) -> int:
    inner = value.values() if type(value) is dict else value if type(value) is list else None
    keys = len(value) if type(value) is dict else 0
    return 0 if inner is None else max(1, len(inner)) + KEY_ENTRIES * keys + sum(map(entries, inner))


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64, 1 << 20])
def test_what_is_counted_is_what_a_reader_finds(chunk: int) -> None:
    rng = random.Random(chunk)
    for _ in range(400):
        value = drawn(rng, 5)
        written = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
        assert count_entries(written.encode("utf-8", "surrogatepass"), chunk) == entries(value)


@pytest.mark.parametrize("body", [b"", b"\\", b'"', b"\\" * 99, b'"\\', b'["\\\\\\"', b"\xff" * 9])
@pytest.mark.parametrize("chunk", [1, 4, 1 << 20])
def test_what_is_no_json_is_counted_all_the_same(body: bytes, chunk: int) -> None:
    assert count_entries(body, chunk) <= 1


@pytest.mark.parametrize("entry", [b"1", b"{}", b"[]", b'""', b"null", b'{"a":1}', b"NaN"])
def test_a_body_of_too_many_entries_is_refused_before_it_is_read(entry: bytes) -> None:
    body = b'{"x": [%b]}' % b",".join([entry] * 1000)
    with pytest.raises(BadRequest, match="at most 999 are taken: send fewer"):
        decode_body(body, max_entries=999)
    # Not even whether it is JSON is looked at: that would be to read it.
    with pytest.raises(BadRequest, match="at most 999 are taken"):
        decode_body(body[:-1], max_entries=999)


def test_a_long_text_is_one_entry_whatever_is_in_it() -> None:
    body = {"text": ',[{"\\' * 5000, "x": [1] * 500}
    assert decode_body(json.dumps(body).encode(), max_entries=502 + 2 * KEY_ENTRIES) == body
