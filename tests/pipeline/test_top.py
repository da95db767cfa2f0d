"""Top: what it shows of a real instance, whom it disturbs (nobody), and how it ends."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from outfeed.ring.board import Role
from outfeed.ring.instance import Instance, InstanceGone, leftovers

from tests.eventually import until
from tests.instances import unique

from .commands import SCRIPTS, launched


def top(*options: str, width: int = 80) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "top.py"), "--interval", "0.5", *options]
    wide = os.environ | {"COLUMNS": str(width)}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=wide)


def busy(instance: str) -> bool:
    """Whether requests are being answered."""
    try:
        here = Instance.attach(instance)
    except InstanceGone:
        return False
    live = here.board.row(Role.READER).get("live")
    here.close()
    return live > 0


def test_it_shows_an_instance_under_load_and_disturbs_nobody(small_tokenizer: Path, small_text: Path) -> None:
    instance = unique("top")
    command = [
        sys.executable, str(SCRIPTS / "demo.py"), "--json", "--instance", instance, "--requests", "64",
        "--steps-per-second", "80", "--tokenizer", str(small_tokenizer), "--text", str(small_text),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        until("the demo to stream", lambda: busy(instance) or demo.poll() is not None)
        with ThreadPoolExecutor() as both:
            seeing = both.submit(top, "--instance", instance, "--once", "--json")
            showing = both.submit(top, "--instance", instance, "--once")
        seen, shown = seeing.result(), showing.result()
        out, _ = demo.communicate(timeout=60)
    result = json.loads(out)
    assert (demo.returncode, result["verified"], result["leaked_segments"]) == (0, 64, 0)
    assert seen.returncode == 0, seen.stderr
    _check_sample(json.loads(seen.stdout), instance)
    assert shown.returncode == 0, shown.stderr
    for word in (instance, "tokens/s", "launcher", "scheduler0", "shard1", "reader0", "step:0", "egress0:1"):
        assert word in shown.stdout


def _check_sample(sample: dict[str, Any], instance: str) -> None:
    assert (sample["instance"], sample["phase"]) == (instance, "running")
    assert sample["interval_s"] >= 0.5
    assert sample["tokens_per_s"] > 0
    assert 0 < sample["live_requests"] <= 64
    assert (sample["restarts"], sample["quarantined"]) == (0, [])
    assert sum(sample["shard_share"]) == pytest.approx(1.0, abs=0.01)
    processes = {process["name"]: process for process in sample["processes"]}
    assert set(processes) == {"launcher", "scheduler0", "shard0", "shard1", "reader0"}
    for process in processes.values():
        assert process["alive"]
        assert process["state"] == "running"
        assert process["cpu_percent"] >= 0
        assert process["rss_bytes"] > 1 << 20
        assert 0 <= process["heartbeat_age_s"] < 30
    assert processes["reader0"]["live"] == sample["live_requests"]
    lanes = {(lane["ring"], lane["lane"]): lane for lane in sample["lanes"]}
    assert set(lanes) == {("request", 0), ("control", 0), ("step", 0), ("egress0", 0), ("egress0", 1)}
    assert lanes["step", 0]["frames_per_s"] > 0
    assert lanes["step", 0]["bytes_per_s"] > lanes["step", 0]["frames_per_s"]
    assert lanes["step", 0]["pid"] == processes["scheduler0"]["pid"]
    assert {c["pid"] for c in sample["consumers"] if c["ring"] == "step"} == {
        processes["shard0"]["pid"],
        processes["shard1"]["pid"],
    }


def test_restarts_and_missing_processes_are_seen(small_tokenizer: Path) -> None:
    instance = unique("top")
    with launched(instance, "--tokenizer", str(small_tokenizer), "--shards", "1"):
        first = json.loads(top("--instance", instance, "--once", "--json").stdout)
        pid = next(process["pid"] for process in first["processes"] if process["name"] == "shard0")
        os.kill(pid, signal.SIGKILL)

        def replaced() -> bool:
            sample = json.loads(top("--instance", instance, "--once", "--json").stdout)
            return bool(sample["restarts"] == 1 and sample["processes"][2]["pid"] not in (None, pid))

        until("the shard to be replaced", replaced)
        absent = next(process for process in first["processes"] if process["name"] == "reader0")
        assert (absent["alive"], absent["state"], absent["pid"]) == (False, "absent", None)
        assert absent["heartbeat_age_s"] is None


def test_a_screen_shows_the_columns_that_fit_it(small_tokenizer: Path) -> None:
    instance = unique("top")
    with launched(instance, "--tokenizer", str(small_tokenizer), "--shards", "1"):
        shown = {width: top("--instance", instance, "--once", width=width).stdout for width in (80, 108, 127)}
        _is_quiet_when_cut_short(instance)
    for width, text in shown.items():
        assert max(map(len, text.splitlines())) <= width
        assert "errors" in text
        assert ("aborts" in text) == (width >= 108)
        assert all((name in text) == (width >= 127) for name in ("stopped", "stale_rows"))


def _is_quiet_when_cut_short(instance: str) -> None:
    """As `top | head` does; without a terminal it prints one look after the other."""
    command = [sys.executable, str(SCRIPTS / "top.py"), "--interval", "0.05", "--instance", instance]
    cut = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert cut.stdout is not None
    assert cut.stderr is not None
    assert instance in cut.stdout.readline()
    cut.stdout.close()
    assert (cut.wait(60), cut.stderr.read()) in ((0, ""), (1, ""))  # rich's own way out is 1
    cut.stderr.close()


@contextmanager
def somebody_elses(instance: str) -> Iterator[None]:
    """An instance that runs and that we may not look at."""
    path = Path(f"/dev/shm/outfeed-{instance}.board")
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        file.write(b"board")
        file.flush()
        path.chmod(0o644)
        try:
            yield
        finally:
            path.unlink()


def test_a_name_is_needed_when_several_run_and_an_unknown_one_is_refused(small_tokenizer: Path) -> None:
    one, two = unique("top"), unique("top")
    options = ("--tokenizer", str(small_tokenizer), "--shards", "1")
    with launched(one, *options), launched(two, *options), somebody_elses(unique("top")):
        several = top("--once")
        unknown = top("--once", "--instance", "nobody")
    for refused in (several, unknown):
        assert refused.returncode == 2
        assert one in refused.stderr
        assert two in refused.stderr
        assert "Traceback" not in refused.stderr
    assert "choose one with --instance" in several.stderr
    assert "no instance 'nobody' is running" in unknown.stderr


def test_it_ends_with_its_instance_and_lets_go_of_it(small_tokenizer: Path) -> None:
    instance = unique("top")
    command = [sys.executable, str(SCRIPTS / "top.py"), "--json", "--interval", "0.1", "--instance", instance]
    with launched(instance, "--tokenizer", str(small_tokenizer), "--shards", "1") as launcher:
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline())["instance"] == instance
        launcher.kill()
        _, err = watching.communicate(timeout=60)
    assert watching.returncode == 1
    assert f"instance '{instance}' has ended" in err
    with launched(instance, "--tokenizer", str(small_tokenizer), "--shards", "1") as launcher:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(60)
    assert leftovers(instance) == []
