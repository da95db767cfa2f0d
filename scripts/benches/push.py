"""One decode step from the scheduler's side: microseconds to hand it over.

What is timed, for everyone: from a step's token ids in an i32 array, as a sampler leaves them, to the call's
return, when the step is on its way to another process. One token per row, nobody ends.

- outfeed: `SchedulerPort.push_tokens(routes, ids)` on a real instance's step ring; a shard-like process reads
  and releases every frame. Beside it the slower ways in: routes and ids as lists, and rids instead of routes.
- zmq_msgpack, zmq_msgspec, zmq_pickle: the message of the field, rids, ids of each row, finish reasons and
  prompt tokens as lists, encoded by the `msgpack` package, by msgspec (the fastest msgpack there is for
  Python) or by pickle 5, and sent by a pyzmq PUSH socket over ipc; a process receives every message.
  Rids, finish reasons and prompt tokens are lists from the start; only the ids have to become one.

A burst of steps is timed step by step, then everyone waits until the other side has it all, so nobody is
timed against a full queue. `*_idle` is one step every 2 ms: the receiver sleeps, so waking it is in the time.
Figures are medians, `p99` beside them. Each implementation takes its turn several times.
"""

import os
import pickle
import tempfile
import time
import uuid
from collections.abc import Callable
from multiprocessing import get_context
from statistics import median
from typing import Any, Protocol

import msgpack
import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray
from outfeed.ring import Doorbell, wait
from outfeed.ring.board import InstanceConfig, Role
from outfeed.ring.frames import TAG_OF, Generate, encode
from outfeed.ring.instance import Instance
from outfeed.ring.route import make_route
from outfeed.sidecar import Requests, SchedulerPort

ROWS = (1, 16, 256, 4096)
PROMPT = 100
BURST = 32
WARM_UP = 20
IDLE_GAP_S = 0.002
FORK = get_context("fork")
Ids = NDArray[np.int32]


class Side(Protocol):
    """One way to hand a step over."""

    def push(self, ids: Ids) -> None:
        """Hand one step over; timed."""

    def drained(self, steps: int) -> None:
        """Wait until the other side has had `steps` steps in all."""

    def close(self) -> None:
        """Leave nothing behind."""


def _wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        if time.monotonic() > deadline:
            raise AssertionError("the receiver has not had every step after 60 s")
        time.sleep(0.0002)


class Outfeed:
    """The port on a bare instance; a forked process plays the shard."""

    def __init__(self, rows: int, tag: str) -> None:
        self.instance = Instance.create(InstanceConfig(instance=f"bench-{tag}", tokenizer="none", shards=1))
        self.step = self.instance.step()
        self.reader = FORK.Process(target=self._read, daemon=True)
        self.reader.start()
        _wait_until(lambda: self.step.stats().consumers[0].owner is not None)
        self.port = SchedulerPort.attach(self.instance.name)
        request = self.instance.request()
        gateway = request.writer(0)
        routes = [make_route(0, 0, slot, 1) for slot in range(rows)]
        for route in routes:
            gateway.write(TAG_OF[Generate], encode(Generate(route, str(route), bytes(4 * PROMPT), {})))
        received = 0
        while received < rows:
            received += self.receive()
        gateway.close()
        request.close()
        self.routes = np.array(routes, dtype=np.uint64)

    def receive(self) -> int:
        """Take the requests in."""
        return len(self.port.recv(4096))

    def _read(self) -> None:
        here = Instance.attach(self.instance.name)
        with Doorbell.create(here.bell(Role.SHARD, 0)) as bell, here.step() as ring:
            consumer = ring.consumer(0, bell)
            while here.alive:
                if consumer.read():
                    consumer.release()
                else:
                    wait([consumer], 0.2)

    def push(self, ids: Ids) -> None:
        """One call."""
        self.port.push_tokens(self.routes, ids)

    def drained(self, steps: int) -> None:
        """The shard's cursor is at the lane's tail."""
        _wait_until(lambda: self.step.stats().consumers[0].lag == 0)

    def close(self) -> None:
        """End the reader, remove the instance."""
        self.port.close()
        self.reader.kill()
        self.reader.join()
        self.step.close()
        self.instance.remove()
        self.instance.close()


class OutfeedLists(Outfeed):
    """The same from lists."""

    def push(self, ids: Ids) -> None:
        """Lists in, as a scheduler without arrays has them."""
        self.port.push_tokens(self.listed, ids.tolist())

    def __init__(self, rows: int, tag: str) -> None:
        super().__init__(rows, tag)
        self.listed = self.routes.tolist()


class OutfeedRids(Outfeed):
    """The same by rid."""

    def push(self, ids: Ids) -> None:
        """Rids in, ids as they are."""
        self.by_rid.push_tokens(self.rids, ids)

    def receive(self) -> int:
        """Take the requests in by rid."""
        self.by_rid = getattr(self, "by_rid", None) or Requests(self.port)
        return len(self.by_rid.recv(4096))

    def __init__(self, rows: int, tag: str) -> None:
        super().__init__(rows, tag)
        self.rids = [str(route) for route in self.routes.tolist()]


class Zmq:
    """Lists, an encoder, a PUSH socket; a forked process pulls."""

    def __init__(self, rows: int, tag: str, dumps: Callable[[Any], bytes]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="outfeed-bench-")
        self.address = f"ipc://{self.folder.name}/{tag}"
        self.had = FORK.Value("Q", 0, lock=False)
        self.dumps = dumps
        self.rids = [uuid.uuid4().hex for _ in range(rows)]
        self.reasons, self.prompts = [None] * rows, [PROMPT] * rows
        self.reader = FORK.Process(target=self._read, daemon=True)
        self.reader.start()
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PUSH)
        self.socket.setsockopt(zmq.SNDHWM, 10_000)
        self.socket.bind(self.address)

    def _read(self) -> None:
        socket = zmq.Context().socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, 10_000)
        socket.connect(self.address)
        while True:
            socket.recv()
            self.had.value += 1

    def push(self, ids: Ids) -> None:
        """Build, encode, send."""
        message = {
            "rids": self.rids,
            "output_ids": [[token] for token in ids.tolist()],
            "finished_reasons": self.reasons,
            "prompt_tokens": self.prompts,
        }
        self.socket.send(self.dumps(message))

    def drained(self, steps: int) -> None:
        """The receiver has counted them."""
        _wait_until(lambda: self.had.value >= steps)

    def close(self) -> None:
        """End the reader, close the socket."""
        self.reader.kill()
        self.reader.join()
        self.socket.close(linger=0)
        self.context.term()
        self.folder.cleanup()


def _pickled(message: Any) -> bytes:
    return pickle.dumps(message, protocol=5)


def sides(rows: int, tag: str) -> list[tuple[str, Callable[[], Side]]]:
    """Return every implementation's name and how to make it."""
    packer, encoder = msgpack.Packer(), msgspec.msgpack.Encoder()
    return [
        ("outfeed", lambda: Outfeed(rows, tag)),
        ("outfeed lists", lambda: OutfeedLists(rows, tag)),
        ("outfeed rids", lambda: OutfeedRids(rows, tag)),
        ("zmq_msgpack", lambda: Zmq(rows, tag, packer.pack)),
        ("zmq_msgspec", lambda: Zmq(rows, tag, encoder.encode)),
        ("zmq_pickle", lambda: Zmq(rows, tag, _pickled)),
    ]


def measure(side: Side, rows: int, steps: int, burst: int, gap_s: float) -> list[int]:
    """Return the ns of each of `steps` pushes, in bursts of `burst` with `gap_s` before each push."""
    taken: list[int] = []
    pushed = 0
    columns = [np.arange(rows, dtype=np.int32) + 1000 + step for step in range(burst)]
    while len(taken) < steps + WARM_UP:
        for ids in columns:
            if gap_s:
                time.sleep(gap_s)
            start = time.perf_counter_ns()
            side.push(ids)
            taken.append(time.perf_counter_ns() - start)
        pushed += burst
        side.drained(pushed)
    return taken[WARM_UP:]


def run(quick: bool) -> dict[str, Any]:
    """Measure every case, the implementations one after the other, round after round."""
    results: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    rounds = 2 if quick else 6
    cases = [(f"rows_{rows}", rows, 0.0) for rows in ROWS] + [("rows_256_idle", 256, IDLE_GAP_S)]
    for case, rows, gap_s in cases:
        taken: dict[str, list[int]] = {}
        steps = 100 if gap_s else max(64, min(1000, 100_000 // rows))
        burst = BURST if rows < 4096 else 8
        for turn in range(rounds):
            for impl, make in sides(rows, f"{os.getpid()}-{turn}"):
                side = make()
                try:
                    taken.setdefault(impl, []).extend(measure(side, rows, steps, burst, gap_s))
                finally:
                    side.close()
        for impl, times in taken.items():
            value, worst = median(times) / 1e3, sorted(times)[len(times) * 99 // 100] / 1e3
            results.append({"case": case, "impl": impl, "value": round(value, 2), "unit": "us/step"})
            results.append({"case": f"{case} p99", "impl": impl, "value": round(worst, 2), "unit": "us/step"})
            if impl.startswith("zmq"):
                ratios[f"vs_{impl}_{case.removeprefix('rows_')}"] = round(
                    median(times) / median(taken["outfeed"]), 2
                )
    return {"bench": "push", "results": results, "ratios": ratios}
