"""What a BATCH's columns are made of: their types, little-endian, and the checks that any of them may need.

Must not know which columns there are, nor where they lie.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
U32 = NDArray[np.uint32]
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]

# Compare with ==, which knows the byte order; not with `is`: an unpickled array has a dtype of its own.
U64_TYPE: Final = np.dtype("<u8")
U32_TYPE: Final = np.dtype("<u4")
I32_TYPE: Final = np.dtype("<i4")
F32_TYPE: Final = np.dtype("<f4")


class BadColumns(ValueError):
    """Columns that do not fit their header or each other."""


def narrowed(found: NDArray[Any], dtype: np.dtype[Any], name: str) -> NDArray[Any]:
    """Return whole numbers as this type of such; BadColumns names the first that it cannot hold."""
    if found.dtype == dtype:
        return found
    narrow = found.astype(dtype, copy=False)
    wrong = narrow != found
    if wrong.any():
        place, limits = int(wrong.argmax()), np.iinfo(dtype)
        raise BadColumns(f"{name}[{place}] is {found[place]}: expected {limits.min} to {limits.max}")
    return narrow


def check_text(name: str, text: bytes, lens: U32) -> None:
    """Check that a text column is UTF-8 and that no row's part begins inside a character."""
    starts = np.cumsum(lens, dtype=np.int64)
    starts = starts[starts < len(text)]
    inside = starts[(np.frombuffer(text, np.uint8)[starts] & 0xC0) == 0x80]
    check_utf8(name, text, int(inside[0]) if inside.size else -1)


def check_utf8(name: str, text: bytes, inside: int) -> None:
    """Check that a text column is UTF-8; `inside` is where a part of it begins inside a character, or -1."""
    if text.isascii():
        return
    try:
        str(text, "utf-8")
    except UnicodeDecodeError as error:
        raise BadColumns(f"{name}: not UTF-8 at byte {error.start}: {error.reason}") from error
    if inside >= 0:
        raise BadColumns(f"{name}: a part begins inside a character, at byte {inside}")


def check_ascending(name: str, column: NDArray[Any], limit: int | None) -> None:
    """Check that a column ascends, to below `limit` if there is one."""
    if len(column) == 0:
        return
    if not bool((column[1:] > column[:-1]).all()):
        raise BadColumns(f"{name}: not ascending")
    if limit is not None and int(column[-1]) >= limit:
        raise BadColumns(f"{name}: {int(column[-1])} in a batch of {limit} rows")


def total_of(column: U32) -> int:
    """Return the sum of a column."""
    # u32 elements added up in u64: fewer than 2^31 of them cannot overflow it.
    return int(np.add.reduce(column, dtype=np.uint64))


def check_range(name: str, value: int, limit: int) -> None:
    """Check that a header's number is within 0..limit."""
    if not 0 <= value <= limit:
        raise BadColumns(f"{name} is {value}, not in 0..{limit}")


def check_same(name: str, what: str, value: int, other: str, expected: int) -> None:
    """Check that two numbers that say the same agree."""
    if value != expected:
        raise BadColumns(f"{name}: {what} {value}, {other} {expected}")


def typed(name: str, column: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Check that a column is an array of one dimension and this type; return it contiguous."""
    if not isinstance(column, np.ndarray):
        raise BadColumns(f"{name}: a column is a {type(column).__name__}, not an array of {dtype}")
    if column.dtype != dtype or column.ndim != 1:
        raise BadColumns(f"{name}: a column is {column.dtype}[{column.ndim}d], not {dtype}[1d]")
    return np.ascontiguousarray(column)
