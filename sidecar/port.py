"""SchedulerPort: the one thing a scheduler imports.

A scheduler attaches, takes requests from `recv`, and after each decode step hands every row over with one
`push_tokens`: one copy into shared memory, no waiting unless the step ring is full. Must not know how a
shard decodes or who reads the text.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from operator import index
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..ring import Consumer, CorruptLane, Doorbell, Frame, RingClosed, wait
from ..ring.board import InstanceConfig, Role, State
from ..ring.errors import LaneOwned
from ..ring.families import Families, Family, Kind
from ..ring.frames import (
    TAG_OF,
    Abort,
    Attach,
    BadFrame,
    Control,
    ErrorFrame,
    Generate,
    Handover,
    Live,
    Message,
    Result,
    check_reader,
    decode,
    encode,
)
from ..ring.instance import Instance, InstanceGone
from ..ring.route import format_route, reader_of, slot_of
from .endings import NOBODY, Finishes, checked
from .origin import Origin
from .rows import RowTable, UnknownRoute
from .steps import StepWriter, column, converted, in_order
from .tallies import Tallies

log = logging.getLogger(__name__)

BEAT_EVERY_NS: Final = 100_000_000
LOOK_EVERY_NS: Final = 200_000_000
Messages = list[Generate | Abort | Control]
Column = Sequence[int] | NDArray[Any] | memoryview
OptionalColumns = Families | Mapping[Kind, Family | None]


class SchedulerPort:
    """A scheduler rank's end of an instance's request and step rings.

    One thread at a time. Rank 0 receives the requests; every rank pushes on a lane of its own and first
    calls `adopt` for requests that rank 0 handed to it. In a process forked after `attach` the port is not
    alive: everything raises RingClosed there, and closing it leaves the parent's as it is.
    """

    def __init__(self, instance: Instance, rank: int) -> None:
        self._instance = instance
        config = instance.config
        self._row = instance.board.row(Role.SCHEDULER, rank)
        self._table = RowTable(config.readers, config.slots)
        with ExitStack() as undo:  # what fails leaves nothing taken: who catches it may attach again
            self._bell = undo.enter_context(Doorbell.create(instance.bell(Role.SCHEDULER, rank)))
            self._step = undo.enter_context(instance.step())
            self._request = undo.enter_context(instance.request())
            self._writer = self._step.writer(rank)
            self._consumer = self._request.consumer(0, self._bell) if rank == 0 else None
            undo.pop_all()
        self._steps = StepWriter(self._writer, self._table)
        self._push: Final = self._steps.push
        self._beat_due = 0
        self._readers = instance.board.rows(Role.READER)
        self._look_due = 0
        others = [*instance.board.rows(Role.SHARD), *self._readers]
        self._tallies = Tallies(rank, self._writer, self._table, others)
        self._several = config.ranks > 1
        self._open: Final = self._table.open_received if self._several else self._table.open
        self._origin = Origin(instance.board) if rank else None
        self._orphans: Messages = []
        """Aborts of what another rank 0 had handed on, for the next `recv`."""
        self._corrupt: set[int] = set()
        """Gateways whose lane is lost."""
        self._doubted: set[int] = set()
        """Gateways of which something was rejected, until they have said what they have."""
        self._closed = False
        self._pid = os.getpid()
        if self._row.owner is not None:
            self._row.count_replacement()
        self._row.claim(State.RUNNING)

    @classmethod
    def attach(cls, instance: str, *, rank: int = 0, timeout: float = 10.0) -> SchedulerPort:
        """Attach as rank `rank` to a running instance; wait up to `timeout` seconds for one to be there.

        Raises:
            InstanceGone: there is no such instance, even after `timeout` seconds.
            BadInstanceName: no instance can have that name.
            LaneOwned: a live scheduler has that rank already.
            NotOurs: it is another user's.
            OtherNamespace: it runs in another pid or time namespace.
            WrongVersion: its shared memory is laid out by another version of this package.
            IndexError: the instance was not started with that many ranks.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                opened = Instance.attach(instance)
                break
            except InstanceGone:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.05)
        try:
            return cls(opened, rank)
        except LaneOwned as error:
            opened.close()
            raise LaneOwned(
                f"instance {instance!r} has a live scheduler of rank {rank}: end it, or attach as another "
                f"rank ({error})"
            ) from error
        except BaseException:
            opened.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether the instance still runs. Also this rank's heartbeat: call it, or `recv`, now and then."""
        self._maybe_beat()
        return not self._closed and os.getpid() == self._pid and self._instance.alive

    @property
    def config(self) -> InstanceConfig:
        """What the instance was started with: its tokenizer's path, context length, slots, ranks …"""
        return self._instance.config

    @property
    def stale_rows(self) -> int:
        """Rows pushed for requests that had already ended; the shards drop them."""
        return self._table.stale_rows

    def recv(self, limit: int = 1024) -> list[Generate | Abort | Control]:
        """Return what the gateways sent since the last call, oldest first; [] when nothing did.

        limit: frames to take in at most, 1 to 4096.
        What one call returns counts as handled at the next call: a scheduler that dies in between gets it
        again when it comes back. An ABORT for a request that has ended is left out. When a gateway has died,
        or its lane is corrupt, there is an Abort for each of its live requests, once. What was damaged on its
        way is not handed out: an ABORT comes again, a request ends for its client with an error.
        A rank other than 0 gets an Abort for each of its live requests when rank 0 has gone away.

        Raises:
            ValueError: the limit is out of its range.
            RingClosed: the port is closed, or was made before this process was forked.
        """
        now = self._maybe_beat()
        if self._consumer is None:
            return self._handed_on_in_vain(now)
        self._consumer.release()
        messages: Messages = []
        for frame in self._frames(self._consumer, limit):
            try:
                message = decode(frame[1], frame[2])
                check_reader(message, frame[0])
                self._take(message, messages)
            except (BadFrame, UnknownRoute, MemoryError) as error:
                # That gateway sees the count, and says what it has (LIVE): so what was lost is found.
                log.error("dropped a frame of gateway %d: %s", frame[0], error or "no memory")
                self._row.count("bad_frames")
                self._doubted.add(frame[0])
        if now >= self._look_due:
            self._look_due = now + LOOK_EVERY_NS
            try:
                self._end_orphans(messages)
            except MemoryError:  # again at the next look; what was read is handed out
                log.error("what gateways had that are gone is not aborted yet: no memory")
        return messages

    def wait(self, timeout: float) -> bool:
        """Sleep until something is there for `recv`, at most `timeout` seconds (1 s at most a call)."""
        self._maybe_beat()
        if self._consumer is None:
            time.sleep(min(timeout, 1.0))
            return False
        self._consumer.release()
        return wait([self._consumer], timeout)

    def is_live(self, route: int) -> bool:
        """Whether a request was received (or adopted) and has not ended.

        Raises:
            UnknownRoute: the number cannot be a route of this instance.
        """
        return self._table.is_live(route)

    def adopt(self, message: Generate | Abort) -> None:
        """Take on a request, so that this rank can push its rows; or end one, with its Abort.

        For all that rank 0 hands on. Rank 0 too adopts what it keeps, if there are several: a request that
        no rank has adopted ends when any of them goes away.

        Raises:
            UnknownRoute: the route cannot be one of this instance.
            RingClosed: the port is closed, or was made before this process was forked.
        """
        self._must_be_open()
        if isinstance(message, Abort):
            if self._origin is not None:
                self._table.end(message.route)
            return
        if self._origin is not None and self._origin.moved():
            self._end_if_rank_0_is_gone()  # what was there before; this one comes from who is rank 0 now
        if self._table.adopt(message.route, len(message.input_ids) // 4) and self._several:
            self._tallies.adopted.append(message.route)

    def push_tokens(
        self,
        routes: Column,
        ids: Column,
        counts: Column | None = None,
        *,
        finishes: Finishes | None = None,
        families: OptionalColumns | None = None,
        timeout: float = 0.0,
    ) -> None:
        """Hand over one decode step.

        routes: u64[rows], from `recv`; at most 65,536. ids: i32[tokens], row after row, matched stop tokens
        included. counts: u32[rows], tokens of each row; None means one each. Contiguous buffers of just these
        types (numpy, array, memoryview) go into shared memory as they are; any other whole numbers (lists,
        other dtypes) are turned into them first, and checked for their range.
        finishes: row → finish reason (the field's mapping, or a FinishReason), for rows whose request ends
        here; a row may end without a token.
        families: the optional columns of this step, by `Kind` or all seven in its order, None where absent:
        log probabilities (natural logarithms), hidden states. docs/scheduler.md has their shapes.
        timeout: seconds to wait when the step ring is full, at most 3600; 0 does not wait.

        Raises:
            RingFull: there was no room within `timeout`; nothing was handed over, push the same again.
            FrameTooLarge: the step does not fit a quarter of the lane; split it.
            UnknownRoute: a row's route was never received; nothing was handed over.
            ValueError: lengths do not match, or a number, finish reason or family is none; nothing was handed
                over.
            CorruptLane: something wrote over this rank's lane; only a new instance brings it back.
            WriterBusy: another thread is in a push of this port; nothing was handed over.
            RingClosed: the port is closed, or was made before this process was forked.
            MemoryError: there was none; nothing was handed over.
        """
        ended, endings = checked(finishes, routes) if finishes else NOBODY
        if ended:
            routes = column(routes, np.uint64, "routes")
            end = self._table.ending([int(routes[row]) for row, _ in ended])
        if self._tallies.adopted:
            self._tallies.say_adopted(timeout)
        stamp = 0 if families else self._push(routes, ids, counts, endings, timeout)
        if not stamp:  # families, or columns of other types than the C pass takes
            columns = converted(routes, ids, counts)
            if families:
                ordered = in_order(families)
                stamp = self._steps.push_with_families(*columns, endings, ordered, timeout)
            else:
                stamp = self._push(*columns, endings, timeout)
        # The step is out: nothing may fail any more, or it would be pushed again.
        if ended:
            end()
        if stamp >= self._beat_due:
            self._beat(stamp)

    def push_result(self, route: int, body: bytes | bytearray | memoryview, *, timeout: float = 1.0) -> None:
        """Answer a Control with `body`, which reaches its handler unchanged.

        An answer to one that has ended (an Abort came with it, say) is dropped and counted in `stale_rows`.

        Raises:
            FrameTooLarge: `body` does not fit a frame; answer with `push_error` or something smaller.
            RingFull: there was no room within `timeout` seconds; nothing was sent.
            UnknownRoute: the control request was never received.
            ValueError: the route is a Generate's, or `body` is not bytes.
        """
        if not isinstance(body, bytes | bytearray | memoryview):
            raise ValueError(f"body is a {type(body).__name__}: give bytes")
        route = index(route)
        if self._is_late(route):
            return
        if not self._table.is_control(route):
            raise ValueError(
                f"{format_route(route)} is no control request: end it with push_tokens and a finish reason, "
                "or with push_error"
            )
        self._finish(Result(route, bytes(body)), timeout)

    def push_error(self, route: int, status: int, type: str, message: str, *, timeout: float = 1.0) -> None:
        """End a request with an error: an HTTP status (400 to 599), a short type, a message for people.

        That of one that has ended already is dropped and counted in `stale_rows`.

        Raises:
            RingFull: there was no room within `timeout` seconds; nothing was sent.
            UnknownRoute: the request was never received.
            ValueError: the status is not an error's, or type or message is no text.
        """
        route, status = index(route), index(status)
        if not 400 <= status <= 599:
            raise ValueError(f"status {status} is no error: give 400 to 599")
        for name, text in (("type", type), ("message", message)):
            if not isinstance(text, str):
                raise ValueError(f"{name} is {text!r}: give text")
        if not self._is_late(route):
            self._finish(ErrorFrame(route, status, type, message), timeout)

    def close(self) -> None:
        """Detach. Twice is fine; a closed port is not alive and refuses everything else.

        Raises WriterBusy while another thread pushes: the port stays as it is.
        """
        if self._closed:
            return
        self._beat(time.monotonic_ns())
        self._step.close()  # a ring closes what was opened of it
        self._closed = True
        if os.getpid() == self._pid:
            self._row.state = State.STOPPED
        self._request.close()
        self._bell.close()
        self._instance.close()

    def __enter__(self) -> SchedulerPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _frames(self, consumer: Consumer, limit: int) -> list[Frame]:
        """Read; a lane that is found corrupt costs its gateway's requests, and nobody else's.

        That gateway ends them for its clients and has no way left to say so: they are aborted here.
        """
        while True:
            try:
                return consumer.read(limit)
            except CorruptLane as error:  # told once for each lane
                log.error("gateway %d can send nothing more, what it has is aborted: %s", error.lane, error)
                self._row.count("bad_frames")
                self._corrupt.add(error.lane)
                self._look_due = 0

    def _end_those_of(self, readers: Collection[int], messages: Messages) -> None:
        """End the live requests of gateways that are gone, with an Abort for each."""
        self._end([route for route in map(int, self._table.live()) if reader_of(route) in readers], messages)

    def _end(self, routes: list[int], messages: Messages) -> None:
        aborts, end = [Abort(route) for route in routes], self._table.ending(routes)
        self._row.count("aborts", len(routes))
        messages += aborts
        end()  # last, and without memory: what ended without its Abort would run for nobody

    def _compare(self, theirs: Live, messages: Messages) -> None:
        """Compare what a gateway has with what is live here; end each that it has not.

        A request of its that never came here was lost: it is noted as one that has ended, and so the next
        tally tells its gateway.
        """
        stated = {route for route in theirs.routes if self._is_theirs(route, theirs)}
        live = [route for route in map(int, self._table.live()) if self._is_theirs(route, theirs)]
        missing = [route for route in stated if not self._table.knows(route)]
        self._end([route for route in live if route not in stated], messages)
        for route in missing:
            log.error("gateway %d has %s, which never came: it ends", theirs.reader, format_route(route))
            self._table.open(route, 0)
            self._table.end(route)
            self._tallies.begin()
        if theirs.end >= self._instance.config.slots:  # the last part
            self._doubted.discard(theirs.reader)

    def _vacate(self, route: int, messages: Messages) -> None:
        """End the request whose slot this one takes: its ABORT was lost.

        No LIVE would miss it from here on: the table has one request a slot. While nothing of a gateway is
        lost, no ABORT of it is: what is live here then was handed on, and another rank has ended it.
        """
        if reader_of(route) not in self._doubted:
            return
        before = self._table.before(route)
        if before is not None:
            self._end([before], messages)

    def _is_theirs(self, route: int, theirs: Live) -> bool:
        inside = theirs.first <= slot_of(route) < min(theirs.end, self._instance.config.slots)
        return inside and reader_of(route) == theirs.reader

    def _end_orphans(self, messages: Messages) -> None:
        """Look for gateways that died, or were closed, and were not replaced, or whose lane is lost."""
        dead = {row.index for row in self._readers if row.owner is not None and not row.serving}
        if gone := dead | self._corrupt:
            before = len(messages)
            self._end_those_of(gone, messages)
            if len(messages) > before:
                self._tallies.begin()  # one that lives, whose row was written over, learns of it by the tally

    def _handed_on_in_vain(self, now: int) -> Messages:
        """Return the Aborts of what rank 0 handed on before it went away."""
        self._must_be_open()
        if now >= self._look_due:
            self._look_due = now + LOOK_EVERY_NS
            self._end_if_rank_0_is_gone()
        orphans, self._orphans = self._orphans, []
        return orphans

    def _end_if_rank_0_is_gone(self) -> None:
        if self._origin is not None and self._origin.is_gone():
            self._end([int(route) for route in self._table.live()], self._orphans)
            self._origin.settle()

    def _take(self, message: Message | Handover, messages: Messages) -> None:
        """Note what a gateway said; add to `messages` what of it is the scheduler's to handle.

        Raises:
            BadFrame: no gateway says that to a scheduler.
            UnknownRoute: it names a route that this instance cannot have.
        """
        match message:
            case Generate():
                self._vacate(message.route, messages)
                self._open(message.route, len(message.input_ids) // 4)
                messages.append(message)
            case Control():
                self._vacate(message.route, messages)
                self._table.open_control(message.route)
                messages.append(message)
            case Abort():
                known = self._table.knows(message.route)
                if self._table.end(message.route) or (self._several and not known):
                    # Not known: the rank 0 before this one had handed it on.
                    self._row.count("aborts")
                    messages.append(message)
            case Attach():
                self._end_those_of({message.reader}, messages)
                self._doubted.discard(message.reader)
            case Live():
                self._compare(message, messages)
            case _:
                raise BadFrame(f"a {TAG_OF[type(message)].name} does not belong on the request ring")

    def _is_late(self, route: int) -> bool:
        """Whether an answer comes when its request has ended: dropped and counted, as a late row is."""
        if self._table.is_live(route):
            return False
        self._table.drop(route)
        return True

    def _finish(self, message: Result | ErrorFrame, timeout: float) -> None:
        self._writer.write(TAG_OF[type(message)], encode(message), timeout=timeout)
        self._table.end(message.route)

    def _must_be_open(self) -> None:
        if self._closed or os.getpid() != self._pid:
            raise RingClosed("the port is closed, or this process was forked after it was made")

    def _maybe_beat(self) -> int:
        """Beat if that is due; return the time."""
        if (now := time.monotonic_ns()) >= self._beat_due:
            self._beat(now)
        return now

    def _beat(self, now: int) -> None:
        """Show the heartbeat and the counters; a push does no more than look whether that is due.

        No call of the scheduler's fails for it.
        """
        try:
            # A forked child's heartbeat would hide a parent that hangs.
            if self._closed or os.getpid() != self._pid:
                return
            self._beat_due = now + BEAT_EVERY_NS
            self._show()
        except MemoryError:
            self._beat_due = 0  # again at the next look

    def _show(self) -> None:
        self._row.beat()
        for name, value in zip(("frames", "rows", "tokens"), self._table.pushed, strict=True):
            self._row.put(name, value)
        self._row.put("stale_rows", self._table.stale_rows)
        self._row.put("live", self._table.live_requests)
        self._tallies.go_on()
