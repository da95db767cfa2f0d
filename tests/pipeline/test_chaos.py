"""A short chaos run in the default suite; the long ones are `./scripts/chaos`'s own."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.eventually import LIMIT_S, until

from .commands import SCRIPTS


@pytest.mark.parametrize(
    "options",
    [["--seed", "5", "--only", "shard"], ["--seed", "5"], ["--seed", "20561", "--ranks", "2"]],
    ids=["shards", "everything", "ranks"],
)
def test_every_stream_is_identical_or_was_itself_killed(
    small_tokenizer: Path, small_text: Path, options: list[str]
) -> None:
    command = [sys.executable, str(SCRIPTS / "chaos.py"), "--json", "--kills", "4", *options]
    command += ["--tokenizer", str(small_tokenizer), "--text", str(small_text)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["shard_kills"] >= 4
    assert result["streams"] > 0
    assert result["identical"] + result["failed_cleanly"] == result["streams"]
    for name in (
        "hung",
        "mismatched",
        "double_ended",
        "leaked_requests",
        "leaked_segments",
        "leaked_processes",
    ):
        assert result[name] == 0, result
    if "--only" in options:
        assert result["identical"] == result["streams"]


def gateways_of(chaos: int) -> list[int]:
    """The pids of a run's gateway processes."""
    children = Path(f"/proc/{chaos}/task/{chaos}/children").read_text().split()
    return [int(pid) for pid in children if b"chaos_gateway" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_gateway_that_ends_by_itself_is_said_with_its_last_words(
    small_tokenizer: Path, small_text: Path
) -> None:
    """Who waits for it to be ready would wait in vain, and not learn why."""
    command = [sys.executable, str(SCRIPTS / "chaos.py"), "--seconds", "600", "--only", "shard"]
    command += ["--tokenizer", str(small_tokenizer), "--text", str(small_text)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as chaos:
        try:
            until("a gateway to start", lambda: chaos.poll() is not None or bool(gateways_of(chaos.pid)))
            os.kill(gateways_of(chaos.pid)[0], signal.SIGKILL)
            _, said = chaos.communicate(timeout=LIMIT_S)
        finally:
            chaos.terminate()
    assert chaos.returncode == 1
    assert re.match(r"chaos: gateway 0 ended with status -9: ", said), said


def test_a_tokenizer_that_is_not_there_is_said_in_one_line() -> None:
    command = [sys.executable, str(SCRIPTS / "chaos.py"), "--only", "shard", "--tokenizer", "/nowhere/at/all"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, line.partition(" (")[0]) == (2, "chaos: no tokenizer at /nowhere/at/all")


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--shards=0", "'0' cannot be used: give a whole number from 1 to 64"),
        ("--ranks=65", "'65' cannot be used: give a whole number from 1 to 64"),
        ("--kills=0", "'0' cannot be used: give a whole number from 1 to 1,000,000"),
        ("--seconds=nan", "'nan' cannot be used: give a number from 0.0 to "),
        ("--text=/nowhere/at/all", "cannot read the text /nowhere/at/all: No such file or directory; give"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is(option: str, why: str) -> None:
    command = [sys.executable, str(SCRIPTS / "chaos.py"), "--only", "shard", option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
