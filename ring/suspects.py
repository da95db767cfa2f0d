"""Whom a damaged frame may have cost a row, and who of them never says anything again.

What such a frame names cannot be believed: a flipped bit in a route names another request, or none, and the
one whose row it was is named nowhere. Who lost a row mostly shows it at once, by the gap before the next one.
Who lost the last one would wait for ever: so whoever was live then, and has no row for a while, is found
here. Must not know frames.
"""

from collections.abc import Callable, Iterable
from typing import Final

SILENT_S: Final = 10.0
"""How long a request may have no row after a damaged frame, until it is taken to have lost its last one."""


class Suspects:
    """The live requests of a shard or a reader, looked at twice.

    live()         every route that may be live
    came(route)    how many tokens of it have come; None when it is not live
    """

    def __init__(self, live: Callable[[], Iterable[int]], came: Callable[[int], int | None]) -> None:
        self._live = live
        self._came = came
        self._damaged = False
        self._then: dict[int, int] = {}
        self._due = 0.0

    def damaged(self) -> None:
        """Note that a frame was rejected: anybody may have lost a row."""
        self._damaged = True

    @property
    def any(self) -> bool:
        """Whether `silent` has anything to look for."""
        return self._damaged or bool(self._then)

    def silent(self, now: float) -> list[int]:
        """Return who is to be given up. Call it often: it looks after damage, once in SILENT_S at most."""
        if self._then:
            if now < self._due:
                return []
            then, self._then = self._then, {}
            return [route for route, tokens in then.items() if self._came(route) == tokens]
        if self._damaged:
            # Those that lose a row from here on are found by the next look.
            self._damaged = False
            self._then = {route: came for route in self._live() if (came := self._came(route)) is not None}
            self._due = now + SILENT_S
        return []
