"""Who owns something, and whether it lives: told also when nothing more can be opened."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest
from outfeed.ring.owner import Owner, space

from tests.limits import no_more_files


def test_the_living_and_the_dead_are_told_apart_without_a_file() -> None:
    me = Owner.me()
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child = Owner.of(other.pid)
    assert child is not None
    with no_more_files():
        with pytest.raises(OSError, match="Too many open files"), open("/proc/self/stat"):
            pass
        assert me.alive()
        assert child.alive()
    other.communicate()
    with no_more_files():
        assert not child.alive()
    assert not child.alive()


def test_a_process_that_has_ended_is_nobody_reaped_or_not() -> None:
    ending = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ending.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert Path(f"/proc/{ending.pid}/stat").exists()
    assert Owner.of(ending.pid) is None
    ending.wait()
    assert Owner.of(ending.pid) is None


def test_who_ends_while_it_is_looked_up_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as ending:
        child = Owner.of(ending.pid)
        assert child is not None

        def end_it(path: str, mode: str) -> IO[bytes]:
            file = open(path, mode)  # noqa: SIM115
            ending.communicate()
            return file

        monkeypatch.setattr("outfeed.ring.owner.open", end_it, raising=False)
        assert Owner.of(child.pid) is None
        assert not child.alive()


def test_a_process_is_itself_whatever_it_calls_itself() -> None:
    """Its name stands before its state, in parentheses, and need not have been chosen by its friends."""
    names_itself = "open('/proc/self/comm', 'w').write(') Z 1 ('); print(flush=True); open(0).read()"
    command = [sys.executable, "-c", names_itself]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as named:
        before = Owner.of(named.pid)
        assert named.stdout is not None
        named.stdout.readline()
        assert Path(f"/proc/{named.pid}/comm").read_text() == ") Z 1 (\n"
        assert before is not None
        assert Owner.of(named.pid) == before
        assert before.alive()
        named.communicate()


@pytest.mark.parametrize("word", [1, 1 << 42, (1 << 64) - 1, 0x0123456789ABCDEF])
def test_any_word_names_somebody_who_can_be_asked_after(word: int) -> None:
    owner = Owner.unpack(word)
    assert owner is not None
    assert not owner.alive()
    with no_more_files():
        assert owner.alive() in (True, False)


@pytest.mark.parametrize(
    ("error", "alive"), [(None, True), (PermissionError, True), (ProcessLookupError, False)]
)
def test_without_a_file_whoever_has_the_pid_is_taken_for_its_owner(
    monkeypatch: pytest.MonkeyPatch, error: type[OSError] | None, alive: bool
) -> None:
    """Another user's process too, which may not be signalled."""
    asked: list[tuple[int, int]] = []

    def kill(pid: int, number: int) -> None:
        asked.append((pid, number))
        if error is not None:
            raise error

    monkeypatch.setattr(os, "kill", kill)
    with no_more_files():
        assert Owner(7, 1).alive() == alive
    assert asked == [(7, 0)]


def test_a_space_is_a_pid_namespace_and_a_time_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"pid": (1 << 40) + 7, "time": (1 << 32) - 1}

    def stat(path: str) -> SimpleNamespace:
        kind = path.removeprefix("/proc/self/ns/")
        if kind not in there:
            raise FileNotFoundError(path)
        return SimpleNamespace(st_ino=there[kind])

    monkeypatch.setattr(os, "stat", stat)
    assert space() == 7 << 32 | 0xFFFFFFFF
    del there["time"]  # as with a kernel that has none
    assert space() == 7 << 32


@pytest.mark.parametrize(("pid", "start"), [(0, 1), (-1, 1), (1 << 22, 1), (1, -1), (1, 1 << 42)])
def test_what_fits_no_word_is_refused(pid: int, start: int) -> None:
    with pytest.raises(ValueError, match="does not fit a word"):
        Owner(pid, start).pack()


def test_every_owner_has_a_word_of_its_own() -> None:
    owners = [Owner(pid, start) for pid in (1, (1 << 22) - 1) for start in (0, 1, (1 << 42) - 1)]
    words = [owner.pack() for owner in owners]
    assert [Owner.unpack(word) for word in words] == owners
    assert 0 < min(words) <= max(words) < 1 << 64


def test_where_proc_is_not_mounted_a_process_cannot_tell_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str, _: str) -> IO[bytes]:
        raise FileNotFoundError(path)

    monkeypatch.setattr("outfeed.ring.owner.open", missing, raising=False)
    with pytest.raises(RuntimeError, match=f"/proc/{os.getpid()}/stat cannot be read: outfeed needs /proc"):
        Owner.me()
