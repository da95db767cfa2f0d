"""A ring's statistics: read from shared memory by any process, at any time, without stopping anyone.

Each number is whole; together they are not a snapshot, since writers and consumers go on.
"""

from dataclasses import dataclass

from .owner import Owner


@dataclass(frozen=True, slots=True)
class LaneStats:
    """One lane, as its writer and its consumers left it."""

    lane: int
    owner: Owner | None
    """Who writes it; None when nobody has it."""
    tail: int
    """Bytes published since the ring was made, headers and padding included."""
    used: int
    """Bytes now between the slowest attached cursor and the tail."""
    frames: int
    """Frames published."""
    bytes: int
    """Bytes of their bodies."""
    full_events: int
    """Writes that met a full lane."""
    full_seconds: float
    """Time that writes waited for room."""
    high_water: int
    """The most bytes that were ever seen in use."""
    bells_rung: int
    """Doorbells rung by its writer."""
    takeovers: int
    """Times a writer took the lane over from a dead one."""
    quarantined: int | None
    """The position at which the lane was found corrupt; None when it is sound."""


@dataclass(frozen=True, slots=True)
class ConsumerStats:
    """One cursor."""

    index: int
    owner: Owner | None
    """Who reads it; None when nobody has it."""
    detached: bool
    """Gone for good: it holds no writer back."""
    parked: bool
    """Asleep, or about to be."""
    frames: int
    """Frames read (a frame read again after a take-over counts again)."""
    bytes: int
    """Bytes of their bodies."""
    batches: int
    """Reads that returned something."""
    parks: int
    """Times it went to sleep on this ring."""
    wakes: int
    """Times a writer of this ring woke it."""
    takeovers: int
    """Times a process took the cursor over from a dead one."""
    lag: int
    """Bytes published and not released, over all lanes."""


@dataclass(frozen=True, slots=True)
class RingStats:
    """A whole ring."""

    name: str
    capacity: int
    """Bytes per lane."""
    created_ns: int
    """Wall-clock time of its making, ns since 1970."""
    lanes: tuple[LaneStats, ...]
    consumers: tuple[ConsumerStats, ...]
