"""Thousands of idle streams, clients that drop, and clients that mean no good, on a running `serve`.

In turn, on one gateway process:

- `--streams` streams are opened and stay idle (each rank of the replay scheduler runs one request at a time,
  the others wait for it): the gateway's memory is read when all are there and again after `--seconds`;
- single clients drop: how long until their abort has reached the scheduler;
- all drop at once: as many aborts at the scheduler, nothing live afterwards in any process, every file given
  back;
- slow clients send a byte now and then while others ask for the gateway's health.

`ok` is: no error, no growth beyond `GROWTH_BYTES`, an abort for every drop and no more, nothing left. Of
several ranks each must have had streams, and have none left.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import resource
import select
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from options import between
from outfeed.ring.board import MAX_EACH, BoardRow, Role
from outfeed.ring.instance import Instance, leftovers

SERVE = Path(__file__).resolve().parent.parent / "serve.py"
LIMIT_S = 60.0
GROWTH_BYTES = 4 << 20
DROPS = 50
SLOW = 500
OPEN_AT_ONCE = 200
MAX_STREAMS = 60_000
HEAD_LIMIT_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this stress's options."""
    parser.add_argument(
        "--streams", type=between(1, MAX_STREAMS), default=5000, help="idle streams (default 5000)"
    )
    parser.add_argument(
        "--ranks", type=between(1, MAX_EACH), default=1, help="scheduler processes (default 1)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Do all of it; return what was seen."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < args.streams + 1000:
        return {"ok": False, "why": f"only {hard} files may be open (ulimit -Hn): lower --streams"}
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    name = f"http-stress-{os.getpid()}"
    with serving(name, args.ranks) as (port, here):
        seen = Seen(port, here)
        found = seen.idle(args.streams, args.seconds) | seen.slow(random.Random(args.seed))
    found["left_in_shm"] = len(leftovers(name))
    wrong = [
        found["growth_bytes"] > GROWTH_BYTES,
        found["aborts_missing"] != 0,
        found["live_after"] != 0,
        min(found["live_of_ranks"]) == 0,
        found["files_after"] > 0,
        found["slow_still_open"] != 0,
        found["left_in_shm"] != 0,
    ]
    return {"ok": not any(wrong), **found}


class Seen:
    """One gateway from outside: its port, its process, and the board."""

    def __init__(self, port: int, here: Instance) -> None:
        self.port = port
        self.reader: BoardRow = here.board.row(Role.READER)
        self.ranks = here.board.rows(Role.SCHEDULER)
        self.scheduler: BoardRow = self.ranks[0]  # it receives, and so counts all aborts
        owner = self.reader.owner
        assert owner is not None
        self.pid = owner.pid
        self._board = here.board

    def live(self) -> int:
        """Count the requests that the gateway, the shards and the scheduler have, each for itself."""
        roles = (Role.SCHEDULER, Role.SHARD, Role.READER)
        return sum(row.get("live") for role in roles for row in self._board.rows(role))

    def live_of_ranks(self) -> list[int]:
        """Return how many requests each rank has."""
        return [row.get("live") for row in self.ranks]

    def idle(self, count: int, seconds: float) -> dict[str, Any]:
        """Hold streams, then drop them."""
        self.health()  # what the first connection opens stays open
        empty, files = self.memory(), self.files()
        streams = self.open(count)
        # Who runs must be read: a client that reads nothing is aborted as too slow.
        reading = Reading(streams)
        until(lambda: self.reader.get("live") >= count, f"{count} live streams")
        with contextlib.suppress(TimeoutError):
            until(lambda: sum(self.live_of_ranks()) >= count, "the ranks to have them")
        of_ranks = self.live_of_ranks()
        full = self.memory()
        time.sleep(seconds)
        later = self.memory()
        aborted = self.scheduler.get("aborts")
        reading.stop()
        drops = sorted(self.drop(streams.pop()) for _ in range(min(DROPS, count)))
        started = time.monotonic()
        for stream in streams:
            stream.close()
        with contextlib.suppress(TimeoutError):
            until(lambda: self.scheduler.get("aborts") - aborted >= count, "the aborts")
        took = time.monotonic() - started
        with contextlib.suppress(TimeoutError):
            until(lambda: self.live() == 0 and self.files() <= files, "all let go")
        return {
            "streams": count,
            "memory_empty_bytes": empty,
            "memory_full_bytes": full,
            "live_of_ranks": of_ranks,
            "bytes_per_stream": (full - empty) // count,
            "growth_bytes": later - full,
            "drop_to_abort_ms_p50": round(statistics.median(drops) * 1e3, 2),
            "drop_to_abort_ms_max": round(drops[-1] * 1e3, 2),
            "all_dropped_s": round(took, 3),
            "aborts_missing": count - (self.scheduler.get("aborts") - aborted),
            "live_after": self.live(),
            "files_after": max(0, self.files() - files),
        }

    def slow(self, rng: random.Random) -> dict[str, Any]:
        """Be slow on many connections, and see how quickly the others are answered."""
        request = b"POST /generate HTTP/1.1\r\nhost: x\r\n" + b"x-slow: " + b"y" * 1000
        clients = [socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S) for _ in range(SLOW)]
        sent = [0] * SLOW
        times: list[float] = []
        deadline = time.monotonic() + HEAD_LIMIT_S + 8
        while time.monotonic() < deadline and (clients_open := [i for i in range(SLOW) if sent[i] >= 0]):
            for i in rng.sample(clients_open, min(len(clients_open), 100)):
                try:
                    clients[i].send(request[sent[i] : sent[i] + 1])
                    sent[i] += 1
                    clients[i].setblocking(False)
                    if clients[i].recv(4096):
                        sent[i] = -1
                except BlockingIOError:
                    continue
                except OSError:
                    sent[i] = -1
            started = time.monotonic()
            self.health()
            times.append(time.monotonic() - started)
            time.sleep(0.05)
        still = sum(1 for one in sent if one >= 0)
        for client in clients:
            client.close()
        times.sort()
        return {
            "slow_clients": SLOW,
            "slow_still_open": still,
            "health_meanwhile_ms_p99": round(times[int(0.99 * (len(times) - 1))] * 1e3, 2),
        }

    def health(self) -> None:
        """Ask for /health on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()

    def open(self, count: int) -> list[socket.socket]:
        """Start streams without end; return when all are accepted."""
        streams: list[socket.socket] = []
        while len(streams) < count:
            some = [self._ask(len(streams) + i) for i in range(min(OPEN_AT_ONCE, count - len(streams)))]
            for client in some:
                if not client.recv(100).startswith(b"HTTP/1.1 200"):
                    raise RuntimeError("a stream was refused")
            streams += some
        return streams

    def _ask(self, number: int) -> socket.socket:
        body = {"input_ids": [1], "rid": f"idle-{number}", "stream": True}
        data = json.dumps(body | {"sampling_params": {"max_new_tokens": 100_000}}).encode()
        client = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S)
        client.sendall(
            b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)
        )
        return client

    def drop(self, client: socket.socket) -> float:
        """Close one client; return the seconds until its abort is at the scheduler."""
        before = self.scheduler.get("aborts")
        started = time.monotonic()
        client.close()
        until(lambda: self.scheduler.get("aborts") > before, "an abort", pause=0.0002)
        return time.monotonic() - started

    def memory(self) -> int:
        """Return the gateway's own memory, bytes."""
        text = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        return sum(int(kib) << 10 for kib in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.M))

    def files(self) -> int:
        """Return how many files the gateway has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))


class Reading:
    """Takes in what comes for some clients, in a thread, until it is told to stop."""

    def __init__(self, clients: list[socket.socket]) -> None:
        self._poll = select.poll()
        self._clients = {client.fileno(): client for client in clients}
        for number in self._clients:
            self._poll.register(number, select.POLLIN)
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Read no more."""
        self._stop = True
        self._thread.join()

    def _run(self) -> None:
        while not self._stop:
            for number, _ in self._poll.poll(100):
                with contextlib.suppress(OSError):
                    if not self._clients[number].recv(65536):
                        self._poll.unregister(number)


@contextlib.contextmanager
def serving(name: str, ranks: int) -> Iterator[tuple[int, Instance]]:
    """Run `serve` with a scheduler each rank of which runs one request at a time."""
    command = [sys.executable, str(SERVE), "--instance", name, "--port", "0", "--shards", "1"]
    command += ["--ranks", str(ranks)]
    command += ["--incremental", "--batch", "1", "--steps-per-second", "500"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        port = next(int(line.rsplit(":", 1)[1]) for line in process.stdout if "serving on" in line)
        here = Instance.attach(name)
        try:
            yield port, here
        finally:
            here.close()
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)


def until(condition: Callable[[], bool], what: str, pause: float = 0.01) -> None:
    """Wait until it holds.

    Raises:
        TimeoutError: it did not within `LIMIT_S`.
    """
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {LIMIT_S:.0f} s")
        time.sleep(pause)
