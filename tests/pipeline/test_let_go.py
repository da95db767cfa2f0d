"""What a request had goes with its end, in the gateway's front and in the scheduler's port."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from outfeed.gateway.front import Stream
from outfeed.sidecar import FinishReason
from outfeed.sink import Frame

from tests.circles import circles
from tests.eventually import LIMIT_S, until

from .rig import Rig, rest_of, running_rig

LAST = FinishReason.length(9)


@pytest.fixture
def rig(small_tokenizer: Path) -> Iterator[Rig]:
    with running_rig("let-go", small_tokenizer, "--shards", "2") as rig:
        yield rig


def by_callback(rig: Rig, streams: list[Stream]) -> None:
    """Read the streams as the gateway does."""
    waiting = set(streams)

    def read(stream: Stream) -> None:
        while (item := stream.source.receive_nowait()) is not None:
            if not isinstance(item, Frame):
                waiting.discard(stream)
                return

    async def story() -> None:
        for stream in streams:
            stream.source.call_when_ready(asyncio.get_running_loop(), partial(read, stream))
        rig.push(streams, [5, 6], LAST)
        deadline = time.monotonic() + LIMIT_S
        while waiting:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)

    asyncio.run(story())


def by_task(rig: Rig, streams: list[Stream]) -> None:
    """With a time limit that passes once, too."""

    async def read(stream: Stream) -> None:
        with suppress(TimeoutError):
            await stream.source.receive(0.001)
        async for _ in stream.source:
            pass

    async def story() -> None:
        reading = [asyncio.ensure_future(read(stream)) for stream in streams]
        await asyncio.sleep(0.01)
        rig.push(streams, [5], LAST)
        await asyncio.gather(*reading)

    asyncio.run(story())


def by_thread(rig: Rig, streams: list[Stream]) -> None:
    rig.push(streams, [5])
    rig.push(streams, [6], LAST)
    for stream in streams:
        rest_of(stream)


def not_at_all(rig: Rig, streams: list[Stream]) -> None:
    for stream in streams:
        stream.close()
    until("the aborts", lambda: rig.receive() or len(rig.aborted) >= len(streams))
    rig.aborted.clear()


@pytest.mark.parametrize("read", [by_callback, by_task, by_thread, not_at_all])
def test_a_request_that_is_over_leaves_nothing_to_the_garbage_collector(
    rig: Rig, read: Callable[[Rig, list[Stream]], None]
) -> None:
    read(rig, rig.submit(3))  # what is made once stays
    with circles() as left:
        for _ in range(3):
            read(rig, rig.submit(3))
        until("nothing to be live", lambda: rig.front.reader.statistics().live == 0)
    assert left == []
