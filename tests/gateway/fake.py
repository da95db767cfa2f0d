"""A backend without an engine: each prompt's stream is played by the test, item by item."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from outfeed.gateway.backend import Reading, Stream
from outfeed.ingress.errors import RidInUse
from outfeed.ingress.request import Model, parse_generate
from outfeed.ingress.tokenize import Tokenize
from outfeed.ring.finish import FinishReason
from outfeed.sink import ChunkEvent, Done, Error, Frame, Item, SinkSender, SinkSource, open_sink
from outfeed.sink.columns import Columns

VOCABULARY = 1000
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]


@dataclass
class Encoded:
    """What a text became."""

    ids: list[int]

    def __len__(self) -> int:
        return len(self.ids)


class WordTokenizer:
    """One token per character: the id is its code point, within a small vocabulary."""

    def encode(self, sequence: str, add_special_tokens: bool = True) -> Any:
        ids = [ord(character) % VOCABULARY for character in sequence]
        return Encoded([1, *ids] if add_special_tokens else ids)

    def encode_batch_fast(self, sequences: list[str], add_special_tokens: bool = True) -> Any:
        return [self.encode(sequence, add_special_tokens) for sequence in sequences]

    def decode_batch(self, sequences: list[list[int]]) -> list[str]:
        return ["".join(map(chr, ids)) for ids in sequences]


def event(
    text: str, first: int, *, finish: FinishReason | None = None, columns: Columns | None = None
) -> ChunkEvent:
    """One token's event, whose id is 100 + its place."""
    ids = np.array([100 + first], dtype="<i4").tobytes()
    return ChunkEvent(text.encode(), ids, first, 1, 3, 0, finish, columns)


@dataclass
class Played:
    """One prompt's stream, and what became of it."""

    rid: str
    prompt: Any
    sender: SinkSender
    source: SinkSource
    closed: bool = False
    over: bool = False
    sent: int = 0

    def close(self) -> None:
        self.closed = True
        self.source.close()

    def say(self, *texts: str, columns: Columns | None = None) -> None:
        for text in texts:
            self.sender.try_send(Frame(event(text, self.sent, columns=columns)))
            self.sent += 1

    def end(self, text: str, finish: FinishReason | None = None) -> None:
        self.over = True
        self.sender.try_send(
            Done(event(text, self.sent, finish=finish or FinishReason.length(self.sent + 1)))
        )

    def fail(self, status: int, message: str) -> None:
        self.over = True
        self.sender.try_send(Error(status, "fault", message))

    def send(self, item: Item) -> None:
        self.sender.try_send(item)


def three(played: Played) -> None:
    """Say three words, and stop."""
    played.say("one ", "two ")
    played.end("three", FinishReason.stop("three"))


@dataclass
class FakeBackend:
    """Takes what ingress takes. `script` plays each stream as soon as it is there."""

    name: str = "fake"
    script: Any = None
    sink_bytes: int = 1 << 20
    model: Model = field(default_factory=lambda: Model(VOCABULARY, 4096, WordTokenizer()))
    streams: list[Played] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    why: str | None = None
    table: dict[int, bytes] = field(default_factory=dict)
    special: set[int] = field(default_factory=set)
    sick: str | None = None
    asked: list[tuple[str, bytes]] = field(default_factory=list)
    answer: bytes | Exception | None = b"{}"
    refuse: Exception | None = None

    def __post_init__(self) -> None:
        self.tokenize = Tokenize(self.model)

    async def submit(self, body: Any) -> list[Stream]:
        request = parse_generate(body, self.model)
        if self.refuse is not None:
            raise self.refuse
        live = {one.rid for one in self.streams if not (one.closed or one.over)}
        for prompt in request.prompts:
            if prompt.rid in live:
                raise RidInUse(f"rid {prompt.rid!r} is taken")
        played = [Played(prompt.rid, prompt, *open_sink(self.sink_bytes)) for prompt in request.prompts]
        self.streams += played
        if self.script is not None:
            for one in played:
                asyncio.get_running_loop().call_soon(self.script, one)
        return [*played]

    async def control(self, op: str, body: bytes, timeout: float) -> bytes:
        self.asked.append((op, body))
        if self.answer is None:
            raise TimeoutError
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def check(self, timeout: float) -> str | None:
        return self.sick

    def abort(self, rid: str) -> bool:
        self.aborted.append(rid)
        for one in self.streams:
            if one.rid == rid and not (one.closed or one.over):
                one.fail(499, "aborted on request")
                return True
        return False

    def token_bytes(self, token: int) -> bytes | None:
        return self.table.get(token)

    def is_special(self, token: int) -> bool:
        return token in self.special

    def trouble(self) -> str | None:
        return self.why

    def info(self) -> dict[str, Any]:
        return {"instance": {"instance": "fake"}}

    def own_readings(self) -> Iterator[Reading]:
        yield Reading("live_streams", "gauge", "Live.", len(self.streams), {"reader": "0"})

    def readings(self) -> Iterator[Reading]:
        yield Reading("ring_depth_bytes", "gauge", "Depth.", 0, {"ring": "egress", "lane": "0"})
        yield Reading("restarts_total", "counter", "Restarts.", 0, {"role": "shard", "index": "0"})
