"""The BATCH frame: one decode step, as columns.

    0             4            8                8 + header_len           (8-aligned)
    ┌─────────────┬────────────┬────────────────────────┬──────────────┬──────────────────────┐
    │ header_len  │ reserved 0 │ msgpack header (array) │ zero padding │ columns, end to end  │
    └─────────────┴────────────┴────────────────────────┴──────────────┴──────────────────────┘

    header   [version 1, stamp_ns, rows, tokens, [[row, finish reason] ...], text_bytes | nil]
    columns  routes u64[rows] │ first u32[rows] │ counts u32[rows] │ prompt_tokens u32[rows] │ ids i32[tokens]
             egress form only: generated u32[rows] │ text_lens u32[rows] │ text, zero-padded to 4

`text_bytes` nil is the step form (scheduler to shard), a number the egress form (shard to reader). All
numbers are little-endian. Decoding is all or nothing: a Batch exists only when every check passed.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from .finish import FinishReason, is_json
from .frames import BadFrame, Buffer

VERSION: Final = 1
MAX_ROWS: Final = 1 << 20
MAX_COUNT: Final = (1 << 31) - 1

U64 = NDArray[np.uint64]
U32 = NDArray[np.uint32]
I32 = NDArray[np.int32]

_U64: Final = np.dtype("<u8")
_U32: Final = np.dtype("<u4")
_I32: Final = np.dtype("<i4")
_PREFIX: Final = struct.Struct("<II")
_PADS: Final = tuple(bytes(n) for n in range(8))


class BadBatch(BadFrame):
    """A BATCH frame was rejected, all of it. `routes` are the requests that it still names."""


class _Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: int
    stamp_ns: int
    rows: int
    tokens: int
    finishes: list[tuple[int, dict[str, Any]]]
    text_bytes: int | None


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Header)


class Batch:
    """One decode step. The arrays of a decoded Batch are views into the frame: valid until its release.

    rows          number of rows, one per request in this step
    stamp_ns      CLOCK_MONOTONIC nanoseconds at the scheduler's push
    routes        u64[rows]
    first         u32[rows], tokens of the request before this row
    counts        u32[rows], how many of `ids` belong to each row
    prompt_tokens u32[rows], length of the request's prompt
    ids           i32[tokens], the rows' ids end to end
    finishes      (row, reason) for each row that ended its request, rows ascending
    generated     u32[rows], tokens each row stands for: what the next row's `first` grows by. In the egress
                  form `ids` may lack a trimmed stop token that `generated` counts; in the step form it is
                  `counts` itself
    text_lens     u32[rows] bytes of text per row, and `text` the UTF-8 end to end; None in the step form
    """

    __slots__ = (
        "counts",
        "finishes",
        "first",
        "generated",
        "ids",
        "prompt_tokens",
        "routes",
        "rows",
        "stamp_ns",
        "text",
        "text_lens",
    )

    def __init__(
        self,
        stamp_ns: int,
        routes: U64,
        first: U32,
        counts: U32,
        prompt_tokens: U32,
        ids: I32,
        finishes: Sequence[tuple[int, FinishReason]] = (),
        generated: U32 | None = None,
        text_lens: U32 | None = None,
        text: Buffer | None = None,
    ) -> None:
        self.rows: int = len(routes)
        self.stamp_ns = stamp_ns
        self.routes = routes
        self.first = first
        self.counts = counts
        self.prompt_tokens = prompt_tokens
        self.ids = ids
        self.finishes = finishes
        self.generated = counts if generated is None else generated
        self.text_lens = text_lens
        self.text = text

    @property
    def egress(self) -> bool:
        """Whether this is the egress form, with text."""
        return self.text_lens is not None

    def select(self, rows: NDArray[np.intp] | Sequence[int]) -> "Batch":
        """Return the step form of the given rows alone (indices, ascending), as arrays of their own."""
        keep = np.asarray(rows, dtype=np.intp)
        place = {int(row): index for index, row in enumerate(keep)} if self.finishes else {}
        return Batch(
            self.stamp_ns,
            self.routes[keep],
            self.first[keep],
            self.counts[keep],
            self.prompt_tokens[keep],
            self.ids[spans(self.counts, keep)],
            [(place[row], reason) for row, reason in self.finishes if row in place],
        )


def spans(counts: U32, keep: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the indices, in a column of sum(counts) elements, of what belongs to the rows in `keep`."""
    ends = np.cumsum(counts, dtype=np.intp)
    taken = counts[keep].astype(np.intp)
    total = int(taken.sum())
    # Each kept row's run is its start plus 0..count-1; a ramp minus each run's own offset makes the latter.
    shift = np.repeat(ends[keep] - taken - (np.cumsum(taken) - taken), taken)
    return shift + np.arange(total, dtype=np.intp)


def encode_batch(
    stamp_ns: int,
    routes: U64,
    first: U32,
    counts: U32,
    prompt_tokens: U32,
    ids: I32,
    finishes: Iterable[tuple[int, FinishReason]] = (),
    *,
    generated: U32 | None = None,
    text_lens: U32 | None = None,
    text: Buffer | None = None,
) -> list[Buffer]:
    """Return a BATCH body as the parts for one lane write; the columns are passed on, not copied.

    Shapes and types are those of Batch; `generated`, `text_lens` and `text` come together (egress form) or
    not at all (step form). Raises ValueError naming the column when they do not fit each other.
    """
    rows, tokens = len(routes), len(ids)
    columns: list[Buffer] = [
        _column("routes", routes, _U64, rows),
        _column("first", first, _U32, rows),
        _column("counts", counts, _U32, rows),
        _column("prompt_tokens", prompt_tokens, _U32, rows),
        _column("ids", ids, _I32, tokens),
    ]
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows in a BATCH; at most {MAX_ROWS}: split the step")
    total = int(counts.sum(dtype=np.uint64))
    if total != tokens:
        raise ValueError(f"counts add up to {total} tokens, but ids has {tokens}")
    text_bytes = None
    if text_lens is not None:
        if generated is None or text is None:
            raise ValueError("the egress form needs generated, text_lens and text together")
        text_bytes = text.nbytes if isinstance(text, np.ndarray | memoryview) else len(text)
        total = int(text_lens.sum(dtype=np.uint64))
        if total != text_bytes:
            raise ValueError(f"text_lens add up to {total} bytes, but text has {text_bytes}")
        columns += (
            _column("generated", generated, _U32, rows),
            _column("text_lens", text_lens, _U32, rows),
            text,
            _PADS[-text_bytes % 4],
        )
    elif generated is not None or text is not None:
        raise ValueError("the egress form needs generated, text_lens and text together")
    header = _encoder.encode(
        (VERSION, stamp_ns, rows, tokens, [(row, reason.to_json()) for row, reason in finishes], text_bytes)
    )
    return [_PREFIX.pack(len(header), 0) + header + _PADS[-len(header) % 8], *columns]


def decode_batch(body: memoryview) -> Batch:
    """Return the Batch in a frame's body, its arrays views of it; raise BadBatch and deliver nothing."""
    size = len(body)
    if size < 8:
        raise BadBatch(f"BATCH body of {size} bytes; at least the 8 of its prefix expected")
    header_len, reserved = _PREFIX.unpack_from(body)
    data = 8 + header_len + -header_len % 8
    if data > size:
        raise BadBatch(f"BATCH header_len {header_len} runs past the body's {size} bytes")
    try:
        header = _decoder.decode(body[8 : 8 + header_len])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadBatch(f"BATCH header: {error}", _candidates(body, data)) from error
    try:
        if reserved:
            raise BadBatch(f"BATCH prefix: reserved word is {reserved}, not 0")
        return _decode_columns(header, body, data)
    except BadBatch as error:
        error.routes = _candidates(body, data, header.rows)
        raise


def _decode_columns(header: _Header, body: memoryview, at: int) -> Batch:
    rows, tokens, text_bytes = header.rows, header.tokens, header.text_bytes
    if header.version != VERSION:
        raise BadBatch(f"BATCH version {header.version}; this side speaks {VERSION}")
    _within("stamp_ns", header.stamp_ns, (1 << 64) - 1)
    _within("rows", rows, MAX_ROWS)
    _within("tokens", tokens, MAX_COUNT)
    expected = at + 20 * rows + 4 * tokens
    if text_bytes is not None:
        _within("text_bytes", text_bytes, MAX_COUNT)
        expected += 8 * rows + text_bytes + -text_bytes % 4
    if expected != len(body):
        raise BadBatch(f"BATCH header implies {expected} bytes, the body has {len(body)}")
    routes: U64 = np.frombuffer(body, _U64, rows, at)
    at += 8 * rows
    first, counts, prompt_tokens = (np.frombuffer(body, _U32, rows, at + 4 * rows * k) for k in range(3))
    at += 12 * rows
    ids: I32 = np.frombuffer(body, _I32, tokens, at)
    at += 4 * tokens
    _sums("counts", counts, "tokens", tokens)
    generated = text_lens = text = None
    if text_bytes is not None:
        generated, text_lens = (np.frombuffer(body, _U32, rows, at + 4 * rows * k) for k in range(2))
        at += 8 * rows
        text = body[at : at + text_bytes]
        _sums("text_lens", text_lens, "text_bytes", text_bytes)
    finishes = _finishes(header.finishes, rows)
    return Batch(
        header.stamp_ns,
        routes,
        first,
        counts,
        prompt_tokens,
        ids,
        finishes,
        generated,
        text_lens,
        text,
    )


def _finishes(raw: list[tuple[int, dict[str, Any]]], rows: int) -> list[tuple[int, FinishReason]]:
    last = -1
    finishes = []
    for row, reason in raw:
        if not last < row < rows:
            raise BadBatch(f"BATCH finish reasons: row {row} after row {last} of {rows} rows")
        if not is_json(reason):
            raise BadBatch(f"BATCH finish reasons: row {row} has one that is not JSON")
        last = row
        finishes.append((row, FinishReason(reason)))
    return finishes


def _column(name: str, column: NDArray[Any], dtype: np.dtype[Any], length: int) -> NDArray[Any]:
    if column.dtype is not dtype or not column.flags.c_contiguous:
        if column.dtype != dtype:
            raise ValueError(f"{name} is {column.dtype}, not {dtype}")
        column = np.ascontiguousarray(column)
    if column.shape != (length,):
        raise ValueError(f"{name} has shape {column.shape}, not ({length},)")
    return column


def _within(name: str, value: int, limit: int) -> None:
    if not 0 <= value <= limit:
        raise BadBatch(f"BATCH {name} {value} is not in 0..{limit}")


def _sums(name: str, column: U32, total_name: str, expected: int) -> None:
    # u32 columns of at most 2^20 rows, added up in u64: cannot overflow.
    total = int(np.add.reduce(column, dtype=np.uint64))
    if total != expected:
        raise BadBatch(f"BATCH {name} add up to {total}, {total_name} is {expected}")


def _candidates(body: memoryview, data: int, rows: int | None = None) -> tuple[int, ...]:
    """Return the routes a rejected frame names: its first column, as far as there can be one.

    A row takes at least 20 bytes, so at most a 20th of the data can be rows; when the header's row count
    says less, it is believed, when more, not.
    """
    room = (len(body) - data) // 20
    named = room if rows is None or not 0 <= rows <= room else rows
    words = np.frombuffer(body, _U64, max(0, min(named, MAX_ROWS)), min(data, len(body)))
    return tuple(int(route) for route in words if route)
