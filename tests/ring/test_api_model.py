"""The whole API against a plain in-memory model: lists of frames and the arithmetic of a lane's room."""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from outfeed.ring import Consumer, Doorbell, LaneWriter, Ring, RingError, RingFull, segment, wait

from tests.instances import unique

LANES, CONSUMERS, CAPACITY = 2, 2, 4096
lanes = st.integers(0, LANES - 1)
cursors = st.integers(0, CONSUMERS - 1)
sizes = st.one_of(st.integers(0, 1024), st.sampled_from([0, 1, 16, 1007, 1008, 1009, 1024]))


@dataclass
class ModelFrame:
    at: int
    end: int
    tag: int
    body: bytes


@dataclass
class ModelLane:
    """What a lane holds, and where its next record would go."""

    tail: int = 0
    frames: list[ModelFrame] = field(default_factory=list)

    def place(self, size: int) -> tuple[int, int]:
        """Return where a record for a body of `size` starts and ends, padding before it counted."""
        need = (16 + size + 15) // 16 * 16
        left = CAPACITY - self.tail % CAPACITY
        at = self.tail if need <= left else self.tail + left
        return at, at + need

    def append(self, tag: int, body: bytes) -> None:
        at, self.tail = self.place(len(body))
        self.frames.append(ModelFrame(at, self.tail, tag, body))


@dataclass
class ModelCursor:
    head: list[int] = field(default_factory=lambda: [0] * LANES)
    next: list[int] = field(default_factory=lambda: [0] * LANES)
    attached: bool = True


class RingAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.name = f"outfeed-{unique('model')}"
        self.ring = Ring.create(self.name, lanes=LANES, consumers=CONSUMERS, capacity=CAPACITY)
        self.bells = [Doorbell.create(f"{self.name}.bell-{index}") for index in range(CONSUMERS)]
        self.writers: list[LaneWriter] = [self.ring.writer(lane) for lane in range(LANES)]
        self.consumers: list[Consumer] = [
            self.ring.consumer(index, self.bells[index]) for index in range(CONSUMERS)
        ]
        self.lanes = [ModelLane() for _ in range(LANES)]
        self.cursors = [ModelCursor() for _ in range(CONSUMERS)]
        self.reserved: dict[int, tuple[memoryview, int]] = {}

    def teardown(self) -> None:
        self.ring.close()
        for bell in self.bells:
            bell.close()
        segment.sweep(self.name)

    def has_room(self, lane: int, size: int) -> bool:
        _, end = self.lanes[lane].place(size)
        heads = [cursor.head[lane] for cursor in self.cursors if cursor.attached]
        return end - min(heads, default=self.lanes[lane].tail) <= CAPACITY

    @rule(lane=lanes, size=sizes, tag=st.integers(0, 255), cut=st.integers(0, 1024))
    def write(self, lane: int, size: int, tag: int, cut: int) -> None:
        body = bytes([tag]) * size
        try:
            self.writers[lane].write(tag, body[:cut], bytearray(body[cut:]))
        except RingFull:
            assert not self.has_room(lane, size)
            assert lane not in self.reserved
        except RingError:
            assert lane in self.reserved
        else:
            assert self.has_room(lane, size)
            self.lanes[lane].append(tag, body)

    @rule(lane=lanes, size=sizes)
    def reserve(self, lane: int, size: int) -> None:
        try:
            view = self.writers[lane].reserve(size)
        except RingFull:
            assert not self.has_room(lane, size)
        except RingError:
            assert lane in self.reserved
        else:
            assert self.has_room(lane, size)
            assert len(view) == size
            view[:] = b"r" * size
            self.reserved[lane] = view, size

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), tag=st.integers(0, 255))
    def commit(self, data: st.DataObject, tag: int) -> None:
        lane = data.draw(st.sampled_from(sorted(self.reserved)))
        _, size = self.reserved.pop(lane)
        used = data.draw(st.integers(0, size))
        # It lies where the whole reservation fitted, even when what was used would have fitted before.
        at, _ = self.lanes[lane].place(size)
        self.writers[lane].commit(tag, used)
        self.lanes[lane].tail = at
        self.lanes[lane].append(tag, b"r" * used)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(sorted(self.reserved)))
        del self.reserved[lane]
        self.writers[lane].cancel()

    @rule(index=cursors, limit=st.integers(1, 300), bounded=st.booleans())
    def read(self, index: int, limit: int, bounded: bool) -> None:
        cursor, consumer = self.cursors[index], self.consumers[index]
        if not cursor.attached:
            return
        upto = consumer.tails() if bounded else None
        assert upto is None or upto == [lane.tail for lane in self.lanes]
        found = consumer.read(limit, upto)
        waiting = [
            [frame for frame in lane.frames if frame.at >= cursor.next[number]]
            for number, lane in enumerate(self.lanes)
        ]
        assert len(found) == min(limit, sum(map(len, waiting)))
        for lane, tag, body in found:
            frame = waiting[lane].pop(0)
            assert (tag, bytes(body)) == (frame.tag, frame.body)
            cursor.next[lane] = frame.end

    @rule(index=cursors)
    def release(self, index: int) -> None:
        if self.cursors[index].attached:
            self.consumers[index].release()
            self.cursors[index].head = list(self.cursors[index].next)

    @rule(index=cursors)
    def look(self, index: int) -> None:
        cursor = self.cursors[index]
        if cursor.attached:
            left = any(lane.tail > cursor.next[number] for number, lane in enumerate(self.lanes))
            assert self.consumers[index].pending() == left
            assert wait([self.consumers[index]], 0.0) == left

    @rule(lane=lanes)
    def another_writer_comes(self, lane: int) -> None:
        self.writers[lane].close()
        self.reserved.pop(lane, None)
        self.writers[lane] = self.ring.writer(lane)

    @rule(index=cursors)
    def another_consumer_comes(self, index: int) -> None:
        cursor = self.cursors[index]
        if not cursor.attached:
            cursor.head = [lane.tail for lane in self.lanes]
            cursor.attached = True
        else:
            self.consumers[index].close()
        cursor.next = list(cursor.head)
        self.consumers[index] = self.ring.consumer(index, self.bells[index])

    @rule(index=cursors)
    def detach(self, index: int) -> None:
        if self.cursors[index].attached:
            self.consumers[index].close()
            self.ring.detach_consumer(index)
            self.cursors[index].attached = False

    @invariant()
    def statistics_agree(self) -> None:
        stats = self.ring.stats()
        for number, lane in enumerate(self.lanes):
            heads = [cursor.head[number] for cursor in self.cursors if cursor.attached]
            found = stats.lanes[number]
            assert (found.tail, found.frames) == (lane.tail, len(lane.frames))
            assert found.bytes == sum(len(frame.body) for frame in lane.frames)
            assert found.used == lane.tail - min(heads, default=lane.tail)
            assert found.used <= found.high_water <= CAPACITY
        for index, cursor in enumerate(self.cursors):
            assert stats.consumers[index].detached == (not cursor.attached)
            if cursor.attached:
                lag = sum(lane.tail - head for lane, head in zip(self.lanes, cursor.head, strict=True))
                assert stats.consumers[index].lag == lag


TestRingAgainstModel = RingAgainstModel.TestCase
TestRingAgainstModel.settings = settings(
    max_examples=60, stateful_step_count=60, suppress_health_check=list(HealthCheck)
)
