"""Drives a Decoder as a shard would: real BATCH frames in, each request's text, ids and ending out."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from outfeed.ring.batch import Batch, decode_batch, encode_batch, join_steps
from outfeed.ring.checked import check_batch
from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import DecodeOptions, Register, Restore
from outfeed.ring.route import make_route
from outfeed.shards.decoder import Decoder
from outfeed.shards.fallback import TokenizerText
from outfeed.shards.table import TokenTable, load_tokenizer

SHARD, READER = 3, 1


def i32(ids: Iterable[int]) -> bytes:
    return np.array(list(ids), dtype="<i4").tobytes()


@cache
def _loaded(path: str) -> TokenizerText:
    return TokenizerText(load_tokenizer(path)[0])


@dataclass
class Heard:
    """What a reader has of one request."""

    text: bytes = b""
    ids: list[int] = field(default_factory=list)
    generated: int = 0
    finish: FinishReason | None = None
    ended_here: bool = False
    pieces: list[str] = field(default_factory=list)


class Driver:
    """One decoder and the requests it serves."""

    def __init__(self, table: TokenTable) -> None:
        self.table = table
        self.decoder = Decoder(table, _loaded(table.meta.path) if table.fallback else None)
        self.heard: dict[int, Heard] = {}
        self.failures: list[tuple[int, int, int]] = []
        self._next: dict[int, int] = {}
        self._slots = 0

    def start(
        self,
        options: DecodeOptions | None = None,
        prompt: Sequence[int] = (),
        prompt_tokens: int | None = None,
    ) -> int:
        self._slots += 1
        route = make_route(READER, SHARD, self._slots, 1)
        self.decoder.register(self.registration(route, options, prompt, prompt_tokens))
        self.heard[route] = Heard()
        self._next[route] = 0
        return route

    @staticmethod
    def registration(
        route: int,
        options: DecodeOptions | None = None,
        prompt: Sequence[int] = (),
        prompt_tokens: int | None = None,
    ) -> Register:
        tail = i32(list(prompt)[-64:])
        total = len(prompt) if prompt_tokens is None else prompt_tokens
        return Register(route, "rid", options or DecodeOptions(), tail, total)

    def step(
        self,
        rows: Sequence[tuple[int, Sequence[int]]],
        finishes: dict[int, FinishReason] | None = None,
        first: dict[int, int] | None = None,
    ) -> Batch:
        """One step: (route, ids) rows; `finishes` by route."""
        return self._decode(decode_batch(self.frame(rows, finishes, first)), 0)

    def backlog(self, frames: Sequence[memoryview], merge: int) -> Batch:
        """Several steps' frames decoded as one."""
        return self._decode(join_steps([check_batch(frame) for frame in frames]), merge)

    def frame(
        self,
        rows: Sequence[tuple[int, Sequence[int]]],
        finishes: dict[int, FinishReason] | None = None,
        first: dict[int, int] | None = None,
    ) -> memoryview:
        """One step's frame, each request's rows counted on; its last row has its finish."""
        counts = np.array([len(ids) for _, ids in rows], dtype=np.uint32)
        starts = []
        for route, ids in rows:
            starts.append((first or {}).get(route, self._next.get(route, 0)))
            self._next[route] = self._next.get(route, 0) + len(ids)
        last = {route: row for row, (route, _) in enumerate(rows)}
        parts = encode_batch(
            7,
            np.array([route for route, _ in rows], dtype=np.uint64),
            np.array(starts, dtype=np.uint32),
            counts,
            np.zeros(len(rows), dtype=np.uint32),
            np.array([token for _, ids in rows for token in ids], dtype=np.int32),
            sorted((last[route], end) for route, end in (finishes or {}).items() if route in last),
        )
        return memoryview(b"".join(bytes(part) for part in parts))

    def _decode(self, batch: Batch, merge: int) -> Batch:
        made, failures, others = self.decoder.decode(batch, SHARD, READER, merge)
        assert others == []
        self.failures += [(found.route, found.expected, found.first) for found in failures]
        decoded = decode_batch(memoryview(b"".join(bytes(part) for part in made.encode())))
        self._hear(decoded)
        return decoded

    def _hear(self, decoded: Batch) -> None:
        assert decoded.text is not None
        assert decoded.text_lens is not None
        text, ids = bytes(decoded.text), decoded.ids.tolist()
        finishes = dict(decoded.finishes)
        text_at = ids_at = 0
        for row, route in enumerate(decoded.routes.tolist()):
            heard = self.heard[route]
            size, count = int(decoded.text_lens[row]), int(decoded.counts[row])
            piece = text[text_at : text_at + size]
            heard.pieces.append(piece.decode())
            heard.text += piece
            heard.ids += ids[ids_at : ids_at + count]
            assert int(decoded.first[row]) == heard.generated
            heard.generated += int(decoded.generated[row])
            heard.finish = finishes.get(row)
            heard.ended_here = row in decoded.ended
            text_at += size
            ids_at += count

    def stream(
        self,
        ids: Sequence[int],
        cuts: Iterable[int] = (),
        finish: FinishReason | None = None,
        options: DecodeOptions | None = None,
        prompt: Sequence[int] = (),
    ) -> Heard:
        """Serve one request whose ids come in rows cut at `cuts`; the last row ends it."""
        route = self.start(options, prompt)
        edges = [0, *sorted(set(cuts) - {0, len(ids)}), len(ids)]
        for begin, end in itertools.pairwise(edges):
            last = end == len(ids)
            ending = {route: finish or FinishReason.length(len(ids))} if last else None
            self.step([(route, ids[begin:end])], ending)
        self.decoder.forget(route)
        return self.heard[route]

    def restore_into(
        self, table: TokenTable, route: int, options: DecodeOptions | None = None, prompt: Sequence[int] = ()
    ) -> "Driver":
        """Let a new decoder take over one request from what its reader has."""
        heard = self.heard[route]
        other = Driver(table)
        start = self.registration(route, options, prompt)
        other.decoder.restore(
            Restore(
                route,
                "rid",
                start.options,
                start.prompt_tail,
                start.prompt_tokens,
                i32(heard.ids),
                len(heard.text),
            )
        )
        other.heard[route] = heard
        other._next[route] = heard.generated
        return other


def every_cut(length: int) -> list[list[int]]:
    """No cut, each single cut, a cut everywhere, and every second place."""
    whole = list(range(1, length))
    return [[], *([at] for at in whole), whole, whole[::2], whole[1::3]]
