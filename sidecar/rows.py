"""The scheduler's row table: which requests are live, and how many tokens of each have been pushed.

One entry per (reader, slot), in numpy memory that the C pass in core/rows.c walks once per step. Must not
know frames or rings: the port asks it for `first` and prompt tokens and writes the frame itself.
"""

from __future__ import annotations

from typing import Final

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


class UnknownRoute(ValueError):
    """A row names a route that this port has not received."""


class RowTable:
    """`readers` × `slots` entries. Not for use from two threads at once."""

    def __init__(self, readers: int, slots: int) -> None:
        self._readers = readers
        self._slots = slots
        self._table = np.zeros(readers * slots, dtype=_SLOT)
        self._pointer = ffi.cast("outfeed_slot *", ffi.from_buffer(self._table))
        self._stale = ffi.new("uint32_t *")
        self._first = np.empty(256, dtype=np.uint32)
        self._prompt = np.empty(256, dtype=np.uint32)
        self._scratch = (ffi.NULL, ffi.NULL)
        self._grow(256)
        self.stale_rows = 0
        """Rows pushed for requests that had ended, so far."""

    def open(self, route: int, prompt_tokens: int) -> None:
        """Note a received request: from now on its rows count from token 0.

        Raises:
            UnknownRoute: the route's reader or slot is not in this instance.
        """
        entry = self._table[self._index(route)]
        if entry["route"] == route and entry["live"]:
            return  # a GENERATE that comes again after a take-over changes nothing
        entry["route"], entry["emitted"], entry["prompt"], entry["live"] = route, 0, prompt_tokens, 1

    def end(self, route: int) -> bool:
        """Note that a request has ended. False if it had already, or was never received."""
        entry = self._table[self._index(route)]
        if entry["route"] != route or not entry["live"]:
            return False
        entry["live"] = 0
        return True

    def is_live(self, route: int) -> bool:
        """Whether the request was received and has not ended."""
        entry = self._table[self._index(route)]
        return bool(entry["route"] == route and entry["live"])

    def advance(
        self, routes: NDArray[np.uint64], counts: NDArray[np.uint32]
    ) -> tuple[int, NDArray[np.uint32], NDArray[np.uint32]]:
        """Count a step's tokens in; return (tokens, first u32[rows], prompt_tokens u32[rows]).

        The two arrays are valid until the next call. Rows of ended requests get first = 0; the shard
        drops them.

        Raises:
            UnknownRoute: a row's route was never received; nothing has been counted.
        """
        rows = len(routes)
        if rows > len(self._first):
            self._grow(rows)
        route_pointer = ffi.from_buffer("uint64_t[]", routes)
        count_pointer = ffi.from_buffer("uint32_t[]", counts)
        tokens = lib.outfeed_rows_advance(
            self._pointer,
            self._readers,
            self._slots,
            rows,
            route_pointer,
            count_pointer,
            *self._scratch,
            self._stale,
        )
        if tokens < 0:
            row = -1 - tokens
            raise UnknownRoute(f"row {row}: {self._describe(int(routes[row]))}")
        if self._stale[0]:
            self.stale_rows += self._stale[0]
        return int(tokens), self._first[:rows], self._prompt[:rows]

    def retract(self, routes: NDArray[np.uint64], counts: NDArray[np.uint32]) -> None:
        """Take back what `advance` counted in for the same rows: their frame was not written."""
        count_pointer = ffi.from_buffer("uint32_t[]", counts)
        lib.outfeed_rows_retract(
            self._pointer, self._slots, len(routes), ffi.from_buffer("uint64_t[]", routes), count_pointer
        )

    def live(self) -> NDArray[np.uint64]:
        """Return the routes of all live requests, u64[n]."""
        routes: NDArray[np.uint64] = self._table["route"][self._table["live"] != 0]
        return routes

    def _grow(self, rows: int) -> None:
        self._first = np.empty(rows, dtype=np.uint32)
        self._prompt = np.empty(rows, dtype=np.uint32)
        self._scratch = (
            ffi.from_buffer("uint32_t[]", self._first),
            ffi.from_buffer("uint32_t[]", self._prompt),
        )

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
