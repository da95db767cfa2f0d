"""The scheduler's ranks, as a gateway sees them on the board: who is there, and who went away.

What a rank had when it went away nobody can answer any more, also when the same process attached anew. Must
not know requests.
"""

from __future__ import annotations

from typing import Final

from ..ring.board import Board, Role
from ..ring.owner import Owner

Holder = tuple[Owner | None, int]
RECEIVER: Final = 0
"""The rank that reads the request ring."""


class Ranks:
    """Looked at by one gateway. For one thread at a time, but for `moved` and `received`."""

    def __init__(self, board: Board) -> None:
        self._rows = board.rows(Role.SCHEDULER)
        self._seen: list[list[int]] = []
        self.present: dict[int, Holder] = {}
        """Who served at the last look, by rank."""
        self._found = self._seen, self.present
        self.look()
        self.settle()

    @property
    def received(self) -> bool:
        """Whether somebody takes requests."""
        return RECEIVER in self.present

    def moved(self) -> bool:
        """Whether the board reads otherwise than at the last look. Quick: it asks nobody whether he lives."""
        return [row.claim_words for row in self._rows] != self._seen

    def look(self) -> list[int]:
        """Look who serves; return the ranks of those that do no more, again and again until `settle`."""
        seen = [row.claim_words for row in self._rows]  # first: who comes meanwhile has moved
        holders = [row.holder for row in self._rows]
        now = {row.index: holder for row, holder in zip(self._rows, holders, strict=True) if row.serving}
        lost = [rank for rank, holder in self.present.items() if now.get(rank) != holder]
        self._found = seen, now
        return lost

    def settle(self) -> None:
        """What the last look found is dealt with."""
        self._seen, self.present = self._found
