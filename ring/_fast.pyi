"""The per-frame calls, built from core/python/fast.c and view.c."""

from collections.abc import Sequence
from typing import Any, ClassVar, SupportsIndex, final, overload

from numpy.typing import NDArray
from typing_extensions import Buffer

@final
class View:
    """A frame's body where it lies in its lane: read-only bytes, valid until the consumer's next `release`.

    A buffer; see the type's own docstring.
    """

    __hash__: ClassVar[None]  # type: ignore[assignment]

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, at: SupportsIndex, /) -> int: ...
    @overload
    def __getitem__(self, part: slice, /) -> memoryview: ...

class Writer:
    """The base of LaneWriter."""

    def write(self, tag: int, /, *parts: Buffer | NDArray[Any], timeout: float = 0.0) -> None:
        """Write one frame whose body is `parts` end to end; see the method's own docstring."""
    def _bind(self, write: int, handle: int, kept: object, /) -> None: ...

class Reader:
    """The base of Consumer."""

    def read(self, limit: int = 256, upto: Sequence[int] | None = None) -> list[tuple[int, int, View]]:
        """Return up to `limit` unread frames as (lane, tag, body); see the method's own docstring."""
    def release(self) -> None:
        """Say that everything read so far is handled: its room goes back to the writers."""
    def pending(self) -> bool:
        """Whether `read` would return or raise something now."""
    def _wait(self, consumers: Sequence[Reader], timeout: float, /) -> bool: ...
    def _bind(
        self, calls: tuple[int, ...], handle: int, bell: int, kept: object, memory: memoryview, lanes: int, /
    ) -> None: ...
