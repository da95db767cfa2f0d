"""The per-step call, built from core/python/push.c."""

from typing import Any

class Pusher:
    """The base of StepWriter."""

    def push(
        self,
        routes: Any,
        ids: Any,
        counts: Any,
        endings: bytes,
        timeout: float,
        families: bytes = b"\x90",
        optional: bytes = b"",
        /,
    ) -> int:
        """Write one decode step; see the method's own docstring."""
    def _bind(
        self, tag: int, lane: tuple[int, int, int, int, memoryview], table: tuple[int, int, int, int], /
    ) -> None: ...
