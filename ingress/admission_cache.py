"""The patterns that were analysed lately: 512 of them, looked up without a lock.

Two dicts of 256, young and old. A hit in the young one is one lookup. A hit in the old one is copied to the
young one if there is room. When the young one is full it becomes the old one, and what was old and not asked
for since is gone: what is in use stays, and no insertion ever clears everything. Lookups and single stores
are atomic in Python; only insertions, which follow an analysis a thousand times as long, take the lock.

Must not know what it keeps. What it keeps must not depend on who asked.
"""

import threading
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Cache(Generic[Value]):
    """At most `entries` values by string, rounded down to an even number. Any thread."""

    def __init__(self, entries: int = 512) -> None:
        if entries < 2:
            raise ValueError(f"entries {entries} is not at least 2")
        self._half = entries // 2
        self._lock = threading.Lock()
        self._young: dict[str, Value] = {}
        self._old: dict[str, Value] = {}

    def get(self, key: str) -> Value | None:
        """Return the value kept for a key, or None. Takes no lock."""
        value = self._young.get(key)
        if value is not None:
            return value
        value = self._old.get(key)
        # Copied now, or by a later hit: without room here, the next turn of generations decides. Two threads
        # at once may make the young dict an entry or two too large; `put` turns it over all the same.
        if value is not None and len(young := self._young) < self._half - 1:
            young[key] = value
        return value

    def put(self, key: str, value: Value) -> None:
        """Keep a value, in place of the one the key had."""
        with self._lock:
            if len(self._young) >= self._half and key not in self._young:
                # A fresh dict each time: a reader that still holds the one before reads on in it.
                self._old, self._young = self._young, {}
            self._young[key] = value

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._old, self._young = {}, {}
