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
    Restore,
    Restored,
    Tag,
    Takeover,
    decode,
    encode,
)
from outfeed.ring.route import make_route, reader_of
from outfeed.shards.decoder import Decoder
from outfeed.shards.loop import Shard
from outfeed.shards.table import TokenTable

ROUTE = make_route(0, 0, 5, 1)


def flipped(body: bytes, bit: int = 100) -> bytes:
    """Return a body with one bit changed."""
    changed = bytearray(body)
    changed[bit // 8 % len(body)] ^= 1 << bit % 8
    return bytes(changed)


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
        self.on_beat = self.answer
        """What happens while the shard waits."""
        self.damages = 0
        self.live: dict[int, Register] = {}
        self.deaf: set[int] = set()
        """Gateways that do not answer when they are asked for all they have."""
        self._heard: list[list[Batch | Message | Handover]] = [[], []]
        self.shard = Shard(
            0,
            Decoder(table, readers=2),
            self.rings["control"].consumer(0, self.bell),
            self.rings["step"].consumer(0, self.bell),
            lambda reader: self.rings[f"egress{reader}"].writer(0) if reader < 2 else None,
            damaged=self.damaged,
            beat=lambda: self.on_beat(),
            stopping=lambda: self.stop,
        )

    def answer(self) -> None:
        """Have the gateways answer a TAKEOVER."""
        self.beats += 1
        for reader in {0, 1} - self.deaf:
            for message in self._listen(reader):
                self._heard[reader].append(message)
                if isinstance(message, Takeover):
                    self.restore(reader, message.epoch)

    def damaged(self) -> None:
        assert self.rings["step"].stats().consumers[0].lag or self.rings["control"].stats().consumers[0].lag
        self.damages += 1

    def restore(self, reader: int, epoch: int) -> None:
        """Say what is live with that gateway: none of it has had a token."""
        for route, known in self.live.items():
            if reader_of(route) == reader:
                self.say(Restore(route, known.rid, known.options, b"", 0, b"", 0))
        self.controls[reader].write(Tag.RESTORED, encode(Restored(reader, 0, epoch)))

    def register(self, *routes: int, options: DecodeOptions | None = None) -> None:
        for route in routes:
            self.live[route] = Register(route, f"rid-{route}", options or DecodeOptions(), b"", 0)
            self.say(self.live[route])

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
        heard, self._heard[reader] = self._heard[reader] + self._listen(reader), []
        return heard

    def _listen(self, reader: int) -> list[Batch | Message | Handover]:
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


def only_batch(heard: list[Batch | Message | Handover]) -> Batch:
    (batch,) = heard
    assert isinstance(batch, Batch)
    return batch


def turn_and_hear(rig: Rig) -> list[Batch]:
    """Turn until nothing is left, reading whenever the shard waits for room."""
    got: list[Batch] = []

    def beat() -> None:
        rig.beats += 1
        if rig.shard.statistics.waits:
            got.extend(batch for batch in rig.hear() if isinstance(batch, Batch))

    rig.on_beat = beat
    while rig.shard.turn():
        pass
    return got + [batch for batch in rig.hear() if isinstance(batch, Batch)]


def said_by(batches: list[Batch]) -> dict[int, int]:
    """How many tokens each request said; each of its rows follows on the one before it."""
    said: dict[int, int] = {}
    for batch in batches:
        columns = (batch.routes.tolist(), batch.first.tolist(), batch.generated.tolist())
        for route, first, made in zip(*columns, strict=True):
            assert first == said.get(route, 0)
            said[route] = first + made
    return said
