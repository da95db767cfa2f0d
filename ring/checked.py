"""What stands between a BATCH body and its use: every check, all or nothing.

A body that passes becomes a Checked, which knows where its columns are; `batch` makes arrays of it, the
reader's C loop walks it as it is. The format is drawn in `batch`.
"""

import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from ._body import (
    COUNTS_AT,
    EGRESS_ROW_BYTES,
    FIRST_AT,
    PREFIX_BYTES,
    PROMPT_TOKENS_AT,
    ROW_BYTES,
    TEXT_LENS_AT,
    VERSION,
    plain,
    probe,
)
from .columns import U64, U64_TYPE, BadColumns, check_range, check_same, check_utf8
from .families import (
    FAMILIES,
    MAX_COUNT,
    Families,
    TokenTexts,
    decode_family,
    decode_texts,
    family_bytes,
    texts_bytes,
)
from .finish import FinishReason, is_json
from .frames import BadFrame, Buffer

MAX_ROWS: Final = 1 << 20
MAX_STAMP: Final = (1 << 64) - 1

PREFIX: Final = struct.Struct("<IIQ")


class BadBatch(BadFrame):
    """A BATCH frame was rejected, all of it."""


class _Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: int
    stamp_ns: int
    rows: int
    tokens: int
    finishes: list[tuple[int, dict[str, Any]]]
    text_bytes: int | None
    families: list[tuple[int, int, int] | None]
    texts: tuple[int, int, int] | None
    ended: list[int] = []


_decode_header: Final = msgspec.msgpack.Decoder(_Header).decode


class Checked:
    """A BATCH body that passed every check, and where its columns are: what needs no arrays to be handled.

    raw        the body, a copy of one's own
    text_at    offset of the egress form's columns (generated, text_lens, text); None in the step form
    data       offset of the core columns; `layout` gives each one's
    """

    __slots__ = (
        "data",
        "ended",
        "families",
        "finishes",
        "raw",
        "rows",
        "stamp_ns",
        "text_at",
        "text_bytes",
        "texts",
        "tokens",
    )

    def __init__(
        self, raw: bytes, data: int, stamp_ns: int, rows: int, tokens: int, text_bytes: int | None
    ) -> None:
        self.raw = raw
        self.data = data
        self.stamp_ns = stamp_ns
        self.rows = rows
        self.tokens = tokens
        self.text_bytes = text_bytes
        self.text_at = None if text_bytes is None else data + ROW_BYTES * rows + 4 * tokens
        self.finishes: Sequence[tuple[int, FinishReason]] = ()
        self.families: Families = ()
        self.texts: TokenTexts | None = None
        self.ended: Sequence[int] = ()

    def layout(self) -> tuple[int, ...]:
        """Return rows, then each core and text column's offset, then the text's end. Egress form only."""
        if self.text_at is None or self.text_bytes is None:
            raise ValueError("the step form has no text columns")
        rows, data, text_at = self.rows, self.data, self.text_at
        text = text_at + EGRESS_ROW_BYTES * rows
        return (
            rows,
            data,
            data + FIRST_AT * rows,
            data + COUNTS_AT * rows,
            data + PROMPT_TOKENS_AT * rows,
            data + ROW_BYTES * rows,
            text_at,
            text_at + TEXT_LENS_AT * rows,
            text,
            text + self.text_bytes,
        )

    def routes(self) -> U64:
        """Return the routes, as a view."""
        return np.frombuffer(self.raw, U64_TYPE, self.rows, self.data)


def check_batch(body: Buffer) -> Checked:
    """Check a frame's body, all of it; raise BadBatch.

    The body is copied first, once: what is checked is what is used, whatever its writer does meanwhile, and
    the result outlives the frame's release.
    """
    raw = bytes(body)
    if (usual := plain(raw)) is not None:
        data, stamp_ns, rows, tokens, text_bytes = usual
        return Checked(raw, data, stamp_ns, rows, tokens, None if text_bytes < 0 else text_bytes)
    return _check_all(raw)


def _check_all(raw: bytes) -> Checked:
    """Check a body that has more than rows and tokens, or say what is wrong with it."""
    size = len(raw)
    if size < PREFIX_BYTES:
        raise BadBatch(
            f"BATCH body has {size} bytes; at least the {PREFIX_BYTES} of its prefix were expected"
        )
    header_len, body_len, check = PREFIX.unpack_from(raw)
    header_end = PREFIX_BYTES + header_len
    data = header_end + -header_len % 8
    if data > size:
        raise BadBatch(f"BATCH header_len is {header_len}, the body has {size} bytes")
    try:
        if body_len != size:
            raise BadColumns(f"body_len is {body_len}, the body has {size} bytes")
        header = _decode_header(raw[PREFIX_BYTES:header_end])
        return _check_columns(header, raw, header_len, data, check)
    except (BadColumns, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadBatch(f"BATCH {error}") from error


def _check_columns(header: _Header, body: bytes, header_len: int, data: int, check: int) -> Checked:
    """Size every column from the header, compare with the body, and only then look at what is in them."""
    rows, tokens, text_bytes = header.rows, header.tokens, header.text_bytes
    _check_core(header)
    checked = Checked(body, data, header.stamp_ns, rows, tokens, text_bytes)
    text_at = data + ROW_BYTES * rows + 4 * tokens
    text = text_at + EGRESS_ROW_BYTES * rows
    end = text_at if text_bytes is None else text + text_bytes + -text_bytes % 4
    starts = []
    for kind, entry in enumerate(header.families):
        starts.append(end)
        if entry is not None:
            end += family_bytes(kind, *entry)
    texts_at = end
    if header.texts is not None:
        end += texts_bytes(*header.texts)
    if end != len(body):
        raise BadColumns(f"header implies {end} bytes, the body has {len(body)}")

    egress = text_bytes is not None
    counted, texts_sum, inside, actual = probe(
        body, header_len, rows, data, text_at if egress else -1, text_bytes or 0
    )
    check_same("counts", "sum", counted, "tokens", tokens)
    if header.finishes:
        checked.finishes = _finishes(header.finishes, rows)
    if text_bytes is not None:
        check_same("text_lens", "sum", texts_sum, "text_bytes", text_bytes)
        check_utf8("text", body[text : text + text_bytes], inside)
    if header.families:
        checked.families = [
            None if entry is None else decode_family(kind, entry, body, starts[kind], rows)
            for kind, entry in enumerate(header.families)
        ]
    if header.texts is not None:
        checked.texts = decode_texts(header.texts, body, texts_at, rows)
    if header.ended:
        checked.ended = _ended(header, checked.finishes)
    # Last, so that a damaged number is reported as what it is where that can be told.
    if actual != check:
        raise BadColumns(f"check is {check:#018x}, the body's is {actual:#018x}: it was changed or torn")
    return checked


def _check_core(header: _Header) -> None:
    if header.version != VERSION:
        raise BadColumns(f"version is {header.version}; this side speaks {VERSION}")
    check_range("stamp_ns", header.stamp_ns, MAX_STAMP)
    check_range("rows", header.rows, MAX_ROWS)
    check_range("tokens", header.tokens, MAX_COUNT)
    if header.text_bytes is not None:
        check_range("text_bytes", header.text_bytes, MAX_COUNT)
    elif header.texts is not None:
        raise BadColumns("token_texts in the step form; only the egress form has them")
    if len(header.families) not in (0, FAMILIES):
        raise BadColumns(f"families has {len(header.families)} entries, not 0 or {FAMILIES}")


def _finishes(raw: list[tuple[int, dict[str, Any]]], rows: int) -> list[tuple[int, FinishReason]]:
    last = -1
    finishes = []
    for row, reason in raw:
        if not last < row < rows:
            raise BadColumns(f"finish reasons: row {row} after row {last}, in a batch of {rows} rows")
        if not is_json(reason):
            raise BadColumns(f"finish reasons: that of row {row} is not JSON")
        last = row
        finishes.append((row, FinishReason(reason)))
    return finishes


def _ended(header: _Header, finishes: Sequence[tuple[int, FinishReason]]) -> list[int]:
    if header.text_bytes is None:
        raise BadColumns("ended rows in the step form; only the egress form has them")
    finished = {row for row, _ in finishes}
    for row in header.ended:
        if row not in finished:
            raise BadColumns(f"ended: row {row} has no finish reason")
    return header.ended
