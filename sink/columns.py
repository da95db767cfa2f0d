"""One request's share of the optional families: log probabilities, hidden states, token texts.

Packed little-endian bytes of its own, so that an event keeps no frame alive, adds up by joining, and has an
exact size. Views are made when somebody asks.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..ring.families import FAMILIES, Families, Family, Kind, TokenTexts
from ._deliver import cut


class Flat(msgspec.Struct, frozen=True, gc=False):
    """A log probability per position. `values` f32[p], `ids` i32[p]; a leading null is NaN."""

    values_raw: bytes
    ids_raw: bytes

    @property
    def values(self) -> NDArray[np.float32]:
        """The log probabilities."""
        return np.frombuffer(self.values_raw, dtype="<f4")

    @property
    def ids(self) -> NDArray[np.int32]:
        """The token each is for."""
        return np.frombuffer(self.ids_raw, dtype="<i4")


class Ragged(msgspec.Struct, frozen=True, gc=False):
    """Several log probabilities per position. `lengths` u32[p], `values` f32[e], `ids` i32[e].

    A position of length 0 is a null position.
    """

    lengths_raw: bytes
    values_raw: bytes
    ids_raw: bytes

    @property
    def lengths(self) -> NDArray[np.uint32]:
        """How many entries each position has."""
        return np.frombuffer(self.lengths_raw, dtype="<u4")

    @property
    def values(self) -> NDArray[np.float32]:
        """The log probabilities, position after position."""
        return np.frombuffer(self.values_raw, dtype="<f4")

    @property
    def ids(self) -> NDArray[np.int32]:
        """The token each is for."""
        return np.frombuffer(self.ids_raw, dtype="<i4")


class Hidden(msgspec.Struct, frozen=True, gc=False):
    """Hidden states. `values` f32[vectors, width]."""

    values_raw: bytes
    vectors: int
    width: int

    @property
    def values(self) -> NDArray[np.float32]:
        """The states, one per line."""
        return np.frombuffer(self.values_raw, dtype="<f4").reshape(self.vectors, self.width)


class Columns(msgspec.Struct, gc=False):
    """What one event has of the families, in their order; None where it has none.

    `texts` maps the ids in them to their text, for a request that asked with `return_text_in_logprobs`.
    `size` is their bytes of content: what a sink's capacity counts. It is counted when it is not given.
    """

    output_logprobs: Flat | None = None
    input_logprobs: Flat | None = None
    output_top_logprobs: Ragged | None = None
    input_top_logprobs: Ragged | None = None
    output_ids_logprobs: Ragged | None = None
    input_ids_logprobs: Ragged | None = None
    hidden_states: Hidden | None = None
    texts: dict[int, str] | None = None
    size: int = -1

    def __post_init__(self) -> None:
        if self.size >= 0:
            return
        # No generator: where memory does not suffice to make one, some CPython 3.12 and 3.13 free its code.
        self.size = 0
        for part in self.parts():
            self.size += 0 if part is None else sum(map(len, _raw(part)))
        if self.texts is not None:
            self.size += sum(map(_text_size, self.texts.values()))

    def parts(self) -> tuple[Flat | Ragged | Hidden | None, ...]:
        """Return the seven families by `Kind`."""
        return (
            self.output_logprobs,
            self.input_logprobs,
            self.output_top_logprobs,
            self.input_top_logprobs,
            self.output_ids_logprobs,
            self.input_ids_logprobs,
            self.hidden_states,
        )


def columns_of(families: Families, texts: TokenTexts | None) -> tuple[list[int], list[Columns]]:
    """Return the rows that have a share, ascending, and each one's: the others are not looked at."""
    found: dict[int, list[Any]] = {}
    for kind, family in enumerate(families):
        if family is None:
            continue
        parts, sizes = _split(family)
        for row, part, size in zip(family.rows.tolist(), parts, sizes, strict=True):
            fields = found.get(row)
            if fields is None:
                fields = found[row] = [None] * FAMILIES + [None, 0]
            fields[kind] = part
            fields[-1] += size
    if texts is not None:
        known = texts.as_dict()
        for row in texts.rows.tolist():
            if row in found:
                fields = found[row]
                fields[-2] = wanted = _only(known, fields[:FAMILIES])
                fields[-1] += sum(map(_text_size, wanted.values()))
    rows = sorted(found)
    return rows, [Columns(*found[row]) for row in rows]


def _split(family: Family) -> tuple[list[Flat] | list[Ragged] | list[Hidden], list[int]]:
    """Cut a family's columns at its rows; return the pieces and their sizes in bytes."""
    if family.ids is not None:
        make = Flat if family.lengths is None else Ragged
        return cut(make, family.counts, family.lengths, family.values, family.ids)
    hidden, sizes, start = [], [], 0
    raw, width = family.values.tobytes(), family.width
    for vectors in family.counts.tolist():
        end = start + 4 * width * vectors
        hidden.append(Hidden(raw[start:end], vectors, width))
        sizes.append(end - start)
        start = end
    return hidden, sizes


def _only(texts: dict[int, str], parts: Sequence[Flat | Ragged | Hidden | None]) -> dict[int, str]:
    """Keep the texts that these columns name."""
    return {
        token: texts[token]
        for part in parts
        if part is not None and not isinstance(part, Hidden)
        for token in part.ids.tolist()
        if token in texts
    }


class ColumnsSum:
    """Adds up the columns of a request's events. Hidden states replace the earlier ones, all else appends."""

    __slots__ = ("_hidden", "_parts", "_texts")

    def __init__(self) -> None:
        self._parts: list[list[bytearray] | None] = [None] * Kind.HIDDEN_STATES
        self._hidden: Hidden | None = None
        self._texts: dict[int, str] | None = None

    def add(self, columns: Columns) -> int:
        """Append an event's columns; return how many bytes of content that replaced."""
        sums, freed = self._parts, 0
        for kind, part in enumerate(columns.parts()):
            if part is None or isinstance(part, Hidden):
                continue
            known, raw = sums[kind], _raw(part)
            if known is None:
                sums[kind] = [bytearray(column) for column in raw]
            else:
                for total, column in zip(known, raw, strict=True):
                    total += column
        if columns.hidden_states is not None:
            freed += 0 if self._hidden is None else len(self._hidden.values_raw)
            self._hidden = columns.hidden_states
        if columns.texts is not None:
            known_texts = self._texts = {} if self._texts is None else self._texts
            freed += sum(_text_size(known_texts[token]) for token in columns.texts if token in known_texts)
            known_texts.update(columns.texts)
        return freed

    def total(self) -> Columns:
        """Return the sum."""
        parts: list[Any] = [
            None if raw is None else Flat(*map(bytes, raw)) if len(raw) == 2 else Ragged(*map(bytes, raw))
            for raw in self._parts
        ]
        out_flat, in_flat, out_top, in_top, out_ids, in_ids = parts
        texts = None if self._texts is None else dict(self._texts)
        return Columns(out_flat, in_flat, out_top, in_top, out_ids, in_ids, self._hidden, texts)


def _text_size(text: str) -> int:
    return 4 + len(text.encode("utf-8"))


def _raw(part: Flat | Ragged | Hidden) -> Sequence[bytes]:
    if isinstance(part, Hidden):
        return (part.values_raw,)
    if isinstance(part, Ragged):
        return (part.lengths_raw, part.values_raw, part.ids_raw)
    return (part.values_raw, part.ids_raw)
