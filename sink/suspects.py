"""Who may hang on a rank whose step lane is lost, and who shows that it does not.

Nobody says which rank a request's rows come from. Whoever has a row, or is vouched for, within a while has
them from another one; the rest would wait for ever. Must not know frames.
"""

from collections.abc import Callable, Iterable
from typing import Final

SILENT_S: Final = 10.0
"""How long a request may have no row after a rank's lane was lost, until it is taken to be that rank's."""


class Suspects:
    """Live requests looked at twice.

    came(route)    how many tokens of it have come; None when it is not live
    """

    def __init__(self, came: Callable[[int], int | None]) -> None:
        self._came = came
        self._then: dict[int, int | None] = {}
        self._due = 0.0

    def doubt(self, routes: Iterable[int], now: float) -> None:
        """Watch these from now (seconds) on, and whoever is watched already for as long."""
        self._then |= {route: self._came(route) for route in routes}
        self._due = now + SILENT_S

    def vouch(self, route: int) -> None:
        """Watch this one no more: its rows come from a rank that is sound."""
        self._then.pop(route, None)

    def silent(self, now: float) -> list[int]:
        """Return who is to be given up, once. Call it often."""
        if now < self._due:
            return []
        then, self._then = self._then, {}
        return [route for route, came in then.items() if came is not None and self._came(route) == came]
