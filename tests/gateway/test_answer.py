"""How streams' items get into an answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from outfeed.gateway.answer import Answer
from outfeed.gateway.metrics import Metrics
from outfeed.sink import ChunkEvent, open_sink

from .fake import Played


class Narrow(Answer):
    """An answer whose client takes one event at a time, when the test says so."""

    room = 0

    def takes(self) -> bool:
        return self.room > 0

    def event(self, index: int, event: ChunkEvent) -> None:
        self.room -= 1
        self.taken.append(index)

    taken: list[int]


def test_streams_that_wait_for_room_all_get_their_turn_though_each_has_always_more() -> None:
    async def run() -> None:
        exchange = SimpleNamespace(gone=False, started=0.0, on_gone=None, on_room=None)
        streams = [Played(f"r{n}", None, *open_sink(1 << 20)) for n in range(5)]
        answer = Narrow(cast(Any, exchange), streams, Metrics(), lambda _: None)
        answer.taken = []
        answer.start()
        for played in streams:
            played.say("first")
        while not all(feed.held for feed in answer._feeds):
            await asyncio.sleep(0)
        assert answer.taken == []
        while len(answer.taken) < 15:
            answer.room = 1
            cast(Any, exchange).on_room()
            # Whoever had its turn has something new at once.
            for played in streams:
                played.say("more")
        answer.close()
        assert answer.taken[:5] == answer.taken[5:10] == answer.taken[10:] == [0, 1, 2, 3, 4]

    asyncio.run(run())
