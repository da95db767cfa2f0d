"""Log probabilities in OpenAI's two shapes, from an event's columns.

A token's text is what the shard sent with the columns; one it did not send is shown by its id.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from ..sink.columns import Columns

_encode: Final = msgspec.json.Encoder().encode


class LogprobsSum:
    """The `logprobs` of a whole choice, each event's rendered once, as it comes."""

    __slots__ = ("_chat", "_lists", "_offset")

    def __init__(self, chat: bool) -> None:
        self._chat = chat
        self._offset = 0
        empty = chat_logprobs(None) if chat else completion_logprobs(None, 0)
        self._lists = {name: bytearray() for name in empty}

    @property
    def size(self) -> int:
        """Bytes rendered so far."""
        return sum(map(len, self._lists.values()))

    def add(self, columns: Columns | None) -> None:
        """Append an event's."""
        if self._chat:
            rendered = chat_logprobs(columns)
        else:
            rendered = completion_logprobs(columns, self._offset)
            self._offset += sum(map(len, rendered["tokens"]))
        for name, known in self._lists.items():
            if more := _encode(rendered[name])[1:-1]:
                known += b"," + more if known else more

    def json(self) -> msgspec.Raw:
        """Return the object."""
        members = [b'"%b":[%b]' % (name.encode(), bytes(inner)) for name, inner in self._lists.items()]
        return msgspec.Raw(b"{%b}" % b",".join(members))


def completion_logprobs(columns: Columns | None, offset: int) -> dict[str, Any]:
    """Return the `logprobs` of a text completion. `offset`: characters of output before these tokens."""
    tokens: list[str] = []
    values: list[float] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for text, value, top in _positions(columns):
        tokens.append(text)
        values.append(value)
        tops.append(dict(top) if top is not None else None)
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(columns: Columns | None) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice."""
    return {
        "content": [
            {**_entry(text, value), "top_logprobs": [_entry(*one) for one in top or ()]}
            for text, value, top in _positions(columns)
        ]
    }


def _entry(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "surrogatepass"))}


def _positions(columns: Columns | None) -> Iterator[tuple[str, float, list[tuple[str, float]] | None]]:
    """Yield each output token's text, log probability, and those of the likeliest at its place."""
    if columns is None or columns.output_logprobs is None:
        return
    texts = columns.texts or {}

    def name(token: int) -> str:
        return texts.get(token, f"token_id:{token}")

    top = columns.output_top_logprobs
    lengths = [] if top is None else top.lengths.tolist()
    top_ids = [] if top is None else top.ids.tolist()
    top_values = [] if top is None else top.values.tolist()
    at = 0
    chosen = columns.output_logprobs
    for position, (token, value) in enumerate(zip(chosen.ids.tolist(), chosen.values.tolist(), strict=True)):
        likeliest = None
        if position < len(lengths):
            end = at + lengths[position]
            likeliest = [(name(top_ids[i]), top_values[i]) for i in range(at, end)]
            at = end
        yield name(token), value, likeliest
