"""Batches of every make, and damage of every kind, drawn from any source of choices.

Used by the tests (hypothesis chooses) and by `./scripts/stress batch` (a seeded generator does).
"""

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
from outfeed.ring._body import check
from outfeed.ring.batch import Batch, encode_batch
from outfeed.ring.families import FAMILIES, RAGGED, Family, Kind, TokenTexts, wanted_ids
from outfeed.ring.family_makers import flat_family, hidden_family, ragged_family
from outfeed.ring.finish import FinishReason
from outfeed.ring.route import make_route

TEXTS = ("", "a", "token", "é", "漢字", "👩‍👩‍👧", "\x00", "하", "ا", "\ufffd")
FLOATS = (0.0, -0.0, -1.5, float("nan"), float("-inf"), float("inf"), 1e-45, 3.4028235e38)
FINISHES: tuple[dict[str, Any], ...] = (
    {"type": "stop", "matched": 0},
    {"type": "stop", "matched": "END"},
    {"type": "stop", "matched": [1, 2]},
    {"type": "length", "length": 7},
    {"type": "abort", "message": None, "status_code": None, "err_type": None},
    {"type": "abort", "message": "no", "status_code": 400, "err_type": "BadRequest"},
    {"type": "brand_new", "why": {"deep": [1, None, {"x": 0.5}]}},
    {"matched": None, "type": None},
    {},
)


class Choose(Protocol):
    """Where the choices come from."""

    def integer(self, low: int, high: int) -> int:
        """Return a number in low..high."""


class Seeded:
    """Choices from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


def pick(choose: Choose, options: tuple[Any, ...]) -> Any:
    return options[choose.integer(0, len(options) - 1)]


@dataclass
class Row:
    """One row, in plain Python: what went in."""

    route: int
    first: int
    ids: list[int]
    generated: int
    prompt_tokens: int
    text: str
    finish: dict[str, Any] | None
    families: dict[Kind, Any] = field(default_factory=dict)
    wants_texts: bool = False


@dataclass
class Step:
    """A batch, in plain Python."""

    stamp_ns: int
    rows: list[Row]
    egress: bool

    def encode(self) -> bytes:
        rows = self.rows
        every = families_of(rows)
        extra: dict[str, Any] = {}
        if self.egress:
            text = [row.text.encode() for row in rows]
            extra = {
                "generated": np.array([row.generated for row in rows], "u4"),
                "text_lens": np.array([len(part) for part in text], "u4"),
                "text": b"".join(text),
                "texts": texts_of(rows, every),
            }
        parts = encode_batch(
            self.stamp_ns,
            np.array([row.route for row in rows], "u8"),
            np.array([row.first for row in rows], "u4"),
            np.array([len(row.ids) for row in rows], "u4"),
            np.array([row.prompt_tokens for row in rows], "u4"),
            np.array([token for row in rows for token in row.ids], "i4"),
            [(index, FinishReason(row.finish)) for index, row in enumerate(rows) if row.finish is not None],
            families=every,
            **extra,
        )
        return b"".join(parts)


def families_of(rows: list[Row]) -> list[Family | None]:
    found: list[Family | None] = []
    for kind in Kind:
        having = [(index, row.families[kind]) for index, row in enumerate(rows) if kind in row.families]
        if kind is Kind.HIDDEN_STATES:
            found.append(hidden_family(having))
        elif kind in RAGGED:
            found.append(ragged_family(having))
        else:
            found.append(flat_family([(index, values, ids) for index, (values, ids) in having]))
    return found


def token_text(token: int) -> str:
    return f"<{token}>" + TEXTS[token % len(TEXTS)]


def texts_of(rows: list[Row], families: list[Family | None]) -> TokenTexts | None:
    wanting = [index for index, row in enumerate(rows) if row.wants_texts]
    if not wanting:
        return None
    ids = wanted_ids(families, wanting, len(rows))
    text = [token_text(token).encode() for token in ids.tolist()]
    lens = np.array([len(part) for part in text], "u4")
    return TokenTexts(np.array(wanting, "u4"), ids, lens, b"".join(text))


def draw_step(choose: Choose, egress: bool = True, most_rows: int = 5) -> Step:
    width = choose.integer(1, 3)
    rows = [draw_row(choose, slot, width, egress) for slot in range(choose.integer(0, most_rows))]
    return Step(choose.integer(0, 2**64 - 1), rows, egress)


def draw_row(choose: Choose, slot: int, width: int, egress: bool) -> Row:
    ids = [choose.integer(-(2**31), 2**31 - 1) for _ in range(choose.integer(0, 3))]
    generated = len(ids) + choose.integer(0, 1)
    families: dict[Kind, Any] = {}
    for kind in Kind:
        if choose.integer(0, 2) == 0:
            families[kind] = draw_family(choose, kind, width)
    return Row(
        route=make_route(choose.integer(0, 255), choose.integer(0, 255), slot, choose.integer(1, 2**28 - 1)),
        first=choose.integer(0, 2**32 - 1),
        ids=ids,
        generated=generated if egress else len(ids),
        prompt_tokens=choose.integer(0, 2**32 - 1),
        text="".join(pick(choose, TEXTS) for _ in range(choose.integer(0, 3))) if egress else "",
        finish=pick(choose, FINISHES) if choose.integer(0, 3) == 0 else None,
        families=families,
        wants_texts=egress and choose.integer(0, 1) == 1,
    )


def draw_family(choose: Choose, kind: Kind, width: int) -> Any:
    count = choose.integer(0, 3)
    if kind is Kind.HIDDEN_STATES:
        return np.array([[pick(choose, FLOATS) for _ in range(width)] for _ in range(count)], "f4").reshape(
            count, width
        )
    if kind in RAGGED:
        return [
            None if length == 0 else draw_pairs(choose, length)
            for length in (choose.integer(0, 3) for _ in range(count))
        ]
    return draw_pairs(choose, count)


def draw_pairs(choose: Choose, count: int) -> tuple[list[float], list[int]]:
    return [pick(choose, FLOATS) for _ in range(count)], [choose.integer(-5, 2**31 - 1) for _ in range(count)]


def bits(values: Any) -> list[int]:
    """f32 values as their bits: NaN equals itself, 0.0 is not -0.0."""
    found: list[int] = np.asarray(values, "f4").reshape(-1).view("u4").tolist()
    return found


def family_in(kind: Kind, given: Any) -> Any:
    """What a row's family must come out as, in comparable form."""
    if kind is Kind.HIDDEN_STATES:
        return (given.shape, bits(given))
    if kind in RAGGED:
        return [None if entry is None else (bits(entry[0]), entry[1]) for entry in given]
    return (bits(given[0]), given[1])


# Damage.


def reseal(body: bytes) -> bytes:
    """Make the prefix right again, so that only the other checks stand between damage and delivery."""
    header_len = struct.unpack_from("<I", body)[0]
    rest = body[16:]
    return struct.pack("<IIQ", header_len, len(body), check(rest, header_len)) + rest


def header_of(body: bytes) -> list[Any]:
    header_len = struct.unpack_from("<I", body)[0]
    header: list[Any] = msgspec.msgpack.decode(body[16 : 16 + header_len])
    return header


def with_header(body: bytes, header: object) -> bytes:
    """Put another header before the same columns; the old check stays."""
    header_len, _, check = struct.unpack_from("<IIQ", body)
    data = body[16 + header_len + -header_len % 8 :]
    raw = msgspec.msgpack.encode(header)
    rest = raw + bytes(-len(raw) % 8) + data
    return struct.pack("<IIQ", len(raw), 16 + len(rest), check) + rest


def flip(choose: Choose, body: bytes) -> bytes:
    at = choose.integer(0, 8 * len(body) - 1)
    damaged = bytearray(body)
    damaged[at // 8] ^= 1 << at % 8
    return bytes(damaged)


def truncate(choose: Choose, body: bytes) -> bytes:
    return body[: choose.integer(0, len(body) - 1)]


def extend(choose: Choose, body: bytes) -> bytes:
    return body + bytes(choose.integer(0, 255) for _ in range(choose.integer(1, 64)))


def overwrite(choose: Choose, body: bytes) -> bytes:
    at = choose.integer(0, len(body) - 1)
    patch = bytes(choose.integer(0, 255) for _ in range(min(choose.integer(1, 16), len(body) - at)))
    return body[:at] + patch + body[at + len(patch) :]


def swap_words(choose: Choose, body: bytes) -> bytes:
    size = pick(choose, (4, 8))
    words = [body[at : at + size] for at in range(0, len(body), size)]
    a, b = choose.integer(0, len(words) - 1), choose.integer(0, len(words) - 1)
    words[a], words[b] = words[b], words[a]
    return b"".join(words)


def swap_columns(choose: Choose, body: bytes) -> bytes:
    """Exchange two stretches of one length, aligned as columns are."""
    header_len = struct.unpack_from("<I", body)[0]
    data = 16 + header_len + -header_len % 8
    rows = header_of(body)[2]
    size = 4 * max(1, rows)
    last = len(body) - size
    if last < data:
        return body
    a, b = sorted((4 * choose.integer(data // 4, last // 4), 4 * choose.integer(data // 4, last // 4)))
    if b < a + size:
        return body
    return body[:a] + body[b : b + size] + body[a + size : b] + body[a : a + size] + body[b + size :]


NUMBERS = (0, 1, -1, 2, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, -(2**63))
ODD: tuple[Any, ...] = (None, True, 0.5, "x", b"x", [], {}, [[0, {}]], [None] * 7, [[1, 1, 1]] * 7, [0, 0, 0])


def change_header(choose: Choose, body: bytes) -> bytes:
    """Change one field of the header: nudge it, replace it, swap it, drop it, add one."""
    header = header_of(body)
    at = choose.integer(0, len(header) - 1)
    action = choose.integer(0, 6)
    if action == 0:
        header[at] = pick(choose, NUMBERS)
    elif action == 1:
        header[at] = pick(choose, ODD)
    elif action == 2:
        other = choose.integer(0, len(header) - 1)
        header[at], header[other] = header[other], header[at]
    elif action == 3:
        del header[at]
    elif action == 4:
        header.insert(at, pick(choose, NUMBERS + ODD))
    else:
        change_within(choose, header, at)
    return with_header(body, header)


def change_within(choose: Choose, header: list[Any], at: int) -> None:
    """Nudge a number, however deep in the field it is."""
    holder, key = header, at
    for _ in range(3):
        inner = holder[key]
        if not isinstance(inner, list) or not inner:
            break
        holder, key = inner, choose.integer(0, len(inner) - 1)
    if isinstance(holder[key], int):
        nudged = holder[key] + pick(choose, (-1, 1, 2, 4, -4))
        holder[key] = nudged if -(2**63) <= nudged < 2**64 else 0
    else:
        holder[key] = pick(choose, NUMBERS)


DAMAGES: tuple[Callable[[Choose, bytes], bytes], ...] = (
    flip,
    truncate,
    extend,
    overwrite,
    swap_words,
    swap_columns,
    change_header,
)


def check_invariants(batch: Batch) -> None:
    """What must hold of any Batch that was let through."""
    rows = batch.rows
    columns = (batch.routes, batch.first, batch.counts, batch.prompt_tokens, batch.generated)
    assert all(len(column) == rows for column in columns)
    assert int(batch.counts.sum(dtype="u8")) == len(batch.ids)
    assert [row for row, _ in batch.finishes] == sorted({row for row, _ in batch.finishes})
    assert all(0 <= row < rows for row, _ in batch.finishes)
    if batch.text is not None:
        assert batch.text_lens is not None
        assert int(batch.text_lens.sum(dtype="u8")) == len(batch.text)
        start = 0
        for length in batch.text_lens.tolist():
            batch.text[start : start + length].decode("utf-8")
            start += length
    assert len(batch.families) in (0, FAMILIES)
    for family in batch.families:
        if family is None:
            continue
        assert all(row < rows for row in family.rows.tolist())
        assert len(set(family.rows.tolist())) == len(family.rows) == len(family.counts)
        positions = int(family.counts.sum(dtype="u8"))
        if family.lengths is not None:
            assert len(family.lengths) == positions
            positions = int(family.lengths.sum(dtype="u8"))
        assert len(family.values) == positions * (family.width if family.ids is None else 1)
        assert family.ids is None or len(family.ids) == positions
