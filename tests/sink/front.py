"""A reader with nothing real around it: frames go in by hand, aborts and ends are written down."""

from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import Tag
from outfeed.sink import ChunkEvent, Columns, Item, Reader, SinkSource, open_sink

from .material import Row, Step

LAST = FinishReason.length(3)
END = LAST.to_json()


def row(route: int, first: int, text: str = "x", finish: dict[str, object] | None = None) -> Row:
    return Row(route, first, [first], 1, 9, text, finish)


def step(*rows: Row) -> bytes:
    return Step(5, list(rows), True).encode()


class FakeBell:
    def __init__(self) -> None:
        self.rung = 0

    def ring(self) -> None:
        self.rung += 1


class FakeEgress:
    def __init__(self) -> None:
        self.frames: list[tuple[int, int, memoryview]] = []
        self.released = 0
        self.doorbell = FakeBell()

    def read(self, limit: int) -> list[tuple[int, int, memoryview]]:
        taken, self.frames = self.frames[:limit], self.frames[limit:]
        return taken

    def release(self) -> None:
        self.released += 1


class Front:
    """The reader's surroundings."""

    def __init__(self) -> None:
        self.egress = FakeEgress()
        self.aborts: list[tuple[int, str]] = []
        self.ends: list[int] = []
        self.refuse_aborts = False
        self.kept: list[SinkSource] = []
        self.reader = Reader(self.egress, self.on_abort, self.ends.append)  # type: ignore[arg-type]

    def on_abort(self, route: int, rid: str) -> None:
        if self.refuse_aborts:
            raise BlockingIOError("the request ring is full")
        self.aborts.append((route, rid))

    def open(self, route: int, *, capacity: int = 1 << 20, first: int = 0, keep: bool = True) -> SinkSource:
        sender, source = open_sink(capacity)
        if keep:
            self.kept.append(source)
        self.reader.register(route, f"rid-{route}", sender)
        self.reader._live[route].next = first
        return source

    def arrive(self, *bodies: bytes, tag: int = Tag.BATCH) -> None:
        self.egress.frames += [(0, tag, memoryview(body)) for body in bodies]
        while self.egress.frames:
            self.reader.drain()


def waiting(source: SinkSource) -> list[Item]:
    """Take all that waits, without waiting."""
    items: list[Item] = []
    while (item := source.receive_nowait()) is not None:
        items.append(item)
        if not hasattr(item, "event") or item.event.finish is not None:
            break
    return items


def chunk(
    text: str, first: int = 0, finish: FinishReason | None = None, columns: Columns | None = None
) -> ChunkEvent:
    """An event of one token."""
    return ChunkEvent(text.encode(), first.to_bytes(4, "little"), first, 1, 9, first, finish, columns)
