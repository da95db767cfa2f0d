"""Which routes are live: one slot per request, on the shard that has the fewest of them.

The table of one reader. A slot is the reader's whatever the shard, so there is one free list; a released
slot waits at its end, and comes back with the next generation. Must not know what a request is.
"""

import secrets
import threading
from collections import deque

from ..ring.route import (
    MAX_GENERATION,
    MAX_SHARDS,
    MAX_SLOTS,
    generation_of,
    make_route,
    next_generation,
    shard_of,
    slot_of,
)
from .errors import Unavailable


class RouteTable:
    """Gives out the routes of one reader. Any thread.

    A table starts at a random generation: rows meant for the process that had this reader's number before
    cannot then be taken for rows of this one's requests.
    """

    def __init__(self, reader: int, shards: int, slots: int, *, generation: int | None = None) -> None:
        if not 1 <= shards <= MAX_SHARDS:
            raise ValueError(f"shards {shards} is not in 1..{MAX_SHARDS}")
        if not 1 <= slots <= MAX_SLOTS:
            raise ValueError(f"slots {slots} is not in 1..{MAX_SLOTS}")
        first = secrets.randbelow(MAX_GENERATION) + 1 if generation is None else generation
        make_route(reader, shards - 1, slots - 1, first)  # says what is out of range
        self.reader = reader
        self.slots = slots
        self._lock = threading.Lock()
        self._generations = [first] * slots
        self._free = deque(range(slots))
        self._held: list[int | None] = [None] * slots  # the route in each slot
        self._live = [0] * shards
        self._turn = 0
        self._avoided: frozenset[int] = frozenset()

    def acquire(self, shard: int | None = None) -> int:
        """Return a new route on the shard with the least live load, or on `shard`.

        Raises Unavailable when every slot is taken, ValueError when there is no such shard.
        """
        if shard is not None and not 0 <= shard < len(self._live):
            raise ValueError(f"shard {shard} is not in 0..{len(self._live) - 1}")
        with self._lock:
            if not self._free:
                raise Unavailable(
                    f"all {self.slots} places for requests are taken; send it again when others have ended"
                )
            # All that takes memory comes first: without it the slot is still free.
            slot = self._free[0]
            shard = self._least() if shard is None else shard
            route = make_route(self.reader, shard, slot, self._generations[slot])
            self._live[shard] += 1
            self._held[slot] = route
            self._free.popleft()
            return route

    def avoid(self, shards: frozenset[int]) -> None:
        """Give out no routes on these shards, unless asked for one or there are no others. Any thread."""
        self._avoided = shards

    def release(self, route: int) -> bool:
        """Give a route back. False, without effect, when it is not live here (ended before, or another's)."""
        with self._lock:
            slot = slot_of(route)
            if slot >= self.slots or self._held[slot] != route:
                return False
            # All that takes memory comes first: without it the route is still live.
            shard, generation = shard_of(route), next_generation(generation_of(route))
            left = self._live[shard] - 1
            self._free.append(slot)
            self._held[slot], self._generations[slot], self._live[shard] = None, generation, left
            return True

    def loads(self) -> list[int]:
        """Return the number of live routes on each shard."""
        with self._lock:
            return list(self._live)

    def _least(self) -> int:
        """Find the least loaded shard; equals take turns, so that short requests spread too."""
        count = len(self._live)
        in_turn = [(self._turn + further) % count for further in range(count)]
        usable = [shard for shard in in_turn if shard not in self._avoided] or in_turn
        # No lambda: where memory does not suffice to make one, some CPython 3.12 and 3.13 free its code.
        best = min(usable, key=self._live.__getitem__)
        self._turn = (best + 1) % count
        return best
