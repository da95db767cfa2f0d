"""A ring: one segment of single-writer lanes and the cursors that read them.

Knows the segment, who owns what in it, and take-over; must not know what travels on it.
"""

import mmap
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, Self

from . import segment
from ._core import ffi, lib
from .consumer import Consumer
from .doorbell import Doorbell
from .errors import (
    BadCapacity,
    CorruptLane,
    LaneOwned,
    NotARing,
    OtherNamespace,
    RingClosed,
    RingError,
    WrongVersion,
)
from .owner import Owner, space
from .stats import ConsumerStats, LaneStats, RingStats
from .writer import LaneWriter

_CLAIM_TRIES = 8  # each lost race means that another process got it, and then died, or lives and refuses us


def _check_geometry(lanes: int, consumers: int, capacity: int) -> int:
    """Return the segment's size in bytes, or raise BadCapacity with the limits."""
    for what, value, most in (
        ("lanes", lanes, lib.RING_MAX_LANES),
        ("consumers", consumers, lib.RING_MAX_CONSUMERS),
    ):
        if not 1 <= value <= most:
            raise BadCapacity(f"{what} {value}: expected 1 to {most}")
    low, high = lib.RING_MIN_CAPACITY, lib.RING_MAX_CAPACITY
    if not low <= capacity <= high or capacity & (capacity - 1):
        raise BadCapacity(
            f"capacity {capacity}: expected a power of two from {low} to {high} bytes per lane "
            "(four times the largest frame, and room for what waits)"
        )
    return int(lib.ring_bytes(lanes, consumers, capacity))


def _refuse_header(name: str, size: int, code: int, found: Any) -> NoReturn:
    """Raise what ring_check found."""
    if code == lib.RING_NOT_A_RING:
        raise NotARing(f"segment {name!r} ({size} bytes) is not a ring: it starts with {found[0]:#018x}")
    if code == lib.RING_VERSION:
        raise WrongVersion(
            f"segment {name!r} has ring layout {found[0]}, this build reads {lib.RING_LAYOUT_VERSION}; "
            "stop the instance that made it, or run the same version of outfeed everywhere"
        )
    raise NotARing(
        f"segment {name!r} ({size} bytes) has a ring's header that does not add up: lanes {found[1]}, "
        f"consumers {found[2]}, capacity {found[3]}; remove the segment and start its instance again"
    )


def _drop(close: Callable[[Any], int], free: Callable[[Any], None], _: memoryview, place: Any) -> None:
    if place[0] != ffi.NULL:
        close(place[0])
        free(place[0])


def _held(kind: str, close: Callable[[Any], int], free: Callable[[Any], None], memory: memoryview) -> Any:
    """Make the place for a handle that C is to claim, in `memory`, which stays mapped as long.

    Who drops it gives back what was claimed: a Ctrl-C on the handle's way to its user leaves nothing taken.
    """
    return ffi.gc(ffi.new(kind), partial(_drop, close, free, memory))


class Ring:
    """A ring that this process has attached. `lanes`, `consumers`; `capacity` in bytes per lane."""

    __slots__ = (
        "__weakref__",
        "_base",
        "_closed",
        "_handles",
        "_memory",
        "_ring",
        "_segment",
        "capacity",
        "consumers",
        "lanes",
        "name",
    )

    def __init__(self, opened: segment.Segment) -> None:
        self.name = opened.name
        self._segment = opened
        self._base = ffi.from_buffer(opened.memory)
        self._memory = memoryview(opened.memory)
        self._ring = ffi.new("ring *")
        found = ffi.new("uint64_t[4]")
        code = lib.ring_check(self._base, opened.size, self._ring, found)
        if code != 0:
            opened.close()
            _refuse_header(opened.name, opened.size, code, found)
        if self._ring.space != space():
            opened.close()
            raise OtherNamespace(opened.name)
        self.lanes = int(self._ring.lanes)
        self.consumers = int(self._ring.consumers)
        self.capacity = int(self._ring.capacity)
        self._closed = False
        self._handles: weakref.WeakSet[LaneWriter | Consumer] = weakref.WeakSet()

    @classmethod
    def create(cls, name: str, *, lanes: int, consumers: int, capacity: int) -> Self:
        """Make /dev/shm/<name>, mode 0600, its pages reserved, and attach it.

        `capacity` is bytes per lane, a power of two of at least 4096. Every cursor holds writers back from
        the start, attached or not, so nothing published before a consumer comes is lost to it.

        Raises BadCapacity, FileExistsError (see `segment.sweep` for stale ones), NoRoom, NoSharedMemory.
        """
        size = _check_geometry(lanes, consumers, capacity)

        def fill(memory: mmap.mmap) -> None:
            base = ffi.from_buffer(memory)
            me, here = Owner.me().pack(), space()
            lib.ring_format(base, size, lanes, consumers, capacity, name.encode(), me, here)

        return cls(segment.create(name, size, fill))

    @classmethod
    def attach(cls, name: str) -> Self:
        """Attach a ring that another process made.

        Raises FileNotFoundError, NotARing, WrongVersion, OtherNamespace, NotOurs, LockHeld.
        """
        return cls(segment.attach(name))

    def _must_be_open(self) -> None:
        if self._closed:
            raise RingClosed(f"ring {self.name!r} is closed")

    def _check(self, what: str, count: int, index: int) -> None:
        self._must_be_open()
        if not 0 <= index < count:
            raise IndexError(f"ring {self.name!r} has {what} 0 to {count - 1}, not {index}")

    def _claim(self, what: str, word: Callable[[], int], claim: Callable[[int, int], int]) -> None:
        """Claim an owner word for this process, taking it over from a dead one."""
        mine = Owner.me().pack()
        for _ in range(_CLAIM_TRIES):
            expected = word()
            owner = Owner.unpack(expected)
            if owner is not None and owner.alive():
                raise LaneOwned(f"ring {self.name!r}: {what} belongs to process {owner.pid}, which is alive")
            code = claim(expected, mine)
            if code == 0:
                return
            if code != lib.RING_OWNED:
                raise RingError(f"ring {self.name!r}: there is no memory to claim {what} (code {code})")
        raise LaneOwned(
            f"ring {self.name!r}: {what} changed hands {_CLAIM_TRIES} times while it was being claimed"
        )

    def writer(self, lane: int) -> LaneWriter:
        """Claim `lane` for this process; a dead process's lane is taken over at its last whole frame.

        Raises LaneOwned while a live process (this one included) has it, CorruptLane, IndexError; RingError
        when there is no memory for it.
        """
        self._check("lanes", self.lanes, lane)
        held = _held("lane_writer **", lib.writer_close, lib.writer_free, self._memory)

        def claim(expected: int, mine: int) -> int:
            code = lib.writer_claim(self._ring, lane, expected, mine, held)
            if code == lib.RING_CORRUPT:
                raise CorruptLane(self.name, lane, lib.writer_fault(held[0]))
            return int(code)

        self._claim(f"lane {lane}", lambda: int(lib.lane_owner(self._ring, lane)), claim)
        writer = LaneWriter(self._segment, lane, self.capacity // 4, held, self._memory)
        self._handles.add(writer)
        return writer

    def consumer(self, index: int, doorbell: Doorbell) -> Consumer:
        """Claim cursor `index` for this process; from a dead process's, unreleased frames come again.

        A cursor that was detached starts afresh, at the lanes' tails.

        Raises LaneOwned while a live process (this one included) has it, IndexError; RingError when there is
        no memory for it.
        """
        self._check("consumers", self.consumers, index)
        held = _held("lane_reader **", lib.reader_close, lib.reader_free, self._memory)
        bell = doorbell.name.encode()

        def claim(expected: int, mine: int) -> int:
            return int(lib.reader_claim(self._ring, index, expected, mine, bell, held))

        self._claim(f"consumer {index}", lambda: int(lib.consumer_owner(self._ring, index)), claim)
        consumer = Consumer(self._segment, self.lanes, index, doorbell, held, self._memory)
        self._handles.add(consumer)
        return consumer

    def detach_consumer(self, index: int) -> None:
        """Say that cursor `index` is gone for good: it holds no writer back any more.

        Raises LaneOwned while its owner lives, IndexError.
        """
        self._check("consumers", self.consumers, index)
        self._claim(
            f"consumer {index}",
            lambda: int(lib.consumer_owner(self._ring, index)),
            lambda expected, mine: int(lib.consumer_detach(self._ring, index, expected, mine)),
        )

    def stats(self) -> RingStats:
        """Return the ring's statistics; nobody is stopped or slowed."""
        self._must_be_open()
        return RingStats(
            name=self.name,
            capacity=self.capacity,
            created_ns=int(self._ring.created_ns),
            lanes=tuple(self._lane_stats(lane) for lane in range(self.lanes)),
            consumers=tuple(self._consumer_stats(index) for index in range(self.consumers)),
        )

    def quarantined(self, lane: int) -> int | None:
        """Return the position at which `lane` was found corrupt, by whoever looked; None when it is sound."""
        self._check("lanes", self.lanes, lane)
        return self._lane_stats(lane).quarantined

    def _lane_stats(self, lane: int) -> LaneStats:
        out = ffi.new("lane_stats *")
        lib.ring_lane_stats(self._ring, lane, out)
        return LaneStats(
            lane=lane,
            owner=Owner.unpack(out.owner),
            tail=out.tail,
            used=out.used,
            frames=out.frames,
            bytes=out.bytes,
            full_events=out.full_events,
            full_seconds=out.full_ns / 1e9,
            high_water=out.high_water,
            bells_rung=out.bells_rung,
            takeovers=out.takeovers,
            quarantined=out.quarantine & ~1 if out.quarantine else None,
        )

    def _consumer_stats(self, index: int) -> ConsumerStats:
        out = ffi.new("consumer_stats *")
        lib.ring_consumer_stats(self._ring, index, out)
        return ConsumerStats(
            index=index,
            owner=Owner.unpack(out.owner),
            detached=bool(out.detached),
            parked=bool(out.parked),
            frames=out.frames,
            bytes=out.bytes,
            batches=out.batches,
            parks=out.parks,
            wakes=out.wakes,
            takeovers=out.takeovers,
            lag=out.lag,
        )

    def close(self) -> None:
        """Close this process's writers and consumers of the ring and let go of it. Twice is fine.

        Frames already read stay readable for as long as their views live.
        """
        for handle in list(self._handles):
            handle.close()
        self._closed = True
        self._segment.close()

    def unlink(self) -> None:
        """Remove the segment's name. Processes that have it keep it."""
        segment.unlink(self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
