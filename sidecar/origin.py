"""Where a rank has its requests from: rank 0, which received them, as it stands on the board.

When it goes away, also when the same process attaches anew, gateways end all that is live: what it had handed
on runs for nobody. Must not know requests.
"""

from __future__ import annotations

from ..ring.board import Board, Role
from ..ring.owner import Owner

Holder = tuple[Owner | None, int] | None


class Origin:
    """Rank 0, looked at by another one."""

    def __init__(self, board: Board) -> None:
        self._row = board.row(Role.SCHEDULER, 0)
        self._words: list[int] = []
        self._holder: Holder = None
        self._found: tuple[list[int], Holder] = [], None
        self.is_gone()
        self.settle()

    def moved(self) -> bool:
        """Whether the board reads otherwise than at the last look. Quick: it asks nobody whether he lives."""
        return self._row.claim_words != self._words

    def is_gone(self) -> bool:
        """Whether who was rank 0 at the last look is it no more, again and again until `settle`."""
        words = self._row.claim_words  # first: who comes meanwhile has moved
        holder = self._row.holder
        self._found = words, holder if self._row.serving else None
        return self._found[1] != self._holder

    def settle(self) -> None:
        """What the last look found is dealt with."""
        self._words, self._holder = self._found
