"""What cannot be had of /dev/shm: each refusal says what is so, and keeps nothing open or in use."""

import errno
import fcntl
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

import pytest
from outfeed.ring import (
    Doorbell,
    LockHeld,
    NoRoom,
    NoSharedMemory,
    NotARing,
    NotOurs,
    Ring,
    RingError,
    segment,
)
from outfeed.ring.board import MAGIC, VERSION, Board
from outfeed.ring.names import segment_name
from outfeed.ring.owner import space

from tests.limits import no_more_files, open_files

SHM = Path("/dev/shm")
INSTANCE = f"t-refused-{os.getpid()}"
BOARD = segment_name(INSTANCE, "board")


def nothing(memory: mmap.mmap) -> None:
    del memory


def test_a_limit_of_this_process_is_not_taken_for_a_small_or_missing_shm(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment.create(name, 4096, nothing).close()
    for call in (lambda _: segment.create(f"{name}x", 4096, nothing), segment.attach, segment.discard):
        with no_more_files(), pytest.raises(OSError, match="Too many open files"):
            call(name)

    def too_large(*_: object) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "posix_fallocate", too_large)
    with pytest.raises(OSError, match="File too large"):
        segment.create(f"{name}x", 4096, nothing)


@pytest.mark.parametrize("error", [FileNotFoundError, NotADirectoryError, PermissionError])
def test_a_folder_that_cannot_be_opened_says_why(
    monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    def refuse(*_: object) -> int:
        raise error(1, "for this reason")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(NoSharedMemory, match=r"cannot be opened \(for this reason\)"):
        segment.folder()


def a_link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to(path.name + "-nothing")


def a_folder(path: Path) -> None:
    path.mkdir(mode=0o700)


def a_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
    path.chmod(0o600)


@pytest.mark.parametrize("make", [a_link, a_link_to_nothing, a_folder, a_pipe, a_socket])
def test_what_is_no_plain_file_is_no_segment_and_is_not_waited_for(
    name: str, make: Callable[[Path], None]
) -> None:
    path = SHM / name
    make(path)
    try:
        with pytest.raises(NotARing, match=f"{name}.*is not a file"):
            Ring.attach(name)
        if make is not a_pipe:  # which goes like a damaged file
            with pytest.raises(RingError, match=f"{name} is neither free nor a doorbell"):
                Doorbell.create(name)
    finally:
        path.rmdir() if make is a_folder else path.unlink()


def test_a_segment_that_may_not_even_be_opened_says_whose_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (SHM / name).touch(mode=0o600)

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(NotOurs, match=f"'{name}' is of user {os.geteuid()}, mode 0600"):
        segment.attach(name)
    assert segment.in_use(name), "for all that can be told"
    assert not segment.discard(name)


def test_who_cannot_have_a_segment_keeps_no_file_open(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "LONGEST_LOCK_S", 0.0)
    monkeypatch.setattr(segment, "_LOOKS", 1)
    path, before = SHM / name, open_files()
    with pytest.raises(NoRoom):
        segment.create(name, 1 << 60, nothing)
    for mode, how, error in (
        (0o644, fcntl.LOCK_SH, NotOurs),
        (0o600, fcntl.LOCK_SH, NotARing),
        (0o600, fcntl.LOCK_EX, LockHeld),
    ):
        path.touch()
        path.chmod(mode)
        with path.open() as held:
            fcntl.flock(held, how)
            with pytest.raises(error):
                segment.attach(name)
            with pytest.raises(FileExistsError):
                segment.create(name, 4096, nothing)
            assert not segment.discard(name)
        assert segment.discard(name)
    assert open_files() == before


def test_a_lock_that_is_given_up_soon_is_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    segment.create(name, 4096, nothing).close()
    with open(SHM / name) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(held, fcntl.LOCK_UN))
        segment.attach(name).close()


@pytest.fixture
def board() -> Iterator[Callable[[int], segment.Segment]]:
    """Makes what lies where a board would. Held until the end: no start in another test sweeps it away."""
    made: list[segment.Segment] = []

    def make(size: int) -> segment.Segment:
        made.append(segment.create(BOARD, size, nothing))
        return made[0]

    yield make
    for one in made:
        one.unlink()
        one.close()


@pytest.mark.parametrize("size", [1, 23, 24, 4096, 65535])
def test_what_is_too_small_for_a_board_is_none(board: Callable[[int], segment.Segment], size: int) -> None:
    board(size)
    with pytest.raises(NotARing, match=f"holds {size} bytes, a board at least 65536: not a board"):
        Board.attach(INSTANCE)


@pytest.mark.parametrize(("rows", "room"), [(5, 4), (4, 5), (6, 6)])
def test_a_board_has_just_the_rows_of_its_configuration(
    board: Callable[[int], segment.Segment], rows: int, room: int
) -> None:
    """Of launcher, scheduler, two shards and a reader: nobody may find his row where the segment ends."""
    config = b'{"instance":"any","tokenizer":"none"}'
    memory = board((1 << 16) + 256 * room).memory
    memory[:24] = struct.pack("<8sIIII", MAGIC, VERSION, rows, len(config), crc32(config))
    memory[48:56] = space().to_bytes(8, "little")
    memory[4096 : 4096 + len(config)] = config
    with pytest.raises(NotARing, match=f"has {rows} rows in .* bytes, its configuration needs 5"):
        Board.attach(INSTANCE)


def test_a_configuration_that_is_nested_without_end_is_none(
    board: Callable[[int], segment.Segment],
) -> None:
    """Whoever wrote it made its check right as well."""
    deep = b'{"sampling_defaults":' + b'{"a":' * 10_000
    memory = board(1 << 17).memory
    memory[:24] = struct.pack("<8sIIII", MAGIC, VERSION, 5, len(deep), crc32(deep))
    memory[48:56] = space().to_bytes(8, "little")
    memory[4096 : 4096 + len(deep)] = deep
    with pytest.raises(NotARing, match="holds no readable configuration"):
        Board.attach(INSTANCE)
