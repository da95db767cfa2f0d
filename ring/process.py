"""What a process of an instance does about its own life: starts from a known state, hears signals, speaks,
and dies when its parent dies.

Must not know what the process is for.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import gc
import io
import os
import resource
import select
import signal
import sys
from typing import Final, Protocol

_PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None, use_errno=True)

MAX_DRAIN_S: Final = 86_400
FULL_COLLECTION_AFTER: Final = 100
"""Collections of the middle generation before one of everything; Python's default is 10."""
OWN_SIGNALS: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD})
"""Signals that a process of an instance hears, each for itself."""

_REMEDIES: Final = {
    errno.EMFILE: "this process may open too few files: raise the limit (ulimit -n, LimitNOFILE=), or ask "
    "for fewer readers or shards",
    errno.EFBIG: "this process may not make files that large: raise the limit (ulimit -f)",
    errno.ENFILE: "the machine has too few files to open: raise fs.file-max",
    errno.ENOMEM: "there is too little memory for this process: raise its limit (ulimit -v, the "
    "container's), or ask for smaller or fewer lanes",
}
"""What to do when the system refuses something, for what an instance meets in narrow places."""


def settle() -> None:
    """Undo what a careless parent leaves to its children; call it first in a process's `main`.

    Standard streams that are closed become /dev/null, or the next file opened, which may be a ring, would
    take their number, and whatever a library says would be written into it. Signals are heard again that the
    parent had blocked; SIGCHLD is not ignored, which would lose how a child ended. A character that the
    terminal's encoding lacks becomes a `?`.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: its number is the lowest that is free
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OWN_SIGNALS)


def keep_what_is_loaded() -> None:
    """Let garbage collections pass over what is there when a process begins to serve; call it just before.

    A collection of everything stops every thread, and so every stream, for as long as it takes to look at
    all objects. What was loaded stays. Requests leave no circles, so a full collection has nothing to find
    but what an accident left, and comes ten times more seldom than usual.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION_AFTER)


def drain_seconds(text: str) -> float:
    """Read how long SIGTERM lets requests finish, for argparse: a nan would be a drain without end."""
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) <= MAX_DRAIN_S:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} cannot be used: give 0 to {MAX_DRAIN_S} seconds")


class HasFileno(Protocol):
    """An open file, as `select` wants it."""

    def fileno(self) -> int:
        """Return its descriptor."""


class Signals:
    """Signals as something to wait for. One per process, made in its main thread.

    Handlers and a pipe, not a mask and sigwait: libraries (a BLAS, say) start threads that have not blocked
    anything, and the kernel gives a process's signal to any thread that takes it.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, lambda *_: None)

    def wait(self, seconds: float) -> signal.Signals | None:
        """Return the next signal, or None after `seconds`."""
        if not readable(self._read, seconds):
            return None
        return signal.Signals(os.read(self._read, 1)[0])


def readable(file: int | HasFileno, seconds: float) -> bool:
    """Wait at most `seconds` until something can be read, the end too; whether it can."""
    poll = select.poll()  # not `select`, which takes no descriptor above 1023
    poll.register(file, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def say(line: str) -> None:
    """Print a line on stdout. That nobody reads it, or it cannot be written, is no reason to end."""
    try:
        print(line, flush=True)
    except OSError:
        # What is left in the buffer must not be tried again at exit.
        with contextlib.suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)


def fail(command: str, error: OSError) -> int:
    """Say what limit of the system a command met and return its exit status; raise what is none again."""
    if (why := refusal(error)) is None:
        raise error
    print(f"{command}: {why}", file=sys.stderr)
    return 2


def refusal(error: OSError) -> str | None:
    """Write what the system refused as one line, with what to do; None when it is no limit that we know."""
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{error}: {remedy}" if remedy else None


def raise_file_limit() -> None:
    """Let this process, and those it starts, have as many files and connections open as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process (SIGKILL) when its parent dies; exit if it is dead already.

    Call it early in the new process; `parent` is the pid that started it. The kernel watches the thread
    that did the fork, so start processes from a thread that lives as long as the parent does.

    Raises:
        OSError: the kernel refused.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)
