"""How much memory a shard's requests may take in all, beyond the few bytes that each has.

What one request may bring is bounded where it is read (stop strings, patterns, ids); how many do is up to a
gateway, which may be broken or hostile. Who would take too much is refused; nobody who is there already
notices. One half is kept in equal shares, so that no gateway can have another's requests refused; the other
half is for whoever comes first. Must not know what the memory is for.
"""

from collections import Counter
from collections.abc import Hashable
from typing import Final

LIMIT: Final = 512 << 20


class Budget:
    """Bytes taken, by which gateway and for what; `readers` gateways share them."""

    def __init__(self, readers: int = 1, limit: int = LIMIT) -> None:
        self.readers = readers
        self.limit = limit
        self._used: Counter[int] = Counter()
        self._taken: Counter[tuple[int, Hashable]] = Counter()

    @property
    def used(self) -> int:
        """Bytes taken in all."""
        return self._used.total()

    def take(self, reader: int, what: Hashable, size: int) -> None:
        """Note that gateway `reader` takes `size` bytes more for `what`.

        Raises MemoryError when that is above its share and what is left for all: it has not.
        """
        if not size:
            return
        share = self.limit // 2 // self.readers
        common = self.limit - share * self.readers
        used = self._used[reader]
        others = sum(max(0, self._used[other] - share) for other in self._used if other != reader)
        most = share + max(0, common - others)
        if used + size > most:
            raise MemoryError(
                f"stops of a shard's requests, and text of theirs that waits, may take {self.limit} bytes, "
                f"{most} of them through gateway {reader} now; {used} are taken there, and {size} more are "
                "too many: send the request again when others have ended, or with fewer or shorter stops"
            )
        self._used[reader] += size
        self._taken[reader, what] += size

    def give_back(self, reader: int, what: Hashable) -> None:
        """Note that gateway `reader` has nothing for `what` any more."""
        self._used[reader] -= self._taken.pop((reader, what), 0)
