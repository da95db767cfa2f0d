"""A process's doorbell: one word in shared memory, on which it sleeps for every ring it reads.

Knows whose a doorbell is; ringing and sleeping are the C core's.
"""

import mmap
import os
import weakref
from typing import Any, Self

from . import segment
from ._core import ffi, lib
from .errors import LaneOwned, NotARing, RingClosed, RingError
from .owner import Owner

LONGEST_SPIN_S = 50e-6
_TRIES = 8


def _open(name: str) -> segment.Segment:
    """Adopt a dead process's doorbell, or make one."""

    def fill(memory: mmap.mmap) -> None:
        lib.bell_format(ffi.from_buffer(memory), lib.RING_BELL_BYTES, Owner.me().pack())

    for _ in range(_TRIES):
        # Adopting comes first: it needs no room, so that a full /dev/shm cannot keep a replacement away.
        if (adopted := _adopt(name)) is not None:
            return adopted
        try:
            return segment.create(name, lib.RING_BELL_BYTES, fill)
        except FileExistsError:
            continue  # somebody was faster: look again whose it is
    raise RingError(
        f"doorbell {name!r}: after {_TRIES} tries /dev/shm/{name} is neither free nor a doorbell; "
        "is something removing it, or does a process have a file of that name open (fuser -v names it)?"
    )


def _adopt(name: str) -> segment.Segment | None:
    """Take over a dead process's doorbell as it is; None when there is none, or it is none and was removed.

    Whose it is says the owner in it, as with a lane, and one of two takers wins: a lock would also be held by
    the children that a dead owner has forked. What its word says by now costs at most a needless wake.
    """
    try:
        found = segment.attach(name)
    except FileNotFoundError:
        return None
    except NotARing:
        segment.discard(name)
        return None
    base = ffi.from_buffer(found.memory)
    if lib.bell_check(base, found.size) != lib.RING_OK:
        found.close()
        segment.discard(name)
        return None
    expected = int(lib.bell_owner(base))
    owner = Owner.unpack(expected)
    if owner is not None and owner.alive():
        found.close()
        raise LaneOwned(
            f"doorbell {name!r} belongs to a live process ({owner.pid}); give each process its own"
        )
    # Its owner may have removed it and ended since it was opened: then the next look finds no such name.
    if lib.bell_claim(base, expected, Owner.me().pack()) != lib.RING_OK or not found.has_name():
        found.close()
        return None
    return found


def _remove(opened: segment.Segment, pid: int) -> None:
    if os.getpid() == pid:  # a forked child's copy is not the owner
        opened.unlink()
    opened.close()


class Doorbell:
    """What wakes a process when any of its rings has something. One thread waits on it at a time."""

    __slots__ = ("__weakref__", "_base", "_bell", "_drop", "name")

    def __init__(self, name: str, longest_spin: float = LONGEST_SPIN_S) -> None:
        if not 0 <= longest_spin <= 0.01:
            raise ValueError(f"longest_spin {longest_spin!r}: expected 0 to 0.01 seconds")
        if len(name) > lib.RING_NAME_BYTES - 2:
            raise ValueError(
                f"doorbell name {name!r} has {len(name)} characters; at most {lib.RING_NAME_BYTES - 2} fit"
            )
        opened = _open(name)
        self.name = name
        self._drop = weakref.finalize(self, _remove, opened, os.getpid())
        self._base = ffi.from_buffer(opened.memory)  # keeps it mapped for as long as the bell is there
        bell = lib.bell_open(self._base, int(longest_spin * 1e9))
        if bell == ffi.NULL:
            self._drop()
            raise MemoryError(f"doorbell {name!r}")
        self._bell: Any = ffi.gc(bell, lib.bell_free)

    @classmethod
    def create(cls, name: str, *, longest_spin: float = LONGEST_SPIN_S) -> Self:
        """Make the doorbell; a dead process's of the same name is taken over.

        A wait spins before it sleeps for as long as recent sleeps taught it to, but at most `longest_spin`
        seconds (0 to 0.01; 0: it always sleeps at once, which suits a machine with too few cores). One of
        more than the default keeps a reader awake between frames that come at most that far apart: its writer
        is spared a system call per frame. That takes a core of its own; where there is none, it is slower.

        Raises LaneOwned when a live process has one of that name, PermissionError when another user has one,
        NoRoom.
        """
        return cls(name, longest_spin)

    def ring(self) -> None:
        """Make this process's wait() return now, from any of its threads. Remembered until a wait sees it."""
        if lib.bell_ring(self._bell) != lib.RING_OK:
            raise RingClosed(f"doorbell {self.name!r} is closed")

    def close(self) -> None:
        """Remove the doorbell. Closing twice is fine."""
        lib.bell_close(self._bell)
        self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
