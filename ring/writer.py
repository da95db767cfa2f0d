"""A lane's one writer: gather-write, or reserve and commit in place.

Knows a lane's rules for who writes; must not know what a tag or a body means.
"""

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Self

from ._core import ffi, lib
from .errors import CorruptLane, FrameTooLarge, RingClosed, RingError, RingFull, WriterBusy

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from .segment import Segment

    Part = Buffer | NDArray[Any]

__all__ = ["LaneWriter"]

LONGEST_TIMEOUT_S = 3600.0


def nanoseconds(timeout: float) -> int:
    """Check a timeout in seconds and return it in nanoseconds."""
    if math.isnan(timeout) or not 0 <= timeout <= LONGEST_TIMEOUT_S:
        raise ValueError(f"timeout {timeout!r}: expected 0 to {LONGEST_TIMEOUT_S:g} seconds")
    return int(timeout * 1e9)


def _gather(parts: "tuple[Part, ...]") -> tuple[Any, list[Any]]:
    """Return the C part list and what keeps the buffers where they are."""
    if len(parts) > lib.RING_MAX_PARTS:
        raise ValueError(
            f"{len(parts)} parts: a frame is gathered from at most {lib.RING_MAX_PARTS}; join some"
        )
    table = ffi.new("part[]", len(parts))
    views = []
    for index, part in enumerate(parts):
        try:
            view = ffi.from_buffer(part)
        except (BufferError, ValueError) as error:
            raise ValueError(f"part {index} ({type(part).__name__}) is not a C-contiguous buffer") from error
        views.append(view)
        table[index].bytes = view
        table[index].length = len(view)
    return table, views


class LaneWriter:
    """The right to write one lane, from one thread at a time. Made by `Ring.writer`.

    `lane` is its index, `max_frame` the largest body in bytes: a quarter of the lane.
    """

    __slots__ = ("__weakref__", "_handle", "_memory", "_offset", "_segment", "lane", "max_frame")

    def __init__(
        self, segment: "Segment", lane: int, max_frame: int, handle: Any, memory: memoryview
    ) -> None:
        self.lane = lane
        self.max_frame = max_frame
        self._segment = segment
        self._memory = memory
        self._handle = handle
        self._offset = ffi.new("uint64_t *")

    def write(self, tag: int, *parts: "Part", timeout: float = 0.0) -> None:
        """Write one frame whose body is `parts` end to end, in one C call, without joining them here.

        `tag` is 0-255; each part is a C-contiguous buffer (bytes, bytearray, memoryview, numpy array). With
        `timeout` 0 a full lane is RingFull at once; else the call waits, parked, up to so many seconds (at
        most an hour). Nothing is visible to any consumer unless the whole frame is.

        Raises FrameTooLarge, RingFull, CorruptLane, RingClosed, WriterBusy (a second thread), ValueError.
        """
        if len(parts) == 1 and type(part := parts[0]) is bytes and timeout == 0.0:
            code = lib.writer_write_one(self._handle, tag, part, len(part), 0)
        else:
            table, views = _gather(parts)
            code = self._until(timeout, lambda ns: lib.writer_write(self._handle, tag, table, len(views), ns))
        if code != 0:
            self._refuse(code, tag, sum(len(ffi.from_buffer(part)) for part in parts), timeout)

    def _until(self, timeout: float, call: Callable[[int], int]) -> int:
        """Make a C call that may wait, again after each signal (handlers run here), until time is up."""
        left = nanoseconds(timeout)
        if left == 0:
            return call(0)
        deadline = time.monotonic_ns() + left
        while (code := call(left)) == lib.RING_INTERRUPTED:
            left = max(0, deadline - time.monotonic_ns())
        return code

    def reserve(self, size: int, timeout: float = 0.0) -> memoryview:
        """Return a writable view of a body of `size` bytes in the lane itself; nothing is visible yet.

        Fill it, then `commit` what it became, or `cancel`. One reservation at a time, and no `write` while
        it is open. The view must not be written to after either.

        Raises as `write` does, and RingError when a reservation is open already.
        """
        if size < 0:
            raise ValueError(f"size {size}: expected 0 to {self.max_frame} bytes")
        if size > self.max_frame:
            self._refuse(lib.RING_TOO_LARGE, 0, size, timeout)
        code = self._until(timeout, lambda ns: lib.writer_reserve(self._handle, size, ns, self._offset))
        if code != 0:
            self._refuse(code, 0, size, timeout)
        start = self._offset[0]
        return self._memory[start : start + size]

    def commit(self, tag: int, size: int) -> None:
        """Publish the first `size` bytes of the reservation as one frame.

        Raises RingError when none is open, FrameTooLarge when `size` is above what was reserved.
        """
        code = lib.writer_commit(self._handle, tag, max(size, 0))
        if code == lib.RING_RESERVED:
            raise RingError(
                f"ring {self._segment.name!r} lane {self.lane}: no reservation is open; call reserve first"
            )
        if code != 0 or size < 0:
            self._refuse(code or lib.RING_ARGUMENT, tag, size, 0.0)

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
            raise RingError(f"{where}: a reservation is open; commit or cancel it first")
        raise ValueError(f"{where}: tag {tag} (expected 0-255) or size {size} (expected 0-{self.max_frame})")

    def close(self) -> None:
        """Give the lane back. Closing twice is fine; WriterBusy while another thread writes."""
        if lib.writer_close(self._handle) == lib.RING_BUSY:
            self._refuse(lib.RING_BUSY, 0, 0, 0.0)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            lib.writer_close(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
