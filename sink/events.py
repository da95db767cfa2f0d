"""What a handler receives: a request's chunks and its one ending.

Events own their bytes: nothing in one points into a ring. Text stays UTF-8 and numbers stay packed until
somebody asks, because most of them are merged, forwarded or rendered without ever being looked at.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from ._deliver import Event, bind
from .columns import ColumnsSum


class ChunkEvent(Event):
    """A run of output tokens: one step's, or several steps' merged while the client lagged.

    text_utf8     their text, UTF-8; `.text` decodes it
    ids_raw       their ids as i32 little-endian; `.ids` views them. A trimmed stop token is not in it
    first         tokens of the request before this event
    generated     tokens this event stands for, a trimmed stop token included
    prompt_tokens length of the request's prompt
    stamp_ns      CLOCK_MONOTONIC nanoseconds of the newest step in it, at the scheduler's push
    finish        why the request ended, in its last event; else None
    columns       log probabilities and hidden states, for a request that asked for any; else None
    size          bytes of content (text, ids, columns): what a sink's capacity counts

    All but `finish` is read-only: a sink takes out what it counted in.
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # `finish` may be set

    @property
    def text(self) -> str:
        """The text, decoded on each call."""
        return self.text_utf8.decode("utf-8")

    @property
    def ids(self) -> NDArray[np.int32]:
        """The ids, as a read-only i32 view."""
        return np.frombuffer(self.ids_raw, dtype="<i4")

    def _fields(self) -> tuple[object, ...]:
        return (
            self.text_utf8,
            self.ids_raw,
            self.first,
            self.generated,
            self.prompt_tokens,
            self.stamp_ns,
            self.finish,
            self.columns,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChunkEvent) and self._fields() == other._fields()

    def __repr__(self) -> str:
        return (
            f"ChunkEvent(text={self.text!r}, ids={self.ids.tolist()}, first={self.first}, "
            f"generated={self.generated}, finish={self.finish})"
        )


class Frame(msgspec.Struct, frozen=True, gc=False):
    """More output; the request goes on."""

    event: ChunkEvent


class Done(msgspec.Struct, frozen=True, gc=False):
    """The last output, with its finish reason. Nothing comes after it."""

    event: ChunkEvent


class Control(msgspec.Struct, frozen=True, gc=False):
    """The answer to a control request, as it was sent. Nothing comes after it."""

    body: bytes


class Error(msgspec.Struct, frozen=True, gc=False):
    """The request failed. `status` is the HTTP status for it. Nothing comes after it."""

    status: int
    type: str
    message: str


Item = Frame | Done | Control | Error

bind(ChunkEvent, Frame, Done)


class Merger:
    """Adds a request's events up to one, without copying again what is there already."""

    __slots__ = ("_columns", "_ids", "_last", "_text", "first", "generated")

    def __init__(self, event: ChunkEvent) -> None:
        self._text = bytearray()
        self._ids = bytearray()
        self._columns: ColumnsSum | None = None
        self.first = event.first
        self.generated = 0
        self.add(event)

    def add(self, event: ChunkEvent) -> int:
        """Append an event, which must follow on what is there; return how many bytes that replaced."""
        freed = 0
        self._text += event.text_utf8
        self._ids += event.ids_raw
        self.generated += event.generated
        if event.columns is not None:
            if self._columns is None:
                self._columns = ColumnsSum()
            freed = self._columns.add(event.columns)
        self._last = event
        return freed

    def event(self) -> ChunkEvent:
        """Return the sum."""
        last = self._last
        return ChunkEvent(
            bytes(self._text),
            bytes(self._ids),
            self.first,
            self.generated,
            last.prompt_tokens,
            last.stamp_ns,
            last.finish,
            None if self._columns is None else self._columns.total(),
        )
