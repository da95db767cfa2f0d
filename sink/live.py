"""What a reader keeps of each live request, and what it counts."""

import msgspec

from ._deliver import LiveFields
from .channel import Channel, SinkSender


class ReaderStatistics(msgspec.Struct):
    """What a reader has seen since its start."""

    frames: int = 0
    rows: int = 0
    delivered: int = 0
    """Rows that became events."""
    stale_rows: int = 0
    """Rows of requests that are not live: ended, or never registered here; dropped."""
    stale_messages: int = 0
    """Results and errors of such requests; dropped."""
    doubled: int = 0
    """Rows delivered before; dropped."""
    gaps: int = 0
    bad_frames: int = 0
    lost: int = 0
    """Requests that a tally found to have lost something."""
    sinks_full: int = 0
    errors: int = 0
    """ERROR frames."""
    aborts: int = 0
    aborts_waiting: int = 0
    """Aborts that `on_abort` refused so far; tried again each turn."""
    live: int = 0


class Live(LiveFields):
    """One request, from registration to its ending.

    channel is its sink's, next the `first` that its next row must have, ids all ids delivered (i32). rank is
    the scheduler's that said it runs it, None before one has.
    """

    __slots__ = ("rank", "rid", "route", "sender")

    channel: Channel

    def __init__(self, route: int, rid: str, sender: SinkSender) -> None:
        super().__init__(sender.channel)
        self.route = route
        self.rid = rid
        self.rank: int | None = None
        self.sender = sender  # held: a sender that is dropped ends its stream

    @property
    def text_bytes(self) -> int:
        """Bytes of text sent: what the channel counted, less the rest of it."""
        return self.channel.sent - len(self.ids) - self.columns_bytes


class Progress(msgspec.Struct, frozen=True):
    """How far a live request has come: what a RESTORE says."""

    route: int
    rid: str
    ids: bytes
    """Every output id delivered, i32 little-endian."""
    text_bytes: int
    """Bytes of UTF-8 text delivered with them."""


class Ending(msgspec.Struct):
    """A request that is live no more, until its owner was told."""

    route: int
    rid: str
    abort: bool
    """Whether it is to be aborted at the scheduler, and was not yet."""
    registered: bool = True
    """False for a ghost: it was never known here."""
