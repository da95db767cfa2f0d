"""From a scheduler's lists and arrays to the families of a step: each maker takes the rows that have it.

Numbers may come as lists or arrays of any numeric type; what is none is refused.
Must not know how a family is written.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .columns import F32, F32_TYPE, I32, I32_TYPE, U32, U32_TYPE, BadColumns, narrowed
from .families import Family

_NOTHING: Final = np.empty(0, I32_TYPE)
# What numpy raises for what is no array, and torch for a tensor that it does not hand out.
_UNREADABLE: Final = (TypeError, ValueError, RuntimeError)


def flat_family(rows: Iterable[tuple[int, ArrayLike, ArrayLike]]) -> Family | None:
    """Build output or input logprobs from (row, values, ids), rows ascending; None when there are none.

    A value of None is NaN. Raises BadColumns, as all makers here: not as many values as ids, no numbers, no
    whole numbers of their types.
    """
    with _taken_apart("(row, values, ids)"):
        listed = [(row, _pair(row, values, ids)) for row, values, ids in rows]
    if not listed:
        return None
    return Family(
        _rows([row for row, _ in listed]),
        np.array([len(values) for _, (values, _) in listed], U32_TYPE),
        _real([values for _, (values, _) in listed]),
        _whole([ids for _, (_, ids) in listed]),
    )


def ragged_family(
    rows: Iterable[tuple[int, Sequence[tuple[ArrayLike, ArrayLike] | None]]],
) -> Family | None:
    """Build a top-k or token-id family from (row, positions), a position being (values, ids) or None."""
    listed = list(rows)
    if not listed:
        return None
    with _taken_apart("(row, positions), each position (values, ids) or None"):
        entries = [
            (_NOTHING, _NOTHING) if position is None else _pair(row, *position)
            for row, positions in listed
            for position in positions
        ]
    return Family(
        _rows([row for row, _ in listed]),
        np.array([len(positions) for _, positions in listed], U32_TYPE),
        _real([values for values, _ in entries]),
        _whole([ids for _, ids in entries]),
        np.array([len(values) for values, _ in entries], U32_TYPE),
    )


def hidden_family(rows: Iterable[tuple[int, ArrayLike]]) -> Family | None:
    """Build hidden states from (row, f32[vectors, width]); all rows have one width."""
    with _taken_apart("(row, vectors)"):
        listed = [(row, _vectors(row, given)) for row, given in rows]
    if not listed:
        return None
    widths = {vectors.shape[1] for _, vectors in listed}
    if len(widths) != 1:
        raise BadColumns(f"hidden states of one batch have widths {sorted(widths)}; expected one")
    return Family(
        _rows([row for row, _ in listed]),
        np.array([len(vectors) for _, vectors in listed], U32_TYPE),
        _real([vectors.reshape(-1) for _, vectors in listed]),
        width=widths.pop(),
    )


@contextmanager
def _taken_apart(expected: str) -> Iterator[None]:
    """Refuse rows that cannot be taken apart so."""
    try:
        yield
    except BadColumns:
        raise
    except (TypeError, ValueError) as error:
        raise BadColumns(f"a row or a position is of another shape: expected rows of {expected}") from error


def _vectors(row: int, given: ArrayLike) -> NDArray[Any]:
    try:
        found = np.asarray(given)
    except _UNREADABLE as error:
        raise _unreadable(row, error) from error
    if found.ndim != 2 or found.shape[1] == 0:
        raise BadColumns(f"hidden states of row {row} have shape {found.shape}: expected (vectors, width)")
    return found


def _pair(row: int, values: ArrayLike, ids: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return values and ids as arrays: numbers as they came, since converting all at once is cheaper."""
    try:
        found, named = np.asarray(values), np.asarray(ids)
        if len(found) == len(named):
            return found, named
    except _UNREADABLE as error:
        raise _unreadable(row, error) from error
    raise BadColumns(f"row {row} has {len(found)} values for {len(named)} ids: expected one for each")


def _unreadable(row: int, error: Exception) -> BadColumns:
    return BadColumns(
        f"row {row} has what numpy cannot read: {error} (of a torch tensor give .float().cpu().numpy())"
    )


def _rows(numbers: list[int]) -> U32:
    try:
        return np.frombuffer(array("I", numbers), U32_TYPE)
    except (TypeError, OverflowError) as error:
        raise BadColumns(f"rows {numbers}: {error}: expected whole numbers from 0") from error


def _joined(name: str, parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Join the columns of rows."""
    try:
        found = np.concatenate(parts) if parts else _NOTHING
    except ValueError as error:
        raise BadColumns(f"{name}: {error}") from error
    if found.ndim != 1:
        raise BadColumns(f"{name} have {found.ndim} dimensions: expected one")
    return found


def _real(parts: list[NDArray[Any]]) -> F32:
    """Join values as f32."""
    found = _joined("values", parts)
    if found.dtype.kind not in "fiuO" and not np.can_cast(found.dtype, F32_TYPE, "same_kind"):
        raise BadColumns(f"values have dtype {found.dtype}: expected numbers")
    try:
        return found.astype(F32_TYPE, copy=False)
    except (TypeError, ValueError) as error:
        raise BadColumns(f"values: {error}: expected numbers, or None") from error


def _whole(parts: list[NDArray[Any]]) -> I32:
    """Join ids as i32."""
    found = _joined("ids", parts)
    if found.dtype.kind not in "iu":  # an empty list is of floats for numpy
        found = _joined("ids", [part for part in parts if part.size])
        if found.dtype.kind not in "iu":
            raise BadColumns(f"ids have dtype {found.dtype}: expected whole numbers")
    return narrowed(found, I32_TYPE, "ids")
