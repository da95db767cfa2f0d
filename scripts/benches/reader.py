"""The reader: nanoseconds per event, from a frame in the egress ring to an item in its handler's hands.

One process and one thread: the frames are written to a real ring beforehand, `Reader.drain` delivers them to
one sink per row, and `receive_nowait` takes every item out again. Both parts are timed, writing is not.

The peer carries the same rows as one msgpack array of maps, decoded into dicts (by msgspec, the fastest
decoder there is for it) and put into one deque per request, then taken out again. It checks nothing: no
order, no doubles, no limits, no endings, and its logprobs come out as lists of Python floats.
"""

import os
import time
from collections import deque
from statistics import median
from typing import Any, Protocol

import msgspec
import numpy as np
from outfeed.ring import Doorbell, LaneWriter, Ring
from outfeed.ring.batch import encode_batch
from outfeed.ring.families import FAMILIES, Family, Kind
from outfeed.ring.frames import Tag
from outfeed.ring.route import make_route
from outfeed.sink import Reader, SinkSource, open_sink

ROWS = (1, 16, 256, 4096)
TOP = 5
TEXT = b" token"
CAPACITY = 1 << 24
SINK_BYTES = 1 << 20
WARM_UP = 5
ROUNDS = 5


class Side(Protocol):
    """One way to carry a step from bytes to handlers."""

    def write(self) -> None:
        """Publish one step; not timed."""

    def deliver(self) -> None:
        """Bytes to queues."""

    def receive(self) -> None:
        """Queues to handlers."""

    def close(self) -> None:
        """Leave nothing behind."""


def families(rows: int, top: int) -> list[Family | None]:
    """Return output logprobs and top-`top` for the first `rows` rows."""
    found: list[Family | None] = [None] * FAMILIES
    every, one = np.arange(rows, dtype="u4"), np.ones(rows, "u4")
    ids = np.arange(rows * top, dtype="i4")
    found[Kind.OUTPUT_LOGPROBS] = Family(every, one, np.full(rows, -0.5, "f4"), ids[:rows])
    lengths = np.full(rows, top, "u4")
    found[Kind.OUTPUT_TOP_LOGPROBS] = Family(every, one, np.full(rows * top, -1.5, "f4"), ids, lengths)
    return found


class Ours:
    """A ring, a reader and one sink per row."""

    def __init__(self, rows: int, top: int, asking: int | None = None) -> None:
        name = f"outfeed-bench-{os.getpid()}.egress0"
        self.ring = Ring.create(name, lanes=1, consumers=1, capacity=CAPACITY)
        self.bell = Doorbell.create(f"{name}.bell")
        self.writer: LaneWriter = self.ring.writer(0)
        self.egress = self.ring.consumer(0, self.bell)
        self.reader = Reader(self.egress, lambda route, rid: None, lambda route: None)
        self.rows, self.step = rows, 0
        self.routes = np.array([make_route(0, 0, slot, 1) for slot in range(rows)], "u8")
        self.sources: list[SinkSource] = []
        for route in self.routes.tolist():
            sender, source = open_sink(SINK_BYTES)
            self.reader.register(route, str(route), sender)
            self.sources.append(source)
        self.one, self.prompt = np.ones(rows, "u4"), np.full(rows, 100, "u4")
        self.ids = np.arange(rows, dtype="i4")
        self.lens, self.text = np.full(rows, len(TEXT), "u4"), TEXT * rows
        self.families = families(rows if asking is None else asking, top) if top else ()

    def write(self) -> None:
        """Publish one step."""
        first = np.full(self.rows, self.step, "u4")
        self.step += 1
        parts = encode_batch(
            time.monotonic_ns(),
            self.routes,
            first,
            self.one,
            self.prompt,
            self.ids,
            generated=self.one,
            text_lens=self.lens,
            text=self.text,
            families=self.families,
        )
        self.writer.write(Tag.BATCH, *parts)

    def deliver(self) -> None:
        """Ring to sinks."""
        self.reader.drain()

    def receive(self) -> None:
        """Sinks to handlers."""
        for source in self.sources:
            if source.receive_nowait() is None:
                raise AssertionError("an event is missing")

    def close(self) -> None:
        """Leave nothing behind."""
        for source in self.sources:
            source.close()
        self.reader.drain()
        self.egress.close()
        self.writer.close()
        self.ring.close()
        self.ring.unlink()
        self.bell.close()


class Dicts:
    """The peer: maps, dicts, deques."""

    def __init__(self, rows: int, top: int) -> None:
        self.rows, self.top, self.step = rows, top, 0
        self.queues: dict[str, deque[dict[str, Any]]] = {str(row): deque() for row in range(rows)}
        self.body = b""

    def write(self) -> None:
        """Encode one step."""
        pairs = [[-1.5, token] for token in range(self.top)]
        step = [
            {
                "rid": str(row),
                "text": TEXT.decode(),
                "ids": [row],
                "first": self.step,
                "generated": 1,
                "prompt_tokens": 100,
                "finish_reason": None,
                **({"logprobs": [[-0.5, row]], "top_logprobs": [pairs]} if self.top else {}),
            }
            for row in range(self.rows)
        ]
        self.step += 1
        self.body = msgspec.msgpack.encode(step)

    def deliver(self) -> None:
        """Bytes to queues."""
        queues = self.queues
        for event in msgspec.msgpack.decode(self.body):
            queues[event["rid"]].append(event)

    def receive(self) -> None:
        """Queues to handlers."""
        for queue in self.queues.values():
            queue.popleft()

    def close(self) -> None:
        """Nothing to leave behind."""


def measure(side: Side, rows: int, turns: int) -> tuple[float, float]:
    """Return the median ns per event of delivering and of receiving."""
    delivering, receiving = [], []
    for turn in range(turns + WARM_UP):
        side.write()
        start = time.perf_counter_ns()
        side.deliver()
        middle = time.perf_counter_ns()
        side.receive()
        end = time.perf_counter_ns()
        if turn >= WARM_UP:
            delivering.append(middle - start)
            receiving.append(end - middle)
    return median(delivering) / rows, median(receiving) / rows


def measure_in_turns(sides: dict[str, Side], rows: int, turns: int) -> dict[str, list[tuple[float, float]]]:
    """Return what `measure` says of each side in each round: the machine's pace changes while one runs."""
    try:
        found: dict[str, list[tuple[float, float]]] = {impl: [] for impl in sides}
        for _ in range(ROUNDS):
            for impl, side in sides.items():
                found[impl].append(measure(side, rows, turns // ROUNDS))
        return found
    finally:
        for side in sides.values():
            side.close()


def run(quick: bool) -> dict[str, Any]:
    """Measure every case. A figure is the median of its rounds, a ratio that of the rounds' ratios."""
    results: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}

    def add(case: str, impl: str, rounds: list[tuple[float, float]]) -> float:
        deliver, receive = (median(part) for part in zip(*rounds, strict=True))
        whole = median(map(sum, rounds))
        for part, value in (("", whole), (" delivering", deliver), (" receiving", receive)):
            results.append({"case": case + part, "impl": impl, "value": round(value), "unit": "ns/event"})
        return whole

    rate = 0
    for kind, top in (("plain", 0), (f"top{TOP}", TOP)):
        for rows in ROWS:
            turns = max(30, (20_000 if quick else 200_000) // rows // (1 + 3 * (top > 0)))
            found = measure_in_turns(
                {"outfeed": Ours(rows, top), "msgpack_dicts": Dicts(rows, top)}, rows, turns
            )
            case = f"{kind}_{rows}"
            ours = add(case, "outfeed", found["outfeed"])
            add(case, "msgpack_dicts", found["msgpack_dicts"])
            pairs = zip(found["outfeed"], found["msgpack_dicts"], strict=True)
            ratios[f"vs_msgpack_dicts_{case}"] = round(median(sum(peer) / sum(own) for own, peer in pairs), 3)
            if (kind, rows) == ("plain", 256):
                rate = round(1e9 / ours)
    alone = measure_in_turns({"outfeed": Ours(256, TOP, asking=1)}, 256, 100 if quick else 800)
    add(f"one_of_256_top{TOP}", "outfeed", alone["outfeed"])
    ratios["vs_msgpack_dicts"] = ratios["vs_msgpack_dicts_plain_256"]
    return {"bench": "reader", "results": results, "ratios": ratios, "events_per_s_plain_256": rate}
