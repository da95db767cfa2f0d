"""From a checked prompt to a running request: a route, REGISTER to its shard, GENERATE to the scheduler.

The order is what makes it safe. The caller gets the route first (`open`) and makes its sink known to the
reader; `submit` then writes REGISTER before GENERATE, so a row can neither reach a shard that does not know
its request nor a reader that has no sink for it. If either ring is full the client gets a 503 at once and
the shard is told to forget: nothing stays registered.

    ingress.must_fit(prompts)                    # a batch that never could is a BadRequest
    ticket = ingress.open(prompt)                # rid claimed, route taken; RidInUse, Unavailable
    reader.register(ticket.route, ticket.rid, sender)
    try:
        ingress.submit(ticket)                   # REGISTER, GENERATE; Unavailable, BadRequest
    except Refused:
        reader.unregister(ticket.route)          # the ticket is closed already
        raise
    ...
    ingress.end(ticket.route)                    # the reader's on_end: FORGET, route and rid free again

Must not know how a response is delivered.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..ring.errors import FrameTooLarge, RingError
from ..ring.frames import (
    Abort,
    Attach,
    Control,
    Forget,
    Generate,
    Live,
    Register,
    Restore,
    Restored,
    Tag,
    encode,
)
from ..ring.route import format_route, slot_of
from .errors import BadRequest, RidInUse, TicketClosed, Unavailable
from .request import Ready, make_rid
from .routes import RouteTable

ATTACH_WAIT_S = 5.0
LANE_FRAMES = 4
"""A lane holds the bytes of as many frames of the largest size."""
RECORD_BYTES = 16 + 15 + 8 + 2 + 1 + 4
"""What a frame takes of its lane at most beside what `must_fit` measures: a record's header and padding, and
what a route, the lengths of a rid and of ids, and a number of tokens take more than those of an empty one."""


class FrameWriter(Protocol):
    """What is needed of a lane's writer (`ring.LaneWriter`)."""

    max_frame: int
    """The largest frame in bytes: a quarter of the lane."""

    def write(self, tag: int, /, *parts: Any, timeout: float = 0.0) -> None:
        """Write one frame at once, or raise RingFull (or FrameTooLarge) and have written nothing."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that has its route and its rid. `prompt` is None for a control request."""

    route: int
    rid: str
    prompt: Ready | None


class Ingress:
    """Registers and submits the requests of one gateway. Any thread; a call writes at most two frames.

    `control` and `request` are the gateway's lanes on those rings. `detect_stops` is passed to the shards:
    true when the scheduler does not look for stop strings itself.
    """

    def __init__(
        self, control: FrameWriter, request: FrameWriter, routes: RouteTable, *, detect_stops: bool = False
    ) -> None:
        self.routes = routes
        self._control = control
        self._request = request
        self._detect_stops = detect_stops
        # One lock for tables and lanes: a lane has one writer at a time, and every hold is microseconds.
        self._lock = threading.Lock()
        self._by_rid: dict[str, Ticket] = {}
        self._by_route: dict[int, Ticket] = {}
        self._submitted: set[int] = set()
        self._unforgotten: dict[int, None] = {}

    def must_fit(self, prompts: Sequence[Ready]) -> None:
        """Refuse a batch that the empty rings could not hold, which a client would send again for ever.

        Nothing waits for the scheduler while a batch is written, so the lanes must hold it whole. Prompts
        that share their parameters are measured once. Raises BadRequest.
        """
        if len(prompts) == 1:
            return  # a frame that is too large is refused by its lane
        if len(prompts) > self.routes.slots:
            raise BadRequest(
                "",
                f"the batch has {len(prompts)} prompts, and this server runs {self.routes.slots} at most; "
                "send fewer at once",
            )
        sizes: dict[tuple[int, int], tuple[int, int]] = {}
        control, request = [], []
        for prompt in prompts:
            kind = id(prompt.params), id(prompt.logprobs)
            if kind not in sizes:
                bare = Ready("", b"", 0, prompt.params, prompt.logprobs, prompt.stream)
                register, generate = self._frames(0, bare)
                sizes[kind] = len(register), len(generate)
            rid = len(prompt.rid.encode()) + RECORD_BYTES
            control.append(sizes[kind][0] + rid + len(prompt.prompt_tail))
            request.append(sizes[kind][1] + rid + len(prompt.input_ids))
        for name, frames, lane in (("control", control, self._control), ("request", request, self._request)):
            size = sum(frames) + max(frames)  # no frame goes around a lane's end: so much may be left there
            if size > (most := LANE_FRAMES * lane.max_frame):
                raise BadRequest(
                    "",
                    f"the batch takes {size} bytes, and the {name} ring holds {most}; send fewer prompts "
                    "at once, or smaller parameters",
                )

    def open(self, prompt: Ready) -> Ticket:
        """Claim the prompt's rid and a route. Nothing is sent yet.

        RidInUse (409): a live request of this gateway has the rid. Unavailable (503): no route is free.
        """
        return self._open(prompt.rid, prompt)

    def open_control(self, rid: str | None = None, shard: int | None = None) -> Ticket:
        """Claim a route for a control request (`submit_control`), as `open` does for a prompt."""
        return self._open(make_rid() if rid is None else rid, None, shard)

    def submit(self, ticket: Ticket) -> None:
        """Write REGISTER, then GENERATE. On any failure the ticket is closed and nothing stays registered.

        Unavailable (503) when a ring is full or closed, BadRequest when the prompt is larger than a frame,
        TicketClosed when the request has been ended meanwhile: its sink has been told why.
        """
        prompt = ticket.prompt
        if prompt is None:
            raise ValueError("this ticket is a control request's: use submit_control")
        register_body, generate_body = self._frames(ticket.route, prompt)
        with self._lock:
            self._must_be_open(ticket)
            self._retry_forgets()
            if self._unforgotten:
                self._close(ticket)
                raise Unavailable("the shards are behind with the requests that ended; try again soon")
            self._send(self._control, Tag.REGISTER, register_body, ticket)
            self._send(self._request, Tag.GENERATE, generate_body, ticket)

    def submit_control(self, ticket: Ticket, op: str, body: bytes = b"") -> None:
        """Write CONTROL: an operation answered by one RESULT or ERROR. Fails as `submit` does."""
        frame = encode(Control(ticket.route, ticket.rid, op, body))
        with self._lock:
            self._must_be_open(ticket)
            self._send(self._request, Tag.CONTROL, frame, ticket)

    def abort(self, route: int, rid: str = "") -> None:
        """Write ABORT for a route, live here or not: the scheduler must hear of it in any case.

        But for one that is not submitted yet, whose ABORT would overtake it: its ticket is closed instead.
        Raises RingError (RingFull) when it could not be written: call again. Fits the reader's `on_abort`.
        """
        with self._lock:
            ticket = self._by_route.get(route)
            if ticket is not None and route not in self._submitted:
                self._end(ticket)
                return
            self._request.write(Tag.ABORT, encode(Abort(route, rid)))

    def end(self, route: int) -> None:
        """The request is over: FORGET to its shard, its route and rid free again. Never raises for a ring.

        A FORGET that finds the control ring full is kept and sent before the next REGISTER. Ending a route
        twice, or one that is not live, changes nothing. Fits the reader's `on_end`.
        """
        with self._lock:
            ticket = self._by_route.get(route)
            if ticket is not None:
                self._end(ticket)

    def restore(self, route: int, ids: bytes, text_bytes: int) -> None:
        """Write RESTORE for a live request: its shard is a new process and goes on from here.

        `ids` are all output ids delivered so far (i32 little-endian), `text_bytes` how much text was. A
        request that has ended meanwhile, or that has no text (a control request), is left out. Raises
        RingError when the frame could not be written: call again, except for FrameTooLarge.
        """
        with self._lock:
            ticket = self._by_route.get(route)
            if ticket is None or ticket.prompt is None:
                return
            prompt = ticket.prompt
            options = prompt.decode_options(detect_stops=self._detect_stops)
            restore = Restore(
                route, ticket.rid, options, prompt.prompt_tail, prompt.prompt_tokens, ids, text_bytes
            )
            self._control.write(Tag.RESTORE, encode(restore))

    def restored(self, shard: int, epoch: int) -> None:
        """Write RESTORED: that was all. Raises RingError when it could not be written: call again."""
        with self._lock:
            self._control.write(Tag.RESTORED, encode(Restored(self.routes.reader, shard, epoch)))

    def live_from(self, slot: int) -> int:
        """Write LIVE: which requests are with the scheduler, from `slot` on as many as a frame takes.

        Return the slot behind them. Raises RingError when it could not be written: call again.
        """
        with self._lock:
            end = min(slot + (self._request.max_frame - 64) // 9, self.routes.slots)
            live = [route for route in self._submitted if slot <= slot_of(route) < end]
            self._request.write(Tag.LIVE, encode(Live(self.routes.reader, slot, end, live)))
        return end

    def attach(self) -> None:
        """Write ATTACH on both lanes, before anything else: what this reader's predecessor had is over.

        Raises RingError when a lane has no room for it.
        """
        frame = encode(Attach(self.routes.reader))
        with self._lock:
            self._control.write(Tag.ATTACH, frame, timeout=ATTACH_WAIT_S)
            self._request.write(Tag.ATTACH, frame, timeout=ATTACH_WAIT_S)

    def route_of(self, rid: str) -> int | None:
        """Return the route of this gateway's live request with that rid (for `/abort_request`), or None."""
        ticket = self._by_rid.get(rid)
        return None if ticket is None else ticket.route

    def live(self) -> int:
        """Return how many requests have a route now."""
        return len(self._by_route)

    def _open(self, rid: str, prompt: Ready | None, shard: int | None = None) -> Ticket:
        with self._lock:
            if rid in self._by_rid:
                raise RidInUse(f"rid {rid!r} names a request that is still running; use another, or none")
            route = self.routes.acquire(shard)
            try:
                ticket = self._by_rid[rid] = self._by_route[route] = Ticket(route, rid, prompt)
            except MemoryError:
                self._by_rid.pop(rid, None)
                self.routes.release(route)
                raise
            return ticket

    def _frames(self, route: int, prompt: Ready) -> tuple[bytes, bytes]:
        """Return a prompt's REGISTER and GENERATE."""
        register = Register(
            route,
            prompt.rid,
            prompt.decode_options(detect_stops=self._detect_stops),
            prompt.prompt_tail,
            prompt.prompt_tokens,
        )
        generate = Generate(
            route,
            prompt.rid,
            prompt.input_ids,
            prompt.params.to_scheduler(),
            prompt.logprobs,
            prompt.stream,
        )
        return encode(register), encode(generate)

    def _must_be_open(self, ticket: Ticket) -> None:
        if self._by_route.get(ticket.route) is not ticket:
            raise TicketClosed(f"ticket of route {format_route(ticket.route)} is closed; open a new one")

    def _end(self, ticket: Ticket) -> None:
        if ticket.prompt is not None:
            self._forget(ticket.route)
        self._close(ticket)

    def _close(self, ticket: Ticket) -> None:
        self.routes.release(ticket.route)  # first: without memory for it the ticket is still open
        del self._by_route[ticket.route]
        del self._by_rid[ticket.rid]
        self._submitted.discard(ticket.route)

    def _send(self, writer: FrameWriter, tag: Tag, frame: bytes, ticket: Ticket) -> None:
        """Write one frame of a ticket's; on failure close it, and unregister it if it was registered."""
        try:
            if tag is not Tag.REGISTER:  # before: what is out must be known to be
                self._submitted.add(ticket.route)
            writer.write(tag, frame)
            return
        except RingError as error:
            if tag is Tag.GENERATE:
                self._forget(ticket.route)
            self._close(ticket)
            if isinstance(error, FrameTooLarge):
                raise BadRequest("", f"the request is too large to hand over: {error}") from None
            raise Unavailable(f"the server cannot take a request now ({error}); try again soon") from None

    def _forget(self, route: int) -> None:
        self._unforgotten[route] = None
        self._retry_forgets()

    def _retry_forgets(self) -> None:
        """Send what FORGETs there are until one is refused. Bounded: while one waits no REGISTER goes."""
        for route in list(self._unforgotten):
            try:
                self._control.write(Tag.FORGET, encode(Forget(route)))
            except RingError:
                return
            del self._unforgotten[route]
