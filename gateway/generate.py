"""`/generate` in JSON: one event at a time for a stream, the sum for a whole answer.

The sink's `Response` knows the objects. The common case, a stream of text and ids, is put together from
bytes that are ready, since this runs once per event of every stream, and must equal what `Response` renders.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from ..sink import ChunkEvent, Error, Response
from .answer import failure_event
from .shapes import sse

_encode: Final = msgspec.json.Encoder().encode


def wants_columns(body: Mapping[str, Any]) -> bool:
    """Whether a checked `/generate` body asks for log probabilities or hidden states."""
    return bool(body.get("return_logprob") or body.get("return_hidden_states"))


class ResponseStream:
    """One prompt's events with everything a request can ask for; `GenerateStream` does the common case."""

    def __init__(self, rid: str, started: float, cumulative: bool, index: int | None) -> None:
        self._response = Response(rid)
        self._started = started
        self._cumulative = cumulative
        self._index = index

    def opening(self) -> bytes:
        """Return nothing: a stream starts with its first token."""
        return b""

    def delta(self, event: ChunkEvent) -> bytes:
        """Render an event."""
        self._response.add(event)
        seconds = None if event.finish is None else round(time.perf_counter() - self._started, 6)
        render = self._response.cumulative if self._cumulative else self._response.incremental
        rendered = render(seconds)
        if self._index is not None:
            rendered["index"] = self._index
        return sse(_encode(rendered))

    def failure(self, error: Error) -> bytes:
        """Render the request's failure."""
        return failure_event(error, index=self._index)


class GenerateStream:
    """One prompt's events. `cumulative`: each holds all the text and ids so far, else what is new."""

    __slots__ = ("_cumulative", "_end", "_ids", "_index", "_meta", "_started", "_text")

    def __init__(self, rid: str, started: float, cumulative: bool, index: int | None) -> None:
        self._started = started
        self._cumulative = cumulative
        self._index = index
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
            text, ids = self._add(text, ids)
        finish = event.finish
        return b'data: {"text":%b,"output_ids":[%b%b%d,"completion_tokens":%d,"finish_reason":%b}%b' % (
            text,
            ids,
            self._meta,
            event.prompt_tokens,
            event.first + event.generated,
            b"null"
            if finish is None
            else b'%b,"e2e_latency":%.6f' % (_encode(finish.to_json()), time.perf_counter() - self._started),
            self._end,
        )

    def failure(self, error: Error) -> bytes:
        """Render the request's failure."""
        return failure_event(error, index=self._index)

    def _add(self, text: bytes, ids: bytes) -> tuple[bytes, bytes]:
        """Add escaped text and ids to what there is: escaping is character by character, so it adds up."""
        self._text += text[1:-1]
        if ids:
            self._ids += b"," + ids if self._ids else ids
        return bytes(self._text) + b'"', bytes(self._ids)


def _ids(raw: bytes) -> bytes:
    """Render packed i32 ids as the inside of a JSON list."""
    if len(raw) == 4:
        return b"%d" % int.from_bytes(raw, "little", signed=True)
    return _encode(memoryview(raw).cast("i").tolist())[1:-1]


def render_whole(rids: Sequence[str], events: Sequence[ChunkEvent], started: float, batch: bool) -> bytes:
    """Render a whole response: one object, or a list of them for a batch."""
    seconds = round(time.perf_counter() - started, 6)
    answers = []
    for rid, event in zip(rids, events, strict=True):
        response = Response(rid)
        response.add(event)
        answers.append(response.unary(seconds))
    return _encode(answers if batch else answers[0])
