"""A short chaos run in the default suite; the long ones are `./scripts/chaos`'s own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .commands import SCRIPTS


@pytest.mark.parametrize(
    "options",
    [["--seed", "5", "--only", "shard"], ["--seed", "5"], ["--seed", "94", "--ranks", "2"]],
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


def test_a_tokenizer_that_is_not_there_is_said_in_one_line() -> None:
    command = [sys.executable, str(SCRIPTS / "chaos.py"), "--only", "shard", "--tokenizer", "/nowhere/at/all"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, line.partition(" (")[0]) == (2, "chaos: no tokenizer at /nowhere/at/all")
