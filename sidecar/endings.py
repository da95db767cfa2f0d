"""A step's finish reasons, checked before they are handed over as whoever reads the step will check them.

A reason that a shard refuses costs every request of its step, so it is the scheduler that must be told. Must
not know rings or the row table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index, itemgetter
from typing import Any, Final

import msgspec

from ..ring.batch import encode_endings
from ..ring.checked import check_endings
from ..ring.families import BadColumns
from ..ring.finish import FinishReason

Reason = FinishReason | Mapping[str, Any]
Finishes = Mapping[int, Reason]
Endings = Sequence[tuple[int, FinishReason]]

# What encoding a value that has no JSON form raises, and reading what came of it.
_NO_JSON: Final = (TypeError, OverflowError, RecursionError, UnicodeError, msgspec.MsgspecError, BadColumns)
NOBODY: Final[tuple[Endings, bytes]] = ((), encode_endings(()))


def checked(finishes: Finishes, rows: int) -> tuple[Endings, bytes]:
    """Return row → finish reason as shards will read it, rows ascending, and as it stands in a step's header.

    Whole numbers of any type (numpy's, say) are numbers.

    Raises:
        ValueError: naming the row: the step has none such, or its reason is none that a client can read.
    """
    if not isinstance(finishes, Mapping):
        raise ValueError(f"finishes is a {type(finishes).__name__}: give a mapping, row → finish reason")
    listed = sorted(
        ((_row(row, rows), _reason(row, why)) for row, why in finishes.items()), key=itemgetter(0)
    )
    try:
        endings = encode_endings(listed)
        ended = check_endings(endings, rows)
    except _NO_JSON as error:
        raise _fault(listed, rows) from error
    for row, reason in ended:
        _check_type(row, reason)
    return ended, endings


def _row(row: int, rows: int) -> int:
    try:
        number = index(row)
    except TypeError:
        raise ValueError(f"finishes names row {row!r}: give the row's number in this step") from None
    if not 0 <= number < rows:
        raise ValueError(f"finishes names row {number} of a step of {rows} rows")
    return number


def _reason(row: int, reason: Reason) -> FinishReason:
    if isinstance(reason, FinishReason):
        return reason
    if not isinstance(reason, Mapping):
        raise ValueError(
            f"finishes: the reason of row {row} is a {type(reason).__name__}: give a FinishReason or a "
            "mapping with a `type`; leave out rows that go on"
        )
    return FinishReason(reason)


def _fault(listed: Endings, rows: int) -> ValueError:
    """Say which reason cannot be read: they are tried again, one by one."""
    for ending in listed:
        try:
            check_endings(encode_endings([ending]), rows)
        except _NO_JSON as error:
            return ValueError(f"finishes: the reason of row {ending[0]} is no JSON object: {error}")
    return ValueError(f"finishes names a row twice: {[row for row, _ in listed]}")


def _check_type(row: int, reason: FinishReason) -> None:
    raw = reason.to_json()
    if not isinstance(raw.get("type"), str):
        raise ValueError(f"finishes: the reason of row {row} has no `type`: {raw}")
    status = raw.get("status_code")
    if raw["type"] == "abort" and status is not None and reason.abort_status is None:
        raise ValueError(
            f"finishes: row {row} is aborted with status_code {status!r}: give 400 to 599, or None for a "
            "normal end"
        )
