"""What HTTP needs of the engine behind it: `Backend`, and the same over a `Front`.

The protocol is all that the endpoints know, so that a test may stand anything behind them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any, Final, Protocol

import msgspec

from ..ingress.request import Model
from ..ingress.tokenize import Tokenize
from ..ring import RingStats
from ..ring.board import BoardRow, Phase, Role
from ..ring.errors import RingError
from ..ring.names import segment_name
from ..shards.errors import TableError
from ..shards.table import TokenTable
from ..sink import SinkSource
from .front import Front

log = logging.getLogger(__name__)


class Stream(Protocol):
    """One prompt's answer as it comes (`front.Stream`)."""

    rid: str
    source: SinkSource

    def close(self) -> None:
        """Nobody waits for it any more."""


class Reading(msgspec.Struct):
    """One figure of a backend for /metrics. `kind` is gauge or counter."""

    name: str
    kind: str
    help: str
    value: float
    labels: dict[str, str] = {}


class Backend(Protocol):
    """What the endpoints stand on."""

    @property
    def model(self) -> Model:
        """What requests are checked against."""

    @property
    def tokenize(self) -> Tokenize:
        """Where prompts are tokenized, and what takes long is done."""

    @property
    def name(self) -> str:
        """The served model's name."""

    async def submit(self, body: Any) -> list[Stream]:
        """Check and submit a `/generate` body; one stream per prompt. Raises ingress.Refused."""

    async def control(self, op: str, body: bytes, timeout: float) -> bytes:
        """Have the scheduler carry out an operation. Raises ingress.Refused, TimeoutError."""

    async def check(self, timeout: float) -> str | None:
        """Ask the scheduler through every shard; say what is sick, or None."""

    def abort(self, rid: str) -> bool:
        """Abort a live request; False when none has that rid."""

    def token_bytes(self, token: int) -> bytes | None:
        """Return which bytes a token stands for; None when that is not known."""

    def is_special(self, token: int) -> bool:
        """Whether text that skips special tokens has none of this one; False when that is not known."""

    def trouble(self) -> str | None:
        """Say why requests cannot be served now; None when they can."""

    def info(self) -> dict[str, Any]:
        """Describe the instance, as JSON."""

    def readings(self) -> Iterator[Reading]:
        """Read the instance's figures for /metrics: the same whichever gateway is asked."""

    def own_readings(self) -> Iterator[Reading]:
        """Read the figures that only this gateway has, each with its `reader` number as a label."""


class FrontBackend:
    """A `Front` as a backend."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._table: TokenTable | None = None
        self._looked = False
        self._look_for_table()

    def _look_for_table(self) -> None:
        """Read the bytes of tokens, which an instance that is only starting has not laid out yet."""
        if self._front.board.phase == Phase.STARTING:
            return
        self._looked = True
        try:  # early: when a client asks for bytes, there may be no file left to open
            self._table = TokenTable.read(segment_name(self._front.instance.name, "tokens"))
        except (OSError, RingError, TableError) as error:
            log.warning("the bytes of tokens are not known: %s", error)

    @property
    def model(self) -> Model:
        """What requests are checked against."""
        return self._front.model

    @property
    def tokenize(self) -> Tokenize:
        """Where prompts are tokenized, and what takes long is done."""
        return self._front.tokenize

    @property
    def name(self) -> str:
        """The served model's name."""
        return self._front.instance.config.served_model_name

    async def submit(self, body: Any) -> list[Stream]:
        """Check and submit a `/generate` body; one stream per prompt. Raises ingress.Refused."""
        if not self._looked:
            self._look_for_table()
        return [*await self._front.submit(body)]

    async def control(self, op: str, body: bytes, timeout: float) -> bytes:
        """Have the scheduler carry out an operation. Raises ingress.Refused, TimeoutError."""
        return await self._front.control(op, body, timeout)

    async def check(self, timeout: float) -> str | None:
        """Ask the scheduler through every shard; say what is sick, or None."""
        return "; ".join((await self._front.health(timeout)).sick) or None

    def abort(self, rid: str) -> bool:
        """Abort a live request; False when this gateway has none with that rid."""
        return self._front.abort(rid)

    def token_bytes(self, token: int) -> bytes | None:
        """Return which bytes a token stands for; None when the instance has no table of them."""
        return None if self._table is None else self._table.bytes_of(token)

    def is_special(self, token: int) -> bool:
        """Whether text that skips special tokens has none of this one; False when there is no table."""
        return self._table is not None and self._table.is_special(token)

    def trouble(self) -> str | None:
        """Say why requests cannot be served now; None when they can."""
        front = self._front
        if not front.instance.alive:
            return "the instance is gone or stopping"
        if front.board.phase != Phase.RUNNING:
            return f"the instance is {front.board.phase.name.lower()}"
        if (why := front.trouble()) is not None:
            return why
        for role, what in ((Role.SHARD, "detokenizer shard"), (Role.SCHEDULER, "scheduler")):
            for row in front.board.rows(role):
                if (why := row.trouble()) is not None:
                    return f"{what} {row.index} {why}"
        return None

    def info(self) -> dict[str, Any]:
        """Describe the instance and its processes."""
        board = self._front.board
        processes = [_describe(row) for role in Role for row in board.rows(role)]
        return {
            "instance": msgspec.to_builtins(board.config),
            "phase": board.phase.name.lower(),
            "processes": processes,
            "ring_high_water_bytes": self._front.high_water(),
        }

    def own_readings(self) -> Iterator[Reading]:
        """Read the figures that only this gateway has, each with its `reader` number as a label."""
        front = self._front
        mine = {"reader": str(front.routes.reader)}
        seen = front.reader.statistics()
        for name, help_, value in (
            ("reader_frames_total", "Frames read from the egress ring.", seen.frames),
            ("reader_rows_total", "Rows read from the egress ring.", seen.rows),
            ("aborts_total", "Requests aborted at the scheduler by this gateway.", seen.aborts),
            ("slow_clients_total", "Requests aborted because their client read too slowly.", seen.sinks_full),
            ("bad_frames_total", "Frames refused by their decoder.", seen.bad_frames),
            ("gaps_total", "Requests ended because tokens were missing.", seen.gaps),
        ):
            yield Reading(name, "counter", help_, value, mine)
        yield Reading("live_streams", "gauge", "Requests registered with the reader now.", seen.live, mine)
        yield from _depths("egress", front.ring_stats()["egress"], mine)

    def readings(self) -> Iterator[Reading]:
        """Read the instance's figures for /metrics: the same whichever gateway is asked."""
        front = self._front
        for ring, stats in front.ring_stats().items():
            yield Reading(
                "ring_capacity_bytes", "gauge", "Bytes each lane holds.", stats.capacity, {"ring": ring}
            )
            if ring != "egress":  # each gateway has one of its own
                yield from _depths(ring, stats, {})
        for role in (Role.SHARD, Role.READER, Role.SCHEDULER):
            for row in front.board.rows(role):
                labels = {"role": str(role), "index": str(row.index)}
                yield Reading(
                    "restarts_total", "counter", "Times the process was replaced.", row.epoch, labels
                )
                for name, help_, roles in _COUNTED:
                    if role in roles:
                        yield Reading(f"{name}_total", "counter", help_, row.get(name), labels)
                yield Reading("process_up", "gauge", "1 while the process lives.", row.alive, labels)


# Counters of the board that are figures, and who has them.
_COUNTED: Final[tuple[tuple[str, str, tuple[Role, ...]], ...]] = (
    ("stopped", "Requests that a shard ended at a stop it found.", (Role.SHARD,)),
    ("corrupt_lanes", "Lanes that a shard found corrupt and goes on without.", (Role.SHARD,)),
    ("no_reader", "Frames of a shard for a gateway that is not there.", (Role.SHARD,)),
    (
        "stale_rows",
        "Rows of requests that are not live in this process: ended, or never there.",
        (Role.SHARD, Role.READER, Role.SCHEDULER),
    ),
)


def _depths(ring: str, stats: RingStats, more: dict[str, str]) -> Iterator[Reading]:
    for lane in stats.lanes:
        labels = {"ring": ring, "lane": str(lane.lane), **more}
        yield Reading("ring_depth_bytes", "gauge", "Bytes in use on a lane.", lane.used, labels)
        yield Reading("ring_full_total", "counter", "Writes that met a full lane.", lane.full_events, labels)


def _describe(row: BoardRow) -> dict[str, Any]:
    owner = row.owner
    return {
        "role": str(row.role),
        "index": row.index,
        "pid": None if owner is None else owner.pid,
        "alive": row.alive,
        "state": row.state.name.lower(),
        "restarts": row.epoch,
        "heartbeat_age_s": round((time.monotonic_ns() - row.heartbeat_ns) / 1e9, 3),
        "live": row.get("live"),
        "tokens": row.get("tokens"),
    }
