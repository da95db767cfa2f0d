"""A lane's one writer: gather-write, or reserve and commit in place.

Knows a lane's rules for who writes; must not know what a tag or a body means.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Self

from ._core import ffi, lib
from ._fast import Writer
from .errors import CorruptLane, FrameTooLarge, RingClosed, RingError, RingFull, WriterBusy

if TYPE_CHECKING:
    from .segment import Segment

LONGEST_TIMEOUT_S: Final[int] = lib.RING_LONGEST_TIMEOUT_S


def address(pointer: Any) -> int:
    """Return where a C pointer points, for the calls of `_fast`."""
    return int(ffi.cast("uintptr_t", pointer))


_WRITE, _RESERVE, _COMMIT, _CANCEL = (
    address(ffi.addressof(lib, call))
    for call in ("writer_write", "writer_reserve", "writer_commit", "writer_cancel")
)


class NativeLane(NamedTuple):
    """What C code of another room needs to write frames in place."""

    handle: int
    """Where the C writer is. Who uses an address must hold the LaneWriter as well."""
    reserve: int
    """Where `writer_reserve` is."""
    commit: int
    """Where `writer_commit` is."""
    cancel: int
    """Where `writer_cancel` is."""
    memory: memoryview
    """The whole segment; a reservation's offset counts from its start."""
    refuse: Callable[[int, int, int, float], NoReturn]
    """Raises what a code means, given it, the tag, the body's size and the timeout in seconds."""


class LaneWriter(Writer):
    """The right to write one lane, from one thread at a time. Made by `Ring.writer`.

    `lane` is its index, `max_frame` the largest body in bytes: a quarter of the lane. `write(tag, *parts,
    timeout=0.0)` comes from the C base: one call per frame, gathering the parts.
    """

    __slots__ = ("__weakref__", "_handle", "_memory", "_offset", "_segment", "lane", "max_frame")

    def __init__(self, segment: "Segment", lane: int, max_frame: int, held: Any, memory: memoryview) -> None:
        self.lane = lane
        self.max_frame = max_frame
        self._segment = segment
        self._memory = memory
        self._handle = held[0]
        self._bind(_WRITE, address(self._handle), (held, memory))
        self._offset = ffi.new("uint64_t *")

    @property
    def native(self) -> NativeLane:
        """This lane for a caller in C; all the rules of `reserve` and `commit` hold."""
        return NativeLane(address(self._handle), _RESERVE, _COMMIT, _CANCEL, self._memory, self._refuse)

    def reserve(self, size: int, timeout: float = 0.0) -> memoryview:
        """Return a writable view of a body of `size` bytes in the lane itself; nothing is visible yet.

        Fill it, then `commit` what it became, or `cancel`. One reservation at a time, and no `write` while
        it is open. The view must not be written to after either.

        Raises as `write` does.
        """
        if size < 0:
            raise ValueError(f"size {size}: expected 0 to {self.max_frame} bytes")
        if size > self.max_frame:
            self._refuse(lib.RING_TOO_LARGE, 0, size, timeout)
        if not 0 <= timeout <= LONGEST_TIMEOUT_S:  # nor is a nan
            raise ValueError(f"timeout {timeout!r}: expected 0 to {LONGEST_TIMEOUT_S} seconds")
        left = int(timeout * 1e9)
        deadline = time.monotonic_ns() + left
        try:
            while (
                code := lib.writer_reserve(self._handle, size, left, self._offset)
            ) == lib.RING_INTERRUPTED:
                left = max(0, deadline - time.monotonic_ns())  # its handlers have run
            if code == 0:
                start = self._offset[0]
                return self._memory[start : start + size]
        except BaseException:
            lib.writer_cancel(self._handle)  # what a signal's handler raised: nobody has the view
            raise
        return self._refuse(code, 0, size, timeout)

    def commit(self, tag: int, size: int) -> None:
        """Publish the first `size` bytes of the reservation as one frame.

        Raises RingError when none is open, FrameTooLarge when `size` is above what was reserved, ValueError
        when it is below 0 or the tag not 0-255: the reservation stays open then. CorruptLane: it is gone.
        """
        if size < 0:
            self._refuse(lib.RING_ARGUMENT, tag, size, 0.0)
        code = lib.writer_commit(self._handle, tag, size)
        if code == lib.RING_RESERVED:
            raise RingError(
                f"ring {self._segment.name!r} lane {self.lane}: no reservation is open; call reserve first"
            )
        if code != 0:
            self._refuse(code, tag, size, 0.0)

    def cancel(self) -> None:
        """Forget the open reservation, if any: nothing of it was ever visible."""
        code = lib.writer_cancel(self._handle)
        if code not in (0, lib.RING_RESERVED):
            self._refuse(code, 0, 0, 0.0)

    def _refuse(self, code: int, tag: int, size: int, timeout: float) -> NoReturn:
        """Raise what a C code means."""
        where = f"ring {self._segment.name!r} lane {self.lane}"
        if code == lib.RING_FULL:
            waited = f" after waiting {timeout:g} s" if timeout else ""
            raise RingFull(f"{where}: no room for {size} bytes{waited}; a consumer is slow, stuck or gone")
        if code == lib.RING_TOO_LARGE:
            raise FrameTooLarge(
                f"{where}: a frame of {size} bytes; at most {self.max_frame} fit (a quarter of the lane, "
                "or what was reserved); split it or make the ring's capacity larger"
            )
        if code == lib.RING_CORRUPT:
            raise CorruptLane(self._segment.name, self.lane, lib.writer_fault(self._handle))
        if code == lib.RING_BUSY:
            raise WriterBusy(
                f"{where}: another thread is writing; a lane has one writer, use a lock or a lane each"
            )
        if code == lib.RING_CLOSED:
            raise RingClosed(f"{where}: the writer is closed, or this process was forked after it was made")
        if code == lib.RING_RESERVED:
            raise WriterBusy(
                f"{where}: a reservation is open: commit or cancel it first, or is another thread writing?"
            )
        raise ValueError(f"{where}: tag {tag} (expected 0-255) or size {size} (expected 0-{self.max_frame})")

    def close(self) -> None:
        """Give the lane back. Closing twice is fine; WriterBusy while another thread writes."""
        if lib.writer_close(self._handle) == lib.RING_BUSY:
            self._refuse(lib.RING_BUSY, 0, 0, 0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
