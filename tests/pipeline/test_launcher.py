"""The launcher: an instance's life, its death in every way, and what is left afterwards."""

import argparse
import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from outfeed.ring import segment
from outfeed.ring._core import lib
from outfeed.ring.board import MAX_LANE_BYTES, MIN_LANE_BYTES, Role
from outfeed.ring.instance import Instance, leftovers
from outfeed.shards.launcher import add_instance_arguments, instance_options
from tokenizers import Tokenizer, models

from tests.eventually import until
from tests.instances import unique

from .commands import LAUNCHER, is_alive, is_running, launched, shard_pids, start_launcher

FORKLESS = str(Path(__file__).with_name("forkless.py"))
SLOW_START = str(Path(__file__).with_name("slow_start.py"))
LOCKED_OUT = """
import sys
from outfeed.ring.errors import LockHeld
from outfeed.ring.instance import Instance
from outfeed.shards import launcher

def remove(instance):
    raise LockHeld("/dev/shm", 30.0)

Instance.remove = remove
sys.exit(launcher.main(sys.argv[1:]))
"""


class Said:
    """What a process has written to stderr, while it runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        self._fd = process.stderr.fileno()
        os.set_blocking(self._fd, False)
        self._text = b""

    def so_far(self) -> str:
        with suppress(BlockingIOError):
            self._text += os.read(self._fd, 1 << 16)
        return self._text.decode()


def name() -> str:
    return unique("launch")


def links_to(file: Path) -> str:
    with suppress(FileNotFoundError):  # closed meanwhile
        return os.readlink(file)
    return ""


def held(part: str, instance: str, tokenizer: Path, gate: Path) -> "subprocess.Popen[str]":
    """Start a launcher that is held, while `gate` exists, as it makes its segments or its tokenizer's table.

    The gate names the process that waits.
    """
    slow = (sys.executable, SLOW_START, str(gate), part)
    launcher = start_launcher(instance, "--tokenizer", str(tokenizer), launcher=slow)
    until(f"its {part} to be made", lambda: gate.exists() or launcher.poll() is not None)
    return launcher


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_told_launcher_leaves_nothing(small_tokenizer: Path, how: signal.Signals) -> None:
    instance = name()
    options = ("--tokenizer", str(small_tokenizer), "--shards", "3", "--drain-seconds", "86400")
    with launched(instance, *options) as launcher:
        pids = shard_pids(instance)
        assert len(pids) == 3
        launcher.send_signal(how)
        out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, err
    assert f"instance '{instance}' is ready: 3 shard(s)" in out
    assert not any(map(is_alive, pids))
    assert leftovers(instance) == []


def test_a_launcher_told_to_end_while_it_starts_leaves_nothing(small_tokenizer: Path, tmp_path: Path) -> None:
    """Whichever of its threads the kernel gives the signal to."""
    instance, gate = name(), tmp_path / "gate"
    launcher = held("segments", instance, small_tokenizer, gate)
    assert leftovers(instance)
    launcher.send_signal(signal.SIGTERM)
    gate.unlink()
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, err
    assert "Traceback" not in err
    assert leftovers(instance) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_told_to_end_while_others_keep_it_from_starting_does(
    small_tokenizer: Path, how: signal.Signals
) -> None:
    """At once, and not when whoever has /dev/shm locked lets go of it, or half a minute is over."""
    instance, shm = name(), segment.folder()
    fcntl.flock(shm, fcntl.LOCK_SH)
    try:
        launcher = start_launcher(instance, "--tokenizer", str(small_tokenizer))
        files = Path(f"/proc/{launcher.pid}/fd")
        until("it to want the lock", lambda: any(links_to(file) == "/dev/shm" for file in files.iterdir()))
        launcher.send_signal(how)
        _, err = launcher.communicate(timeout=60)
    finally:
        os.close(shm)
    assert (launcher.returncode, err) == (0, "")
    assert leftovers(instance) == []


def test_what_compiles_the_tokenizer_leaves_being_told_to_end_to_its_launcher(
    small_tokenizer: Path, tmp_path: Path
) -> None:
    """`timeout`, or a service manager, tells the whole group: whoever hears it first is no fault."""
    instance, gate = name(), tmp_path / "gate"
    launcher = held("tokenizer", instance, small_tokenizer, gate)
    os.kill(int(gate.read_text(encoding="ascii")), signal.SIGTERM)
    gate.unlink()
    until("the instance to be ready", lambda: launcher.poll() is not None or is_running(instance))
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, err
    assert leftovers(instance) == []


def test_a_launcher_whose_tokenizer_takes_more_memory_than_there_is_says_so(
    small_tokenizer: Path, tmp_path: Path
) -> None:
    """The kernel kills the process that compiles it."""
    instance, gate = name(), tmp_path / "gate"
    launcher = held("tokenizer", instance, small_tokenizer, gate)
    os.kill(int(gate.read_text(encoding="ascii")), signal.SIGKILL)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 2
    assert "the process that compiled the tokenizer was killed (Killed); if a limit on memory" in err
    assert "Traceback" not in err
    assert leftovers(instance) == []


@pytest.mark.parametrize(
    "careless",
    [
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        "os.close(0), os.close(1), os.close(2)",
    ],
    ids=["ignores SIGCHLD", "closes streams"],
)
def test_a_careless_parent_is_no_matter(small_tokenizer: Path, careless: str) -> None:
    instance = name()
    code = f"import os, signal, sys; {careless}; os.execv(sys.argv[1], sys.argv[1:])"
    careless_one = (sys.executable, "-c", code, *LAUNCHER)
    options = ("--tokenizer", str(small_tokenizer), "--shards", "1")
    with launched(instance, *options, launcher=careless_one) as launcher:
        launcher.send_signal(signal.SIGINT)
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, err
    assert "Traceback" not in err
    assert leftovers(instance) == []


def test_a_killed_launcher_takes_its_shards_along_and_the_next_start_is_clean(small_tokenizer: Path) -> None:
    instance = name()
    with launched(instance, "--tokenizer", str(small_tokenizer)) as launcher:
        pids = shard_pids(instance)
        launcher.kill()
        until("the shards to die", lambda: not any(map(is_alive, pids)))
    assert leftovers(instance)
    with launched(instance, "--tokenizer", str(small_tokenizer)) as launcher:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(60)
    assert leftovers(instance) == []


def test_a_launcher_that_may_not_remove_what_it_made_leaves_it_to_the_next(small_tokenizer: Path) -> None:
    instance = name()
    with launched(
        instance, "--tokenizer", str(small_tokenizer), launcher=(sys.executable, "-c", LOCKED_OUT)
    ) as launcher:
        launcher.send_signal(signal.SIGINT)
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 0
    assert "stays there until an instance is started: /dev/shm: another process has had it locked" in err
    assert "Traceback" not in err
    with launched(name(), "--tokenizer", str(small_tokenizer)):
        assert leftovers(instance) == []


def test_killed_shards_are_replaced_and_the_log_has_each(small_tokenizer: Path) -> None:
    instance = name()
    with launched(instance, "--tokenizer", str(small_tokenizer)) as launcher:
        before = shard_pids(instance)
        os.kill(before[1], signal.SIGKILL)
        until("a new shard 1", lambda: len(now := shard_pids(instance)) == 2 and now[1] != before[1])
        assert shard_pids(instance)[0] == before[0]
        here = Instance.attach(instance)
        assert [row.epoch for row in here.board.rows(Role.SHARD)] == [0, 1]
        here.close()
        os.kill(before[0], signal.SIGKILL)
        deaths = [f"shard {shard} (pid {before[shard]}) was killed" for shard in (0, 1)]
        said = Said(launcher)
        until("the log to have both deaths", lambda: all(death in said.so_far() for death in deaths))
        launcher.send_signal(signal.SIGINT)
        launcher.wait(60)
    assert leftovers(instance) == []


def test_a_launcher_that_nobody_listens_to_any_more_goes_on(small_tokenizer: Path) -> None:
    """Whoever read its log has gone: what it says of a shard's death is lost, and nothing else."""
    instance = name()
    buffered = ("env", "-u", "PYTHONUNBUFFERED", *LAUNCHER)  # what could not be written is tried again then
    options = ("--tokenizer", str(small_tokenizer), "--shards", "1")
    with launched(instance, *options, launcher=buffered) as launcher:
        assert launcher.stderr is not None
        launcher.stderr.close()
        launcher.stderr = None
        for _ in range(3):
            (before,) = shard_pids(instance)
            os.kill(before, signal.SIGKILL)
            until("a new shard", lambda before=before: shard_pids(instance) not in ([before], []))  # type: ignore[misc]
        launcher.send_signal(signal.SIGINT)
        launcher.wait(60)
    assert leftovers(instance) == []


def test_an_idle_instance_uses_next_to_no_cpu(small_tokenizer: Path) -> None:
    instance = name()
    with launched(instance, "--tokenizer", str(small_tokenizer)) as launcher:
        pids = [launcher.pid, *shard_pids(instance)]
        before, began = _cpu_seconds(pids), time.monotonic()
        # Two seconds of its life: long enough that a busy wait would show as 100 times the bound.
        until("two seconds to pass", lambda: time.monotonic() - began > 2)
        used = (_cpu_seconds(pids) - before) / (time.monotonic() - began)
    assert used < 0.05


def _cpu_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokenizer", "/nowhere/tokenizer.json"], "no tokenizer at /nowhere"),
        (["--tokenizer", "/" + "long" * 1200], "(File name too long): give a tokenizer.json"),
        (["--tokenizer", "{broken}"], "is not a usable Hugging Face tokenizer.json"),
        (["--tokenizer", "{good}", "--shards", "0"], "outfeed-launch: --shards 0: give 1 to 64\n"),
        (["--tokenizer", "{good}", "--shards", "65"], "outfeed-launch: --shards 65: give 1 to 64\n"),
        (["--tokenizer", "{good}", "--readers", "65"], "outfeed-launch: --readers 65: give 1 to 64\n"),
        (["--tokenizer", "{good}", "--ranks", "-1"], "outfeed-launch: --ranks -1: give 1 to 64\n"),
        (
            ["--tokenizer", "{good}", "--step-bytes", "5000000"],
            "outfeed-launch: --step-bytes 5000000: give a power of two from 4096 to 1073741824 (1 GiB), "
            "e.g. 4194304\n",
        ),
        (
            ["--tokenizer", "{good}", "--egress-bytes", "0"],
            "outfeed-launch: --egress-bytes 0: give a power of two from 4096 to 1073741824 (1 GiB), "
            "e.g. 4096\n",
        ),
        (
            ["--tokenizer", "{good}", "--control-bytes", "2147483648"],
            "outfeed-launch: --control-bytes 2147483648: give a power of two from 4096 to 1073741824 "
            "(1 GiB), e.g. 1073741824\n",
        ),
        (
            ["--tokenizer", "{good}", "--heartbeat-limit", "nan"],
            "outfeed-launch: --heartbeat-limit nan: give more than 0 and at most 3600 seconds\n",
        ),
        (
            ["--tokenizer", "{good}", "--egress-bytes", "1073741824", "--shards", "64", "--readers", "64"],
            "outfeed-launch: instance '{instance}' needs 4398",
        ),
        (
            ["--tokenizer", "{good}", "--drain-seconds", "nan"],
            "argument --drain-seconds: 'nan' cannot be used: give 0 to 86400 seconds\n",
        ),
        (
            ["--instance", "No", "--tokenizer", "{good}"],
            "outfeed-launch: instance id 'No' is not usable: give 1 to 32 of",
        ),
        ([], "--tokenizer is required"),
    ],
    ids=[
        "missing",
        "long",
        "broken",
        "no shard",
        "too many shards",
        "too many readers",
        "no rank",
        "odd capacity",
        "small capacity",
        "large capacity",
        "no limit",
        "no room",
        "endless drain",
        "odd name",
        "no tokenizer",
    ],
)
def test_bad_input_is_said_in_one_message_and_leaves_nothing(
    small_tokenizer: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    instance = name()
    broken = tmp_path / "tokenizer.json"
    broken.write_text('{"model": ', encoding="utf-8")
    filled = [option.format(broken=broken, good=small_tokenizer) for option in options]
    launcher = start_launcher(instance, *filled)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 2
    assert message.replace("{instance}", instance) in err
    assert "Traceback" not in err
    assert leftovers(instance) == []


@pytest.mark.parametrize("limit", [1 << 19, 1 << 17], ids=["token table", "rings"])
def test_a_limit_on_files_that_something_of_the_instance_is_above_is_said(tmp_path: Path, limit: int) -> None:
    """The table of a large vocabulary is made in a process of its own, where the rings are there already."""
    instance, path = name(), tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({f"word{at}": at for at in range(40_000)}, unk_token="word0")).save(str(path))
    limited = f"""
import resource, sys
from outfeed.shards import launcher

resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
sys.exit(launcher.main(sys.argv[1:]))
"""
    launcher = start_launcher(
        instance, "--tokenizer", str(path), "--shards", "1", launcher=(sys.executable, "-c", limited)
    )
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 2
    assert "raise the limit (ulimit -f)" in err
    assert "Traceback" not in err
    assert leftovers(instance) == []


def test_a_launcher_that_may_open_no_files_says_so(small_tokenizer: Path) -> None:
    instance = name()
    limited = """
import argparse, resource, sys
from outfeed.shards import launcher

argparse.ArgumentParser().format_help()  # it imports more when it is used
with open("/dev/null") as file:
    limit = file.fileno() + 1  # one more than are open
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
sys.exit(launcher.main(sys.argv[1:]))
"""
    launcher = start_launcher(
        instance, "--tokenizer", str(small_tokenizer), launcher=(sys.executable, "-c", limited)
    )
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 2
    assert "raise the limit (ulimit -n" in err
    assert "Traceback" not in err


def test_a_shard_that_cannot_be_forked_is_tried_again(small_tokenizer: Path, tmp_path: Path) -> None:
    """No memory for a moment, or no process left for this user: that passes."""
    instance, refusals = name(), tmp_path / "refusals"
    refusals.touch()
    forkless = (sys.executable, FORKLESS, str(refusals))
    with launched(
        instance, "--tokenizer", str(small_tokenizer), "--shards", "1", launcher=forkless
    ) as launcher:
        before = shard_pids(instance)
        refusals.write_bytes(b"...")
        os.kill(before[0], signal.SIGKILL)
        until("a new shard", lambda: launcher.poll() is None and shard_pids(instance) != before)
        until("it to be ready", lambda: is_running(instance))
        assert refusals.read_bytes() == b""
        launcher.send_signal(signal.SIGINT)
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 0
    assert "could not be forked" in err
    assert leftovers(instance) == []


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_launcher_that_is_refused_every_process_gives_up_and_says_why(
    small_tokenizer: Path, tmp_path: Path, from_the_start: bool
) -> None:
    instance, refusals = name(), tmp_path / "refusals"
    refusals.write_bytes(b"." * 100 if from_the_start else b"")
    options = ("--tokenizer", str(small_tokenizer), "--shards", "1")
    forkless = (sys.executable, FORKLESS, str(refusals))
    if from_the_start:
        launcher = start_launcher(instance, *options, launcher=forkless)
        _, err = launcher.communicate(timeout=60)
    else:
        with launched(instance, *options, launcher=forkless) as launcher:
            refusals.write_bytes(b"." * 100)
            os.kill(shard_pids(instance)[0], signal.SIGKILL)
            _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == (2 if from_the_start else 1)
    assert "forked" in err
    assert "Resource temporarily unavailable" in err
    assert "Traceback" not in err
    assert leftovers(instance) == []


def test_the_bounds_of_a_lane_are_the_rings() -> None:
    assert (MIN_LANE_BYTES, MAX_LANE_BYTES) == (lib.RING_MIN_CAPACITY, lib.RING_MAX_CAPACITY)


def test_options_survive_being_written_as_a_command_line() -> None:
    parser = argparse.ArgumentParser()
    add_instance_arguments(parser)
    odd: dict[str, object] = {"tokenizer": "a b"}
    for action in parser._actions:
        if action.dest not in ("help", "tokenizer"):
            default = action.default
            odd[action.dest] = (
                "a file" if default is None else not default if default is False else default * 2
            )
    assert vars(parser.parse_args(instance_options(argparse.Namespace(**odd)))) == odd


def test_a_second_launcher_of_the_same_instance_is_refused_and_the_first_goes_on(
    small_tokenizer: Path,
) -> None:
    instance = name()
    with launched(instance, "--tokenizer", str(small_tokenizer)) as first:
        second = start_launcher(instance, "--tokenizer", str(small_tokenizer))
        _, err = second.communicate(timeout=60)
        assert second.returncode == 2
        assert f"instance '{instance}' is running already (launcher pid {first.pid})" in err
        assert is_running(instance)


def test_a_shard_that_cannot_start_takes_the_instance_down_and_says_so(small_tokenizer: Path) -> None:
    """The token table goes missing between the launcher's start and the shard's."""
    instance = name()
    with launched(instance, "--tokenizer", str(small_tokenizer), "--shards", "1") as launcher:
        Path(f"/dev/shm/outfeed-{instance}.tokens").unlink()
        os.kill(shard_pids(instance)[0], signal.SIGKILL)
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert "goes down: shard 0 died" in err
    assert leftovers(instance) == []
