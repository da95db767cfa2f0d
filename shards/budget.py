"""How much memory a shard's requests may take in all, beyond the few bytes that each has.

What one request may bring is bounded where it is read (stop strings, patterns, ids); how many do is up to a
gateway, which may be broken or hostile. Who would take too much is refused; nobody who is there already
notices. Must not know what the memory is for.
"""

from collections.abc import Hashable
from typing import Final

LIMIT: Final = 512 << 20


class Budget:
    """Bytes taken, by whom."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.used = 0
        self._taken: dict[Hashable, int] = {}

    def take(self, who: Hashable, size: int) -> None:
        """Note that `who` takes `size` bytes more. Raises MemoryError when that is too much: it has not."""
        if not size:
            return
        if self.used + size > self.limit:
            raise MemoryError(
                f"stops of a shard's requests, and text of theirs that waits, may take {self.limit} bytes; "
                f"{self.used} are taken, and {size} more are too many: send the request again when others "
                "have ended, or with fewer or shorter stops"
            )
        self.used += size
        self._taken[who] = self._taken.get(who, 0) + size

    def give_back(self, who: Hashable) -> None:
        """Note that `who` has nothing any more."""
        self.used -= self._taken.pop(who, 0)
