"""A gateway process that cannot start says why in one line."""

import itertools
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from .commands import launched, unique

NUMBERS = itertools.count()


def refused(instance: str) -> str:
    command = [sys.executable, "-m", "outfeed.gateway", "--instance", instance, "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    said: str = done.stderr.splitlines()[-1]
    return said


def test_a_tokenizer_that_it_does_not_see(small_tokenizer: Path, tmp_path: Path) -> None:
    instance, file = unique("gateway", NUMBERS), tmp_path / "tokenizer.json"
    shutil.copy(small_tokenizer, file)
    with launched(instance, "--tokenizer", str(file), "--shards", "1") as launcher:
        file.unlink()
        said = refused(instance)
        launcher.send_signal(signal.SIGINT)
        launcher.wait(60)
    assert said.startswith(f"gateway: cannot load the instance's tokenizer {file}: ")
    assert said.endswith("the file that the launcher was given, under the same path")


def test_a_number_that_another_process_has(small_tokenizer: Path) -> None:
    instance = unique("gateway", NUMBERS)
    with (
        launched(instance, "--tokenizer", str(small_tokenizer), "--shards", "1"),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as taken,
    ):
        taken.bind(f"\0outfeed-{instance}.gateway0".encode())
        said = refused(instance)
    assert said.startswith("gateway: cannot open the socket to the other gateways: Address already in use; ")
