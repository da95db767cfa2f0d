"""What a rank says of its requests beside their rows: how far each is, and which are its own.

Must not know what a gateway says.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from ..ring import LaneWriter
from ..ring.board import BoardRow
from ..ring.errors import RingError
from ..ring.frames import Standing, Tag, Tally, encode, tally_rows
from .rows import RowTable

log = logging.getLogger(__name__)

TALLIED: Final = 1 << 13
"""Requests of one TALLY, at most; there is one a heartbeat at most. A gateway's default slots are told within
a second; one TALLY costs the scheduler, each shard and each reader some milliseconds."""


class Tallies:
    """The TALLYs of one rank's lane.

    others: the rows of shards and gateways on the board, whose damage is a reason to tell everything
    """

    def __init__(self, rank: int, writer: LaneWriter, table: RowTable, others: Sequence[BoardRow]) -> None:
        self._rank = rank
        self._writer = writer
        self._table = table
        self._others = others
        self._damage = self._seen_damage()
        self._at: int | None = None
        self.adopted: list[int] = []
        """Whose gateways have not been told yet that this rank runs them."""

    def begin(self) -> None:
        """Tell of everything, from the next heartbeat on."""
        self._at = 0

    def go_on(self) -> None:
        """Tell how many tokens each request has had when somebody may have lost some: a bit at a time.

        That is when a shard or a gateway has rejected a frame, or a shard is a new process; or when what a
        gateway has is not live here.
        """
        if self.adopted:
            with suppress(RingError):  # full: before the next step
                self.say_adopted(0.0)
        if (damage := self._seen_damage()) != self._damage:
            self._damage, self._at = damage, 0
        if self._at is None:
            return
        rows, rest = self._table.standings(self._at, self._most())
        if rows:
            try:
                self._write(rows, 0.0)
            except RingError as error:  # full: later
                log.debug("a tally goes on in a moment: %s", error)
                return
        self._at = rest

    def say_adopted(self, timeout: float) -> None:
        """Tell whose rows come by this lane, before the first of them: who goes by another one is not lost
        with it. Raises what a write does."""
        while self.adopted:
            now = self.adopted[: self._most()]
            running = int(Standing.RUNNING)
            rows = [(route, 0, running) for route in now if self._table.is_live(route)]
            if rows:
                self._write(rows, timeout)
            del self.adopted[: len(now)]

    def _most(self) -> int:
        return min(TALLIED, tally_rows(self._writer.max_frame))

    def _write(self, rows: list[tuple[int, int, int]], timeout: float) -> None:
        self._writer.write(Tag.TALLY, encode(Tally(self._rank, rows)), timeout=timeout)

    def _seen_damage(self) -> list[tuple[int, int]]:
        return [(row.epoch, row.get("bad_frames")) for row in self._others]
