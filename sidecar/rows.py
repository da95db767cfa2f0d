"""The scheduler's row table: which requests are live, and how many tokens of each have been pushed.

One entry per (reader, slot), in numpy memory that the C pass in core/rows.c walks once per step. Must not
know frames or rings: the port asks it for `first` and prompt tokens and writes the frame itself.
"""

from __future__ import annotations

from typing import Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..ring.route import format_route, reader_of, slot_of
from ._rows import ffi, lib

_SLOT: Final = np.dtype(
    [
        ("route", np.uint64),
        ("emitted", np.uint32),
        ("prompt", np.uint32),
        ("live", np.uint32),
        ("pad", np.uint32),
    ]
)


from_buffer = ffi.from_buffer
_BODY_BYTES: Final = 16 + 8  # the prefix, and the most that pads the header
_ROW_BYTES: Final = 20


class UnknownRoute(ValueError):
    """A row names a route that this port has not received."""


class RowTable:
    """`readers` × `slots` entries. Not for use from two threads at once."""

    def __init__(self, readers: int, slots: int) -> None:
        self._readers = readers
        self._slots = slots
        self._entries = np.zeros(readers * slots, dtype=_SLOT)
        self._table = ffi.new("outfeed_table *")
        self._memory = ffi.from_buffer("outfeed_slot[]", self._entries)
        self._table.slots = self._memory
        self._table.readers = readers
        self._table.slots_each = slots
        self._body = memoryview(b"")
        self._out = ffi.NULL
        self._grow(1 << 16)

    @property
    def stale_rows(self) -> int:
        """Rows pushed for requests that had ended, so far."""
        return int(self._table.stale)

    def open(self, route: int, prompt_tokens: int) -> None:
        """Note a received request: from now on its rows count from token 0.

        Raises:
            UnknownRoute: the route's reader or slot is not in this instance.
        """
        entry = self._entries[self._index(route)]
        if entry["route"] == route and entry["live"]:
            return  # a GENERATE that comes again after a take-over changes nothing
        entry["route"], entry["emitted"], entry["prompt"], entry["live"] = route, 0, prompt_tokens, 1

    def end(self, route: int) -> bool:
        """Note that a request has ended. False if it had already, or was never received."""
        entry = self._entries[self._index(route)]
        if entry["route"] != route or not entry["live"]:
            return False
        entry["live"] = 0
        return True

    def is_live(self, route: int) -> bool:
        """Whether the request was received and has not ended."""
        entry = self._entries[self._index(route)]
        return bool(entry["route"] == route and entry["live"])

    def step(
        self,
        header: bytes,
        routes: NDArray[np.uint64],
        counts: NDArray[np.uint32] | None,
        ids: NDArray[np.int32],
    ) -> memoryview:
        """Write a step's whole BATCH body and count its tokens in; return the body.

        `header` is `ring.batch.step_header`'s; columns are contiguous, counts None means one token each.
        The body is valid until the next call. Rows of ended requests get first = 0; the shard drops them.

        Raises:
            UnknownRoute: a row's route was never received; nothing has been counted.
            ValueError: the counts do not sum to the ids; nothing has been counted.
        """
        rows, tokens = len(routes), len(ids)
        need = _BODY_BYTES + len(header) + _ROW_BYTES * rows + 4 * tokens
        if need > len(self._body):
            self._grow(need)
        size = lib.outfeed_step(
            self._table,
            header,
            len(header),
            rows,
            from_buffer(routes),
            ffi.NULL if counts is None else from_buffer(counts),
            tokens,
            from_buffer(ids),
            self._out,
            len(self._body),
        )
        if size < 0:
            self._refuse(size, routes, counts, tokens)
        return self._body[:size]

    def advance(
        self, routes: NDArray[np.uint64], counts: NDArray[np.uint32] | None
    ) -> tuple[int, NDArray[np.uint32], NDArray[np.uint32]]:
        """Count a step's tokens in; return (tokens, first u32[rows], prompt_tokens u32[rows]).

        For a step that is encoded elsewhere; `step` does both at once.

        Raises:
            UnknownRoute: a row's route was never received; nothing has been counted.
        """
        rows = len(routes)
        first, prompt = np.empty(rows, dtype=np.uint32), np.empty(rows, dtype=np.uint32)
        tokens = lib.outfeed_rows_advance(
            self._table,
            rows,
            from_buffer(routes),
            ffi.NULL if counts is None else from_buffer(counts),
            ffi.from_buffer("uint32_t[]", first),
            ffi.from_buffer("uint32_t[]", prompt),
        )
        if tokens < 0:
            self._refuse(tokens, routes, counts, 0)
        return int(tokens), first, prompt

    def retract(self, routes: NDArray[np.uint64], counts: NDArray[np.uint32] | None) -> None:
        """Take back what `step` or `advance` counted in for the same rows: their frame was not written."""
        lib.outfeed_rows_retract(
            self._table, len(routes), from_buffer(routes), ffi.NULL if counts is None else from_buffer(counts)
        )

    def live(self) -> NDArray[np.uint64]:
        """Return the routes of all live requests, u64[n]."""
        routes: NDArray[np.uint64] = self._entries["route"][self._entries["live"] != 0]
        return routes

    def _grow(self, size: int) -> None:
        room = np.empty(-(-size // 8) * 8, dtype=np.uint8)
        self._body = room.data
        self._out = from_buffer(room)

    def _refuse(
        self, code: int, routes: NDArray[np.uint64], counts: NDArray[np.uint32] | None, tokens: int
    ) -> NoReturn:
        if code <= lib.OUTFEED_ROUTE:
            row = lib.OUTFEED_ROUTE - code
            raise UnknownRoute(f"row {row}: {self._describe(int(routes[row]))}")
        if code == lib.OUTFEED_TOKENS:
            total = len(routes) if counts is None else int(counts.sum(dtype=np.uint64))
            raise ValueError(f"ids has {tokens} entries, the counts of {len(routes)} rows sum to {total}")
        raise AssertionError(f"the step's body did not fit the room made for it ({code})")

    def _index(self, route: int) -> int:
        reader, slot = reader_of(route), slot_of(route)
        if not route or reader >= self._readers or slot >= self._slots:
            raise UnknownRoute(self._describe(route))
        return reader * self._slots + slot

    def _describe(self, route: int) -> str:
        return (
            f"{format_route(route)} was never received by this port ({self._readers} reader(s), "
            f"{self._slots} slots each): push only routes from recv(), or adopt() what another rank received"
        )
