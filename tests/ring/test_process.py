"""A process's own life: what it does about a careless parent, about signals and about limits."""

import argparse
import errno
import os
import subprocess
import sys

import pytest
from outfeed.ring.process import drain_seconds, fail, refusal

SAYS = """
import os, signal, sys
from outfeed.ring.process import OWN_SIGNALS, settle
settle()
opened = os.open(os.devnull, os.O_RDONLY)
blocked = sorted(OWN_SIGNALS & signal.pthread_sigmask(signal.SIG_BLOCK, ()))
print("said to nobody"), print("this too", file=sys.stderr)
inherited = [os.get_inheritable(fd) for fd in range(3)] == [True] * 3
found = (opened > 2, inherited, blocked, int(signal.getsignal(signal.SIGCHLD)), sys.stdin.read())
os.write(int(sys.argv[1]), repr(found).encode())
"""
CARELESS = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
os.close(0), os.close(1), os.close(2)
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""


def test_what_a_careless_parent_left_is_undone() -> None:
    read, write = os.pipe()
    command = [sys.executable, "-c", CARELESS, SAYS, str(write)]
    done = subprocess.run(command, pass_fds=[write], timeout=60, check=False)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as told:
        assert told.read() == repr((True, True, [], 0, ""))
    assert done.returncode == 0


def test_a_character_that_the_terminal_lacks_is_no_error() -> None:
    script = "from outfeed.ring.process import settle; settle(); print('na\\xefve \\u2026')"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "na?ve ?\n"


def test_a_line_that_nobody_reads_ends_nothing() -> None:
    code = "from outfeed.ring.process import say\nfor _ in range(3): say('x' * 1000)"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("limit", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFBIG])
def test_a_limit_of_the_system_is_said_with_a_remedy(limit: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert fail("launch", OSError(limit, os.strerror(limit))) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"launch: [Errno {limit}] {os.strerror(limit)}: ")
    assert "raise" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "86401", "soon", ""])
def test_a_drain_without_end_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be used: give 0 to 86400 seconds"):
        drain_seconds(text)
    assert [drain_seconds(text) for text in ("0", "2.5", "86400")] == [0, 2.5, 86400]


def test_any_other_error_of_the_system_is_raised_again() -> None:
    error = OSError(errno.EIO, "Input/output error")
    assert refusal(error) is None
    with pytest.raises(OSError, match="Input/output error"):
        fail("launch", error)


def test_what_is_loaded_is_passed_over_by_garbage_collections() -> None:
    """In a process of its own: this one's collections are the tests'."""
    script = (
        "import gc; from outfeed.ring.process import keep_what_is_loaded; usual = gc.get_threshold(); "
        "keep_what_is_loaded(); print(gc.get_freeze_count() > 1000, len(gc.get_objects()) < 1000, "
        "gc.isenabled(), gc.get_threshold()[:2] == usual[:2], gc.get_threshold()[2] > usual[2])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 5


def test_a_process_with_many_files_hears_its_signals() -> None:
    """A careless parent may have left them; or it has that many rings and clients."""
    script = (
        "import os, resource, signal; from outfeed.ring.process import Signals, raise_file_limit; "
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE); "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard)); raise_file_limit(); "
        "many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]; "
        "signals = Signals(signal.SIGTERM, signal.SIGHUP); print(signals.wait(0)); "
        "os.kill(os.getpid(), signal.SIGHUP); os.kill(os.getpid(), signal.SIGTERM); "
        "print(*sorted([signals.wait(60).name, signals.wait(60).name])); print(signals.wait(0.001))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "SIGHUP", "SIGTERM", "None"]


def test_a_process_whose_parent_is_dead_already_ends() -> None:
    """Whoever has adopted it is not who started it: the kernel will not tell of that one's death."""
    script = (
        "import os; from outfeed.ring.process import die_with_parent; die_with_parent(%s); print('lives')"
    )
    for parent, ended in (("os.getppid()", (0, "lives\n")), ("os.getpid()", (1, ""))):
        done = subprocess.run(
            [sys.executable, "-c", script % parent], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == ended
