"""The shard loop: reads registrations and steps, decodes its own rows, writes them to their readers.

Order rule: a turn notes how far the step ring goes, drains the control ring, and only then handles steps up
to that mark. A gateway registers a request before it submits it, so a row always finds its registration.

A frame is released after its rows were written: a shard that dies in between is followed by one that reads
the frame again, and the reader drops what it has had. Knows rings and frames; must not know sinks or HTTP.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from ..ring.batch import BadBatch, Batch, Checked, as_batch, check_batch, join_steps
from ..ring.consumer import Consumer, Frame, wait
from ..ring.errors import CorruptLane, FrameTooLarge, RingFull
from ..ring.frames import (
    Attach,
    BadFrame,
    Buffer,
    ErrorFrame,
    Forget,
    Handover,
    Message,
    Register,
    Restore,
    Restored,
    Result,
    Tag,
    Takeover,
    check_reader,
    decode,
    encode,
)
from ..ring.route import format_route, reader_of, shard_of
from ..ring.suspects import Suspects
from ..ring.writer import LaneWriter
from .decoded import Decoded, halves
from .decoded import encode as encode_rows
from .decoder import Decoder
from .errors import BadRegistration
from .kernel import Failure

log = logging.getLogger(__name__)

# Steps handled between two looks at the control ring.
STEPS = 64
CONTROLS = 1024
# How many rows and tokens of several steps are decoded as one, at most; and how many bytes of the egress
# lane's largest frame each is taken to need.
JOINED = 1 << 12
JOINED_BYTES = 16
# A request's rows in them become one row of at most this part of a frame.
MERGED_SHARE = 4
# The most bytes of an ERROR's message and of its type, and what the frame takes besides the message. The
# smallest lane takes frames of 1 KiB.
MESSAGE_BYTES = 2048
TYPE_BYTES = 64
ERROR_BYTES = 128
# Longest sleep and longest wait for a reader's room; the heartbeat goes on between two of them.
WAIT_S = 0.25
RESTORE_WAIT_S = 0.05


class Stopped(Exception):
    """The shard was told to stop while it waited for a reader's room."""


@dataclass(slots=True)
class ShardStatistics:
    """What a shard's loop has seen since its start."""

    steps: int = 0
    controls: int = 0
    bad_frames: int = 0
    unnamed_bad_frames: int = 0
    """Of these, those that named no request of this shard."""
    corrupt_lanes: int = 0
    no_reader: int = 0
    """Frames for a reader that has no lane or a corrupt one, or that died with a full one; dropped."""
    waits: int = 0
    """Times a reader's ring was full."""
    wakes: int = 0
    """Times something woke the sleeping shard."""
    errors: int = 0
    """Requests failed by this shard."""


class Shard:
    """The loop over one shard's rings.

    egress(reader)  the lane to that reader, or None when it has none; asked once per reader and again
                    while it says None
    lives(reader)   whether that reader's process runs; asked while its lane is full
    beat()          called every turn and during every wait: "I am alive"
    stopping()      whether to end; asked as often
    """

    def __init__(
        self,
        number: int,
        decoder: Decoder,
        control: Consumer,
        steps: Consumer,
        egress: Callable[[int], LaneWriter | None],
        *,
        lives: Callable[[int], bool] = lambda reader: True,
        beat: Callable[[], None] = lambda: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.number = number
        self.decoder = decoder
        self.statistics = ShardStatistics()
        self._control = control
        self._steps = steps
        self._egress = egress
        self._reader = 0
        self._writers: dict[int, LaneWriter] = {}
        self._cut_off: set[int] = set()  # readers whose egress lane is corrupt
        self._mute: set[int] = set()  # readers whose control lane is
        self._awaited: int | None = None  # while this shard takes over: its epoch
        self._restored: set[int] = set()  # readers that have answered it
        self._routes: defaultdict[int, set[int]] = defaultdict(set)  # reader → its registered routes
        self._suspects = Suspects(
            lambda: (route for routes in self._routes.values() for route in routes),
            lambda route: self.decoder.came(route),
        )
        self._lives = lives
        self._beat = beat
        self._stopping = stopping

    def run(self) -> None:
        """Turn until told to stop."""
        rings = [self._control, self._steps]
        try:
            while not self._stopping():
                self._beat()
                if not self.turn() and wait(rings, WAIT_S):
                    self.statistics.wakes += 1
        except Stopped:
            pass

    def take_over(self, epoch: int, readers: Callable[[], Collection[int]], limit_s: float) -> None:
        """Take the place of a shard that died: have every reader RESTORE its live requests here.

        To be called before the first turn. `readers()` names the readers that live now; one that dies
        meanwhile is not waited for, nor is one that says nothing for `limit_s` seconds: its requests then
        end by the gap that it sees. Raises Stopped.
        """
        self._awaited = epoch
        asked = list(readers())
        for reader in asked:
            self._write(reader, Tag.TAKEOVER, encode(Takeover(self.number, epoch)))
        deadline = time.monotonic() + limit_s
        while missing := self._missing(set(asked) & set(readers())):
            if time.monotonic() > deadline:
                log.error(
                    "shard %d goes on without readers %s: no RESTORED within %.1f s",
                    self.number,
                    sorted(missing),
                    limit_s,
                )
                return
            self._beat()
            if self._stopping():
                raise Stopped
            if not self._drain_control():
                wait([self._control], RESTORE_WAIT_S)

    def _missing(self, readers: set[int]) -> set[int]:
        """Return which of them have yet to say RESTORED, and can."""
        return readers - self._restored - self._cut_off - self._mute

    def turn(self) -> bool:
        """Handle what is there now; whether there was anything."""
        upto = self._steps.tails()
        busy = self._drain_control()
        while frames := self._read(self._steps, STEPS, upto):
            self._step_frames(frames)
            self._steps.release()
            busy = True
            self._beat()
        for route in self._suspects.silent(time.monotonic()) if self._suspects.any else ():
            self._fail(
                route, 500, "row_lost", "no row has come since a damaged frame, which may have held its last"
            )
        return busy

    def _read(
        self, ring: Consumer, limit: int, upto: list[int] | None = None
    ) -> list[tuple[int, int, memoryview]]:
        while True:
            try:
                return ring.read(limit, upto)
            except CorruptLane as error:
                self.statistics.corrupt_lanes += 1
                log.error("shard %d goes on without it: %s", self.number, error)
                if ring is self._control:
                    self._mute.add(error.lane)
                    self.forget_reader(error.lane)  # that gateway ends them, and cannot say so any more

    def _drain_control(self) -> bool:
        busy = False
        while frames := self._read(self._control, CONTROLS):
            for lane, tag, body in frames:
                self._control_frame(lane, tag, body)
            self._control.release()
            busy = True
        return busy

    def _control_frame(self, lane: int, tag: int, body: memoryview) -> None:
        self.statistics.controls += 1
        try:
            message = decode(tag, body)
            check_reader(message, lane)
        except BadFrame as error:
            theirs = tuple(route for route in error.routes if reader_of(route) == lane)
            self._bad_frame(BadFrame(str(error), theirs), known=False)
            return
        if isinstance(message, Takeover | Restored | Attach):
            self._handover(message)
            return
        if shard_of(message.route) != self.number:
            return
        routes = self._routes[reader_of(message.route)]
        try:
            match message:
                case Register():
                    routes.add(message.route)
                    self.decoder.register(message)
                case Restore():
                    routes.add(message.route)
                    self.decoder.restore(message)
                case Forget():
                    routes.discard(message.route)
                    self.decoder.forget(message.route)
                case _:
                    self._bad_frame(
                        BadFrame(f"a {Tag(tag).name} frame does not belong on a control ring"), known=False
                    )
        except BadRegistration as error:
            self._fail(message.route, 400, "bad_request", str(error))
        except MemoryError as error:
            self._fail(message.route, 503, "no_memory", str(error))

    def _handover(self, message: Takeover | Restored | Attach) -> None:
        match message:
            case Restored(reader, shard, epoch) if (shard, epoch) == (self.number, self._awaited):
                self._restored.add(reader)
            case Attach(reader):
                self.forget_reader(reader)
                # A new process has nothing to restore: of what it registers behind this no step is released.
                self._restored.add(reader)

    def forget_reader(self, reader: int) -> None:
        """Drop every request of a reader whose process is gone."""
        for route in self._routes.pop(reader, ()):
            self.decoder.forget(route)

    def _step_frames(self, frames: list[Frame]) -> None:
        """Handle frames in their order. Plain steps that lie here one behind the other are decoded as one.

        So a backlog pays once, here and in the reader, what every frame costs. Nothing is waited for.
        """
        self.statistics.steps += len(frames)
        together: list[Checked] = []
        room = most = self._joined_at_most() if len(frames) > 1 else 0
        for _, tag, body in frames:
            found = _content(tag, body)
            if isinstance(found, Checked) and not found.families and found.text_at is None:
                size = found.rows + found.tokens
                if together and size > room:
                    self._together(together)
                    together, room = [], most
                together.append(found)
                room -= size
                continue
            if together:
                self._together(together)
                together, room = [], most
            self._alone(found, tag, body)
        if together:
            self._together(together)

    def _joined_at_most(self) -> int:
        """Return how many rows and tokens may be decoded as one: what most likely fits one egress frame."""
        lane = self._lane(self._reader) if self.decoder.joins else None
        return 0 if lane is None else min(JOINED, lane.max_frame // JOINED_BYTES)

    def _together(self, steps: list[Checked]) -> None:
        try:
            self._batch(as_batch(steps[0]) if len(steps) == 1 else join_steps(steps), joined=len(steps) > 1)
        except BadFrame as error:
            self._bad_frame(error, known=True)

    def _alone(self, found: Checked | Message | Handover | BadFrame, tag: int, body: memoryview) -> None:
        if isinstance(found, Checked):
            self._together([found])
        elif isinstance(found, BadFrame):
            self._damaged(found)
        elif not isinstance(found, Result | ErrorFrame):
            self._damaged(BadFrame(f"a {Tag(tag).name} frame does not belong on a step ring"))
        elif shard_of(found.route) == self.number:
            self._pass_on(found, tag, body)

    def _damaged(self, error: BadFrame) -> None:
        """Fail what a damaged step frame names, and watch the others: it may have had rows of theirs."""
        self._bad_frame(error, known=True)
        self._suspects.damaged()

    def _pass_on(self, answer: Result | ErrorFrame, tag: int, body: memoryview) -> None:
        """Hand a scheduler's answer to its reader as it is, or say that the egress lane cannot take it."""
        try:
            self._write(reader_of(answer.route), tag, body)
        except FrameTooLarge as error:
            log.error(
                "shard %d cannot pass on an answer: %s", self.number, error, extra={"route": answer.route}
            )
            if isinstance(answer, Result):
                answer = ErrorFrame(answer.route, 500, "answer_too_large", str(error))
            self._say(answer)

    def _batch(self, batch: Batch, joined: bool) -> None:
        if batch.egress:
            raise BadBatch("a BATCH with text does not belong on a step ring", tuple(batch.routes.tolist()))
        if not batch.rows:
            return
        # Nearly always there is one reader; a step that has rows for others is decoded for each of them.
        todo, done = [self._reader], set()
        while todo:
            reader = todo.pop()
            done.add(reader)
            try:
                merge = self._merged_at_most(reader) if joined else 0
                rows, failures, others = self.decoder.decode(batch, self.number, reader, merge)
            except Exception as error:
                # A fault of ours, or a step that no memory can hold: it costs its requests, not the shard,
                # which would read the same step again after every restart.
                log.exception("shard %d could not decode a step of %d rows", self.number, batch.rows)
                raise BadBatch(f"could not be decoded: {error!r}", tuple(batch.routes.tolist())) from error
            if rows.rows:
                self._reader = reader
                self._write_rows(reader, rows)
            for failure in failures:
                self._lost(failure)
            todo += [other for other in others if other not in done and other not in todo]

    def _merged_at_most(self, reader: int) -> int:
        """Return how many bytes a request's merged row may have: few enough for a frame to take it."""
        lane = self._lane(reader)
        return 0 if lane is None else lane.max_frame // MERGED_SHARE

    def _write_rows(self, reader: int, rows: Decoded) -> None:
        try:
            self._write(reader, Tag.BATCH, *rows.encode())
        except FrameTooLarge:
            self._write_halves(reader, rows.batch())

    def _write_halves(self, reader: int, batch: Batch) -> None:
        """Write rows in as few frames as the lane takes; a single row too large for it fails its request."""
        for half in halves(batch) if batch.rows > 1 else (batch,):
            try:
                self._write(reader, Tag.BATCH, *encode_rows(half))
            except FrameTooLarge as error:
                if half.rows > 1:
                    self._write_halves(reader, half)
                else:
                    self._fail(int(half.routes[0]), 500, "row_too_large", str(error))

    def _write(self, reader: int, tag: int, *parts: Buffer) -> None:
        """Write one frame to a reader, however long it takes to have room: so the scheduler learns of it.

        A reader whose process is dead is not waited for: nobody is there to miss the frame.
        """
        writer = self._lane(reader)
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

    def _lane(self, reader: int) -> LaneWriter | None:
        """Return the lane to a reader, None when it has none or a corrupt one."""
        if reader in self._cut_off:
            return None
        lane = self._writers.get(reader)
        if lane is None:
            try:
                lane = self._egress(reader)
            except CorruptLane as error:
                self._lose_lane(reader, error)
            if lane is not None:
                self._writers[reader] = lane
        return lane

    def _lose_lane(self, reader: int, error: CorruptLane) -> None:
        """Go on without a reader: it finds the lane lost too, and ends its requests of this shard."""
        self.statistics.corrupt_lanes += 1
        self._cut_off.add(reader)
        log.error("shard %d goes on without reader %d: %s", self.number, reader, error)

    def _lost(self, failure: Failure) -> None:
        if failure.too_much:
            message = f"the text of {failure.tokens} tokens from {failure.first} on is too large"
            self._fail(failure.route, 500, "row_too_large", message)
            return
        message = (
            f"tokens from {failure.expected} on were expected, a row of {failure.tokens} "
            f"from {failure.first} on came"
        )
        self._fail(failure.route, 500, "gap", message)

    def _bad_frame(self, error: BadFrame, *, known: bool) -> None:
        """Fail what a rejected frame names; a damaged name is believed only if it is a live request's."""
        self.statistics.bad_frames += 1
        routes = [
            route
            for route in dict.fromkeys(error.routes)
            if shard_of(route) == self.number and (not known or self.decoder.knows(route))
        ]
        log.error("shard %d rejected a frame naming %d of its requests: %s", self.number, len(routes), error)
        if not routes:
            self.statistics.unnamed_bad_frames += 1
        for route in routes:
            self._fail(route, 500, "bad_frame", f"a damaged frame was rejected: {error}")

    def _fail(self, route: int, status: int, kind: str, message: str) -> None:
        self.statistics.errors += 1
        log.error("shard %d fails %s: %s", self.number, format_route(route), message)
        self.decoder.end(route)
        self._say(ErrorFrame(route, status, kind, message, running=True))

    def _say(self, error: ErrorFrame) -> None:
        """Write an ERROR, its texts cut to what the lane takes: they may be a client's or a scheduler's."""
        reader = reader_of(error.route)
        lane = self._lane(reader)
        room = MESSAGE_BYTES if lane is None else min(MESSAGE_BYTES, lane.max_frame - ERROR_BYTES)
        short = msgspec.structs.replace(
            error, type=_cut(error.type, TYPE_BYTES), message=_cut(error.message, room)
        )
        self._write(reader, Tag.ERROR, encode(short))


def _cut(text: str, size: int) -> str:
    """Return what of a text fits `size` bytes of UTF-8."""
    return text.encode(errors="replace")[:size].decode(errors="ignore")


def _content(tag: int, body: memoryview) -> Checked | Message | Handover | BadFrame:
    """Return what a step frame holds, or why it is rejected."""
    try:
        return check_batch(body) if tag == Tag.BATCH else decode(tag, body)
    except BadFrame as error:
        return error
