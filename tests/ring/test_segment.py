"""Segments: whole or not at all, private, with all their pages, unlinked by no bystander, swept if stale."""

import errno
import fcntl
import mmap
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from outfeed.ring import (
    BadCapacity,
    Doorbell,
    LaneOwned,
    LockHeld,
    NoRoom,
    NoSharedMemory,
    NotARing,
    OtherNamespace,
    Ring,
    WrongVersion,
    instance,
    segment,
)
from outfeed.ring.owner import space

from tests.limits import locks, open_files

MakeRing = Callable[..., Ring]
SHM = Path("/dev/shm")


def nothing(memory: mmap.mmap) -> None:
    del memory


def run_python(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *words], capture_output=True, text=True, check=False
    )


def test_mode_and_pages(make_ring: MakeRing) -> None:
    ring = make_ring(lanes=2, capacity=1 << 16)
    found = os.stat(SHM / ring.name)
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_blocks * 512 >= found.st_size


def test_a_name_is_taken_once(make_ring: MakeRing) -> None:
    ring = make_ring()
    before = locks()
    with pytest.raises(FileExistsError) as refused:
        Ring.create(ring.name, lanes=1, consumers=1, capacity=4096)
    assert locks() == before, f"while {refused!r} is held"
    other = Ring.attach(ring.name)
    assert (other.lanes, other.consumers, other.capacity) == (1, 1, 4096)
    other.close()
    assert (SHM / ring.name).exists()


def test_a_small_shm_is_an_error_with_a_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = SimpleNamespace(f_bavail=16, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    with pytest.raises(NoRoom, match=r"needs \d+ bytes.*65536 are free.*--shm-size") as caught:
        Ring.create(name, lanes=4, consumers=1, capacity=1 << 20)
    assert caught.value.needed > 4 << 20
    assert caught.value.free == 65536
    assert "remount" in caught.value.remedy
    assert not (SHM / name).exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_a_shm_that_fills_meanwhile_is_the_same_error(
    name: str, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Also one that has room where a container's memory has none."""

    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoRoom):
        Ring.create(name, lanes=1, consumers=1, capacity=4096)
    assert not (SHM / name).exists()


def test_what_just_fits_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "free_bytes", lambda: 4096)
    segment.create(name, 4096, nothing).close()
    with pytest.raises(NoRoom, match="needs 4097 bytes"):
        segment.create(f"{name}.larger", 4097, nothing)


@pytest.mark.parametrize("there", [False, True], ids=["missing", "no tmpfs"])
def test_no_shm_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    shm = Path("/proc") if there else tmp_path / "none"  # /proc takes no file from anybody
    monkeypatch.setattr(segment, "SHM", shm)
    with pytest.raises(NoSharedMemory, match=r"/dev/shm .*expected a tmpfs there.*--shm-size"):
        segment.create("outfeed-x.y", 4096, nothing)
    if not there:
        with pytest.raises(NoSharedMemory, match=r"cannot be opened \(No such file"):
            instance.running()
        with pytest.raises(NoSharedMemory):
            instance.sweep_dead()


@pytest.mark.parametrize(
    ("lanes", "consumers", "capacity"),
    [
        (0, 1, 4096),
        (257, 1, 4096),
        (1, 0, 4096),
        (1, 257, 4096),
        (1, 1, 2048),
        (1, 1, 5000),
        (1, 1, 1 << 31),
        (1, 1, 0),
        (1, 1, -4096),
        (-1, 1, 4096),
        (1, 1, 1 << 70),
    ],
)
def test_odd_geometry_is_refused_with_the_limits(
    name: str, lanes: int, consumers: int, capacity: int
) -> None:
    with pytest.raises(BadCapacity, match="expected"):
        Ring.create(name, lanes=lanes, consumers=consumers, capacity=capacity)
    assert not (SHM / name).exists()


@pytest.mark.parametrize(
    ("lanes", "consumers", "capacity"), [(256, 1, 4096), (1, 256, 4096), (1, 1, 1 << 30)]
)
def test_a_geometry_at_the_limits_is_none_too_large(
    name: str, monkeypatch: pytest.MonkeyPatch, lanes: int, consumers: int, capacity: int
) -> None:
    monkeypatch.setattr(segment, "free_bytes", lambda: 0)
    with pytest.raises(NoRoom):
        Ring.create(name, lanes=lanes, consumers=consumers, capacity=capacity)


@pytest.mark.parametrize("bad", ["", "a/b", "../x", ".hidden", "a b", "é", "x" * 201])
def test_odd_names_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="segment name"):
        Ring.attach(bad)


def test_what_is_no_ring_says_what_it_is(name: str) -> None:
    with pytest.raises(FileNotFoundError):
        Ring.attach(name)
    (SHM / name).touch(mode=0o600)
    with pytest.raises(NotARing, match="0 bytes") as refused:
        Ring.attach(name)
    assert not segment.in_use(name), f"while {refused!r} is held"
    (SHM / name).write_bytes(b"not a ring, but long enough to be one" * 1000)
    with pytest.raises(NotARing, match=r"starts with 0x") as refused:
        Ring.attach(name)
    assert f"{int.from_bytes(b'not a ri', 'little'):#x}" in str(refused.value)
    assert not segment.in_use(name), f"while {refused!r} is held, with all that was made"
    (SHM / name).write_bytes(b"short")
    with pytest.raises(NotARing):
        Ring.attach(name)


def test_another_versions_ring_says_both_versions(make_ring: MakeRing) -> None:
    ring = make_ring()
    with open(SHM / ring.name, "r+b") as file:
        file.seek(8)
        file.write((77).to_bytes(4, "little"))
    with pytest.raises(WrongVersion, match=r"layout 77, this build reads 3"):
        Ring.attach(ring.name)


def test_a_ring_of_another_pid_namespace_is_refused_before_its_owners_look_dead(name: str) -> None:
    Ring.create(name, lanes=1, consumers=1, capacity=4096).close()
    with open(SHM / name, "r+b") as file:
        file.seek(128)
        file.write((space() + 1).to_bytes(8, "little"))
    with pytest.raises(OtherNamespace, match="another pid or time namespace") as refused:
        Ring.attach(name)
    assert not segment.in_use(name), f"while {refused!r} is held, with all that was made"


@pytest.mark.parametrize("size", [-4096, 4096])
def test_a_ring_of_another_size_than_its_header_says_is_refused(make_ring: MakeRing, size: int) -> None:
    ring = make_ring(lanes=2, consumers=3)
    data = (SHM / ring.name).read_bytes()
    (SHM / f"{ring.name}x").touch(mode=0o600)
    (SHM / f"{ring.name}x").write_bytes(data[:size] if size < 0 else data + bytes(size))
    with pytest.raises(NotARing, match="does not add up: lanes 2, consumers 3, capacity 4096"):
        Ring.attach(f"{ring.name}x")


def test_what_is_made_while_a_stale_one_is_removed_stays(
    make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sweep at once, and between one's look and its lock the other is done and a new owner has come."""
    ring = make_ring()
    ring.close()
    new: list[Ring] = []

    def other_first(fd: int, how: int) -> None:
        monkeypatch.undo()
        assert segment.discard(ring.name)
        new.append(Ring.create(ring.name, lanes=1, consumers=1, capacity=4096))
        fcntl.flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", other_first)
    assert not segment.discard(ring.name)
    assert (SHM / ring.name).exists()
    new[0].close()


@pytest.mark.parametrize("ask", ["in use", "sweep"])
def test_who_only_looks_whether_a_segment_is_stale_is_not_taken_for_its_user(
    name: str, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    """It locks what is stale, for a moment. A scheduler that waits for its instance looks again and again."""
    segment.create(name, 4096, nothing).close()
    with open(SHM / name) as looker:
        fcntl.flock(looker, fcntl.LOCK_EX)
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(looker, fcntl.LOCK_UN))
        if ask == "in use":
            assert not segment.in_use(name)
        else:
            assert segment.sweep(name) == [name]


def test_a_segment_that_is_used_is_seen_to_be_at_the_first_look(
    make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance has dozens, and who starts one looks at all of them."""

    def never(_: float) -> None:
        raise AssertionError("it is looked again")

    ring = make_ring()
    monkeypatch.setattr(time, "sleep", never)
    assert segment.in_use(ring.name)
    assert segment.sweep(ring.name) == []


def test_what_another_one_removed_meanwhile_is_not_reported(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment.create(name, 4096, nothing).close()
    monkeypatch.setattr(fcntl, "flock", lambda *_: segment.unlink(name))
    assert segment.sweep(name) == []


def test_another_processs_exit_unlinks_nothing_and_warns_of_nothing(make_ring: MakeRing) -> None:
    ring = make_ring()
    script = (
        "import sys\n"
        "from outfeed.ring import Ring\n"
        "ring = Ring.attach(sys.argv[1])\n"
        "ring.writer(0).write(5, b'from another process')\n"
    )
    done = run_python(script, ring.name)
    assert (done.returncode, done.stderr) == (0, "")
    assert (SHM / ring.name).exists()
    made = run_python(
        "import sys; from outfeed.ring import Ring\n"
        "Ring.create(sys.argv[1], lanes=1, consumers=1, capacity=4096)",
        f"{ring.name}made",
    )
    assert (made.returncode, made.stderr) == (0, "")
    assert (SHM / f"{ring.name}made").exists()


def test_stale_segments_and_doorbells_are_swept_and_live_ones_never(
    make_ring: MakeRing, bell: Doorbell, name: str
) -> None:
    ring = make_ring()
    script = (
        "import os, signal, sys\n"
        "from outfeed.ring import Doorbell, Ring\n"
        "ring = Ring.create(sys.argv[1] + '.dead', lanes=1, consumers=1, capacity=4096)\n"
        "bell = Doorbell.create(sys.argv[1] + '.dead-bell')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run_python(script, name)
    assert segment.in_use(ring.name)
    assert not segment.in_use(f"{name}.dead")
    assert segment.sweep(name) == [f"{name}.dead", f"{name}.dead-bell"]
    assert segment.listed(name) == sorted([ring.name, bell.name])
    assert segment.sweep(name) == []


def test_a_sweep_goes_by_the_name_and_takes_files_alone(name: str) -> None:
    for made in (f"{name}-a", f"{name}-b", f"{name}x-a"):
        segment.create(made, 4096, nothing).close()
    (SHM / f"{name}-folder").mkdir()
    (SHM / f"{name}-link").symlink_to(f"{name}x-a")
    try:
        before = open_files()
        assert segment.listed(f"{name}-") == [f"{name}-a", f"{name}-b"]
        assert segment.sweep(f"{name}-") == [f"{name}-a", f"{name}-b"]
        assert segment.listed(f"{name}-") == []
        assert open_files() == before
        assert (SHM / f"{name}x-a").exists()
        assert not segment.discard(f"{name}-a"), "it is gone"
        assert not segment.in_use(f"{name}-a")
    finally:
        (SHM / f"{name}-folder").rmdir()
        (SHM / f"{name}-link").unlink()


@pytest.mark.parametrize("mode", [0o666, 0o640, 0o604])
def test_a_segment_that_others_may_open_is_not_attached(make_ring: MakeRing, mode: int) -> None:
    ring = make_ring()
    (SHM / ring.name).chmod(mode)
    with pytest.raises(PermissionError, match=f"{ring.name}.*mode {mode:04o}"):
        Ring.attach(ring.name)


def test_another_users_segment_is_neither_attached_nor_swept(
    make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = make_ring()
    ring.close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(PermissionError, match=f"is of user {os.getuid()}, mode"):
            Ring.attach(ring.name)
        with pytest.raises(PermissionError):
            Doorbell.create(ring.name)
        patch.setattr(
            fcntl, "flock", lambda *_: pytest.fail("it may be locked for long, and is not to be touched")
        )
        assert segment.sweep(ring.name) == []
    assert segment.sweep(ring.name) == [ring.name]


def test_a_lock_that_somebody_keeps_is_an_error_that_names_the_file(
    make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can lock what it can open, such as /dev/shm itself: nobody may wait for that without end."""
    monkeypatch.setattr(segment, "LONGEST_LOCK_S", 0.05)
    monkeypatch.setattr(instance, "LONGEST_REGISTER_S", 0.05)
    ring = make_ring()
    path = SHM / ring.name
    ring.close()
    for name, how, attempt in (
        (path, fcntl.LOCK_EX, lambda: Ring.attach(ring.name)),
        (SHM, fcntl.LOCK_SH, instance.sweep_dead),
    ):
        fd = os.open(name, os.O_RDONLY)
        fcntl.flock(fd, how)
        with pytest.raises(LockHeld, match=f"^{name}: another process has had it locked"):
            attempt()
        os.close(fd)
    monkeypatch.undo()
    Ring.attach(ring.name).close()
    instance.sweep_dead()


def test_a_closed_ring_is_stale_even_while_its_frames_are_held(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    ring.writer(0).write(1, b"held")
    [(_, _, body)] = ring.consumer(0, bell).read()
    pid = os.fork()
    if pid == 0:
        ring.close()  # a child's copy: the parent's use is not its to give up
        os._exit(0)
    os.waitpid(pid, 0)
    assert segment.in_use(ring.name)
    ring.close()
    assert segment.sweep(ring.name) == [ring.name]
    assert bytes(body) == b"held"


def test_a_dead_processs_doorbell_is_replaced_and_a_live_ones_refused(bell: Doorbell, name: str) -> None:
    with pytest.raises(LaneOwned, match="belongs to a live process"):
        Doorbell.create(bell.name)
    script = (
        "import os, signal, sys\n"
        "from outfeed.ring import Doorbell\n"
        "bell = Doorbell.create(sys.argv[1])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run_python(script, f"{name}.again")
    Doorbell.create(f"{name}.again").close()
    Doorbell.create(name.ljust(62, "x")).close()
    with pytest.raises(ValueError, match="has 63 characters; at most 62 fit"):
        Doorbell.create(name.ljust(63, "x"))


def test_a_fill_that_fails_leaves_nothing(name: str) -> None:
    def fail(memory: mmap.mmap) -> None:
        memory[0] = 1
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        segment.create(name, 4096, fail)
    assert segment.listed(name) == []


@pytest.mark.parametrize("when", ["before it is looked at", "before it is locked"])
def test_a_segment_removed_while_it_is_attached_is_not_there(
    name: str, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    segment.create(name, 4096, nothing)
    where, what = (os, "fstat") if when == "before it is looked at" else (segment, "lock")
    real = getattr(where, what)

    def remove_then_go_on(*words: object) -> object:
        segment.unlink(name)
        return real(*words)

    monkeypatch.setattr(where, what, remove_then_go_on)
    with pytest.raises(FileNotFoundError, match="removed"):
        segment.attach(name)


def test_a_segment_that_is_removed_while_it_is_looked_at_is_nobodys(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment.create(name, 4096, nothing).close()
    opened = os.open

    def remove_it(path: str, flags: int) -> int:
        os.unlink(path)
        return opened(path, flags)

    monkeypatch.setattr(os, "open", remove_it)
    assert not segment.in_use(name)
