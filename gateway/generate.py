"""`/generate` in JSON: one event at a time for a stream, the sum for a whole answer.

The sink's `Response` knows the objects. Here they are put together from bytes that are ready, since this
runs once per event of every stream: each event is rendered once, however often what it said is sent again.
Both must be equal.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from ..sink import ChunkEvent, Error
from ..sink.accumulate import render_columns
from ..sink.columns import Columns, Hidden
from .answer import failure_event

_encode: Final = msgspec.json.Encoder().encode
FLOAT_BYTES: Final = 12
"""About what a rendered number takes."""


def wants_columns(body: Mapping[str, Any]) -> bool:
    """Whether a checked `/generate` body asks for log probabilities or hidden states."""
    return bool(body.get("return_logprob") or body.get("return_hidden_states"))


def count_prompts(body: Any) -> int:
    """Count the prompts of a body that nobody has checked yet; what is none of any kind counts as one."""
    texts, ids = (body.get("text"), body.get("input_ids")) if type(body) is dict else (None, None)
    if type(texts) is list:
        return max(1, len(texts))
    if type(ids) is list and ids and type(ids[0]) is list:
        return len(ids)
    return 1


def is_batch(body: dict[str, Any]) -> bool:
    """Whether a `/generate` body that was taken asks for a list of answers."""
    if body.get("text") is not None:
        return type(body["text"]) is list
    return type(body["input_ids"][0]) is list


def are_ids(value: Any) -> bool:
    """Whether a value is token ids, or lists of them; which ids there are is checked later."""
    if type(value) is not list or not value:
        return False
    prompts = value if type(value[0]) is list else [value]
    return all(
        type(prompt) is list
        and set(map(type, prompt)) == {int}
        and min(prompt) >= 0
        and max(prompt) < 1 << 31
        for prompt in prompts
    )


class GenerateStream:
    """One prompt's events. `cumulative`: each holds all the text and ids so far, else what is new."""

    __slots__ = ("_cumulative", "_end", "_ids", "_index", "_meta", "_start", "_started", "_text")

    def __init__(self, rid: str, started: float, cumulative: bool, index: int | None) -> None:
        self._started = started
        self._cumulative = cumulative
        self._index = index
        self._start = b'data: {"text":'
        self._meta = b'],"meta_info":{"id":%b,"prompt_tokens":' % _encode(rid)
        self._end = b"}\n\n" if index is None else b',"index":%d}\n\n' % index
        self._text = bytearray(b'"')
        self._ids = bytearray()

    def opening(self) -> bytes:
        """Return nothing: a stream starts with its first token."""
        return b""

    def delta(self, event: ChunkEvent) -> bytes:
        """Render an event."""
        text, ids = _encode(event.text_utf8.decode()), _ids(event.ids_raw)
        if self._cumulative:
            self._add(text, ids)
            text, ids = bytes(self._text) + b'"', bytes(self._ids)
        return self._object(event, text, ids)

    def failure(self, error: Error) -> bytes:
        """Render the request's failure."""
        return failure_event(error, index=self._index)

    def _object(self, event: ChunkEvent, text: bytes, ids: bytes, columns: bytes = b"") -> bytes:
        finish = event.finish
        return b'%b%b,"output_ids":[%b%b%d,"completion_tokens":%d,"finish_reason":%b%b}%b' % (
            self._start,
            text,
            ids,
            self._meta,
            event.prompt_tokens,
            event.first + event.generated,
            b"null"
            if finish is None
            else b'%b,"e2e_latency":%.6f' % (_encode(finish.to_json()), time.perf_counter() - self._started),
            columns,
            self._end,
        )

    def _add(self, text: bytes, ids: bytes) -> None:
        """Add escaped text and ids to what there is: escaping is character by character, so it adds up."""
        self._text += text[1:-1]
        if ids:
            self._ids += b"," + ids if self._ids else ids


class ResponseStream(GenerateStream):
    """One prompt's events with everything a request can ask for; `GenerateStream` does the common case."""

    __slots__ = ("_columns",)

    def __init__(self, rid: str, started: float, cumulative: bool, index: int | None) -> None:
        super().__init__(rid, started, cumulative, index)
        self._columns = ColumnsJson()

    def delta(self, event: ChunkEvent) -> bytes:
        """Render an event."""
        text, ids = _encode(event.text_utf8.decode()), _ids(event.ids_raw)
        if self._cumulative:
            self._add(text, ids)
            text, ids = bytes(self._text) + b'"', bytes(self._ids)
        else:
            self._columns = ColumnsJson()
        if event.columns is not None:
            self._columns.add(event.columns)
        return self._object(event, text, ids, self._columns.render())


class WholeResponse(ResponseStream):
    """One prompt's whole answer, rendered piece by piece as it comes: nothing is left to do at the end."""

    __slots__ = ("_last",)

    def __init__(self, rid: str, started: float) -> None:
        super().__init__(rid, started, True, None)
        self._start, self._end = b'{"text":', b"}"
        self._last: ChunkEvent | None = None

    def add(self, event: ChunkEvent) -> int:
        """Add an event; return how many bytes there are now."""
        self._add(_encode(event.text_utf8.decode()), _ids(event.ids_raw))
        if event.columns is not None:
            self._columns.add(event.columns)
        self._last = event
        return len(self._text) + len(self._ids) + self._columns.size

    def render(self) -> bytes:
        """Return the answer."""
        assert self._last is not None
        return self._object(self._last, bytes(self._text) + b'"', bytes(self._ids), self._columns.render())


class ColumnsJson:
    """Log probabilities and hidden states as members of `meta_info`, each event's rendered once."""

    __slots__ = ("_families", "_hidden", "size")

    def __init__(self) -> None:
        self._families: dict[str, bytearray] = {}
        self._hidden: Hidden | None = None
        self.size = 0

    def add(self, columns: Columns) -> None:
        """Append an event's; its hidden states replace the ones before."""
        if columns.hidden_states is not None:
            # Rendered when they are wanted: of a whole answer's, only the last.
            self._hidden = columns.hidden_states
            columns = msgspec.structs.replace(columns, hidden_states=None)
        for name, rendered in render_columns(columns).items():
            known, more = self._families.setdefault(name, bytearray()), _encode(rendered)[1:-1]
            if known and more:
                known += b","
            known += more
        self.size = sum(map(len, self._families.values()))
        if self._hidden is not None:
            self.size += FLOAT_BYTES * len(self._hidden.values_raw) // 4

    def render(self) -> bytes:
        """Return all members, each with a comma before it."""
        members = [b',"%b":[%b]' % (name.encode(), bytes(inner)) for name, inner in self._families.items()]
        if self._hidden is not None:
            members.append(b',"hidden_states":%b' % _encode(self._hidden.values.tolist()))
        return b"".join(members)


def _ids(raw: bytes) -> bytes:
    """Render packed i32 ids as the inside of a JSON list."""
    if len(raw) == 4:
        return b"%d" % int.from_bytes(raw, "little", signed=True)
    return _encode(memoryview(raw).cast("i").tolist())[1:-1]


def render_whole(answers: Sequence[WholeResponse], batch: bool) -> bytes:
    """Render a whole response: one object, or a list of them for a batch."""
    rendered = [answer.render() for answer in answers]
    return b"[%b]" % b",".join(rendered) if batch else rendered[0]
