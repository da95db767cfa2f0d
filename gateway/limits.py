"""What one gateway process takes from its clients at most. Every number has a reason to be finite."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..ingress.request import MAX_BODY_BYTES


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one gateway process. Times are seconds, sizes bytes.

    Raises:
        ValueError: a limit is not positive.
    """

    body_bytes: int = MAX_BODY_BYTES
    """A request's body; above it 413."""
    head_bytes: int = 64 << 10
    """A request's line and headers together; above it 431."""
    headers: int = 100
    """Headers of a request; above it 431."""
    connections: int = 16_384
    """Open connections; one more is answered 503 and closed."""
    requests: int = 8_192
    """Prompts being answered; one more is answered 503."""
    pipelined: int = 16
    """Requests that may wait on a connection for the one before them; then it is not read any more."""
    head_s: float = 10.0
    """From a request's first byte (or the connection's start) to its last header; then 408."""
    body_s: float = 60.0
    """From the last header to the last byte of the body; then 408."""
    idle_s: float = 75.0
    """A kept-alive connection without a request; then it is closed."""
    stall_s: float = 60.0
    """A client that takes nothing of what is sent to it, not a byte; then it is cut off."""
    write_bytes: int = 64 << 10
    """Bytes that may wait in a connection's own buffer before what follows waits, and merges, in its sink."""
    answer_bytes: int = 32 << 20
    """A whole answer, or one event of a stream; above it the request is aborted, its client reads a 400."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"the limit {field.name} is {value}: give a positive number")
