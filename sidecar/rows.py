"""The scheduler's row table: which requests are live, and how many tokens of each have been pushed.

One entry per (reader, slot), in numpy memory that the C pass in core/rows.c walks once per step: it counts a
step's tokens in as it writes the frame. Must not know frames or rings.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..ring.frames import MAX_ROUTE, Standing
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


# By what a slot has in `live`.
_STANDINGS: Final = np.array([Standing.ENDED, Standing.RUNNING, Standing.CONTROL, Standing.RECEIVED])
assert (lib.OUTFEED_GENERATE, lib.OUTFEED_CONTROL, lib.OUTFEED_RECEIVED) == (1, 2, 3)

_from_buffer: Final = ffi.from_buffer


class UnknownRoute(ValueError):
    """A row names a route that this port has not received."""


class RowTable:
    """`readers` × `slots` entries. Not for use from two threads at once."""

    def __init__(self, readers: int, slots: int) -> None:
        self._readers = readers
        self._slots = slots
        self._entries = np.zeros(readers * slots, dtype=_SLOT)
        self._table = ffi.new("outfeed_table *")
        self._memory = _from_buffer("outfeed_slot[]", self._entries)
        self._table.slots = self._memory
        self._table.readers = readers
        self._table.slots_each = slots

    @property
    def address(self) -> int:
        """Where the C table is, for a caller that stays in C. Valid while this object lives."""
        return int(ffi.cast("uintptr_t", self._table))

    @property
    def stale_rows(self) -> int:
        """Rows pushed for requests that had ended, so far."""
        return int(self._table.stale_rows)

    @property
    def live_requests(self) -> int:
        """How many requests are live now, less those that were only received."""
        return int(self._table.live)

    @property
    def pushed(self) -> tuple[int, int, int]:
        """Steps, rows and tokens pushed so far."""
        return int(self._table.steps), int(self._table.rows), int(self._table.tokens)

    def open(self, route: int, prompt_tokens: int) -> None:
        """Note a request to run: from now on its rows count from token 0.

        Raises:
            UnknownRoute: the route's reader or slot is not in this instance.
        """
        self._known(route, lib.outfeed_rows_open, prompt_tokens, lib.OUTFEED_GENERATE)

    def open_received(self, route: int, prompt_tokens: int) -> None:
        """Note a request that another rank may run. Raises as `open`."""
        self._known(route, lib.outfeed_rows_open, prompt_tokens, lib.OUTFEED_RECEIVED)

    def adopt(self, route: int, prompt_tokens: int) -> bool:
        """Note that a request is run here. False when it was already, or has ended. Raises as `open`."""
        return bool(self._known(route, lib.outfeed_rows_adopt, prompt_tokens))

    def open_control(self, route: int) -> None:
        """Note a received control request, which has no rows and one answer. Raises as `open`."""
        self._known(route, lib.outfeed_rows_open, 0, lib.OUTFEED_CONTROL)

    def end(self, route: int) -> bool:
        """Note that a request has ended. False if it had already, or was never received."""
        return bool(self._known(route, lib.outfeed_rows_end))

    def ending(self, routes: list[int]) -> Callable[[], None]:
        """Return what notes that these requests have ended, once their rows are out: it takes no memory."""
        return partial(lib.outfeed_rows_end_all, self._table, ffi.new("uint64_t[]", routes), len(routes))

    def is_live(self, route: int) -> bool:
        """Whether the request was received and has not ended."""
        return bool(self._known(route, lib.outfeed_rows_live))

    def is_control(self, route: int) -> bool:
        """Whether the request is live and a control request."""
        return bool(self._known(route, lib.outfeed_rows_live) == lib.OUTFEED_CONTROL)

    def drop(self, route: int) -> None:
        """Count an answer that comes when its request has ended among the stale rows.

        Raises:
            UnknownRoute: it was never received.
        """
        if not self._entry(route)["route"]:
            raise UnknownRoute(self._describe(route))
        self._table.stale_rows += 1

    def live(self) -> NDArray[np.uint64]:
        """Return the routes of all live requests, u64[n]."""
        routes: NDArray[np.uint64] = self._entries["route"][self._entries["live"] != 0]
        return routes

    def knows(self, route: int) -> bool:
        """Whether the request was received, whether it has ended or not.

        Raises:
            UnknownRoute: the route's reader or slot is not in this instance.
        """
        return bool(self._entry(route)["route"] == route)

    def before(self, route: int) -> int | None:
        """Return the live request in whose slot this one comes; None when there is none but itself.

        Raises:
            UnknownRoute: the route's reader or slot is not in this instance.
        """
        entry = self._entry(route)
        return int(entry["route"]) if entry["live"] and entry["route"] != route else None

    def standings(self, start: int, limit: int) -> tuple[list[tuple[int, int, int]], int | None]:
        """Return (route, tokens pushed, Standing) of up to `limit` requests, and where the next ones begin.

        From entry `start` on (0: the first); a request is told until its slot is used again. The second is
        None when those were the last.
        """
        entries = self._entries[start:]
        found = np.flatnonzero(entries["route"])[: limit + 1]
        rest = start + int(found[limit]) if len(found) > limit else None
        entries = entries[found[:limit]]
        standing = _STANDINGS[entries["live"]]
        standing[(standing == Standing.RECEIVED) & (entries["emitted"] > 0)] = Standing.RUNNING
        columns = (entries["route"].tolist(), entries["emitted"].tolist(), standing.tolist())
        return list(zip(*columns, strict=True)), rest

    def refuse_route(self, row: int, route: int) -> NoReturn:
        """Say why a row of a step is refused: ValueError for a control request's, else UnknownRoute."""
        if lib.outfeed_rows_live(self._table, route) == lib.OUTFEED_CONTROL:
            raise ValueError(
                f"row {row}: {format_route(route)} is a control request: answer it with push_result or "
                "push_error"
            )
        raise UnknownRoute(f"row {row}: {self._describe(route)}")

    def _known(self, route: int, call: Any, *more: int) -> int:
        code: int = call(self._table, route, *more) if 0 <= route <= MAX_ROUTE else -1
        if code < 0:
            raise UnknownRoute(self._describe(route))
        return code

    def _entry(self, route: int) -> Any:
        """Return the entry of a route's slot, whoever has it. Raises UnknownRoute when there is none."""
        self._known(route, lib.outfeed_rows_live)
        return self._entries[reader_of(route) * self._slots + slot_of(route)]

    def _describe(self, route: int) -> str:
        return (
            f"{format_route(route)} was never received by this port ({self._readers} reader(s), "
            f"{self._slots} slots each): push only routes from recv(), or adopt() what another rank received"
        )


def address(function: str) -> int:
    """Return where a function of the C core is, for a caller that stays in C."""
    return int(ffi.cast("uintptr_t", ffi.addressof(lib, function)))
