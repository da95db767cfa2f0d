"""A ring as a whole: closing it, and what it tells of itself."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from outfeed.ring import CorruptLane, Doorbell, Owner, Ring, RingClosed, RingFull, segment

MakeRing = Callable[..., Ring]


def test_a_ring_that_is_closed_gives_back_what_somebody_still_holds(
    make_ring: MakeRing, bell: Doorbell
) -> None:
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    with Ring.attach(ring.name) as other:
        ring.close()
        other.writer(0).write(1, b"another's")
        assert [tag for _, tag, _ in other.consumer(0, bell).read()] == [1]
    for call in (
        consumer.read,
        consumer.tails,
        lambda: writer.write(1),
        lambda: writer.reserve(1),
        writer.cancel,
    ):
        with pytest.raises(RingClosed, match="closed, or this process was forked"):
            call()


def test_what_a_with_statement_has_is_closed_at_its_end(name: str, bell: Doorbell) -> None:
    with Ring.create(name, lanes=1, consumers=1, capacity=4096) as ring:
        for _ in range(2):
            with ring.writer(0) as writer, ring.consumer(0, bell) as consumer:
                writer.write(1, b"")
                assert len(consumer.read()) == 1
                consumer.release()
            with pytest.raises(RingClosed):
                writer.write(1, b"")
            with pytest.raises(RingClosed):
                consumer.read()
    with pytest.raises(RingClosed, match=f"ring '{name}' is closed"):
        ring.stats()
    assert not segment.in_use(name)
    for _ in range(2):
        ring.unlink()
        assert segment.listed(name) == [bell.name]


def test_a_writer_lets_go_of_the_doorbells_that_it_rang(make_ring: MakeRing, bell: Doorbell) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(bell.name)

    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    before = mapped()
    with Path("/dev/shm", ring.name).open("r+b") as file:
        file.seek(4096 + 512)
        file.write(b"\x01")  # as if the consumer slept
    writer.write(1, b"")
    assert mapped() == before + 1
    del writer
    assert mapped() == before
    assert len(consumer.read()) == 1


def test_a_lane_is_sound_until_somebody_found_it_corrupt(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring(lanes=2)
    consumer = ring.consumer(0, bell)
    for lane in range(2):
        ring.writer(lane).write(1, b"good")
    at = os.stat(f"/dev/shm/{ring.name}").st_size - 4096
    with Path("/dev/shm", ring.name).open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" * 8)
    assert [lane for lane, _, _ in consumer.read()] == [0]
    with pytest.raises(CorruptLane):
        consumer.read()
    assert ring.quarantined(0) is None
    assert ring.quarantined(1) == 0
    for lane in (-1, 2):
        with pytest.raises(IndexError, match=f"has lanes 0 to 1, not {lane}"):
            ring.quarantined(lane)
    ring.close()
    with pytest.raises(RingClosed):
        ring.quarantined(0)


def test_a_rings_numbers_are_those_of_what_was_done(make_ring: MakeRing, bell: Doorbell) -> None:
    before = time.time_ns()
    ring = make_ring(lanes=2, consumers=2)
    ring.detach_consumer(0)
    writer, consumer = ring.writer(1), ring.consumer(1, bell)
    for size in (10, 100, 1000, 1000, 1000):
        writer.write(1, bytes(size))
    started = time.monotonic()
    with pytest.raises(RingFull):
        writer.write(1, bytes(1000), timeout=0.01)
    longest = time.monotonic() - started
    consumer.read(2)
    consumer.release()
    consumer.read()
    stats = ring.stats()
    assert (stats.name, stats.capacity) == (ring.name, 4096)
    assert before <= stats.created_ns <= time.time_ns()
    idle, lane = stats.lanes
    assert (idle.lane, idle.owner, idle.tail, idle.frames, idle.full_seconds) == (0, None, 0, 0, 0)
    assert (lane.lane, lane.owner, lane.frames, lane.bytes) == (1, Owner.me(), 5, 3110)
    assert (lane.tail, lane.used, lane.high_water) == (3232, 3072, 3232)
    assert (lane.full_events, lane.bells_rung, lane.takeovers, lane.quarantined) == (1, 0, 0, None)
    assert 0.01 <= lane.full_seconds <= longest
    gone, there = stats.consumers
    assert (gone.index, gone.owner, gone.detached) == (0, None, True)
    assert (there.index, there.owner, there.detached, there.parked) == (1, Owner.me(), False, False)
    assert (there.frames, there.bytes, there.batches, there.lag) == (5, 3110, 2, 3072)
    assert (there.parks, there.wakes, there.takeovers) == (0, 0, 0)


def test_a_lanes_high_mark_stays_when_its_frames_are_gone(make_ring: MakeRing, bell: Doorbell) -> None:
    """A consumer sets it where the writer never looks, the writer where no consumer does."""
    ring = make_ring(lanes=2)
    seen, unseen, consumer = ring.writer(0), ring.writer(1), ring.consumer(0, bell)
    seen.write(1, bytes(1000))
    consumer.read()
    consumer.release()
    for _ in range(4):
        unseen.write(1, bytes(1000))
    with pytest.raises(RingFull):
        unseen.write(1, bytes(1000))
    consumer.close()
    ring.detach_consumer(0)
    assert [(lane.used, lane.high_water) for lane in ring.stats().lanes] == [(0, 1024), (0, 4096)]
