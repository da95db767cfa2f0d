"""The front: one gateway process's whole path, from a request's body to its stream.

Joins ingress (check, register, submit) with a reader (deliver) on the instance's rings, and keeps the
gateway's row on the board. HTTP is not known here: an HTTP front, a script or a test stands on this alike.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ..ingress.errors import Refused, TicketClosed, Unavailable
from ..ingress.register import Ingress, Ticket
from ..ingress.request import MAX_TOP_LOGPROBS, Model, Ready
from ..ingress.routes import RouteTable
from ..ingress.tokenize import Tokenize
from ..ring import Doorbell, RingStats, logs, wait
from ..ring.board import Board, Phase, Role, State
from ..ring.instance import Instance
from ..sink import Control, Error, Item, Reader, SinkSource, open_sink
from .damage import Damage
from .lanes import LaneWatch
from .model import load_tokenizer, model_of
from .ranks import RECEIVER, Ranks
from .restoring import Restoring

log = logging.getLogger(__name__)

SINK_BYTES: Final = 1 << 20
TICK_S: Final = 0.1
"""How often a busy front looks at the board and shows its own heartbeat."""
IDLE_S: Final = 0.5
"""The same for an idle one: how long it sleeps at a time."""
LOOK_S: Final = 0.02
"""For how long a scheduler that was found alive is taken to be."""
RETRY_S: Final = 0.02
"""How soon a frame that found its ring full is tried again, or a turn that failed."""
TURN_PROMPTS: Final = 64
"""Prompts of a batch that are submitted in one turn of the loop: the streams that run wait for so long."""
FAILING_S: Final = 1.0
"""For how long the reader's thread may fail, turn after turn, until its requests are ended."""


@dataclass(frozen=True, slots=True)
class Health:
    """What `Front.health` found.

    sick: each part that is not well, with the reason. round_trip_ms: per shard, how long a control request
    took from here to the scheduler and back through that shard; None when no answer came.
    """

    sick: list[str]
    round_trip_ms: list[float | None]

    @property
    def healthy(self) -> bool:
        """Whether no part is sick."""
        return not self.sick


class Stream:
    """One request's answer, as it comes: iterate it from a task or a thread.

    Leaving the `with` block, closing, cancelling or dropping it before its end aborts the request.
    """

    def __init__(self, ticket: Ticket, source: SinkSource) -> None:
        self.rid = ticket.rid
        self.route = ticket.route
        self.source = source

    def close(self) -> None:
        """The handler is gone: a request that still runs is aborted at the scheduler."""
        self.source.close()

    def __aiter__(self) -> AsyncIterator[Item]:
        return self.source

    def __iter__(self) -> Iterator[Item]:
        return self.source

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Front:
    """Reader number `reader` of an instance. `submit` from one event loop or from threads.

    sink_bytes: how much content may wait for a client before its request is aborted as too slow.
    """

    def __init__(self, instance: Instance, reader: int, model: Model, sink_bytes: int = SINK_BYTES) -> None:
        self.instance = instance
        self.model = model
        self._sink_bytes = sink_bytes
        self._row = instance.board.row(Role.READER, reader)
        with ExitStack() as undo:  # what fails leaves nothing taken: who catches it may attach again
            self._take(undo, reader)
            self._start_reading()
            undo.pop_all()

    def _take(self, undo: ExitStack, reader: int) -> None:
        """Take the reader's doorbell and its lanes."""
        instance, config = self.instance, self.instance.config
        self._bell = undo.enter_context(Doorbell.create(instance.bell(Role.READER, reader)))
        self._rings = {
            "request": undo.enter_context(instance.request()),
            "control": undo.enter_context(instance.control()),
            "egress": undo.enter_context(instance.egress(reader)),
            "step": undo.enter_context(instance.step()),
        }
        self._lanes = LaneWatch(self._rings, reader)
        self._consumer = self._rings["egress"].consumer(0, self._bell)
        control = self._rings["control"].writer(reader)
        request = self._rings["request"].writer(reader)
        self.routes = RouteTable(reader, config.shards, config.slots)
        self.ingress = Ingress(control, request, self.routes, detect_stops=config.detect_stops)

    def _start_reading(self) -> None:
        """Watch what there is, be there for all to see, and read."""
        board = self.instance.board
        self.reader = Reader(self._consumer, self.ingress.abort, self.ingress.end, self._take_over)
        self._restoring = Restoring(self.ingress, self._lost)
        self._ranks = Ranks(board)
        self._damage = Damage(board, self._rings["egress"], self._lanes, self.reader, self.ingress)
        self.ingress.attach()  # when what is rejected is counted: this may be
        self._look_due = 0.0
        self._gone = False
        self._failing_since: float | None = None
        self._failing: str | None = None
        self.tokenize = Tokenize(self.model)
        self._closing = False
        self._stop = False  # no Event: without memory, one can lose its lock for good
        self._pid = os.getpid()
        self._looking = threading.Lock()
        self._ticked = 0.0
        if self._row.owner is not None:
            self._row.count_replacement()
        self._row.claim(State.RUNNING)
        self._thread = threading.Thread(target=self._run, name="outfeed-reader", daemon=True)
        self._thread.start()

    @classmethod
    def attach(
        cls,
        instance: str,
        reader: int = 0,
        *,
        tokenizer: Any = None,
        sink_bytes: int = SINK_BYTES,
        max_top_logprobs: int = MAX_TOP_LOGPROBS,
    ) -> Front:
        """Attach to a running instance as its reader number `reader`.

        tokenizer: a `tokenizers.Tokenizer` for text prompts; by default the instance's own is loaded.
        max_top_logprobs: the most that a request's `top_logprobs_num` may be.

        Raises:
            InstanceGone: there is no such instance, or it ended meanwhile.
            LaneOwned: a live gateway has that number.
            IndexError: the instance has fewer readers.
            NoTokenizer: the instance's tokenizer file cannot be loaded here.
            BadRequest: its sampling defaults are none for this tokenizer.
        """
        opened = Instance.attach(instance)
        try:
            opened.board.row(Role.READER, reader)
            if tokenizer is None:
                tokenizer = load_tokenizer(opened.config.tokenizer)
            return cls(opened, reader, model_of(opened.config, tokenizer, max_top_logprobs), sink_bytes)
        except BaseException:
            opened.close()
            raise

    @property
    def board(self) -> Board:
        """The instance's board."""
        return self.instance.board

    async def submit(self, body: Any) -> list[Stream]:
        """Check, register and submit a `/generate` body (a decoded JSON object); one stream per prompt.

        Raises:
            Refused: with the HTTP status and a message for the client; nothing of the request is left.
        """
        request = await self.tokenize.parse(body)
        self._must_serve()
        prompts = await self.tokenize.ready(request)
        self.ingress.must_fit(prompts)
        streams: list[Stream] = []
        try:
            for number, prompt in enumerate(prompts, 1):
                streams.append(self._start(prompt))
                if number % TURN_PROMPTS == 0:
                    await asyncio.sleep(0)
        except BaseException:
            # A batch is taken whole or not at all: a prompt that is refused closes those before it.
            for stream in streams:
                stream.close()
            raise
        return streams

    async def control(self, op: str, body: bytes = b"", timeout: float = 10.0) -> bytes:
        """Have the scheduler carry out a control operation; return its answer.

        Raises:
            Refused: it was not taken, or the scheduler answered with an error.
            TimeoutError: no answer within `timeout` seconds.
        """
        self._must_serve()
        with self._start(None, (op, body)) as stream:
            match await stream.source.receive(timeout):
                case Control(answer):
                    return answer
                case Error(status, kind, message):
                    raise Answered(status, kind, message)
                case other:
                    raise Answered(
                        500, "internal_error", f"a control request was answered by {type(other).__name__}"
                    )

    async def health(self, timeout: float = 5.0) -> Health:
        """Go all the way round, scheduler → shard → sink, once for each shard, and say which part is sick.

        Each shard has `timeout` seconds to answer; a part that the board knows to be dead or silent is named
        as the reason.
        """
        began = time.monotonic()
        shards = range(self.instance.config.shards)
        answers = await asyncio.gather(*(self._ask(shard, timeout) for shard in shards))
        rows = [row for role in (Role.SCHEDULER, Role.SHARD) for row in self.board.rows(role)]
        sick = {(row.role, row.index): why for row in rows if (why := row.trouble())}
        if not self.instance.alive:
            sick[Role.LAUNCHER, 0] = "is gone or stopping"
        # Without a scheduler no shard has an answer to bring: that is no shard's fault.
        if not any(role == Role.SCHEDULER for role, _ in sick):
            for shard, answer in zip(shards, answers, strict=True):
                if isinstance(answer, str):
                    sick.setdefault((Role.SHARD, shard), answer)
        times = [None if isinstance(answer, str) else round((answer - began) * 1e3, 3) for answer in answers]
        parts = self._own_troubles() + [f"{role} {index}: {why}" for (role, index), why in sick.items()]
        return Health(parts, times)

    def _own_troubles(self) -> list[str]:
        """Name what is wrong with this gateway itself, and the lanes that it found corrupt."""
        why = self.trouble()
        lost = [f"lane: {lane}" for lane in self._lanes.lost if lane != why]
        return lost if why is None else [f"gateway: {why}", *lost]

    async def _ask(self, shard: int, timeout: float) -> float | str:
        """Return when a shard's answer came, or why none did."""
        try:
            self._must_serve()
            with self._start(None, ("health", b""), shard) as stream:
                item = await stream.source.receive(timeout)
        except TimeoutError:
            return f"no answer within {timeout:g} s"
        except Refused as refusal:
            return refusal.message
        return time.monotonic() if isinstance(item, Control) else f"answered {item}"

    def trouble(self) -> str | None:
        """Say why this gateway itself cannot serve, whatever the other processes do; None when it can."""
        return self._failing or self._lanes.fatal

    def abort(self, rid: str) -> bool:
        """Abort the live request that has this rid. False when none of this gateway's has."""
        route = self.ingress.route_of(rid)
        if route is None:
            return False
        self.reader.abort(route, Error(499, "aborted", f"request {rid!r} was aborted on request"))
        return True

    def high_water(self) -> dict[str, int]:
        """Return the most bytes that were ever in use on a lane of each ring."""
        return {
            name: max(lane.high_water for lane in stats.lanes) for name, stats in self.ring_stats().items()
        }

    def ring_stats(self) -> dict[str, RingStats]:
        """Return what each ring that this gateway has open shows now."""
        return {name: ring.stats() for name, ring in self._rings.items()}

    def close(self) -> None:
        """Stop: live requests end with a 503 and are aborted at the scheduler. Twice is fine.

        In a forked child it only lets go of what the child inherited: the front is its parent's.
        """
        if self._closing:
            return
        self._closing = True  # before: who submits meanwhile is ended with the others, or sees this
        mine = os.getpid() == self._pid
        if mine:
            self.reader.fail(
                Error(503, "stopping", "the gateway is stopping; send the request again"),
                abort=self.instance.alive,
            )
        self._stop = True
        if mine:
            self._bell.ring()
            self._thread.join()
            self.tokenize.close()
            self._row.state = State.STOPPED
        for ring in self._rings.values():
            ring.close()  # and what was opened of it
        self._bell.close()
        self.instance.close()

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(
        self, prompt: Ready | None, operation: tuple[str, bytes] = ("", b""), shard: int | None = None
    ) -> Stream:
        """Register and submit a prompt, or else an operation. Without memory, too, nothing is left of it."""
        ticket = self.ingress.open_control(shard=shard) if prompt is None else self.ingress.open(prompt)
        try:
            sender, source = open_sink(self._sink_bytes)
            stream = Stream(ticket, source)  # made first: behind the submission nothing may fail
            self.reader.register(ticket.route, ticket.rid, sender)
            # Again: who ended the live requests since the door has not ended this one.
            self._must_serve()
            if prompt is not None:
                self.ingress.submit(ticket)
            else:
                self.ingress.submit_control(ticket, *operation)
        except TicketClosed:
            pass  # ended before it began, and told why: its shard is lost, say
        except BaseException:
            self.reader.unregister(ticket.route)
            try:
                self.ingress.end(ticket.route)
            except MemoryError:
                self.reader.call(partial(self.ingress.end, ticket.route))  # until there is some
            raise
        return stream

    def _must_serve(self) -> None:
        """Refuse at the door what nobody would answer."""
        if self._closing:
            raise Unavailable("this gateway is stopping; send the request again to another")
        if not self.instance.alive:
            raise Unavailable("the instance is gone or stopping; send the request again when it is back")
        if (why := self.trouble()) is not None:
            raise Unavailable(f"{why}; try another")
        if self.board.phase == Phase.DRAINING:
            raise Unavailable(
                "the server is draining: it finishes what runs and takes nothing new; try another"
            )
        if time.monotonic() >= self._look_due or self._ranks.moved():
            self._look()
        if not self._ranks.received:
            raise Unavailable("no scheduler is attached to the instance; send the request again soon")

    def _run(self) -> None:
        """Turn until told to stop, and once more. No fault ends the thread: every stream hangs on it."""
        last = False
        while not last:
            last = self._stop
            try:
                self._turn()
                self._failing_since = self._failing = None
            except Exception as error:
                with suppress(Exception):  # no memory even to tell of it, say
                    self._turn_failed(error)

    def _turn_failed(self, error: Exception) -> None:
        """Try again soon. While it goes on failing, end what is live and take nothing."""
        time.sleep(RETRY_S)
        log.error("a turn of the reader's thread failed", exc_info=error)
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since > FAILING_S:
            self._failing = f"the gateway's reader fails: {error!r}"
            self.reader.fail(Error(500, "reader_failed", "the gateway cannot read its answers"), abort=True)

    def _turn(self) -> None:
        drained = self.reader.drain()
        restored = self._restoring.go_on()
        if drained == 0 and not self._stop:
            settled = restored and not self.reader.statistics().aborts_waiting
            wait((self._consumer,), IDLE_S if settled else RETRY_S)
        if (now := time.monotonic()) - self._ticked >= TICK_S:
            self._ticked = now
            self._tick()

    def _take_over(self, shard: int, epoch: int) -> None:
        self._restoring.begin(shard, epoch, self.reader.progress(shard))

    def _lost(self, route: int, why: str) -> None:
        self.reader.abort(route, Error(500, "not_restored", f"its shard died, and {why}"))

    def _look(self) -> None:
        """End what cannot be answered any more: the scheduler, or the whole instance, is gone.

        Called now and then, and before a submission when another scheduler is on the board than the last time
        (or that was a while ago: whether a process lives takes longer to tell than a request to submit), so
        that a request is only ever ended with the scheduler it was submitted to.
        """
        with self._looking:
            self._look_due = time.monotonic() + LOOK_S
            gone = not self.instance.alive
            lost = self._ranks.look()
            # What rank 0 has handed on ends with it, too: nobody else could say what of it was taken on.
            for rank in [None] if RECEIVER in lost else lost:
                self.reader.fail(
                    Error(503, "scheduler_gone", "the scheduler went away; send the request again"),
                    abort=True,
                    rank=rank,
                )
            self._ranks.settle()  # behind it, for which there may be no memory; who comes meanwhile waits
            if lost:
                log.error("scheduler rank %s is gone: its requests end", lost)
            if gone:  # each time: whoever saw it alive just before may come later
                self.reader.fail(
                    Error(503, "instance_gone", "the instance went away; send the request again")
                )
                if not self._gone:
                    log.error("instance %r is gone: its requests end", self.instance.name)
            self._gone = gone

    def _tick(self) -> None:
        """Look around, and show this gateway on the board."""
        self._look()
        self._damage.look()
        now = time.monotonic_ns()  # first: a drain that began later waits for the next count
        seen = self.reader.statistics()
        row = self._row
        for name, value in (
            ("frames", seen.frames),
            ("rows", seen.rows),
            ("live", seen.live),
            ("aborts", seen.aborts),
            ("errors", seen.errors),
            ("stale_rows", seen.stale_rows),
            ("doubled_rows", seen.doubled),
            ("bad_frames", seen.bad_frames),
        ):
            row.put(name, value)
        row.beat(now)  # last: a heartbeat vouches for the numbers before it
        logs.due()


class Answered(Refused):
    """The scheduler answered a control request with an error."""

    def __init__(self, status: int, type: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.type = type

    def __str__(self) -> str:
        return json.dumps({"status": self.status, "type": self.type, "message": self.message})
