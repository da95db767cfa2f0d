"""The C of a sink against callers that mean harm: run under sanitizers by test_sanitizers.py.

    python hostile.py EXTENSION SEED ROUNDS

EXTENSION is sink/core built with sanitizers; it takes the place of outfeed.sink._deliver. What goes in is
anything: bodies and layouts that do not fit, lists that change while they are walked, callbacks that close,
unregister, raise and come in again. What comes out is whole events or an exception; nothing stays behind.
"""
# ruff: noqa: E402  # the package is imported when its extension is in place

import gc
import importlib.machinery
import importlib.util
import random
import sys
import tracemalloc
from typing import Any

NAME = "outfeed.sink._deliver"


def put_in(path: str) -> None:
    """Have the package import this extension as its own."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)


put_in(sys.argv[1])
from outfeed.sink import (
    ChunkEvent,
    Columns,
    Done,
    Flat,
    Frame,
    Ragged,
    SinkClosed,
    SinkEnded,
    SinkSource,
    open_sink,
)
from outfeed.sink.channel import Channel
from outfeed.sink.live import Live
from outfeed.sink.waiting import ThreadWaiter

core: Any = sys.modules[NAME]
fold = Channel.try_fold

ODD: tuple[Any, ...] = (None, True, -1, 0, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 80, 0.5, "x", b"", [], {})
HUGE = (0, 1, 4, 1 << 20, 1 << 21, 1 << 40, (1 << 63) - 1, -1, -(1 << 63))
EXPECTED = (TypeError, ValueError, OverflowError, AttributeError, IndexError, BufferError, ZeroDivisionError)


class Lying:
    """Columns that say anything of their size."""

    def __init__(self, size: Any) -> None:
        self._size = size

    @property
    def size(self) -> Any:
        if self._size is None:
            raise ZeroDivisionError
        return self._size


class Waiter(ThreadWaiter):
    """A waiter that is marked with anything."""

    def __init__(self, marked: Any) -> None:
        super().__init__()
        self.marked = marked


FIRST_ROUTE = 1 << 36


class Harm:
    """One reader's table, and everything that its callbacks do to it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sources: list[SinkSource] = []
        self.table: dict[Any, Any] = {}
        self.lists: list[list[Any]] = []
        self.depth = 0
        for route in range(FIRST_ROUTE, FIRST_ROUTE + 6):
            sender, source = open_sink(self.random.choice((1, 40, 1 << 20)))
            self.sources.append(source)
            self.table[route] = Live(route, str(route), sender)
        self.table[FIRST_ROUTE + 7] = self.random.choice(
            (5, None, Live.__new__(Live), ChunkEvent(b"", b"", 0, 0, 0, 0))
        )

    def body(self) -> tuple[bytes, list[int]]:
        """A body that fits its layout, mostly."""
        rows = self.random.randrange(9)
        counts = [self.random.randrange(4) for _ in range(rows)]
        lens = [self.random.randrange(30) for _ in range(rows)]
        routes = [FIRST_ROUTE + self.random.randrange(9) for _ in range(rows)]
        first = [getattr(self.table.get(route), "next", 0) for route in routes]
        data = self.random.randrange(3) * 4
        parts = [bytes(data), *(route.to_bytes(8, "little") for route in routes)]
        for column in (first, counts, [9] * rows, [7] * sum(counts), counts, lens):
            parts += [number.to_bytes(4, "little") for number in column]
        parts.append(b"t" * sum(lens))
        ids = data + 20 * rows
        generated = ids + 4 * sum(counts)
        text = generated + 8 * rows
        layout = [data, data + 8 * rows, data + 12 * rows, data + 16 * rows, ids, generated]
        layout = [rows, *layout, generated + 4 * rows, text, text + sum(lens)]
        body = bytearray(b"".join(parts))
        for _ in range(self.random.choice((0, 0, 0, 1, 3))):
            at = self.random.randrange(10)
            layout[at] = self.random.choice((layout[at] + 4, layout[at] - 4, self.random.choice(HUGE)))
        if body and self.random.random() < 0.3:
            body[self.random.randrange(len(body))] = self.random.randrange(256)
        return bytes(
            body[: self.random.choice((len(body), len(body), self.random.randrange(len(body) + 1)))]
        ), layout

    def numbers(self) -> list[Any]:
        rows: list[Any] = sorted(self.random.sample(range(9), self.random.randrange(4)))
        if self.random.random() < 0.1:
            rows.insert(0, self.random.choice(ODD))
        return rows

    def columns(self) -> Any:
        some = Columns(output_logprobs=Flat(b"\0" * 4, b"\0" * 4))
        return self.random.choice(
            (None, some, some, Lying(0), Lying(self.random.choice(HUGE)), Lying(None), 5)
        )

    def odd(self, row: int, route: int, live: Any, event: Any) -> None:
        act = self.random.randrange(9)
        if act == 0:
            self.table.pop(route, None)
        elif act == 1:
            self.table.clear()
        elif act == 2:
            self.random.choice(self.sources).close()
        elif act == 3:
            for each in self.lists:
                del each[self.random.randrange(len(each) + 1) :]
        elif act == 4:
            raise ZeroDivisionError
        elif act == 5 and self.depth < 3:
            self.deliver()
        elif act == 6 and isinstance(live, Live):
            live.channel.waiter = self.random.choice((None, Waiter(False), Waiter(True), Waiter(5)))
        elif act == 7 and isinstance(event, ChunkEvent):
            event.finish = self.random.choice(ODD)
        elif act == 8:
            self.receive()

    def folding(self, channel: Channel) -> None:
        """What takes the place of a channel's `try_fold`: the one call in the middle of a usual row."""
        if self.random.random() < 0.3:
            self.table.clear()
        fold(channel)

    def deliver(self) -> None:
        self.depth += 1
        setattr(Channel, "try_fold", lambda channel: self.folding(channel))  # noqa: B010
        body, layout = self.body()
        ending, having = self.numbers(), self.numbers()
        columns = [self.columns() for _ in having]
        wakes: list[Any] = []
        self.lists += [ending, having, columns, wakes]
        try:
            core.deliver(
                self.table,
                body,
                tuple(layout),
                5,
                ending,
                having,
                columns,
                self.random.randrange(9),
                wakes,
                self.odd,
            )
        except EXPECTED:
            pass
        finally:
            self.depth -= 1

    def receive(self) -> None:
        source = self.random.choice(self.sources)
        try:
            item = source.receive_nowait()
        except (*EXPECTED, SinkClosed, SinkEnded):
            return
        if isinstance(item, Frame | Done):
            assert isinstance(item.event, ChunkEvent)
            assert set(item.event.text_utf8) <= {*range(256)}

    def cut(self) -> None:
        """Cut buffers of any size at rows of any count, into what may fail to be made."""
        ragged = self.random.random() < 0.5
        sizes = [self.random.choice((0, 3, 4, 8, 40)) for _ in range(4)]
        counts, lengths, values, ids = (
            bytearray(
                b"".join(self.random.choice((0, 1, 2, 2**32 - 1)).to_bytes(4, "little") for _ in range(10))
            )[:size]
            for size in sizes
        )

        def make(*parts: bytes) -> object:
            act = self.random.randrange(20)
            if act == 0:
                raise ZeroDivisionError
            if act == 1:
                values.clear()  # it is looked at: refused
            return (Ragged if ragged else Flat)(*parts)

        given: tuple[Any, ...] = (make, counts, lengths if ragged else None, values, ids)
        if self.random.random() < 0.1:
            given = (*given[:4], self.random.choice(ODD))
        try:
            parts, sizes = core.cut(*given)
            assert len(parts) == len(sizes) == len(counts) // 4
        except EXPECTED:
            pass

    def make(self) -> None:
        """An event of anything is a whole one, or none."""
        arguments = [b"text", b"\0" * 4, 0, 1, 2, 3, None, None]
        for _ in range(self.random.randrange(3)):
            arguments[self.random.randrange(8)] = self.random.choice((*ODD, Lying(self.random.choice(HUGE))))
        del arguments[self.random.choice((8, 8, 8, 7, 6, 5)) :]
        try:
            event = ChunkEvent(*arguments)  # type: ignore[arg-type]
        except EXPECTED:
            return
        assert event.size == len(event.text_utf8) + len(event.ids_raw) + event.columns_bytes
        for name in ("text_utf8", "ids_raw", "columns", "size", "first"):
            try:
                setattr(event, name, 5)
            except (AttributeError, TypeError):
                continue
            raise AssertionError(f"{name} was changed")


def rounds(seed: int, count: int) -> None:
    for number in range(count):
        harm = Harm(seed + number)
        for _ in range(12):
            harm.random.choice((harm.deliver, harm.deliver, harm.cut, harm.make, harm.receive))()


if __name__ == "__main__":
    seed, count = int(sys.argv[2]), int(sys.argv[3])
    rounds(seed, count // 4)
    gc.collect()
    tracemalloc.start()
    rounds(seed, count // 4)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    rounds(seed, count)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    print("rounds", count, "grown", grown)
