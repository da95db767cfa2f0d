"""The demo, run as a user runs it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from outfeed.ring.instance import leftovers

from tests.eventually import until
from tests.instances import unique

from .commands import SCRIPTS, demo, is_running, launched


def test_every_stream_is_right_with_a_small_tokenizer(small_tokenizer: Path, small_text: Path) -> None:
    done = demo(
        "--tokenizer", str(small_tokenizer), "--text", str(small_text), "--requests", "40", "--shards", "3",
        "--steps-per-second", "0", "--tokens-per-step", "16",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["requests"], result["verified"], result["mismatched"]) == (40, 40, 0)
    assert result["leaked_segments"] == 0
    assert len(result["shard_share"]) == 3
    assert min(result["shard_share"]) > 0


def test_every_stream_is_right_with_a_real_tokenizer_and_text() -> None:
    done = demo("--requests", "64", "--steps-per-second", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["verified"] == 64
    assert result["tokens"] > 5000
    assert 0 < result["step_to_sink_us"]["p50"] <= result["step_to_sink_us"]["p99"]


def test_every_logprob_that_was_asked_for_arrives(small_tokenizer: Path, small_text: Path) -> None:
    done = demo(
        "--tokenizer", str(small_tokenizer), "--text", str(small_text), "--requests", "20",
        "--steps-per-second", "0", "--tokens-per-step", "4", "--logprobs", "5",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["verified"], result["logprob_mismatches"]) == (20, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b"ab\xffcd", "not UTF-8: byte 0xff at offset 2"),
        (None, "cannot read"),
    ],
    ids=["empty", "blank", "not UTF-8", "missing"],
)
def test_a_text_that_cannot_be_replayed_is_refused(
    small_tokenizer: Path, tmp_path: Path, text: bytes | None, message: str
) -> None:
    path = tmp_path / "text.txt"
    if text is not None:
        path.write_bytes(text)
    done = demo("--tokenizer", str(small_tokenizer), "--text", str(path))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_more_logprobs_than_a_request_may_ask_for_are_refused() -> None:
    done = demo("--logprobs", "129")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--logprobs 129: give 0 to 128" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("option", "why"),
    [("--shards", "--shards 0: give 1 to 64"), ("--tokens-per-step", "0 tokens per step: give 1 to 1024")],
)
def test_what_one_of_its_processes_refuses_is_said_as_its_own(
    small_tokenizer: Path, small_text: Path, option: str, why: str
) -> None:
    done = demo("--tokenizer", str(small_tokenizer), "--text", str(small_text), option, "0")
    assert (done.returncode, done.stderr) == (2, f"demo: {why}\n")


def test_an_instance_that_runs_already_is_refused_and_left_alone(
    small_tokenizer: Path, small_text: Path
) -> None:
    instance = unique("demo")
    with launched(instance, "--tokenizer", str(small_tokenizer)):
        before = leftovers(instance)
        done = demo("--tokenizer", str(small_tokenizer), "--text", str(small_text), "--instance", instance)
        assert done.returncode == 2
        assert "is running already" in done.stderr
        assert leftovers(instance) == before


@pytest.mark.parametrize("how", [signal.SIGHUP, signal.SIGINT])
def test_one_that_is_told_to_end_leaves_nothing(
    small_tokenizer: Path, small_text: Path, how: signal.Signals
) -> None:
    """SIGHUP is what the end of its terminal sends; a shell has SIGINT ignored in its background jobs."""
    instance = unique("demo")
    background = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # these tests themselves may run under nohup
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", background, sys.executable, str(SCRIPTS / "demo.py"), "--json"]
    command += ["--instance", instance]
    command += ["--tokenizer", str(small_tokenizer), "--text", str(small_text), "--steps-per-second", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            until("it to run", lambda: is_running(instance) or running.poll() is not None)
            running.send_signal(how)
            _, err = running.communicate(timeout=60)
        finally:
            running.kill()
    assert (running.returncode, err) == (130, "demo: stopped\n")
    assert leftovers(instance) == []
