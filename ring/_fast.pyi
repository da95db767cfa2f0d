"""The per-frame calls, built from core/python/fast.c."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray
from typing_extensions import Buffer

class Writer:
    """The base of LaneWriter."""

    def write(self, tag: int, /, *parts: Buffer | NDArray[Any], timeout: float = 0.0) -> None:
        """Write one frame whose body is `parts` end to end; see the method's own docstring."""
    def _bind(self, write: int, handle: int, kept: object, /) -> None: ...

class Reader:
    """The base of Consumer."""

    def read(self, limit: int = 256, upto: Sequence[int] | None = None) -> list[tuple[int, int, memoryview]]:
        """Return up to `limit` unread frames as (lane, tag, body); see the method's own docstring."""
    def release(self) -> None:
        """Say that everything read so far is handled: its room goes back to the writers."""
    def pending(self) -> bool:
        """Whether `read` would return or raise something now."""
    def _wait(self, consumers: Sequence[Reader], timeout: float, /) -> bool: ...
    def _bind(
        self, calls: tuple[int, ...], handle: int, bell: int, kept: object, view: memoryview, lanes: int, /
    ) -> None: ...
