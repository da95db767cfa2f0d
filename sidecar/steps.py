"""Writes decode steps into a lane: from a scheduler's arrays to a frame the shards see, in one C call.

Knows the row table and the lane. Must not know requests or when they end.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..ring import LaneWriter
from ..ring.batch import encode_batch
from ..ring.families import Families
from ..ring.finish import FinishReason
from ..ring.frames import Tag
from ._push import Pusher
from ._rows import lib
from .rows import RowTable, address

MAX_ROWS: Final[int] = lib.OUTFEED_MAX_ROWS
"""Rows of one step at most."""
_CODES: Final[dict[Any, str]] = {np.uint64: "Q", np.uint32: "I", np.int32: "i"}


class StepWriter(Pusher):
    """Pushes steps of the requests in `table` onto the lane of `writer`, from one thread at a time.

    `push(routes, ids, counts, endings, timeout)` comes from the C base.
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
        finishes: Sequence[tuple[int, FinishReason]],
        families: Families,
        timeout: float,
    ) -> int:
        """Write a step that has optional columns; return its stamp. Raises what `push` does."""
        rows, tokens, stamp = len(routes), len(ids), time.monotonic_ns()
        if not 1 <= rows <= MAX_ROWS:
            self._refuse(lib.OUTFEED_ROWS, 0, routes, ids, counts, timeout)
        if counts is not None and len(counts) != rows:
            self._refuse(lib.OUTFEED_COUNTS, 0, routes, ids, counts, timeout)
        if tokens and ids.min() < 0:
            self._refuse(lib.OUTFEED_IDS, 0, routes, ids, counts, timeout)
        step = self._table.advance(routes, counts)
        try:
            if step.tokens != tokens:
                self._refuse(lib.OUTFEED_TOKENS, 0, routes, ids, counts, timeout)
            each = np.ones(rows, dtype=np.uint32) if counts is None else counts
            parts = encode_batch(
                stamp, routes, step.first, each, step.prompt_tokens, ids, finishes, families=families
            )
            self._writer.write(Tag.BATCH, *parts, timeout=timeout)
        except BaseException:
            self._table.retract(routes, counts)
            raise
        self._table.count(step)
        return stamp

    def _refuse(self, code: int, size: int, routes: Any, ids: Any, counts: Any, timeout: float) -> NoReturn:
        """Raise what a C code means; nothing was written or counted."""
        rows = len(routes)
        if code <= lib.OUTFEED_ROUTE:
            self._table.refuse_route(lib.OUTFEED_ROUTE - code, int(routes[lib.OUTFEED_ROUTE - code]))
        if code == lib.OUTFEED_ROWS:
            raise ValueError(f"a step has 1 to {MAX_ROWS} rows, not {rows}")
        if code == lib.OUTFEED_COUNTS:
            raise ValueError(f"counts has {len(counts)} entries for {rows} rows")
        if code == lib.OUTFEED_IDS:
            place = int(np.flatnonzero(np.asarray(ids) < 0)[0])
            raise ValueError(
                f"ids[{place}] is {int(ids[place])}: a token's id is 0 or more; leave out what is none, "
                "counts says how many tokens a row has"
            )
        if code == lib.OUTFEED_TOKENS:
            total = rows if counts is None else sum(map(int, counts))
            raise ValueError(f"ids has {len(ids)} entries, the counts of {rows} rows sum to {total}")
        self._writer.native.refuse(code, Tag.BATCH, size, timeout)


def column(values: ArrayLike, dtype: type[np.integer[Any]], name: str) -> NDArray[Any]:
    """Return `values` as a contiguous one-dimensional array of `dtype`, the same one where it is one.

    Raises:
        ValueError: naming the column: not one-dimensional, not whole numbers, or out of the type's range.
    """
    if isinstance(values, list | tuple):
        # What fails here fails again below, where it is said in the words of the column.
        with contextlib.suppress(TypeError, OverflowError):
            return np.frombuffer(array(_CODES[dtype], values), dtype)
    found = np.asarray(values)
    if found.ndim != 1:
        raise ValueError(f"{name} has shape {found.shape}: expected one dimension")
    if found.dtype == dtype:
        return np.ascontiguousarray(found, dtype)
    if found.size and found.dtype.kind not in "iu":
        raise ValueError(f"{name} has dtype {found.dtype}: expected whole numbers")
    narrow = found.astype(dtype)
    if found.dtype.kind == narrow.dtype.kind:
        fits = bool((narrow == found).all())
    else:  # the same bits may be another number, so neither may be negative
        fits = bool(
            (narrow.astype(found.dtype) == found).all() and (found >= 0).all() and (narrow >= 0).all()
        )
    if not fits:
        limits = np.iinfo(dtype)
        raise ValueError(f"{name} has a value outside {limits.min}..{limits.max}")
    return narrow
