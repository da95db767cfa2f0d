"""A step's finish reasons, checked before they are handed over.

A reason that a shard could not read costs every request of its step, so the scheduler must be told. Must not
know rings or the row table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import index, itemgetter
from typing import Any, Final

import msgspec

from ..ring.batch import encode_endings
from ..ring.finish import FinishReason, is_json

Reason = FinishReason | Mapping[str, Any]
Finishes = Mapping[int, Reason]
Endings = Sequence[tuple[int, FinishReason]]

NOBODY: Final[tuple[Endings, bytes]] = ((), encode_endings(()))
_PLAIN: Final = frozenset((str, int, bool, float, type(None)))
_by_row: Final = itemgetter(0)


def _whole(value: Any) -> int:
    """Let numpy's whole numbers be numbers like others."""
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{value!r} is a {type(value).__name__}") from None


_encode: Final = msgspec.msgpack.Encoder(enc_hook=_whole).encode
_decode: Final = msgspec.msgpack.Decoder(dict[str, Any]).decode


def checked(finishes: Finishes, routes: Any) -> tuple[Endings, bytes]:
    """Return row → finish reason as shards will read it, rows ascending, and as it stands in a step's header.

    routes: the step's, of which only the number matters here. Whole numbers of any type (numpy's, say) are
    numbers.

    Raises:
        ValueError: the step has no such row, or its reason is none that a client can read.
    """
    try:
        rows = len(routes)
    except TypeError:
        raise ValueError(f"routes is a {type(routes).__name__}: expected a list or an array") from None
    if not isinstance(finishes, Mapping):
        raise ValueError(f"finishes is a {type(finishes).__name__}: give a mapping, row → finish reason")
    ended = []
    for row, why in finishes.items():
        if type(row) is not int:
            row = _number(row)
        if not 0 <= row < rows:
            raise ValueError(f"finishes names row {row} of a step of {rows} rows")
        reason = why if type(why) is FinishReason else _made(row, why)
        ended.append((row, reason if _is_plain(reason) else _checked(row, reason)))
    if len(ended) > 1:
        ended.sort(key=_by_row)
        for (row, _), (following, _) in pairwise(ended):
            if row == following:  # of keys that equal no others, as torch's numbers, a mapping may have two
                raise ValueError(f"finishes names row {row} twice")
    try:
        return ended, encode_endings(ended)
    except (OverflowError, UnicodeError):  # a number or a text that no encoder takes
        for row, reason in ended:
            _as_read(row, reason.to_json())
        raise


def _number(row: Any) -> int:
    try:
        return index(row)
    except TypeError:
        raise ValueError(f"finishes names row {row!r}: give the row's number in this step") from None


def _made(row: int, reason: Any) -> FinishReason:
    if isinstance(reason, FinishReason):
        return reason
    if isinstance(reason, Mapping):
        return FinishReason(reason)
    raise ValueError(
        f"finishes: the reason of row {row} is a {type(reason).__name__}: give a FinishReason or a mapping "
        "with a `type`; leave out rows that go on"
    )


def _is_plain(reason: FinishReason) -> bool:
    """Whether it will be read as it is written, for certain: a quick look, since most are."""
    raw = reason.to_json()
    for key, value in raw.items():
        if type(key) is not str or type(value) not in _PLAIN:
            return False
    return type(kind := raw.get("type")) is str and kind != "abort"


def _checked(row: int, reason: FinishReason) -> FinishReason:
    """Return a finish reason as who reads the step will have it."""
    raw = _as_read(row, reason.to_json())
    reason = FinishReason(raw)
    if not isinstance(raw.get("type"), str):
        raise ValueError(f"finishes: the reason of row {row} has no `type`: {raw}")
    if raw["type"] == "abort" and reason.abort_status is None and raw.get("status_code") is not None:
        raise ValueError(
            f"finishes: row {row} is aborted with status_code {raw['status_code']!r}: give 400 to 599, or "
            "None for a normal end"
        )
    return reason


def _as_read(row: int, raw: dict[str, Any]) -> dict[str, Any]:
    try:
        read = _decode(_encode(raw))
    except (TypeError, OverflowError, RecursionError, UnicodeError, msgspec.MsgspecError) as error:
        raise ValueError(f"finishes: the reason of row {row} is no JSON object: {error}") from error
    if not is_json(read):
        raise ValueError(f"finishes: the reason of row {row} is no JSON object, or one too deep: {read}")
    return read
