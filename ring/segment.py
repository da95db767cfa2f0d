"""Named shared memory, made whole or not at all, found and removed when nobody is left.

A segment is a file in /dev/shm of mode 0600. It is filled before it gets its name, so nobody ever maps
half a segment and a process that dies while making one leaves nothing. Every process that has one holds
a shared flock on it, which the kernel drops when the process ends, however it ends: a segment that can
be locked exclusively is stale. multiprocessing.shared_memory is not used: before Python 3.13 its
resource tracker unlinks, at the exit of any one process, what the others still use.

Knows files; must not know what is in them.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from .errors import LockHeld, NoRoom, NoSharedMemory, NotARing, NotOurs

SHM = Path("/dev/shm")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z")
# Mapping these pages at once costs a few ms and saves a fault per page in the middle of a stream.
_POPULATE_UP_TO = 256 << 20
LONGEST_LOCK_S = 10.0
_LOCK_AGAIN_S = 0.005
_LOOKS = 200  # 1 s: a look is a moment, but who looks may have to wait for a core
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)  # opening a link, a folder, a socket


def _path(name: str) -> str:
    if not _NAME.match(name):
        raise ValueError(
            f"segment name {name!r}: expected 1-200 letters, digits, '.', '_' or '-', a letter or digit first"
        )
    return f"{SHM}/{name}"


def _names(name: str, fd: int) -> bool:
    """Whether the name in /dev/shm is that of the file that is open as `fd`."""
    try:
        return os.stat(_path(name), follow_symlinks=False).st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False


def _let_go(fd: int, pid: int) -> None:
    """Drop the lock, which the mapping's copy of the descriptor would keep; it is not a forked child's."""
    if os.getpid() == pid:
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


class Segment:
    """A mapped segment. Its memory stays mapped for as long as anything made from `memory` lives.

    A process that was forked with one shares its lock: attach again in the child before the parent closes.
    """

    __slots__ = ("__weakref__", "_drop", "_fd", "memory", "name", "size")
    memory: mmap.mmap
    size: int

    def __init__(self, name: str, fd: int) -> None:
        # From here on nothing else closes it: by a second time the number may be another file's.
        self._drop = weakref.finalize(self, _let_go, fd, os.getpid())
        self.name = name
        self._fd = fd

    def _map(self) -> None:
        self.size = os.fstat(self._fd).st_size
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if self.size <= _POPULATE_UP_TO else 0)
        self.memory = mmap.mmap(self._fd, self.size, flags=flags)

    def has_name(self) -> bool:
        """Whether the segment still has a name: nobody has removed it. Not to be asked of a closed one."""
        return os.fstat(self._fd).st_nlink > 0

    def unlink(self) -> None:
        """Remove the name, if it is still this segment's and not a later one's. Not for a closed one."""
        if _names(self.name, self._fd):
            unlink(self.name)

    def close(self) -> None:
        """Stop counting as a user of the segment."""
        self._drop()


def folder() -> int:
    """Open /dev/shm itself, for its lock or to make a name in it; raises NoSharedMemory."""
    try:
        return os.open(SHM, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise NoSharedMemory(f"cannot be opened ({error.strerror})") from None


def free_bytes() -> int:
    """Return how many bytes of /dev/shm are free."""
    room = os.statvfs(SHM)
    return room.f_bavail * room.f_frsize


def lock(fd: int, how: int, path: str, longest: float, nap: Callable[[float], object]) -> None:
    """Take a flock that nobody is expected to withhold for long; any user may, on what it can open.

    Raises LockHeld when it cannot be had within `longest` seconds, and what `nap`, in which it waits, raises.
    """
    deadline = time.monotonic() + longest
    while True:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise LockHeld(path, longest) from None
        nap(_LOCK_AGAIN_S)


def _reserve(name: str, fd: int, size: int) -> None:
    """Give the file its pages now: a page that is missing later is a SIGBUS in whoever touches it."""
    if size > (free := free_bytes()):
        raise NoRoom(f"segment {name!r}", size, free)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        raise NoRoom(f"segment {name!r}", size, free_bytes()) from error


def _nameless() -> int:
    try:
        return os.open(SHM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise NoSharedMemory(f"takes no file ({error.strerror})") from None


def create(name: str, size: int, fill: Callable[[mmap.mmap], None]) -> Segment:
    """Make segment `name` of `size` bytes, zeroed; `fill` writes what must be there before anyone sees it.

    Raises FileExistsError when the name is taken, NoRoom when /dev/shm cannot hold it, NoSharedMemory when
    no file can be made there.
    """
    path = _path(name)
    fd = _nameless()
    segment = Segment(name, fd)
    try:
        _reserve(name, fd, size)
        fcntl.flock(fd, fcntl.LOCK_SH)
        segment._map()
        fill(segment.memory)
        shm = folder()
        try:
            # A folder makes CPython use linkat(2), the only call that follows /proc/self/fd/N.
            os.link(f"/proc/self/fd/{fd}", path, dst_dir_fd=shm, follow_symlinks=True)
        except FileExistsError:
            why = "taken, and by what no start removes: end who has it, or remove it if it is nobody's"
            raise FileExistsError(errno.EEXIST, why, path) from None
        finally:
            os.close(shm)
        return segment
    except BaseException:
        segment.unlink()  # a Ctrl-C may come when it has its name already
        segment.close()
        raise


def attach(name: str) -> Segment:
    """Map the segment `name`.

    Raises FileNotFoundError when there is none, NotOurs when it is another user's or open to others,
    NotARing when the name is not a plain file or an empty one, LockHeld.
    """
    # O_NONBLOCK: whatever has the name, opening it never waits.
    try:
        fd = os.open(_path(name), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError:
        raise _not_ours(name, os.stat(_path(name), follow_symlinks=False)) from None
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise NotARing(f"segment {name!r} is not a file ({error.strerror})") from None
    segment = Segment(name, fd)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise _not_ours(name, found)
        lock(fd, fcntl.LOCK_SH, _path(name), LONGEST_LOCK_S, time.sleep)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size == 0:
            raise NotARing(f"segment {name!r} is not a file with anything in it ({found.st_size} bytes)")
        if found.st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "segment was removed while it was being attached", name)
        segment._map()
        return segment
    except BaseException:
        segment.close()
        raise


def _not_ours(name: str, found: os.stat_result) -> NotOurs:
    return NotOurs(name, found.st_uid, stat.S_IMODE(found.st_mode), os.geteuid())


def unlink(name: str) -> None:
    """Remove the name. Who has the segment keeps it; a name that is gone already is fine."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_path(name))


def listed(prefix: str) -> list[str]:
    """Return the names in /dev/shm that start with `prefix`; raises NoSharedMemory."""
    shm = folder()
    try:
        return sorted(
            entry.name
            for entry in os.scandir(shm)
            if entry.name.startswith(prefix) and entry.is_file(follow_symlinks=False)
        )
    finally:
        os.close(shm)


def _locked(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_if_stale(name: str) -> int | None:
    """Return a descriptor that locks `name` against all; None if it is in use, another user's or no file."""
    try:
        fd = os.open(_path(name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return None
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        return None
    try:
        looks = _LOOKS if os.fstat(fd).st_uid == os.geteuid() else 0
        for _ in range(looks):
            if _locked(fd, fcntl.LOCK_EX):
                return fd
            if _locked(fd, fcntl.LOCK_SH) and not _locked(fd, fcntl.LOCK_EX):
                break
            # Whoever keeps a user's lock from it looks, too, as who waits for an instance does often.
            time.sleep(_LOCK_AGAIN_S)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def in_use(name: str) -> bool:
    """Whether a live process has the segment (or doorbell)."""
    fd = _lock_if_stale(name)
    if fd is None:
        return os.path.exists(_path(name))
    os.close(fd)
    return False


def sweep(prefix: str) -> list[str]:
    """Remove every segment and doorbell whose name starts with `prefix` and that no live process has.

    Returns what was removed. One in use is never touched, nor is one of another user.
    """
    return [name for name in listed(prefix) if discard(name)]


def discard(name: str) -> bool:
    """Remove the segment or doorbell `name` unless a live process has it; whether it was removed."""
    fd = _lock_if_stale(name)
    if fd is None:
        return False
    try:
        # Between the look and the lock somebody else may have removed it, and a third made one of that name.
        stale = _names(name, fd)
        # Whoever opened it meanwhile gets its lock after this one is dropped, and sees it has no name.
        if stale:
            unlink(name)
        return stale
    finally:
        os.close(fd)
