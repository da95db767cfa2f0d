"""The shard loop: reads registrations and steps, decodes its own rows, writes them to their readers.

Order rule: a turn notes how far the step ring goes, drains the control ring, and only then handles steps up
to that mark. A gateway registers a request before it submits it, so a row always finds its registration.

A frame is released after its rows were written: a shard that dies in between is followed by one that reads
the frame again, and the reader drops what it has had. Knows rings and frames; must not know sinks or HTTP.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass

from ..ring.batch import Batch, as_batch, join_steps
from ..ring.checked import BadBatch, Checked, check_batch
from ..ring.consumer import Consumer, Frame, wait
from ..ring.errors import CorruptLane, FrameTooLarge
from ..ring.frames import (
    TAG_OF,
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
    Standing,
    Tag,
    Takeover,
    Tally,
    check_reader,
    decode,
    encode,
    tally_rows,
)
from ..ring.route import format_route, reader_of, shard_of, slot_of
from ..ring.writer import LaneWriter
from .decoder import Decoder
from .egress import WAIT_S, Egress, ShardStatistics
from .errors import BadRegistration, Stopped
from .kernel import Failure

log = logging.getLogger(__name__)

# Steps handled between two looks at the control ring.
STEPS = 64
CONTROLS = 1024
# How many rows and tokens of several steps are decoded as one, at most; and how many bytes of the egress
# lane's largest frame each is taken to need.
JOINED = 1 << 15
JOINED_BYTES = 16
# A request's rows in them become one row of at most this part of a frame.
MERGED_SHARE = 4
# Longest sleep while readers are waited for; the heartbeat goes on between two of them.
RESTORE_WAIT_S = 0.05


@dataclass(slots=True)
class _Asked:
    """A reader that is to RESTORE all it has here. `before`: registered then, less those restored."""

    epoch: int
    before: set[int]
    late: bool = False


class Shard:
    """The loop over one shard's rings.

    egress(reader)  the lane to that reader, or None when it has none; asked once per reader and again
                    while it says None
    lives(reader)   whether that reader's process runs; asked while it is waited for
    damaged()       called when somebody may have lost a row: a frame was rejected, and is not released yet;
                    or frames for a reader that can be reached were dropped
    beat()          called every turn and during every wait: "I am alive"
    stopping()      whether to end; asked as often
    restore_limit_s how long to wait for a reader's RESTOREs, at most
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
        damaged: Callable[[], None] = lambda: None,
        beat: Callable[[], None] = lambda: None,
        stopping: Callable[[], bool] = lambda: False,
        restore_limit_s: float = 5.0,
    ) -> None:
        self.number = number
        self.decoder = decoder
        self.statistics = ShardStatistics()
        self._control = control
        self._steps = steps
        self._reader = 0
        self._mute: set[int] = set()  # readers whose control lane is
        # reader → slot → who is registered
        self._routes: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._unsure: set[int] = set()  # readers that are to be asked for all they have
        self._asked: dict[int, _Asked] = {}  # those that were, and have yet to say RESTORED
        self._damaged = damaged
        self._restore_limit_s = restore_limit_s
        self._lives = lives
        self._beat = beat
        self._stopping = stopping
        self._egress = Egress(number, egress, self.statistics, lives, beat, stopping)

    @property
    def cut_off(self) -> Set[int]:
        """The readers that cannot be reached."""
        return self._egress.cut_off

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

    def take_over(self, readers: Collection[int]) -> None:
        """Take the place of a shard that died: have `readers`, all that live, RESTORE what they have here.

        To be called before the first turn. Raises Stopped.
        """
        self._unsure.update(readers)
        self._have_restored()

    def _have_restored(self) -> None:
        """Ask who is to be asked, and touch no step until they have said what they have.

        A reader that dies meanwhile is not waited for, nor is one that has not said all of it after
        `restore_limit_s` seconds: whoever loses a row by that is found by the tally that is asked for when it
        answers.
        """
        began = time.monotonic()
        asked_again = False
        while self._unsure or self._missing():
            while self._unsure:  # more may come while one is asked
                self._ask(self._unsure.pop())
            waited = time.monotonic() - began
            if waited > self._restore_limit_s:
                late = self._missing()
                log.error(
                    "shard %d goes on without readers %s: no RESTORED within %.1f s",
                    self.number,
                    late,
                    self._restore_limit_s,
                )
                for reader in late:
                    self._asked[reader].late = True
                return
            if waited > self._restore_limit_s / 2 and not asked_again:
                asked_again = True  # what asked them may have been damaged on its way
                self._unsure.update(self._missing())
            self._beat()
            if self._stopping():
                raise Stopped
            if not self._drain_control():
                wait([self._control], RESTORE_WAIT_S)

    def _ask(self, reader: int) -> None:
        epoch = time.monotonic_ns()  # never asked with before, by no process
        self._asked[reader] = _Asked(epoch, set(self._routes[reader].values()))
        self._egress.write(reader, Tag.TAKEOVER, encode(Takeover(self.number, epoch)))

    def _missing(self) -> list[int]:
        """Return which readers have yet to say RESTORED, and can."""
        return [
            reader
            for reader, asked in sorted(self._asked.items())
            if not asked.late and reader not in self._egress.cut_off | self._mute and self._lives(reader)
        ]

    def turn(self) -> bool:
        """Handle what is there now; whether there was anything."""
        upto = self._steps.tails()
        busy = self._drain_control()
        if self._unsure:
            self._have_restored()
        frames = self._read(self._steps, STEPS, upto)
        while frames:
            self._step_frames(frames)
            self._steps.release()
            busy = True
            self._beat()
            # Fewer than were asked for: that was all up to the mark.
            frames = self._read(self._steps, STEPS, upto) if len(frames) == STEPS else []
        return busy

    def _read(self, ring: Consumer, limit: int, upto: list[int] | None = None) -> list[Frame]:
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

    def _control_frame(self, lane: int, tag: int, body: Buffer) -> None:
        self.statistics.controls += 1
        try:
            message = decode(tag, body)
        except BadFrame as error:
            # A registration, or the end of one: that gateway says again what it has, before any further step.
            self._bad_frame(error)
            self._unsure.add(lane)
            return
        try:
            check_reader(message, lane)
            if isinstance(message, Handover):
                self._handover(message)
            elif shard_of(message.route) == self.number:
                self._registration(message)
        except BadFrame as error:
            self._bad_frame(error)

    def _registration(self, message: Message) -> None:
        if not isinstance(message, Register | Restore | Forget):
            raise _stray(message, "control")
        route, routes = message.route, self._routes[reader_of(message.route)]
        try:
            if isinstance(message, Forget):
                self._forget(route)
                return
            if (before := routes.get(slot_of(route), route)) != route:
                self._forget(before)  # its FORGET was lost, or never said: the slot is used again
            if isinstance(message, Register):
                self.decoder.register(message)
            else:
                self.decoder.restore(message)
            routes[slot_of(route)] = route
            if isinstance(message, Restore) and (asked := self._asked.get(reader_of(route))):
                asked.before.discard(route)
        except BadRegistration as error:
            self._fail(route, 400, "bad_request", str(error))
        except MemoryError as error:
            self._fail(route, 503, "no_memory", str(error))
        except Exception as error:
            # A fault of ours costs the request, not the shard, whose successor would read the frame again.
            log.exception("shard %d could not take a registration", self.number)
            self._fail(route, 500, "internal_error", f"could not be registered: {error!r}")

    def _handover(self, message: Handover) -> None:
        match message:
            case Restored(reader, shard, epoch):
                if shard == self.number and (asked := self._asked.get(reader)) and asked.epoch == epoch:
                    self._restored(reader)
            case Attach(reader):
                self.forget_reader(reader)
                # A new process has nothing to restore: of what it registers behind this no step is released.
                self._asked.pop(reader, None)
            case _:
                raise _stray(message, "control")

    def _restored(self, reader: int) -> None:
        asked = self._asked.pop(reader)
        for route in asked.before:  # over for its gateway, whose FORGET was lost
            self._forget(route)
        if asked.late:
            self._damaged()

    def _forget(self, route: int) -> None:
        routes = self._routes[reader_of(route)]
        if routes.get(slot_of(route)) == route:
            del routes[slot_of(route)]
        self.decoder.forget(route)

    def doubt(self, reader: int) -> None:
        """Have a reader say again what it has here, and a tally what it lost: frames for it were dropped."""
        log.warning("shard %d has dropped frames for reader %d, which lives", self.number, reader)
        self._unsure.add(reader)
        self._damaged()

    def try_lanes(self) -> None:
        """Try the lanes to readers that could not be had. Call it now and then."""
        for reader in self._egress.try_again():
            self.doubt(reader)

    def forget_reader(self, reader: int) -> None:
        """Drop every request of a reader whose process is gone."""
        for route in self._routes.pop(reader, {}).values():
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
            plain = found if isinstance(found, Checked) and _is_plain(found) else None
            if together and (plain is None or plain.rows + plain.tokens > room):
                self._together(together)
                together, room = [], most
            if plain is None:
                self._alone(found, tag, body)
            else:
                together.append(plain)
                room -= plain.rows + plain.tokens
        if together:
            self._together(together)

    def _joined_at_most(self) -> int:
        """Return how many rows and tokens may be decoded as one: what most likely fits one egress frame."""
        lane = self._egress.lane(self._reader) if self.decoder.joins else None
        return 0 if lane is None else min(JOINED, lane.max_frame // JOINED_BYTES)

    def _together(self, steps: list[Checked]) -> None:
        batch = as_batch(steps[0]) if len(steps) == 1 else join_steps(steps)
        if batch.egress:
            self._bad_frame(BadBatch("a BATCH with text does not belong on a step ring"))
            return
        try:
            self._batch(batch, joined=len(steps) > 1)
        except Stopped:
            raise
        except Exception as error:
            # A fault of ours, or a step that no memory can hold: it costs its requests, not the shard, which
            # would read the same step again after every restart. Those whose end it was, too.
            log.exception("shard %d could not decode a step of %d rows", self.number, batch.rows)
            for route in dict.fromkeys(batch.routes.tolist()):
                if self._routes[reader_of(route)].get(slot_of(route)) == route:
                    self._fail(route, 500, "not_decoded", f"a step could not be decoded: {error!r}")

    def _alone(self, found: Checked | Message | Handover | BadFrame, tag: int, body: Buffer) -> None:
        if isinstance(found, Checked):
            self._together([found])
        elif isinstance(found, BadFrame):
            self._bad_frame(found)
        elif isinstance(found, Tally):
            self._tally(found)
        elif not isinstance(found, Result | ErrorFrame):
            self._bad_frame(_stray(found, "step"))
        elif shard_of(found.route) == self.number:
            self._pass_on(found, tag, body)

    def _tally(self, tally: Tally) -> None:
        """Pass on what is said of this shard's requests. What is not known here gets no row any more."""
        theirs: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for route, tokens, standing in tally.rows:
            if shard_of(route) == self.number:
                if standing in (Standing.RUNNING, Standing.RECEIVED) and not self.decoder.knows(route):
                    standing = Standing.ENDED
                theirs[reader_of(route)].append((route, tokens, standing))
        for reader, rows in theirs.items():
            lane = self._egress.lane(reader)
            most = tally_rows(lane.max_frame) if lane is not None else len(rows)
            for at in range(0, len(rows), most):
                self._egress.write(reader, Tag.TALLY, encode(Tally(tally.rank, rows[at : at + most])))

    def _pass_on(self, answer: Result | ErrorFrame, tag: int, body: Buffer) -> None:
        """Hand a scheduler's answer to its reader as it is, or say that the egress lane cannot take it."""
        try:
            self._egress.write(reader_of(answer.route), tag, body)
        except FrameTooLarge as error:
            log.error(
                "shard %d cannot pass on an answer: %s", self.number, error, extra={"route": answer.route}
            )
            if isinstance(answer, Result):
                answer = ErrorFrame(answer.route, 500, "answer_too_large", str(error))
            self._egress.say(answer)

    def _batch(self, batch: Batch, joined: bool) -> None:
        if not batch.rows:
            return
        # Nearly always there is one reader; a step that has rows for others is decoded for each of them.
        todo, done = [self._reader], set()
        while todo:
            reader = todo.pop()
            done.add(reader)
            merge = self._merged_at_most(reader) if joined else 0
            rows, failures, others = self.decoder.decode(batch, self.number, reader, merge)
            if rows.rows:
                self._reader = reader
                for route, why in self._egress.write_rows(reader, rows):
                    self._fail(route, 500, "row_too_large", why)
            for failure in failures:
                self._lost(failure)
            todo += [other for other in others if other not in done and other not in todo]

    def _merged_at_most(self, reader: int) -> int:
        """Return how many bytes a request's merged row may have: few enough for a frame to take it."""
        lane = self._egress.lane(reader)
        return 0 if lane is None else lane.max_frame // MERGED_SHARE

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

    def _bad_frame(self, error: BadFrame) -> None:
        """Note a rejected frame. Whose rows it had nobody can say: a tally tells who has too few."""
        log.error("shard %d rejected a frame: %s", self.number, error)
        self._damaged()

    def _fail(self, route: int, status: int, kind: str, message: str) -> None:
        self.statistics.errors += 1
        log.error("shard %d fails %s: %s", self.number, format_route(route), message)
        self.decoder.end(route)
        self._egress.say(ErrorFrame(route, status, kind, message, running=True))


def _is_plain(step: Checked) -> bool:
    """Whether a step is ids alone: no optional columns, nor text, which does not belong here."""
    return not step.families and step.text_at is None


def _stray(message: Message | Handover, ring: str) -> BadFrame:
    return BadFrame(f"a {TAG_OF[type(message)].name} frame does not belong on a {ring} ring")


def _content(tag: int, body: Buffer) -> Checked | Message | Handover | BadFrame:
    """Return what a step frame holds, or why it is rejected."""
    try:
        return check_batch(body) if tag == Tag.BATCH else decode(tag, body)
    except BadFrame as error:
        return error
