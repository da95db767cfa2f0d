"""The reader on a ring of its own, with a thread that drains it."""

import asyncio
import threading
from collections.abc import Iterator
from itertools import count
from os import getpid

import numpy as np
import pytest
from outfeed.ring import Doorbell, Ring, wait
from outfeed.ring.batch import encode_batch
from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import Tag
from outfeed.ring.route import make_route
from outfeed.sink import Done, Error, Frame, Reader, open_sink

from .front import waiting

A, B, C = (make_route(0, shard, slot, 1) for slot, shard in ((1, 0), (2, 1), (3, 0)))

_names = count()


@pytest.fixture
def egress() -> Iterator[tuple[Ring, Doorbell]]:
    name = f"outfeed-t{getpid()}-{next(_names)}.egress0"
    with Ring.create(name, lanes=2, consumers=1, capacity=1 << 20) as ring:
        bell = Doorbell.create(f"{name}.bell")
        yield ring, bell
        bell.close()
        ring.unlink()


def test_a_real_ring_a_thread_and_a_task(egress: tuple[Ring, Doorbell]) -> None:
    ring, bell = egress
    aborts: list[tuple[int, str]] = []
    ends: list[int] = []
    with ring.writer(0) as writer, ring.consumer(0, bell) as consumer:
        reader = Reader(consumer, lambda route, rid: aborts.append((route, rid)), ends.append)
        over = threading.Event()

        def drain() -> None:
            while not over.is_set():
                if reader.drain() == 0:
                    wait((consumer,), 1.0)

        thread = threading.Thread(target=drain)
        thread.start()
        sender, source = open_sink(1 << 20)
        reader.register(A, "a", sender)
        gone, _ = open_sink(10)
        reader.register(C, "c", gone)
        del _

        async def story() -> str:
            text = ""
            for first in range(100):
                parts = encode_batch(
                    1,
                    np.array([A], "u8"),
                    np.array([first], "u4"),
                    np.array([1], "u4"),
                    np.array([9], "u4"),
                    np.array([first], "i4"),
                    [(0, FinishReason.length(100))] if first == 99 else (),
                    generated=np.array([1], "u4"),
                    text_lens=np.array([1], "u4"),
                    text=b"x",
                )
                writer.write(Tag.BATCH, b"".join(parts), timeout=10)
                item = await source.receive(30)
                assert isinstance(item, Frame | Done)
                text += item.event.text
            return text

        assert asyncio.run(story()) == "x" * 100
        over.set()
        bell.ring()
        thread.join()
        assert ends == [C, A]
        assert aborts == [(C, "c")]


def test_a_corrupt_lane_costs_its_shard_alone(egress: tuple[Ring, Doorbell]) -> None:
    ring, bell = egress
    aborts: list[tuple[int, str]] = []
    with ring.consumer(0, bell) as consumer:
        from outfeed.ring import CorruptLane, View

        class Corrupt:
            doorbell = bell
            raised = False

            def read(self, limit: int, upto: list[int] | None = None) -> list[tuple[int, int, View]]:
                if not self.raised:
                    self.raised = True
                    raise CorruptLane("egress0", 0, 128)
                return consumer.read(limit)

            def release(self) -> None:
                consumer.release()

        reader = Reader(
            Corrupt(),  # type: ignore[arg-type]
            lambda route, rid: aborts.append((route, rid)),
            lambda route: None,
        )
        pairs = {route: open_sink(100) for route in (A, B)}
        for route, (sender, _) in pairs.items():
            reader.register(route, str(route), sender)
        reader.drain()
        (error,) = waiting(pairs[A][1])
        assert isinstance(error, Error)
        assert (error.status, error.type) == (500, "corrupt_lane")
        assert waiting(pairs[B][1]) == []
        assert aborts == [(A, str(A))]
        sender, source = open_sink(100)
        reader.register(C, "c", sender)
        reader.drain()
        assert isinstance(waiting(source)[0], Error)
