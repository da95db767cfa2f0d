"""A shard's lanes to its readers: each opened when its first frame comes, written to for as long as it takes.

What cannot be reached is one reader's loss: the others go on. Knows frames and lanes; must not know steps.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ..ring.batch import Batch
from ..ring.errors import CorruptLane, FrameTooLarge, RingFull
from ..ring.frames import Buffer, ErrorFrame, Tag, encode
from ..ring.route import reader_of
from ..ring.writer import LaneWriter
from .decoded import Decoded, halves
from .decoded import encode as encode_rows
from .errors import Stopped

log = logging.getLogger(__name__)

# The most bytes of an ERROR's message and of its type, and what the frame takes besides the message. The
# smallest lane takes frames of 1 KiB.
MESSAGE_BYTES = 2048
TYPE_BYTES = 64
ERROR_BYTES = 128
# Longest wait for a reader's room; the heartbeat goes on between two of them.
WAIT_S = 0.25


@dataclass(slots=True)
class ShardStatistics:
    """What a shard's loop has seen since its start."""

    steps: int = 0
    controls: int = 0
    corrupt_lanes: int = 0
    no_reader: int = 0
    """Frames for a reader that has no lane or cannot be reached, or that died with a full one; dropped."""
    waits: int = 0
    """Times a reader's ring was full."""
    wakes: int = 0
    """Times something woke the sleeping shard."""
    errors: int = 0
    """Requests failed by this shard."""


class Egress:
    """The lanes of shard `number`. The callables are the loop's own (see `Shard`)."""

    def __init__(
        self,
        number: int,
        open_lane: Callable[[int], LaneWriter | None],
        statistics: ShardStatistics,
        lives: Callable[[int], bool],
        beat: Callable[[], None],
        stopping: Callable[[], bool],
    ) -> None:
        self.cut_off: set[int] = set()  # readers whose lane is corrupt, or cannot be had
        self._corrupt: set[int] = set()  # those whose lane is
        self.statistics = statistics
        self._number = number
        self._open = open_lane
        self._writers: dict[int, LaneWriter] = {}
        self._lives = lives
        self._beat = beat
        self._stopping = stopping

    def write_rows(self, reader: int, rows: Decoded) -> list[tuple[int, str]]:
        """Write rows in as few frames as the lane takes; return those too large for it, and why."""
        try:
            self.write(reader, Tag.BATCH, *rows.encode())
        except FrameTooLarge:
            return self._write_halves(reader, rows.batch())
        return []

    def _write_halves(self, reader: int, batch: Batch) -> list[tuple[int, str]]:
        too_large = []
        for half in halves(batch) if batch.rows > 1 else (batch,):
            try:
                self.write(reader, Tag.BATCH, *encode_rows(half))
            except FrameTooLarge as error:
                if half.rows > 1:
                    too_large += self._write_halves(reader, half)
                else:
                    too_large.append((int(half.routes[0]), str(error)))
        return too_large

    def write(self, reader: int, tag: int, *parts: Buffer) -> None:
        """Write one frame to a reader, however long it takes to have room: so the scheduler learns of it.

        A reader whose process is dead is not waited for: nobody is there to miss the frame.
        """
        writer = self.lane(reader)
        if writer is None:
            self.statistics.no_reader += 1
            return
        try:
            self._write_for_sure(writer, reader, tag, *parts)
        except CorruptLane as error:
            self._lose_lane(reader, error)
            self.statistics.no_reader += 1

    def _write_for_sure(self, writer: LaneWriter, reader: int, tag: int, *parts: Buffer) -> None:
        try:
            writer.write(tag, *parts)
            return
        except RingFull:
            self.statistics.waits += 1
        while True:
            self._beat()
            if self._stopping():
                raise Stopped
            if not self._lives(reader):
                self.statistics.no_reader += 1
                return
            try:
                writer.write(tag, *parts, timeout=WAIT_S)
                return
            except RingFull:
                continue

    def lane(self, reader: int) -> LaneWriter | None:
        """Return the lane to a reader, None when it has none or cannot be reached."""
        if reader in self.cut_off:
            return None
        lane = self._writers.get(reader)
        return self._take_lane(reader) if lane is None else lane

    def _take_lane(self, reader: int) -> LaneWriter | None:
        try:
            lane = self._open(reader)
        except Exception as error:  # corrupt, no ring any more, no file left to open: it is one reader's
            self._lose_lane(reader, error)
            return None
        if lane is not None:
            self._writers[reader] = lane
        return lane

    def _lose_lane(self, reader: int, error: Exception) -> None:
        """Go on without a reader: it finds that on the board, and ends its requests of this shard."""
        if isinstance(error, CorruptLane):
            self.statistics.corrupt_lanes += 1
            self._corrupt.add(reader)
        if reader not in self.cut_off:
            log.error("shard %d goes on without reader %d: %s", self._number, reader, error)
        self.cut_off.add(reader)

    def try_again(self) -> list[int]:
        """Try the lanes that could not be had; return the readers that are reached again.

        Not those that are corrupt: they stay so for the life of the ring.
        """
        reached = []
        for reader in sorted(self.cut_off - self._corrupt):
            if self._take_lane(reader) is not None:
                self.cut_off.discard(reader)
                log.warning("shard %d reaches reader %d again", self._number, reader)
                reached.append(reader)
        return reached

    def say(self, error: ErrorFrame) -> None:
        """Write an ERROR, its texts cut to what the lane takes: they may be a client's or a scheduler's."""
        reader = reader_of(error.route)
        lane = self.lane(reader)
        room = MESSAGE_BYTES if lane is None else min(MESSAGE_BYTES, lane.max_frame - ERROR_BYTES)
        short = msgspec.structs.replace(
            error, type=_cut(error.type, TYPE_BYTES), message=_cut(error.message, room)
        )
        self.write(reader, Tag.ERROR, encode(short))


def _cut(text: str, size: int) -> str:
    """Return what of a text fits `size` bytes of UTF-8."""
    return text.encode(errors="replace")[:size].decode(errors="ignore")
