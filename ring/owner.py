"""Who owns a lane, a cursor or a row: a process, named so that a reused pid is not mistaken for it.

Knows /proc; must not know what is owned.
"""

import os
from dataclasses import dataclass
from typing import Self

_PID_BITS = 22  # Linux: PID_MAX_LIMIT is 2^22
_START_BITS = 64 - _PID_BITS  # clock ticks since boot: 1,400 years at 100 Hz
_DEAD_STATES = "ZXx"


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """Return fields 3 and 22 of /proc/<pid>/stat (proc_pid_stat(5)), or None without such a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Field 2 is the command in parentheses and may hold anything, parentheses and spaces included.
    fields = text[text.rindex(b")") + 2 :].split()
    return fields[0].decode(), int(fields[19])


def space() -> int:
    """Return a u64 for what pids and start times count in here: the pid and the time namespace, 0 for one
    that this kernel does not have.

    Owners of one space mean nothing in another: there, a live one looks dead.
    """
    return _namespace("pid") << 32 | _namespace("time")


def _namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino & 0xFFFFFFFF
    except FileNotFoundError:
        return 0


def _has_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@dataclass(frozen=True, slots=True)
class Owner:
    """A process: its pid and its start time in clock ticks since boot, as they count in this `space`."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """Return the owner that process `pid` is now, or None when there is none (a zombie is none)."""
        found = _state_and_start(pid)
        if found is None or found[0] in _DEAD_STATES:
            return None
        return cls(pid, found[1])

    @classmethod
    def me(cls) -> Self:
        """Return this process."""
        owner = cls.of(os.getpid())
        if owner is None:
            raise RuntimeError(f"/proc/{os.getpid()}/stat cannot be read: outfeed needs /proc mounted")
        return owner

    @classmethod
    def unpack(cls, word: int) -> Self | None:
        """Return the owner a u64 word names; None for 0, nobody. Any word is safe to unpack."""
        if word == 0:
            return None
        return cls(word >> _START_BITS, word & ((1 << _START_BITS) - 1))

    def pack(self) -> int:
        """Return pid (22 bits) and start time (42 bits) as a u64, never 0."""
        if not 0 < self.pid < 1 << _PID_BITS or not 0 <= self.start < 1 << _START_BITS:
            raise ValueError(f"{self} does not fit a word: pid below 2^22, start below 2^42")
        return self.pid << _START_BITS | self.start

    def alive(self) -> bool:
        """Whether this very process still runs. A zombie does not: it will never write again.

        When no file can be opened (this process's limit, or the machine's), a signal tells at least whether a
        process has the pid: so a dead one may seem to live until files can be opened, never the reverse.
        """
        try:
            found = _state_and_start(self.pid)
        except OSError:
            return _has_process(self.pid)
        return found is not None and found[0] not in _DEAD_STATES and found[1] == self.start
