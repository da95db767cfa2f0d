"""The reader: drains one egress ring and hands each row to its request's sink.

It owns the rule that a request ends exactly once. A request is in `live` from `register` until its ending,
and whoever takes it out of there ends it; what still arrives for it later is counted and dropped. Endings
that the scheduler does not know of (handler gone, sink full, bad frame, decode failure, gap) come with
exactly one abort.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from ..ring import Consumer, CorruptLane, Frame, RingClosed
from ..ring.checked import Checked, check_batch
from ..ring.finish import FinishReason
from ..ring.frames import TAG_OF, BadFrame, Buffer, ErrorFrame, Result, Standing, Tag, Takeover, Tally, decode
from ..ring.route import format_route, reader_of, shard_of
from ._deliver import deliver
from .channel import FOLD_AT, SinkClosed, SinkFull, SinkSender
from .columns import columns_of
from .events import ChunkEvent, Control, Error
from .live import Ending, Live, Progress, ReaderStatistics
from .waiting import Waiter, wake

log = logging.getLogger(__name__)

# Frames per drain: what is sent in one is woken at its end.
DRAIN_FRAMES = 32
# How many ended routes are remembered, to tell a stale row from a ghost's.
REMEMBERED = 1 << 13


class Reader:
    """Delivers one egress ring.

    egress                        the ring's one consumer; its doorbell also wakes the reader for requests
                                  from other threads
    on_abort(route, rid)          stop this request at the scheduler. Called once per request; when it raises
                                  (a full request ring), again each turn until it returns. `rid` is empty
                                  for a row of a route that this reader never knew
    on_end(route)                 the request is over for the reader: its slot may be used again. Called once
                                  for each registered request, behind its abort if it has one, which must not
                                  come after what is next in its slot; without memory again each turn
    on_takeover(shard, epoch)     a new process is that shard: RESTORE what `progress` says

    The callbacks run on the reader's thread and must not block. `register`, `unregister`, `call`,
    `abort`, `fail` and `statistics` may be called from any thread, the rest from the one that drains.
    """

    def __init__(
        self,
        egress: Consumer,
        on_abort: Callable[[int, str], None],
        on_end: Callable[[int], None],
        on_takeover: Callable[[int, int], None] = lambda shard, epoch: None,
    ) -> None:
        self._egress = egress
        self._on_abort = on_abort
        self._on_end = on_end
        self._on_takeover = on_takeover
        self._live: dict[int, Live] = {}
        # Routes that have ended, oldest first: a late row of one of these needs no abort.
        self._ended: dict[int, None] = {}
        # Which reader this is, as soon as a route tells.
        self._index: int | None = None
        self._corrupt: set[int] = set()
        self._cut_off: frozenset[int] = frozenset()
        self._requests: deque[Callable[[], None]] = deque()
        # Who has ended and is to be aborted first, in order; and who is not.
        self._aborts: deque[Ending] = deque()
        self._ends: deque[Ending] = deque()
        self._wakes: list[Waiter] = []
        self._stats = ReaderStatistics()

    def register(self, route: int, rid: str, sender: SinkSender) -> None:
        """Deliver this route's rows to that sink, from before it is submitted on. Any thread.

        Raises ValueError when the route is registered already.
        """
        live = Live(route, rid, sender)
        if self._live.setdefault(route, live) is not live:
            raise ValueError(
                f"route {format_route(route)} is registered already; end it before using it again"
            )
        self._index = reader_of(route)
        live.channel.on_gone = partial(self.abort, route)
        if live.channel.gone:
            self.abort(route)
        elif shard_of(route) in self.lost_shards:
            self.abort(route, self._lost_lane(shard_of(route)))

    def unregister(self, route: int) -> bool:
        """Forget a route that was not submitted: no abort, no on_end, no item to its sink. Any thread.

        False when it is not live: it has ended already, and on_end has been or is being called.
        """
        return self._live.pop(route, None) is not None

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` on the draining thread, soon. Any thread."""
        self._requests.append(function)
        self._nudge()

    def abort(self, route: int, error: Error | None = None) -> None:
        """End a live request and abort it at the scheduler. Any thread.

        Its sink gets `error` if there is one. Nothing happens when the request has ended already.
        """
        self.call(partial(self._fail_now, error, (route,), True))

    def fail(self, error: Error, *, abort: bool = False, rank: int | None = None) -> None:
        """End every request that is live now with `error`. Any thread.

        `abort`: at the scheduler, too; not when nobody is left to be told. `rank`: only those of that rank of
        the scheduler, and those that no rank has said it runs: they may be its.
        """
        routes = list(self._live)
        self.call(partial(self._fail_now, error, routes, abort, rank))

    def cut_off(self, shards: frozenset[int]) -> None:
        """Say which shards cannot reach this reader: what is live with one ends. On the draining thread.

        Call it now and then: who could not be ended for want of memory, by it or with a corrupt lane, ends
        then.
        """
        # Before those that are live are gone through: who registers meanwhile looks here.
        self._cut_off = shards
        for shard in self.lost_shards:
            self._lose_shard(shard)

    @property
    def lost_shards(self) -> frozenset[int]:
        """Shards that can deliver nothing here: a request registered with one ends at once."""
        return self._cut_off | self._corrupt

    def progress(self, shard: int) -> list[Progress]:
        """Return how far each live request of a shard has come. On the draining thread.

        Right in `on_takeover`: a TAKEOVER comes behind everything that the shard before it published.
        """
        return [
            Progress(live.route, live.rid, bytes(live.ids), live.text_bytes)
            for live in list(self._live.values())
            if shard_of(live.route) == shard
        ]

    def drain(self, limit: int = DRAIN_FRAMES) -> int:
        """Handle what was asked from other threads and up to `limit` frames; return how many frames.

        All sinks that were sent to are woken at the end, with one call into each event loop.
        """
        for _ in range(len(self._requests)):  # what asks again has its turn at the next drain
            try:
                self._requests[0]()
            except MemoryError:
                break  # again at the next drain: who is to end may have nothing else that ends it
            except Exception:
                log.exception("a call on the reader's thread failed")
            self._requests.popleft()
        try:
            frames = self._read(limit)
            if frames:
                self._handle(frames)
        finally:  # also when the ring cannot be read: who was sent something must hear of it
            if self._wakes:
                wake(self._wakes)  # without memory for it again at the next drain: nobody else would
                self._wakes.clear()
            self._settle()
        return len(frames)

    def statistics(self) -> ReaderStatistics:
        """Return a copy of the counters. Any thread."""
        return msgspec.structs.replace(self._stats, live=len(self._live), aborts_waiting=len(self._aborts))

    def _nudge(self) -> None:
        """End the reader's wait. Any thread, also from a garbage collection, also after the end."""
        with contextlib.suppress(RingClosed):
            self._egress.doorbell.ring()

    def _read(self, limit: int) -> list[Frame]:
        """Read frames; a lane found corrupt is lost for good, and so are its shard's requests."""
        try:
            return self._egress.read(limit)
        except CorruptLane as error:
            log.error("egress lane lost: %s", error)
            self._corrupt.add(error.lane)
            self._lose_shard(error.lane)
            return []

    def _lose_shard(self, shard: int) -> None:
        lost = [route for route in list(self._live) if shard_of(route) == shard]  # others register
        self._fail_now(self._lost_lane(shard), lost, True)

    def _lost_lane(self, shard: int) -> Error:
        """Say why a lane's requests end."""
        if shard in self._corrupt:
            message = f"the lane from shard {shard} is corrupt; its requests cannot be served"
            return Error(500, "corrupt_lane", message)
        message = f"shard {shard} cannot write to this gateway (its log says why); send the request again"
        return Error(503, "shard_cut_off", message)

    def _handle(self, frames: list[Frame]) -> None:
        """Handle frames, then give their room back: a reader that dies in between is read to again."""
        self._stats.frames += len(frames)
        for lane, tag, body in frames:
            # One frame must not end everybody, and whose rows it had nobody can say: a tally will tell.
            try:
                self._frame(lane, tag, body)
            except BadFrame as error:
                log.error("rejected a frame from shard %d: %s", lane, error)
                self._stats.bad_frames += 1
            except Exception:
                log.exception("a frame from shard %d could not be handled", lane)
                self._stats.bad_frames += 1
        self._egress.release()

    def _frame(self, lane: int, tag: int, body: Buffer) -> None:
        if tag == Tag.BATCH:
            self._batch(check_batch(body))
            return
        message = decode(tag, body)
        if isinstance(message, Result):
            self._result(message)
        elif isinstance(message, ErrorFrame):
            self._error(message)
        elif isinstance(message, Tally):
            self._tally(lane, message)
        elif isinstance(message, Takeover) and message.shard == lane:
            self._on_takeover(message.shard, message.epoch)
        else:
            raise BadFrame(f"a {TAG_OF[type(message)].name} frame does not belong here")

    def _batch(self, step: Checked) -> None:
        """Deliver each row: the usual ones in the C core, all others in `odd`, in order."""
        if step.text_at is None:
            raise BadFrame("a BATCH without text does not belong on an egress ring")
        finishes: dict[int, FinishReason] = dict(step.finishes)
        ended = frozenset(step.ended)  # as many as there are rows, if whoever wrote it means harm
        having, columns = columns_of(step.families, step.texts) if step.families else ([], [])
        odd_delivered = 0

        def odd(row: int, route: int, live: Live | None, event: ChunkEvent) -> None:
            nonlocal odd_delivered
            if live is None or event.first != live.next:
                self._unexpected(live, route, event.first, event.generated)
                return
            event.finish = finishes.get(row)
            odd_delivered += self._deliver(live, event, row in ended)

        delivered = deliver(
            self._live,
            step.raw,
            step.layout(),
            step.stamp_ns,
            list(finishes),
            having,
            columns,
            FOLD_AT,
            self._wakes,
            odd,
        )
        self._stats.rows += step.rows
        self._stats.delivered += delivered + odd_delivered

    def _deliver(self, live: Live, event: ChunkEvent, abort: bool) -> bool:
        """Deliver an event that may be the last one or not fit; False when it was refused.

        `abort` is for a last one that the scheduler does not know to be that.
        """
        had = len(live.ids)
        live.ids.extend(event.ids_raw)  # first: without memory for them nothing has been sent
        try:
            waiter = live.channel.push(event, event.size)
        except (SinkFull, SinkClosed) as error:
            self._refused(live, error)
            return False
        except MemoryError:
            del live.ids[had:]
            raise
        live.columns_bytes += event.columns_bytes
        live.next = event.first + event.generated
        if waiter is not None:
            self._wakes.append(waiter)
        if event.finish is not None:
            live.channel.ended = True
            self._end(live, abort)
        return True

    def _result(self, message: Result) -> None:
        live = self._answered(message.route)
        if live is None:
            return
        try:
            waiter = live.channel.end(Control(message.body), len(message.body))
        except (SinkFull, SinkClosed) as error:
            self._refused(live, error)
            return
        if waiter is not None:
            self._wakes.append(waiter)
        self._end(live)

    def _error(self, message: ErrorFrame) -> None:
        self._stats.errors += 1
        live = self._answered(message.route)
        if live is None:
            return
        self._fail_live(live, Error(message.status, message.type, message.message), abort=message.running)

    def _answered(self, route: int) -> Live | None:
        """Return the live request that an answer is for; None when it comes too late."""
        live = self._live.get(route)
        if live is None:
            self._stats.stale_messages += 1
            self._not_live(route)
        return live

    def _tally(self, lane: int, tally: Tally) -> None:
        """End who has had less than was sent: all that was came before this in the lane, or never will."""
        for route, tokens, standing in tally.rows:
            live = self._live.get(route)
            if live is None or shard_of(route) != lane:
                continue
            if tokens > live.next or standing == Standing.ENDED:
                self._stats.lost += 1
                message = f"{live.next} of {tokens} tokens came, or its end did not: a damaged frame had them"
                log.error("%s has lost something: %s", format_route(route), message)
                self._fail_live(live, Error(500, "frame_lost", message))
            elif standing != Standing.RECEIVED:
                live.rank = tally.rank

    def _unexpected(self, live: Live | None, route: int, first: int, generated: int) -> None:
        """A row that is not the next one of a live request: stale, doubled, or behind a gap."""
        if live is None:
            self._stats.stale_rows += 1
            self._not_live(route)
        elif first < live.next and first + generated <= live.next:
            self._stats.doubled += 1
        else:
            self._stats.gaps += 1
            message = f"a row from token {first} on came where one from {live.next} on was expected"
            log.error("gap in %s: %s", format_route(route), message)
            self._fail_live(live, Error(500, "gap", message))

    def _refused(self, live: Live, error: SinkFull | SinkClosed) -> None:
        """The sink took no more."""
        if isinstance(error, SinkFull):
            self._stats.sinks_full += 1
            self._fail_live(live, Error(408, "client_too_slow", str(error)))
        else:
            self._fail_live(live, None)

    def _not_live(self, route: int) -> None:
        """Something came for a request that is not live. One we never knew is a ghost: aborted once.

        While very many aborts wait, it is left to its next row: rows can name any number of routes.
        """
        if route in self._ended or reader_of(route) != self._index or len(self._aborts) >= REMEMBERED:
            return
        self._remember(route)
        self._aborts.append(Ending(route, "", abort=True, registered=False))

    def _fail_now(
        self, error: Error | None, routes: Iterable[int], abort: bool, rank: int | None = None
    ) -> None:
        for route in routes:
            live = self._live.get(route)
            if live is not None and (rank is None or live.rank in (None, rank)):
                self._fail_live(live, error, abort)

    def _fail_live(self, live: Live, error: Error | None, abort: bool = True) -> None:
        if error is not None:
            waiter = live.channel.fail(error)
            if waiter is not None:
                self._wakes.append(waiter)
        self._end(live, abort)

    def _end(self, live: Live, abort: bool = False) -> None:
        """The one place a request ends."""
        # All that takes memory comes first: whom it fails for is live until the next try.
        self._remember(live.route)
        waiting = self._aborts if abort else self._ends
        waiting.append(Ending(live.route, live.rid, abort))
        if self._live.pop(live.route, None) is None:
            waiting.pop()  # unregistered meanwhile
        self._settle()

    def _remember(self, route: int) -> None:
        self._ended[route] = None
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _settle(self) -> None:
        """Abort who is to be, in order, until one is refused; say of all others that they are over."""
        while self._aborts and self._is_aborted(self._aborts[0]) and self._is_over(self._aborts[0]):
            self._aborts.popleft()
        while self._ends and self._is_over(self._ends[0]):
            self._ends.popleft()

    def _is_aborted(self, ending: Ending) -> bool:
        """Whether its abort is sent, or cannot be any more."""
        if not ending.abort:
            return True
        try:
            self._on_abort(ending.route, ending.rid)
        except CorruptLane as error:
            # The scheduler finds the lane lost, too, and stops all that came on it.
            log.error("%d aborts cannot be sent: %s", len(self._aborts), error)
            for waiting in self._aborts:
                waiting.abort = False
            return True
        except Exception as error:
            log.warning("abort of %s is tried again: %s", format_route(ending.route), error)
            return False
        ending.abort = False
        self._stats.aborts += 1
        return True

    def _is_over(self, ending: Ending) -> bool:
        """Whether `on_end` was called, or need not be. Without memory for it the slot is still taken."""
        if not ending.registered:
            return True
        try:
            self._on_end(ending.route)
        except MemoryError:
            return False
        except Exception:
            log.exception("on_end of %s failed", format_route(ending.route))
        return True
