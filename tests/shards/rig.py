"""A shard's loop between real rings: the test is its gateways, its scheduler and its readers."""

import numpy as np
from outfeed.ring import Consumer, Doorbell, LaneWriter, Ring
from outfeed.ring.batch import Batch, decode_batch, encode_batch
from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import (
    TAG_OF,
    DecodeOptions,
    Handover,
    Message,
    Register,
    Tag,
    decode,
    encode,
)
from outfeed.ring.route import make_route, reader_of
from outfeed.shards.decoder import Decoder
from outfeed.shards.loop import Shard
from outfeed.shards.table import TokenTable

ROUTE = make_route(0, 0, 5, 1)


class Rig:
    """One shard between a control and a step ring and two readers' egress rings."""

    def __init__(self, name: str, table: TokenTable, capacity: int = 1 << 16) -> None:
        self.bell = Doorbell.create(f"{name}.bell")
        self.rings = {
            what: Ring.create(f"{name}.{what}", lanes=lanes, consumers=1, capacity=size)
            for what, lanes, size in (
                ("control", 2, 1 << 20),
                ("step", 1, 1 << 20),
                ("egress0", 1, capacity),
                ("egress1", 1, capacity),
            )
        }
        self.controls: list[LaneWriter] = [self.rings["control"].writer(reader) for reader in (0, 1)]
        self.control = self.controls[0]
        self.steps: LaneWriter = self.rings["step"].writer(0)
        self.readers: list[Consumer] = [self.rings[f"egress{n}"].consumer(0, self.bell) for n in (0, 1)]
        self.stop = False
        self.beats = 0
        self.shard = Shard(
            0,
            Decoder(table),
            self.rings["control"].consumer(0, self.bell),
            self.rings["step"].consumer(0, self.bell),
            lambda reader: self.rings[f"egress{reader}"].writer(0) if reader < 2 else None,
            beat=self.beat,
            stopping=lambda: self.stop,
        )

    def beat(self) -> None:
        self.beats += 1

    def register(self, *routes: int, options: DecodeOptions | None = None) -> None:
        for route in routes:
            self.say(Register(route, f"rid-{route}", options or DecodeOptions(), b"", 0))

    def say(self, message: Message) -> None:
        self.controls[reader_of(message.route)].write(TAG_OF[type(message)], encode(message))

    def push(
        self, rows: list[tuple[int, int, list[int]]], finishes: list[tuple[int, FinishReason]] | None = None
    ) -> None:
        """One step of (route, first, ids)."""
        self.steps.write(Tag.BATCH, *self.frame(rows, finishes))

    @staticmethod
    def frame(
        rows: list[tuple[int, int, list[int]]], finishes: list[tuple[int, FinishReason]] | None = None
    ) -> list[bytes]:
        parts = encode_batch(
            1,
            np.array([route for route, _, _ in rows], dtype=np.uint64),
            np.array([first for _, first, _ in rows], dtype=np.uint32),
            np.array([len(ids) for _, _, ids in rows], dtype=np.uint32),
            np.zeros(len(rows), dtype=np.uint32),
            np.array([token for _, _, ids in rows for token in ids], dtype=np.int32),
            finishes or [],
        )
        return [bytes(part) for part in parts]

    def hear(self, reader: int = 0) -> list[Batch | Message | Handover]:
        """What a reader got, copied out of the ring."""
        heard: list[Batch | Message | Handover] = []
        while frames := self.readers[reader].read():
            for _, tag, body in frames:
                copy = memoryview(bytes(body))
                heard.append(decode_batch(copy) if tag == Tag.BATCH else decode(tag, copy))
            self.readers[reader].release()
        return heard

    def close(self) -> None:
        for ring in self.rings.values():
            ring.close()
            ring.unlink()
        self.bell.close()
