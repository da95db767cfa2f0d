"""Run the project's commands as a user does, and wait for what they lead to."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from outfeed.ring.board import Phase, Role
from outfeed.ring.instance import Instance, InstanceGone, leftovers

from tests.eventually import LIMIT_S, until

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
# Small rings: an instance of the tests takes a few hundred KiB.
SMALL = [f"--{ring}-bytes={1 << 18}" for ring in ("request", "control", "step", "egress")]


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the demo to its end."""
    command = [sys.executable, str(SCRIPTS / "demo.py"), "--json", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


LAUNCHER = (sys.executable, "-m", "outfeed.shards.launcher")


def start_launcher(instance: str, *options: str, launcher: Sequence[str] = LAUNCHER) -> subprocess.Popen[str]:
    """Start a launcher and come back at once."""
    command = [*launcher, "--instance", instance, *SMALL, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def launched(
    instance: str, *options: str, launcher: Sequence[str] = LAUNCHER
) -> Iterator[subprocess.Popen[str]]:
    """Run a launcher whose instance is ready; whatever happens, it is gone afterwards."""
    process = start_launcher(instance, *options, launcher=launcher)
    try:
        until(f"instance {instance} to be ready", lambda: is_running(instance) or process.poll() is not None)
        assert process.poll() is None, process.communicate()[1]
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # it removes what it made, which a killed one cannot
            with suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT_S)
        process.kill()
        process.communicate()


@contextmanager
def served(instance: str, tokenizer: Path, *scheduler: str) -> Iterator[None]:
    """Run an instance with its scheduler: a command, to which the instance's name is added."""
    with launched(instance, "--tokenizer", str(tokenizer)) as launcher:
        process = subprocess.Popen([*scheduler, instance], stderr=subprocess.PIPE, text=True)
        try:
            until("the scheduler to attach", lambda: process.poll() is not None or has_scheduler(instance))
            assert process.poll() is None, process.communicate()[1]
            yield
            launcher.send_signal(signal.SIGINT)
            assert process.wait(LIMIT_S) == 0, "it ends with its instance"
        finally:
            process.kill()
            process.communicate()
    assert leftovers(instance) == []


def has_scheduler(instance: str) -> bool:
    """Whether a scheduler has attached to the instance."""
    here = Instance.attach(instance)
    alive = here.board.row(Role.SCHEDULER).alive
    here.close()
    return alive


def is_running(instance: str) -> bool:
    """Whether the instance is up: all its shards read their rings."""
    try:
        here = Instance.attach(instance)
    except InstanceGone:
        return False
    phase = here.board.phase
    here.close()
    return phase == Phase.RUNNING


def shard_pids(instance: str) -> list[int]:
    """Return the pids of an instance's shards."""
    here = Instance.attach(instance)
    owners = [row.owner for row in here.board.rows(Role.SHARD)]
    here.close()
    return [owner.pid for owner in owners if owner is not None]


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
