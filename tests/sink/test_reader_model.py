"""A reader beside a plain model of it: whatever comes, a request gets its rows once, and ends once.

Seeded, not shrunk: a failure names its seed, and `story(seed)` tells it again.
"""

import logging
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from outfeed.ring.families import Kind
from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import ErrorFrame, Result, Standing, Tag, Takeover, Tally, encode
from outfeed.ring.route import make_route, shard_of
from outfeed.sink import Control, Done, Error, Frame, Reader, Response, SinkEnded, SinkSource, open_sink

from .front import Front
from .material import Row, Step, header_of, reseal, with_header
from .test_round_trip import columns_out

SHARDS, SLOTS, STEPS = 2, 6, 150
END = FinishReason.length(3).to_json()


@dataclass
class Request:
    """One request as it should be: `rows` were delivered, `taken` bytes of them read, `end` is its last."""

    route: int
    source: SinkSource
    capacity: int
    response: Response
    next: int = 0
    rows: list[Row] = field(default_factory=list)
    sent: int = 0
    taken: int = 0
    end: type | str | None = None
    aborts: int = 0
    closed: bool = False
    items: list[object] = field(default_factory=list)


def size_of(row: Row) -> int:
    return (
        len(row.text.encode()) + 4 * len(row.ids) + 8 * len(row.ids) * (Kind.OUTPUT_LOGPROBS in row.families)
    )


class Story:
    """Acts at random, and what must come of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.front = Front()
        self.front.reader = Reader(
            self.front.egress,  # type: ignore[arg-type]
            self.front.on_abort,
            self.front.ends.append,
            self.takeover,
        )
        self.live: dict[int, Request] = {}
        self.all: dict[int, Request] = {}
        self.ghosts: set[int] = set()
        self.generation = 0
        self.told = 0
        self.register()

    # What happens.

    def register(self) -> None:
        self.generation += 1
        slot = self.random.randrange(SLOTS)
        route = make_route(0, slot % SHARDS, slot, self.generation)
        if any(other & 0xFFFFF == slot for other in self.live):
            return
        capacity = self.random.choice((30, 200, 1 << 20))
        sender, source = open_sink(capacity)
        self.front.reader.register(route, f"rid-{route}", sender)
        self.live[route] = self.all[route] = Request(route, source, capacity, Response(str(route)))

    def rows(self) -> None:
        """A frame of one shard: next rows, doubles, gaps, overlaps, stale ones and ghosts'."""
        shard = self.random.randrange(SHARDS)
        rows: list[Row] = []
        ended: list[int] = []
        known = [route for route in self.all if shard_of(route) == shard]
        for _ in range(self.random.randrange(1, 6)):
            if known and self.random.random() < 0.97:
                route = self.random.choice([route for route in known if route in self.live] or known)
                if self.random.random() < 0.1:
                    route = self.random.choice(known)
                if route in [row.route for row in rows] and self.random.random() < 0.7:
                    continue
            else:
                route = make_route(0, shard, 50 + self.random.randrange(9) * SHARDS + shard, 1)
            row = self.row(route)
            if row.finish is not None and self.random.random() < 0.5:
                ended.append(len(rows))
            rows.append(row)
            self.expect(row, len(rows) - 1 in ended)
        self.arrive(shard, Tag.BATCH, step_of(rows, ended))

    def row(self, route: int) -> Row:
        request = self.all.get(route)
        first = request.next if request else 5
        chance = self.random.random()
        tokens = self.random.randrange(4)
        if chance < 0.1:
            first = max(0, first - self.random.randrange(1, 4))  # a double, or overlapping
        elif chance < 0.12:
            first += self.random.randrange(1, 3)
        ids = list(range(first, first + tokens))
        generated = tokens + (self.random.random() < 0.2)
        families = {}
        if ids and self.random.random() < 0.3:
            families[Kind.OUTPUT_LOGPROBS] = ([-float(token) for token in ids], ids)
        finish = END if self.random.random() < 0.1 else None
        if not generated and not finish:
            generated = 1
        return Row(route, first, ids, generated, 9, "é" * self.random.randrange(3), finish, families)

    def answer(self) -> None:
        """RESULT or ERROR, of a live request or an ended one."""
        if not self.all:
            return
        route = self.random.choice(list(self.live or self.all))
        request = self.live.get(route)
        if self.random.random() < 0.5:
            body = b"answer" * self.random.choice((1, 5))
            if request and self.fits(request, len(body)):
                self.finish(request, Control, 0)
            self.arrive(shard_of(route), Tag.RESULT, encode(Result(route, body)))
        else:
            running = self.random.random() < 0.5
            if request:
                self.finish(request, "failed", running)
            message = ErrorFrame(route, 503, "failed", "it failed", running)
            self.arrive(shard_of(route), Tag.ERROR, encode(message))

    def tally(self) -> None:
        shard = self.random.randrange(SHARDS)
        rows = []
        for request in self.random.sample(list(self.all.values()), min(3, len(self.all))):
            tokens = max(0, request.next + self.random.choice((-1, 0, 0, 0, 1)))
            standing = self.random.choice((Standing.RUNNING, Standing.RUNNING, Standing.ENDED))
            rows.append((request.route, tokens, int(standing)))
            mine = request.route in self.live and shard_of(request.route) == shard
            if mine and (tokens > request.next or standing == Standing.ENDED):
                self.finish(request, "frame_lost", 1)
        self.arrive(shard, Tag.TALLY, encode(Tally(0, rows)))

    def damage(self) -> None:
        body = bytearray(step_of([Row(make_route(0, 0, 40, 1), 0, [1], 1, 9, "x", None)], []))
        body[self.random.randrange(len(body))] ^= 1 << self.random.randrange(8)
        self.arrive(0, Tag.BATCH, bytes(body))

    def read(self) -> None:
        if self.all:
            self.receive(self.random.choice(list(self.all.values())))

    def close(self) -> None:
        """A client goes; what it closes when its request is over is nobody's business."""
        if not self.live or self.random.random() < 0.5:
            return
        request = self.all[self.random.choice(list(self.live))]
        request.source.close()
        request.closed = True
        self.finish(request, "gone", 1)
        self.drain()

    def abort(self) -> None:
        if self.all and self.random.random() < 0.3:
            route = self.random.choice(list(self.all))
            self.front.reader.abort(route, Error(500, "told", "to"))
            if route in self.live:
                self.finish(self.all[route], "told", 1)
            self.drain()

    def fail(self) -> None:
        if self.random.random() < 0.1:
            self.front.reader.fail(Error(503, "scheduler", "is gone"))
            for request in list(self.live.values()):
                self.finish(request, "scheduler", 0)
            self.drain()

    def lose(self) -> None:
        """A shard is cut off for a moment."""
        if self.random.random() < 0.1:
            shard = self.random.randrange(SHARDS)
            self.front.reader.cut_off(frozenset({shard}))
            for request in [request for route, request in self.live.items() if shard_of(route) == shard]:
                self.finish(request, "shard_cut_off", 1)
            self.front.reader.cut_off(frozenset())

    def refuse(self) -> None:
        self.front.refuse_aborts = not self.front.refuse_aborts

    def take_over(self) -> None:
        shard = self.random.randrange(SHARDS)
        before = self.told
        self.arrive(shard, Tag.TAKEOVER, encode(Takeover(shard, 1)))
        assert self.told == before + 1

    def takeover(self, shard: int, epoch: int) -> None:
        """What a RESTORE would say is what was delivered."""
        self.told += 1
        progress = {one.route: one for one in self.front.reader.progress(shard)}
        assert progress.keys() == {route for route in self.live if shard_of(route) == shard}
        for route, one in progress.items():
            rows = self.live[route].rows
            assert np.frombuffer(one.ids, "<i4").tolist() == [token for row in rows for token in row.ids]
            assert one.text_bytes == sum(len(row.text.encode()) for row in rows)

    # What must come of it.

    def expect(self, row: Row, by_shard: bool) -> None:
        request = self.live.get(row.route)
        if request is None:
            if row.route not in self.all:
                self.ghosts.add(row.route)
        elif row.first < request.next and row.first + row.generated <= request.next:
            pass
        elif row.first != request.next:
            self.finish(request, "gap", 1)
        elif self.fits(request, size_of(row)):
            request.rows.append(row)
            request.sent += size_of(row)
            request.next += row.generated
            if row.finish is not None:
                self.finish(request, Done, by_shard)

    def fits(self, request: Request, size: int) -> bool:
        waiting = request.sent - request.taken
        if waiting and waiting + size > request.capacity:
            self.finish(request, "client_too_slow", 1)
            return False
        return True

    def finish(self, request: Request, end: type | str, aborted: int) -> None:
        del self.live[request.route]
        request.end, request.aborts = end, int(aborted)

    def receive(self, request: Request) -> bool:
        if request.closed:
            return False
        try:
            item = request.source.receive_nowait()
        except SinkEnded:
            assert request.items
            return False
        if isinstance(item, Frame | Done):
            request.response.add(item.event)
            request.taken += item.event.size
        if item is not None and not isinstance(item, Frame):
            assert request.end is not None
            request.items.append(item)
        return item is not None

    def arrive(self, shard: int, tag: int, body: bytes) -> None:
        self.front.egress.frames.append((shard, tag, memoryview(body)))
        if self.random.random() < 0.7 or tag != Tag.BATCH:
            self.drain()

    def drain(self) -> None:
        while self.front.egress.frames or self.front.reader._requests:
            self.front.reader.drain()
        statistics = self.front.reader.statistics()
        assert statistics.live == len(self.live)
        for request in self.live.values():
            waiting = request.source.statistics().waiting_bytes
            assert waiting == request.sent - request.taken
            assert waiting <= max([request.capacity, *map(size_of, request.rows)])

    def finale(self) -> None:
        """Everything is read to its end, and compared."""
        self.front.refuse_aborts = False
        self.drain()
        self.front.reader.drain()
        for request in self.all.values():
            while self.receive(request):
                pass
            self.compare(request)
        aborts = dict.fromkeys([*self.all, *self.ghosts], 0)
        for route, _ in self.front.aborts:
            aborts[route] += 1
        assert aborts == {
            **{route: request.aborts for route, request in self.all.items()},
            **dict.fromkeys(self.ghosts, 1),
        }
        assert sorted(self.front.ends) == sorted(route for route in self.all if route not in self.live)

    def compare(self, request: Request) -> None:
        if request.closed:
            return
        whole = request.response.whole()
        assert whole.text == "".join(row.text for row in request.rows)
        assert whole.ids.tolist() == [token for row in request.rows for token in row.ids]
        assert whole.first + whole.generated == request.next
        values = [-float(token) for row in request.rows if row.families for token in row.ids]
        wanted = {
            Kind.OUTPUT_LOGPROBS: (np.array(values, "f4").view("u4").tolist(), [int(-v) for v in values])
        }
        assert columns_out(whole.columns) == (wanted if values else {})
        if isinstance(request.end, str):
            (item,) = request.items
            assert isinstance(item, Error)
            assert item.type == request.end
        elif request.end is not None:
            assert [type(item) for item in request.items] == [request.end]
        else:
            assert request.items == []


def step_of(rows: list[Row], ended: list[int]) -> bytes:
    body = Step(5, rows, True).encode()
    if ended:
        header = header_of(body)
        header[8:] = [ended]
        body = reseal(with_header(body, header))
    return body


ACTS = (
    [Story.rows] * 12
    + [Story.register, Story.read] * 5
    + [Story.answer, Story.tally, Story.damage, Story.close, Story.abort, Story.fail, Story.lose]
    + [Story.refuse, Story.take_over]
)


def story(seed: int) -> Story:
    told = Story(seed)
    for _ in range(STEPS):
        act = told.random.choice(ACTS)
        if act is not Story.rows:
            told.drain()
        act(told)
    told.finale()
    return told


def test_it_agrees_with_the_model_whatever_happens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "outfeed")
    ends: set[object] = set()
    for seed in range(40):
        try:
            told = story(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        ends |= {request.end for request in told.all.values()}
    assert len(ends) == 11, f"not every way to end came up: {ends}"
