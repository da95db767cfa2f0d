"""A doorbell's name: whose it is, who takes it over, and what goes with it."""

import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from outfeed.ring import Doorbell, LaneOwned, Owner, RingClosed, segment
from outfeed.ring._core import ffi, lib

from tests.limits import locks

SHM = Path("/dev/shm")


def left_by_the_dead(name: str) -> Path:
    """A doorbell as a killed process leaves it."""
    pid = os.fork()
    if pid == 0:
        kept = None
        try:
            kept = Doorbell.create(name)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
        del kept
    os.waitpid(pid, 0)
    assert (SHM / name).exists()
    return SHM / name


def owner_of(path: Path) -> Owner | None:
    return Owner.unpack(int.from_bytes(path.read_bytes()[8:16], "little"))


@pytest.mark.parametrize("replaced", [False, True])
def test_who_closes_a_doorbell_removes_no_later_one_of_its_name(name: str, replaced: bool) -> None:
    bell = Doorbell.create(name)
    segment.unlink(name)
    if replaced:
        later = segment.create(name, lib.RING_BELL_BYTES, lambda _: None)
    bell.close()
    assert (SHM / name).exists() == replaced
    if replaced:
        later.close()


def test_a_doorbell_that_is_removed_as_it_is_taken_over_is_made_anew(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, alive = left_by_the_dead(name), Owner.alive

    def remove_it(owner: Owner) -> bool:
        monkeypatch.setattr(Owner, "alive", alive)
        path.unlink()
        return False

    monkeypatch.setattr(Owner, "alive", remove_it)
    with Doorbell.create(name):
        assert owner_of(path) == Owner.me()


@pytest.mark.parametrize("found", ["the dead's", "nobody's"])
def test_a_doorbell_that_is_taken_over_has_a_new_owner(name: str, found: str) -> None:
    path = left_by_the_dead(name)
    if found == "nobody's":
        with path.open("r+b") as file:
            file.seek(8)
            file.write(bytes(8))
    with Doorbell.create(name):
        assert owner_of(path) == Owner.me()
    assert not path.exists()


@pytest.mark.parametrize(
    "found",
    [b"", b"no doorbell" * 100, bytes(lib.RING_BELL_BYTES)],
    ids=["nothing in it", "something else in it", "zeros in it"],
)
def test_a_file_that_is_no_doorbell_and_nobodys_makes_room_for_one(name: str, found: bytes) -> None:
    file = SHM / name
    file.write_bytes(found)
    file.chmod(0o600)
    with Doorbell.create(name) as bell:
        assert owner_of(file) == Owner.me()
        made = file.read_bytes()
        assert lib.bell_check(ffi.from_buffer(made), len(made)) == lib.RING_OK, "who writes will ring it"
        bell.ring()
    assert not file.exists()


def test_of_two_that_take_a_doorbell_over_one_has_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, other, alive = left_by_the_dead(name), Owner.of(os.getppid()), Owner.alive
    assert other is not None

    def is_faster(owner: Owner) -> bool:
        lives = alive(owner)
        if not lives:
            with file.open("r+b") as opened:
                opened.seek(8)
                opened.write(other.pack().to_bytes(8, "little"))
        return lives

    monkeypatch.setattr(Owner, "alive", is_faster)
    with pytest.raises(LaneOwned, match=f"belongs to a live process .{other.pid}."):
        Doorbell.create(name)
    assert owner_of(file) == other


def test_who_is_refused_or_has_closed_its_doorbell_keeps_none_in_use(name: str) -> None:
    before = locks()
    bell = Doorbell.create(name)
    mine = locks()
    assert mine > before
    with pytest.raises(LaneOwned) as refused:
        Doorbell.create(name)
    assert locks() == mine, f"while {refused!r} is held, with all that was made"
    bell.close()
    assert locks() == before
    with pytest.raises(RingClosed, match=f"'{name}' is closed"):
        bell.ring()


def test_a_doorbell_without_memory_leaves_no_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = {one: getattr(lib, one) for one in dir(lib)}
    without = SimpleNamespace(**{**core, "bell_open": lambda *_: ffi.NULL})
    monkeypatch.setattr("outfeed.ring.doorbell.lib", without)
    with pytest.raises(MemoryError, match=name):
        Doorbell.create(name)
    assert not (SHM / name).exists()


def test_a_forked_child_that_closes_its_copy_leaves_its_parents_doorbell(name: str) -> None:
    with Doorbell.create(name) as bell:
        child = multiprocessing.get_context("fork").Process(target=bell.close)
        child.start()
        child.join()
        assert child.exitcode == 0
        assert (SHM / name).exists()
        assert segment.in_use(name)
        bell.ring()
    assert not (SHM / bell.name).exists()
