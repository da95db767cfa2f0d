"""The optional columns of a BATCH: log probabilities, hidden states, and the texts of their tokens.

A family is sparse: it lists the rows that have it, so a row that asked for nothing is not in it, costs no
byte and no work. In wire order (the field's), with what follows each one's `rows u32[k] │ counts u32[k]`:

    0 output_logprobs        flat    values f32[p] │ ids i32[p]
    1 input_logprobs         flat
    2 output_top_logprobs    ragged  lengths u32[p] │ values f32[e] │ ids i32[e]
    3 input_top_logprobs     ragged
    4 output_ids_logprobs    ragged
    5 input_ids_logprobs     ragged
    6 hidden_states          hidden  values f32[p * width]
      token_texts            rows u32[k] │ ids i32[m] │ lens u32[m] │ UTF-8, zero-padded to 4

`k` rows, ascending; `counts` says how many of the `p` positions each has; in a ragged family `lengths` says
how many of the `e` entries each position has, 0 being a null position. A leading null of a flat family is
NaN. Each family's header entry is the three numbers that size it: [k, p, e], [k, p, p], [k, p, width] or
[k, m, bytes]; nil when it is absent.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._body import ascends, total
from .columns import (
    F32,
    F32_TYPE,
    I32,
    I32_TYPE,
    U32,
    U32_TYPE,
    BadColumns,
    check_ascending,
    check_range,
    check_same,
    check_text,
    total_of,
    typed,
)

MAX_COUNT: Final = (1 << 31) - 1


class Kind(IntEnum):
    """A family's place in the header."""

    OUTPUT_LOGPROBS = 0
    INPUT_LOGPROBS = 1
    OUTPUT_TOP_LOGPROBS = 2
    INPUT_TOP_LOGPROBS = 3
    OUTPUT_IDS_LOGPROBS = 4
    INPUT_IDS_LOGPROBS = 5
    HIDDEN_STATES = 6


FAMILIES: Final = len(Kind)
# By kind. Asked of the enum each time, one costs a microsecond.
_NAMES: Final = tuple(kind.name.lower() for kind in Kind)
RAGGED: Final = frozenset(
    (
        Kind.OUTPUT_TOP_LOGPROBS,
        Kind.INPUT_TOP_LOGPROBS,
        Kind.OUTPUT_IDS_LOGPROBS,
        Kind.INPUT_IDS_LOGPROBS,
    )
)


class Family:
    """One family's columns.

    rows    u32[k], the batch's rows that have it, ascending
    counts  u32[k], positions of each
    values  f32[p], f32[e] for a ragged family, f32[p * width] for hidden states
    ids     i32, as many as values; None for hidden states
    lengths u32[p], entries of each position; None unless ragged
    width   numbers in one hidden state, 1 or more; 0 otherwise
    """

    __slots__ = ("counts", "ids", "lengths", "rows", "values", "width")

    def __init__(
        self,
        rows: U32,
        counts: U32,
        values: F32,
        ids: I32 | None = None,
        lengths: U32 | None = None,
        width: int = 0,
    ) -> None:
        self.rows = rows
        self.counts = counts
        self.values = values
        self.ids = ids
        self.lengths = lengths
        self.width = width

    def select(self, place: NDArray[np.intp]) -> "Family | None":
        """Keep the rows r with place[r] >= 0 and number them place[r]; None when none is left."""
        renumbered = place[self.rows]
        keep = np.flatnonzero(renumbered >= 0)
        if keep.size == 0:
            return None
        rows, counts = renumbered[keep].astype(U32_TYPE), self.counts[keep]
        positions = spans(self.counts, keep)
        if self.lengths is not None:
            entries = spans(self.lengths, positions)
            assert self.ids is not None
            return Family(rows, counts, self.values[entries], self.ids[entries], self.lengths[positions])
        if self.ids is not None:
            return Family(rows, counts, self.values[positions], self.ids[positions])
        vectors = self.values.reshape(-1, self.width)
        return Family(rows, counts, vectors[positions].reshape(-1), width=self.width)


class TokenTexts:
    """The texts of the tokens in the logprob families, for the rows that asked for them (egress form only).

    A token's text is its own decoding, alone and with special tokens kept, so it depends on the id only:
    the frame carries each id once, however many rows and positions name it. The shard fills it in.

    rows u32[k]  the rows that asked, ascending
    ids  i32[m]  every id in those rows' families, ascending, each once (`wanted_ids` finds them)
    lens u32[m]  bytes of each id's text
    text         the UTF-8 end to end
    """

    __slots__ = ("ids", "lens", "rows", "text")

    def __init__(self, rows: U32, ids: I32, lens: U32, text: bytes) -> None:
        self.rows = rows
        self.ids = ids
        self.lens = lens
        self.text = text

    def as_dict(self) -> dict[int, str]:
        """Return id → text."""
        texts, start = {}, 0
        for token, length in zip(self.ids.tolist(), self.lens.tolist(), strict=True):
            texts[token] = self.text[start : start + length].decode("utf-8")
            start += length
        return texts


Families = Sequence[Family | None]


def spans(counts: U32, keep: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the indices, in a column of sum(counts) elements, of what belongs to the places in `keep`."""
    ends = np.cumsum(counts, dtype=np.intp)
    taken = counts[keep].astype(np.intp)
    total = int(taken.sum())
    # Each kept place's run is its start plus 0..count-1; a ramp minus each run's own offset makes the latter.
    shift = np.repeat(ends[keep] - taken - (np.cumsum(taken) - taken), taken)
    return shift + np.arange(total, dtype=np.intp)


def wanted_ids(families: Families, rows: ArrayLike, of: int) -> I32:
    """Return the distinct ids, ascending, that the given rows (of a batch of `of`) name in any family."""
    place = np.full(of, -1, dtype=np.intp)
    place[np.asarray(rows, dtype=np.intp)] = 0
    found = [
        part.ids
        for family in families
        if family is not None and family.ids is not None
        if (part := family.select(place)) is not None and part.ids is not None
    ]
    return np.unique(np.concatenate(found)) if found else np.empty(0, I32_TYPE)


def encode_family(
    kind: int, family: Family, batch_rows: int
) -> tuple[tuple[int, int, int], list[NDArray[Any]]]:
    """Return a family's header entry and columns; BadColumns when they do not fit."""
    name = _NAMES[kind]
    columns: list[NDArray[Any]] = [typed(name, family.rows, U32_TYPE), typed(name, family.counts, U32_TYPE)]
    k, positions = len(family.rows), total_of(family.counts)
    check_same(name, "rows", k, "counts", len(family.counts))
    check_ascending(f"{name} rows", family.rows, batch_rows)
    if (family.lengths is not None) != (kind in RAGGED) or (family.ids is None) != (
        kind == Kind.HIDDEN_STATES
    ):
        raise BadColumns(f"{name}: the family given is of another kind")
    entries = third = positions
    if family.lengths is not None:
        entries = third = total_of(family.lengths)
        check_same(name, "positions", positions, "lengths", len(family.lengths))
        columns.append(typed(name, family.lengths, U32_TYPE))
    if family.ids is None:
        _has_width(name, positions, family.width)
        third, entries = family.width, positions * family.width
    check_same(name, "entries", entries, "values", len(family.values))
    columns.append(typed(name, family.values, F32_TYPE))
    if family.ids is not None:
        check_same(name, "entries", entries, "ids", len(family.ids))
        columns.append(typed(name, family.ids, I32_TYPE))
    return (k, positions, third), columns


def encode_texts(texts: TokenTexts) -> tuple[tuple[int, int, int], list[NDArray[Any] | bytes]]:
    """Return the header entry and columns of the token texts, which a shard made: who reads them checks."""
    columns: list[NDArray[Any] | bytes] = [
        typed("token_texts", texts.rows, U32_TYPE),
        typed("token_texts", texts.ids, I32_TYPE),
        typed("token_texts", texts.lens, U32_TYPE),
        texts.text,
        bytes(-len(texts.text) % 4),
    ]
    return (len(texts.rows), len(texts.ids), len(texts.text)), columns


def family_bytes(kind: int, k: int, positions: int, third: int) -> int:
    """Return how many bytes a header entry implies; BadColumns when a number is out of range."""
    _check_entry(_NAMES[kind], k, positions, third)
    if kind == Kind.HIDDEN_STATES:
        _has_width(_NAMES[kind], positions, third)
        return 4 * (2 * k + positions * third)
    if kind in RAGGED:
        return 4 * (2 * k + positions + 2 * third)
    if third != positions:
        raise BadColumns(f"{_NAMES[kind]}: {positions} positions but {third} entries in its header")
    return 4 * (2 * k + 2 * positions)


def texts_bytes(k: int, ids: int, text: int) -> int:
    """Return how many bytes the header entry of the token texts implies; raises as `family_bytes`."""
    _check_entry("token_texts", k, ids, text)
    return 4 * (k + 2 * ids) + text + -text % 4


def decode_family(kind: int, entry: tuple[int, int, int], body: bytes, at: int, batch_rows: int) -> Family:
    """Return a family from its columns at `at`, where `family_bytes` has been found to fit."""
    name = _NAMES[kind]
    k, positions, third = entry
    rows: U32 = np.frombuffer(body, U32_TYPE, k, at)
    counts: U32 = np.frombuffer(body, U32_TYPE, k, at + 4 * k)
    # As `check_ascending` and `total_of` do, over the body itself: ten times cheaper for a few rows.
    if not ascends(body, at, k, batch_rows):
        check_ascending(f"{name} rows", rows, batch_rows)
    check_same(name, "sum of counts", total(body, at + 4 * k, k), "positions", positions)
    at += 8 * k
    if kind == Kind.HIDDEN_STATES:
        return Family(rows, counts, np.frombuffer(body, F32_TYPE, positions * third, at), width=third)
    lengths: U32 | None = None
    if kind in RAGGED:
        lengths = np.frombuffer(body, U32_TYPE, positions, at)
        check_same(name, "sum of lengths", total(body, at, positions), "entries", third)
        at += 4 * positions
    values: F32 = np.frombuffer(body, F32_TYPE, third, at)
    return Family(rows, counts, values, np.frombuffer(body, I32_TYPE, third, at + 4 * third), lengths)


def decode_texts(entry: tuple[int, int, int], body: bytes, at: int, batch_rows: int) -> TokenTexts:
    """Return the token texts from their columns at `at`, where `texts_bytes` has been found to fit."""
    k, count, size = entry
    rows: U32 = np.frombuffer(body, U32_TYPE, k, at)
    ids: I32 = np.frombuffer(body, I32_TYPE, count, at + 4 * k)
    lens: U32 = np.frombuffer(body, U32_TYPE, count, at + 4 * (k + count))
    start = at + 4 * (k + 2 * count)
    text = body[start : start + size]
    check_ascending("token_texts rows", rows, batch_rows)
    check_ascending("token_texts ids", ids, None)
    check_same("token_texts", "sum of lens", total_of(lens), "bytes", size)
    check_text("token_texts", text, lens)
    return TokenTexts(rows, ids, lens, text)


def _check_entry(name: str, *numbers: int) -> None:
    """Check the numbers of a header entry."""
    what = f"{name}: a number in its header"
    for number in numbers:
        check_range(what, number, MAX_COUNT)


def _has_width(name: str, positions: int, width: int) -> None:
    # Else no byte of a body would bound its positions, and who takes rows out makes room for each.
    if width == 0:
        raise BadColumns(f"{name}: {positions} positions of width 0")
