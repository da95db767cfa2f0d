"""Writes decode steps into a lane: from a scheduler's arrays to a frame the shards see, in one C call.

Knows the row table and the lane. Must not know requests or when they end.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..ring import LaneWriter
from ..ring.batch import encode_families
from ..ring.columns import narrowed
from ..ring.families import Families, Family, Kind
from ..ring.frames import Tag
from ._push import Pusher
from ._rows import lib
from .rows import RowTable, address

MAX_ROWS: Final[int] = lib.OUTFEED_MAX_ROWS
"""Rows of one step at most."""
Columns = tuple[NDArray[np.uint64], NDArray[np.int32], NDArray[np.uint32] | None]
"""Routes, ids and counts of a step; None: one token each."""
_KINDS: Final = tuple(Kind)  # going through an enum itself takes as long as a plain step's push
_PER_TOKEN: Final = (Kind.OUTPUT_LOGPROBS, Kind.OUTPUT_TOP_LOGPROBS, Kind.OUTPUT_IDS_LOGPROBS)
_CODES: Final[dict[Any, str]] = {np.uint64: "Q", np.uint32: "I", np.int32: "i"}


class StepWriter(Pusher):
    """Pushes steps of the requests in `table` onto the lane of `writer`, from one thread at a time.

    `push(routes, ids, counts, endings, timeout[, families, optional])` comes from the C base.
    """

    def __init__(self, writer: LaneWriter, table: RowTable) -> None:
        self._writer = writer
        self._table = table
        lane = writer.native
        self._bind(
            Tag.BATCH,
            (lane.handle, lane.reserve, lane.commit, lane.cancel, lane.memory),
            (
                address("outfeed_step_size"),
                address("outfeed_step"),
                address("outfeed_step_retract"),
                table.address,
            ),
        )

    def push_with_families(
        self,
        routes: NDArray[np.uint64],
        ids: NDArray[np.int32],
        counts: NDArray[np.uint32] | None,
        endings: bytes,
        families: Families,
        timeout: float,
    ) -> int:
        """Write a step that has optional columns; return its stamp. Raises what `push` does."""
        rows = len(routes)
        each = np.ones(rows, dtype=np.uint32) if counts is None else counts
        if len(each) != rows:
            self._refuse(lib.OUTFEED_COUNTS, 0, routes, ids, counts, timeout)
        sizes, optional = encode_families(families, rows)
        check_positions(families, each)
        return self.push(routes, ids, counts, endings, timeout, sizes, optional)

    def _refuse(self, code: int, size: int, routes: Any, ids: Any, counts: Any, timeout: float) -> NoReturn:
        """Raise what a C code means; nothing was written or counted.

        The columns are buffers, which not all can be indexed as they are.
        """
        rows = len(routes)
        if code <= lib.OUTFEED_ROUTE:
            row = lib.OUTFEED_ROUTE - code
            self._table.refuse_route(row, int(np.frombuffer(routes, np.uint64)[row]))
        if code == lib.OUTFEED_ROWS:
            raise ValueError(f"a step has 1 to {MAX_ROWS} rows, not {rows}")
        if code == lib.OUTFEED_COUNTS:
            raise ValueError(f"counts has {len(counts)} entries for {rows} rows")
        if code == lib.OUTFEED_IDS:
            found = np.frombuffer(ids, np.int32)
            place = int(np.flatnonzero(found < 0)[0])
            raise ValueError(
                f"ids[{place}] is {found[place]}: a token's id is 0 or more; leave out what is none, "
                "counts says how many tokens a row has"
            )
        if code == lib.OUTFEED_TOKENS:
            total = rows if counts is None else int(np.frombuffer(counts, np.uint32).sum(dtype=np.uint64))
            raise ValueError(f"ids has {len(ids)} entries, the counts of {rows} rows sum to {total}")
        self._writer.native.refuse(code, Tag.BATCH, size, timeout)


def in_order(families: Families | Mapping[Kind, Family | None]) -> Families:
    """Return families by `Kind` as a list in its order.

    Raises:
        ValueError: a key is no Kind, or a family none.
    """
    if isinstance(families, Mapping):
        if unknown := [kind for kind in families if kind not in _KINDS]:
            raise ValueError(f"families names {unknown}: its keys are {', '.join(map(repr, Kind))}")
        families = [families.get(kind) for kind in _KINDS]
    for family in families:
        if family is not None and not isinstance(family, Family):
            raise ValueError(
                f"families has a {type(family).__name__}: make each with flat_family, ragged_family or "
                "hidden_family"
            )
    return families


def check_positions(families: Families, counts: NDArray[np.uint32]) -> None:
    """Check that what says something of each output token says it of as many as the row has."""
    for kind in _PER_TOKEN:
        family = families[kind]
        if family is None:
            continue
        wrong = np.flatnonzero(family.counts != counts[family.rows])
        if wrong.size:
            row, has = int(family.rows[wrong[0]]), int(family.counts[wrong[0]])
            raise ValueError(
                f"{kind.name.lower()}: row {row} has {has} positions for {int(counts[row])} tokens: give one "
                "for each token of the row"
            )


def converted(routes: ArrayLike, ids: ArrayLike, counts: ArrayLike | None) -> Columns:
    """Return a step's columns as arrays of just their types. Raises what `column` does."""
    return (
        column(routes, np.uint64, "routes"),
        column(ids, np.int32, "ids"),
        None if counts is None else column(counts, np.uint32, "counts"),
    )


def column(values: ArrayLike, dtype: type[np.integer[Any]], name: str) -> NDArray[Any]:
    """Return `values` as a contiguous one-dimensional array of `dtype`, the same one where it is one.

    Raises:
        ValueError: naming the column: not one-dimensional, not whole numbers, or out of the type's range.
    """
    if isinstance(values, list | tuple):
        # What fails here fails again below, where it is said in the words of the column.
        with contextlib.suppress(TypeError, OverflowError):
            return np.frombuffer(array(_CODES[dtype], values), dtype)
    try:
        found = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} cannot be read as an array: {error}") from error
    if found.ndim != 1:
        shape = f"has shape {found.shape}" if found.ndim else f"is a {type(values).__name__}"
        raise ValueError(f"{name} {shape}: expected a list or an array of one dimension")
    if found.size and found.dtype.kind not in "iu":
        limits = np.iinfo(dtype)
        raise ValueError(f"{name} has dtype {found.dtype}: expected whole numbers from 0 to {limits.max}")
    return np.ascontiguousarray(narrowed(found, np.dtype(dtype), name))
