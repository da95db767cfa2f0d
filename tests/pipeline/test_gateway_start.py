"""A gateway process that cannot start says why in one line; one whose instance ends does not outlive it."""

import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from outfeed.gateway import front
from outfeed.gateway.model import load_tokenizer
from outfeed.gateway.readers import attach_reader
from outfeed.gateway.server import listen
from outfeed.ring.instance import InstanceGone, leftovers

from tests.eventually import until
from tests.instances import unique

from .commands import is_alive, launched


def refused(instance: str, port: int = 0) -> str:
    command = [sys.executable, "-m", "outfeed.gateway", "--instance", instance, "--port", str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    said: str = done.stderr.splitlines()[-1]
    return said


@contextmanager
def serving(instance: str) -> Iterator[subprocess.Popen[str]]:
    """Run a gateway that serves."""
    command = [sys.executable, "-m", "outfeed.gateway", "--instance", instance, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as gateway:
        try:
            assert gateway.stdout is not None
            assert "serves on http://" in gateway.stdout.readline()
            yield gateway
        finally:
            gateway.kill()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read tokenizer file {file}: No such file or directory; "),
        ("{}", "{file} (2 bytes) is not a usable Hugging Face tokenizer.json: "),
        # The library crashes at it, instead of raising an exception.
        (
            '{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}',
            "{file} (71 bytes) is not ",
        ),
    ],
    ids=["missing", "no tokenizer", "a crash"],
)
def test_a_tokenizer_that_it_cannot_load(
    small_tokenizer: Path, tmp_path: Path, content: str | None, says: str
) -> None:
    """Its container may have another file under that path, or none, or somebody wrote over it since."""
    instance, file = unique("gateway"), tmp_path / "tokenizer.json"
    shutil.copy(small_tokenizer, file)
    with launched(instance, "--tokenizer", str(file), "--shards", "1") as launcher:
        file.unlink()
        if content is not None:
            file.write_text(content, encoding="utf-8")
        said = refused(instance)
        launcher.send_signal(signal.SIGINT)
        launcher.wait(60)
    assert said.startswith(f"outfeed-gateway: {says.format(file=file)}")
    assert said.endswith("the file that the launcher was given, under the same path")


def test_an_instance_that_ends_while_it_loads_the_tokenizer(
    small_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes a second for a large one. The board is open by then, and the rings are not yet."""
    instance = unique("gateway")
    with launched(instance, "--tokenizer", str(small_tokenizer), "--shards", "1") as launcher:

        def load_slowly(path: str) -> Any:
            launcher.send_signal(signal.SIGINT)
            launcher.wait(60)
            return load_tokenizer(path)

        monkeypatch.setattr(front, "load_tokenizer", load_slowly)
        with pytest.raises(InstanceGone, match=f"instance '{instance}' has ended"):
            attach_reader(instance)
    assert leftovers(instance) == []


def test_a_number_or_a_port_that_another_process_has(small_tokenizer: Path) -> None:
    """On a shared port the kernel would give each a part of the connections, and a client either model."""
    instance = unique("gateway")
    with launched(instance, "--tokenizer", str(small_tokenizer), "--shards", "1"):
        with listen("127.0.0.1", 0) as other:
            other.listen()
            port = other.getsockname()[1]
            said = refused(instance, port)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as taken:
            taken.bind(f"\0outfeed-{instance}.gateway0".encode())
            sibling = refused(instance)
    assert said.startswith(f"outfeed-gateway: cannot listen on 127.0.0.1 port {port}: another program does, ")
    assert sibling.startswith(
        "outfeed-gateway: cannot open the socket to the other gateways: Address already in use; "
    )


def test_it_ends_with_its_instance_and_the_next_one_is_free_to_start(small_tokenizer: Path) -> None:
    instance = unique("gateway")
    options = ("--tokenizer", str(small_tokenizer), "--shards", "1")
    with launched(instance, *options) as launcher, serving(instance) as gateway:
        launcher.kill()
        _, err = gateway.communicate(timeout=60)
    assert gateway.returncode == 1
    assert f"outfeed-gateway: instance '{instance}' is gone: ended with it" in err.splitlines()
    with launched(instance, *options) as launcher:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(60)
    assert leftovers(instance) == []


def test_one_that_is_told_to_stop_with_its_instance_has_not_failed(small_tokenizer: Path) -> None:
    """A Ctrl-C for all of a terminal, or a machine that shuts down: whoever watches takes 1 for a failure."""
    instance = unique("gateway")
    options = ("--tokenizer", str(small_tokenizer), "--shards", "1")
    with launched(instance, *options) as launcher, serving(instance) as gateway:
        gateway.send_signal(signal.SIGSTOP)  # a busy machine: it hears of both at once
        gateway.send_signal(signal.SIGINT)
        launcher.send_signal(signal.SIGINT)
        launcher.wait(60)
        gateway.send_signal(signal.SIGCONT)
        _, err = gateway.communicate(timeout=60)
    assert gateway.returncode == 0, err
    assert "ended with it" not in err
    assert leftovers(instance) == []


def test_it_takes_as_many_clients_as_the_system_allows_and_dies_with_who_started_it(
    small_tokenizer: Path,
) -> None:
    """Whatever the limit of the shell, and however its parent ends: `serve` may be killed, too."""
    instance = unique("gateway")
    parent = (
        "import os, resource, subprocess, sys\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "gateway = subprocess.Popen([*sys.argv[1:], '--die-with-parent', str(os.getpid())])\n"
        "print(gateway.pid, flush=True)\n"
        "gateway.wait()\n"
    )
    command = [sys.executable, "-m", "outfeed.gateway", "--instance", instance, "--port", "0"]
    with (
        launched(instance, "--tokenizer", str(small_tokenizer), "--shards", "1"),
        subprocess.Popen(
            [sys.executable, "-c", parent, *command], stdout=subprocess.PIPE, text=True
        ) as starter,
    ):
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert "serves on http://" in starter.stdout.readline()
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        assert soft == hard
        starter.kill()
        until("the gateway to die", lambda: not is_alive(pid))


def test_a_ctrl_c_while_it_starts_is_no_traceback(small_tokenizer: Path) -> None:
    instance = unique("gateway")
    pressed = (
        "import sys\n"
        "from outfeed.gateway import front, server\n"
        "def load(path):\n"
        "    raise KeyboardInterrupt\n"
        "front.load_tokenizer = load\n"
        "sys.exit(server.main(sys.argv[1:]))\n"
    )
    with launched(instance, "--tokenizer", str(small_tokenizer), "--shards", "1") as launcher:
        command = [sys.executable, "-c", pressed, "--instance", instance, "--port", "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        launcher.send_signal(signal.SIGINT)
        launcher.wait(60)
    assert (done.returncode, done.stderr) == (130, "")
    assert leftovers(instance) == []
