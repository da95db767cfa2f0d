"""A row travels from a frame to the handler that asked, and the request ends once."""

import asyncio

import numpy as np
from outfeed.ring.batch import encode_batch
from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import ErrorFrame, Result, Tag, encode, join
from outfeed.sink import Control, Done, Error, Frame, Reader, open_sink


class FakeBell:
    def ring(self) -> None:
        pass


class FakeEgress:
    doorbell = FakeBell()

    def __init__(self) -> None:
        self.frames: list[tuple[int, int, memoryview]] = []

    def read(self, limit: int = 256, upto: list[int] | None = None) -> list[tuple[int, int, memoryview]]:
        taken, self.frames = self.frames[:limit], self.frames[limit:]
        return taken

    def release(self) -> None:
        pass


def row(
    route: int, first: int, text: bytes, ids: list[int], finish: FinishReason | None = None
) -> memoryview:
    count = np.array([len(ids)], "u4")
    return memoryview(
        join(
            encode_batch(
                1,
                np.array([route], "u8"),
                np.array([first], "u4"),
                count,
                np.array([3], "u4"),
                np.array(ids, "i4"),
                [] if finish is None else [(0, finish)],
                generated=count,
                text_lens=np.array([len(text)], "u4"),
                text=text,
            )
        )
    )


class Front:
    def __init__(self) -> None:
        self.egress = FakeEgress()
        self.aborts: list[tuple[int, str, str]] = []
        self.ends: list[int] = []
        self.reader = Reader(
            self.egress,  # type: ignore[arg-type]
            lambda route, rid, reason: self.aborts.append((route, rid, reason)),
            self.ends.append,
        )

    def arrive(self, *bodies: memoryview, tag: int = Tag.BATCH) -> None:
        self.egress.frames += [(0, tag, body) for body in bodies]
        self.reader.drain()


def test_two_deltas_and_the_end() -> None:
    front = Front()
    sender, source = open_sink(1000)
    front.reader.register(7, "a", sender)
    front.arrive(row(7, 0, b"he", [1]))
    item = source.receive_nowait()
    assert isinstance(item, Frame)
    assert (item.event.text, item.event.ids.tolist()) == ("he", [1])
    front.arrive(row(7, 1, b"ll", [2]), row(7, 2, b"o", [3], FinishReason.length(3)))
    items = list(source)
    assert isinstance(items[0], Done)
    assert (items[0].event.text, items[0].event.ids.tolist(), items[0].event.first) == ("llo", [2, 3], 1)
    assert (front.ends, front.aborts) == ([7], [])


def test_a_gap_ends_with_an_error_and_one_abort() -> None:
    front = Front()
    sender, source = open_sink(1000)
    front.reader.register(7, "a", sender)
    front.arrive(row(7, 0, b"he", [1]), row(7, 0, b"he", [1]), row(7, 2, b"o", [3]), row(7, 3, b"o", [3]))
    items = list(source)
    assert isinstance(items[0], Frame)
    assert isinstance(items[1], Error)
    assert items[1].status == 500
    assert front.aborts == [(7, "a", "gap")]
    assert front.ends == [7]


def test_a_result_and_an_error() -> None:
    front = Front()
    sender, source = open_sink(1000)
    front.reader.register(7, "a", sender)
    front.arrive(memoryview(encode(Result(7, b"fine"))), tag=Tag.RESULT)
    assert list(source) == [Control(b"fine")]
    sender, source = open_sink(1000)
    front.reader.register(8, "b", sender)
    front.arrive(memoryview(encode(ErrorFrame(8, 503, "gone", "no scheduler"))), tag=Tag.ERROR)
    assert list(source) == [Error(503, "gone", "no scheduler")]
    assert front.aborts == []


def test_a_task_is_woken_and_a_cancelled_one_is_gone() -> None:
    front = Front()
    sender, source = open_sink(1000)
    front.reader.register(7, "a", sender)

    async def story() -> None:
        waiting = asyncio.ensure_future(source.receive())
        await asyncio.sleep(0)
        await asyncio.to_thread(front.arrive, row(7, 0, b"x", [1]))
        assert isinstance(await waiting, Frame)
        waiting = asyncio.ensure_future(source.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])

    asyncio.run(story())
    front.reader.drain()
    assert front.aborts == [(7, "a", "handler gone")]
