"""A ring's reading side: batches of zero-copy frames, the release that gives their room back, and waiting.

Knows cursors and doorbells; must not know what a tag or a body means.
"""

from collections.abc import Sequence
from typing import Any, NoReturn, Self

from ._core import ffi, lib
from ._fast import Reader, View
from .doorbell import Doorbell
from .errors import ConsumerBusy, CorruptLane, RingClosed
from .segment import Segment
from .writer import address

Frame = tuple[int, int, View]
"""(lane, tag, body). A plain tuple: a named one would double what a small frame costs to read."""

_CALLS = tuple(
    address(ffi.addressof(lib, call))
    for call in ("reader_read", "reader_unread", "reader_release", "reader_pending", "readers_wait")
)


class Consumer(Reader):
    """One cursor of a ring, for one thread at a time. Made by `Ring.consumer`.

    `read(limit=256, upto=None)`, `release()` and `pending()` come from the C base: one call per batch of
    zero-copy frames.
    """

    __slots__ = (
        "__weakref__",
        "_handle",
        "_segment",
        "_tails",
        "doorbell",
        "index",
        "lanes",
    )

    def __init__(
        self, segment: Segment, lanes: int, index: int, doorbell: Doorbell, held: Any, memory: memoryview
    ) -> None:
        self.index = index
        self.lanes = lanes
        self.doorbell = doorbell
        self._segment = segment
        self._tails = ffi.new("uint64_t[]", lanes)
        self._handle = held[0]
        bell = doorbell._bell
        kept = held, bell, doorbell._base
        self._bind(_CALLS, address(self._handle), address(bell), kept, memory.toreadonly(), lanes)

    def tails(self) -> list[int]:
        """Return each lane's position now, for `read(upto=...)`: what is published later lies beyond."""
        code = lib.reader_tails(self._handle, self._tails)
        if code != 0:
            self._refuse(code)
        positions: list[int] = ffi.unpack(self._tails, self.lanes)
        return positions

    def _refuse(self, code: int) -> NoReturn:
        """Raise what a C code means."""
        where = f"ring {self._segment.name!r} consumer {self.index}"
        if code == lib.RING_CORRUPT:
            lane, position = lib.reader_fault_lane(self._handle), lib.reader_fault_position(self._handle)
            raise CorruptLane(self._segment.name, lane, position)
        if code == lib.RING_BUSY:
            raise ConsumerBusy(f"{where} or its doorbell: another thread is reading or waiting; each has one")
        raise RingClosed(f"{where} or its doorbell: closed, or this process was forked after it was made")

    def close(self) -> None:
        """Give the cursor back; it goes on holding writers at what is not released. Twice is fine."""
        if lib.reader_close(self._handle) == lib.RING_BUSY:
            self._refuse(lib.RING_BUSY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait(consumers: Sequence[Consumer], timeout: float) -> bool:
    """Wait until any of `consumers` has something, at most `timeout` seconds and at most one second.

    True when something is there; False when time is up or `Doorbell.ring` was called. It looks, spins
    (at most as long as the doorbell allows), then parks and sleeps on the doorbell that all the consumers
    must share. Signal handlers run while it waits; what they raise (KeyboardInterrupt) comes out of here.

    Raises ValueError for no consumers or several doorbells, ConsumerBusy, RingClosed.
    """
    if not consumers:
        raise ValueError("wait: no consumers; expected at least one")
    return consumers[0]._wait(consumers, timeout)
