"""The end of a gateway process: what a signal, or the end of its instance, does to who is being served."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from outfeed.gateway.limits import Limits

from .conftest import LIMIT_S, Raw, Serve, eventually

ROOT = Path(__file__).parents[2]
# A gateway process over a fake backend, whose streams say a word and go on. Its instance is there for as long
# as the file is; its exit status is 0 if it was told to stop.
SCRIPT = """
import sys
from pathlib import Path
import uvloop
from outfeed.gateway.app import App
from outfeed.gateway.server import Serving, serve
from outfeed.ring import logs
from tests.gateway.fake import FakeBackend

logs.start("test")
host, drain, instance, end = sys.argv[1:]

def play(played):
    played.say("begun")
    if end == "ends":
        played.end("ended")

app = App(FakeBackend(script=play))
serving = Serving(host, 0, float(drain))
sys.exit(not uvloop.run(serve(app, serving, "ready: ", alive=Path(instance).exists)))
"""


class Gateway:
    """A gateway process that serves, and what it says."""

    def __init__(self, process: subprocess.Popen[str], instance: Path) -> None:
        self.process = process
        self.instance = instance
        assert process.stdout is not None
        self.ready = process.stdout.readline()
        found = re.search(r":(\d+)$", self.ready)
        assert found
        self.port = int(found[1])

    def stream(self) -> Raw:
        """A client of a stream that has begun."""
        client = Raw(self.port)
        client.post("/generate", {"text": "x", "stream": True})
        client.until(b"begun")
        return client

    def ended(self) -> tuple[int, list[str]]:
        """Its exit status, and how many prompts it said that it left unfinished, if it did."""
        _, err = self.process.communicate(timeout=LIMIT_S)
        assert "Traceback" not in err
        return self.process.returncode, re.findall(r"stopping with (\d+) prompts unfinished", err)


@contextmanager
def gateway(tmp_path: Path, drain: float, host: str = "127.0.0.1", end: str = "") -> Iterator[Gateway]:
    instance = tmp_path / "instance"
    instance.touch()
    command = [sys.executable, "-c", SCRIPT, host, str(drain), str(instance), end]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Gateway(process, instance)
        finally:
            process.kill()


def drains(running: Gateway) -> bool:
    """Whether it says that it takes nothing new."""
    with closing(Raw(running.port)) as client:
        client.send(b"GET /health HTTP/1.0\r\n\r\n")
        return b"draining" in client.rest()


@pytest.mark.parametrize("by", ["a second signal", "the time is over", "its instance goes"])
def test_a_drain_is_over_when_it_has_to_be_and_says_what_was_left(tmp_path: Path, by: str) -> None:
    with gateway(tmp_path, 0.5 if by == "the time is over" else 3600.0) as running:
        with closing(running.stream()) as client:
            running.process.send_signal(signal.SIGTERM)
            if by != "the time is over":
                eventually(lambda: drains(running), "it to drain")
            if by == "a second signal":
                running.process.send_signal(signal.SIGINT)
            elif by == "its instance goes":
                running.instance.unlink()
            rest = client.rest()
        assert b'"code":503' in rest
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert running.ended() == (0, ["1"])


def test_a_drain_that_nobody_is_left_in_is_over(tmp_path: Path) -> None:
    with gateway(tmp_path, 3600.0, end="ends") as running:
        with closing(running.stream()) as client:
            running.process.send_signal(signal.SIGTERM)
            client.rest()
        assert running.ended() == (0, [])


@pytest.mark.parametrize("told", [True, False])
def test_who_is_served_when_it_ends_at_once_hears_of_it(tmp_path: Path, told: bool) -> None:
    with gateway(tmp_path, 3600.0) as running:
        with closing(running.stream()) as client:
            if told:
                running.process.send_signal(signal.SIGINT)
            else:
                running.instance.unlink()
            assert b'"code":503' in client.rest()
        assert running.ended() == (0 if told else 1, [])


def test_an_ipv6_address_is_shown_as_a_url_has_it(tmp_path: Path) -> None:
    with gateway(tmp_path, 0.0, host="::1") as running:
        assert running.ready.startswith(f"ready: http://[::1]:{running.port}")
        socket.create_connection(("::1", running.port), timeout=LIMIT_S).close()
        running.process.send_signal(signal.SIGTERM)
        assert running.ended() == (0, [])


def test_deadlines_are_looked_at_all_along(serve: Serve) -> None:
    running = serve(limits=Limits(idle_s=0.1))
    client = running.raw()
    client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    client.until(b"\r\n\r\n")
    assert client.rest() == b"", "it was idle for too long"


def test_a_stop_does_not_wait_for_who_reads_nothing(serve: Serve) -> None:
    text = "x" * (16 << 20)  # more than the kernel keeps for a client that reads nothing
    running = serve(lambda played: played.end(text), sink_bytes=2 * len(text))
    client = running.raw()
    client.post("/generate", {"text": "x"})
    eventually(lambda: running.server.connections.sending, "the answer to wait for its client")
    running.call(running.server.stop())
    assert not running.server.connections.open
