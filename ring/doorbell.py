"""A process's doorbell: one named semaphore that wakes it for every ring it reads.

The only module that knows posix_ipc, which makes and unlinks; posting and sleeping are the C core's.
"""

import contextlib
import errno
import fcntl
import os
import weakref
from typing import Any, Self

import posix_ipc

from . import segment
from ._core import ffi, lib
from .errors import LaneOwned, NoRoom, RingClosed, RingError

__all__ = ["Doorbell"]

LONGEST_SPIN_S = 50e-6
_TRIES = 8
_SEMAPHORE_BYTES = 32  # glibc's sem_t on 64-bit Linux


def _make(name: str) -> int:
    """Make the semaphore, or adopt a dead process's; return a descriptor whose flock says it is in use."""
    for _ in range(_TRIES):
        # Adopting comes first: glibc needs room in /dev/shm even to find out that a name is taken.
        if (fd := _adopt(name)) is not None:
            return fd
        if segment.in_use(f"sem.{name}"):
            raise LaneOwned(f"doorbell {name!r} belongs to a live process; give each process its own")
        segment.sweep(name)
        try:
            posix_ipc.Semaphore(f"/{name}", posix_ipc.O_CREX, mode=0o600, initial_value=0).close()
        except posix_ipc.ExistentialError:
            continue  # somebody was faster: look again whose it is
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise NoRoom(f"sem.{name}", _SEMAPHORE_BYTES, 0) from error
        fd = os.open(f"{segment.SHM}/sem.{name}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_nlink:  # else swept between its making and the lock
            return fd
        os.close(fd)
    raise RingError(f"doorbell {name!r}: made and swept away {_TRIES} times; is something removing it?")


def _adopt(name: str) -> int | None:
    """Take over a dead process's semaphore as it is: that needs no room, even when /dev/shm is full.

    What its count is by now costs at most as many needless wakes. None when a live process has it, when it
    is gone, or when the file is no semaphore.
    """
    try:
        fd = os.open(f"{segment.SHM}/sem.{name}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(fd)
        if found.st_nlink and found.st_size == _SEMAPHORE_BYTES:
            fcntl.flock(fd, fcntl.LOCK_SH)
            return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return None


def _remove(name: str, fd: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child's copy is not the owner
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_semaphore(f"/{name}")
    os.close(fd)


class Doorbell:
    """What wakes a process when any of its rings has something. One thread waits on it at a time."""

    __slots__ = ("__weakref__", "_bell", "_drop", "name")

    def __init__(self, name: str, longest_spin: float = LONGEST_SPIN_S) -> None:
        if not 0 <= longest_spin <= 0.01:
            raise ValueError(f"longest_spin {longest_spin!r}: expected 0 to 0.01 seconds")
        if len(name) > lib.RING_NAME_BYTES - 2:
            raise ValueError(
                f"doorbell name {name!r} has {len(name)} characters; at most {lib.RING_NAME_BYTES - 2} fit"
            )
        fd = _make(name)
        self.name = name
        self._drop = weakref.finalize(self, _remove, name, fd, os.getpid())
        bell = lib.bell_open(f"/{name}".encode(), int(longest_spin * 1e9))
        if bell == ffi.NULL:
            self._drop()
            raise RingError(
                f"doorbell {name!r} was made but cannot be opened: is /dev/shm this process's own?"
            )
        self._bell: Any = ffi.gc(bell, lib.bell_free)

    @classmethod
    def create(cls, name: str, *, longest_spin: float = LONGEST_SPIN_S) -> Self:
        """Make the doorbell; a dead process's of the same name is replaced.

        A wait spins before it sleeps for as long as recent sleeps taught it to, but at most `longest_spin`
        seconds (0 to 0.01; 0: it always sleeps at once, which suits a machine with too few cores). One of
        more than the default keeps a reader awake between frames that come at most that far apart: its writer
        is spared a system call per frame. That takes a core of its own; where there is none, it is slower.

        Raises LaneOwned when a live process has one of that name.
        """
        return cls(name, longest_spin)

    def ring(self) -> None:
        """Make this process's wait() return now, from any of its threads. Remembered until a wait sees it."""
        if lib.bell_ring(self._bell) != lib.RING_OK:
            raise RingClosed(f"doorbell {self.name!r} is closed")

    def close(self) -> None:
        """Unlink the semaphore. Closing twice is fine."""
        lib.bell_close(self._bell)
        self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
