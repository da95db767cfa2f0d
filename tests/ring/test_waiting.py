"""Waiting: woken across processes, bounded, interruptible, by hand, and never spinning on an idle ring."""

import mmap
import multiprocessing
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from outfeed.ring import Consumer, ConsumerBusy, Doorbell, Ring, RingClosed, RingFull, WriterBusy, wait
from outfeed.ring._core import ffi, lib

from tests.eventually import until
from tests.limits import no_more_files, no_more_memory

MakeRing = Callable[..., Ring]
PARKED = 4096 + 512  # the first consumer's flag in a ring of one lane
ROOM = 4096 + 256  # the first lane's flag; what its writer waits for is 8 bytes on
FORK = multiprocessing.get_context("fork")


def test_a_parked_reader_is_woken_from_another_process(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    consumer = ring.consumer(0, bell)

    def write_when_parked() -> None:
        with ring.writer(0) as writer:
            for tag in range(20):
                until("the reader to park", lambda: ring.stats().consumers[0].parked)
                writer.write(tag, b"")

    process = FORK.Process(target=write_when_parked)
    process.start()
    seen: list[int] = []
    while len(seen) < 20:
        wait([consumer], 1.0)
        seen += [tag for _, tag, _ in consumer.read()]
        consumer.release()
    process.join(30)
    assert seen == list(range(20))
    stats = ring.stats()
    assert stats.consumers[0].parks >= stats.consumers[0].wakes >= 20
    assert stats.lanes[0].bells_rung >= 20
    assert not stats.consumers[0].parked


def test_one_doorbell_serves_many_rings(make_ring: MakeRing, bell: Doorbell) -> None:
    rings = [make_ring() for _ in range(3)]
    consumers = [ring.consumer(0, bell) for ring in rings]

    def write_when_parked() -> None:
        for tag, ring in enumerate(rings):
            with ring.writer(0) as writer:
                until("the reader to park", lambda: rings[0].stats().consumers[0].parked)
                writer.write(tag, b"")

    process = FORK.Process(target=write_when_parked)
    process.start()
    seen: list[int] = []
    while len(seen) < 3:
        wait(consumers, 1.0)
        seen += [tag for consumer in consumers for _, tag, _ in consumer.read()]
    process.join(30)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(("longest_spin", "stays_awake"), [(0.01, True), (50e-6, False)])
def test_a_reader_stays_awake_for_as_long_as_its_doorbell_allows(
    make_ring: MakeRing, name: str, longest_spin: float, stays_awake: bool
) -> None:
    ring = make_ring()

    def write_every_millisecond() -> None:
        with ring.writer(0) as writer:
            while True:
                writer.write(1, b"", timeout=30.0)
                time.sleep(0.001)

    process = FORK.Process(target=write_every_millisecond, daemon=True)
    with Doorbell.create(f"{name}.bell-awake", longest_spin=longest_spin) as bell:
        consumer = ring.consumer(0, bell)
        process.start()
        in_a_row = longest = seen = 0  # frames that were waited for without a park; all frames
        deadline = time.monotonic() + 60
        while longest < 20 and (stays_awake or seen < 300):
            assert time.monotonic() < deadline, (
                f"{seen} frames came, {longest} of them in a row without a park"
            )
            before = ring.stats().consumers[0].parks
            came = wait([consumer], 1.0)
            seen += len(consumer.read())
            consumer.release()
            in_a_row = in_a_row + 1 if ring.stats().consumers[0].parks == before else 0
            assert came or in_a_row < 3  # a ring that came late for a sleep ends one of the waits after it
            longest = max(longest, in_a_row)
        process.kill()
        process.join()
    assert (longest >= 20) == stays_awake


def test_a_wait_is_capped_and_checked(make_ring: MakeRing, bell: Doorbell, name: str) -> None:
    ring = make_ring(consumers=2)
    consumer = ring.consumer(0, bell)
    started = time.monotonic()
    assert not wait([consumer], 3600.0)
    assert time.monotonic() - started >= 0.9  # one second, however long was asked for
    for timeout in (-1.0, float("nan"), float("inf"), 1e9):
        with pytest.raises(ValueError, match="timeout"):
            wait([consumer], timeout)
    with pytest.raises(ValueError, match="at least one"):
        wait([], 1.0)
    with (
        Doorbell.create(f"{name}.bell-other") as other,
        pytest.raises(ValueError, match="different doorbells"),
    ):
        wait([consumer, ring.consumer(1, other)], 1.0)
    consumer.close()
    with pytest.raises(RingClosed):
        wait([consumer], 1.0)


@pytest.fixture
def handler() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Install a SIGUSR1 handler for the test."""
    old = signal.getsignal(signal.SIGUSR1)

    def install(work: Callable[[], None]) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: work())

    yield install
    signal.signal(signal.SIGUSR1, old)


def _signal_when(condition: Callable[[], object]) -> Any:
    """Signal this process from a child once `condition`, read from shared memory, holds."""
    parent = os.getpid()

    def child() -> None:
        until("the parent to wait", condition)
        # The flag is set just before the sleep begins; signal again until the parent has had one in it.
        for _ in range(200):
            os.kill(parent, signal.SIGUSR1)
            time.sleep(0.01)
            if not condition():
                return

    process = FORK.Process(target=child)
    process.start()
    return process


def _wait_for_ever(consumer: Consumer) -> None:
    while True:
        wait([consumer], 1.0)


def test_a_signal_gets_through_a_wait(
    make_ring: MakeRing, bell: Doorbell, handler: Callable[[Callable[[], None]], None]
) -> None:
    ring = make_ring()
    consumer = ring.consumer(0, bell)

    def interrupt() -> None:
        raise KeyboardInterrupt

    handler(interrupt)
    process = _signal_when(lambda: ring.stats().consumers[0].parked)
    try:
        with pytest.raises(KeyboardInterrupt):
            _wait_for_ever(consumer)
    finally:
        handler(lambda: None)
    process.join(30)


def test_a_ring_by_hand_that_meets_a_signal_ends_the_wait(compile_c: Callable[..., Path]) -> None:
    """The handler itself rings, in C: so the two always meet in the same sleep."""
    done = subprocess.run([compile_c("signal")], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_a_signal_gets_through_a_full_lane_and_a_quiet_one_changes_nothing(
    make_ring: MakeRing, handler: Callable[[Callable[[], None]], None]
) -> None:
    ring = make_ring()
    writer = ring.writer(0)
    for _ in range(4):
        writer.write(1, bytes(1000))
    seen: list[int] = []
    handler(lambda: seen.append(1))
    full = ring.stats().lanes[0].full_events
    process = _signal_when(lambda: ring.stats().lanes[0].full_events > full)
    with pytest.raises(RingFull, match="after waiting 3 s"):
        writer.write(1, bytes(1000), timeout=3.0)
    process.join(30)
    assert seen

    def interrupt() -> None:
        raise KeyboardInterrupt

    handler(interrupt)
    before = ring.stats().lanes[0].full_events
    process = _signal_when(lambda: ring.stats().lanes[0].full_events > before)
    try:
        with pytest.raises(KeyboardInterrupt):
            writer.write(1, bytes(1000), timeout=60.0)
    finally:
        handler(lambda: None)
        process.kill()
    process.join(30)


def test_a_signal_that_comes_just_before_the_sleep_waits_a_second_at_most(make_ring: MakeRing) -> None:
    """It ends no sleep, so the C core comes back for it in the middle of a long wait."""
    ring = make_ring()
    writer = ring.writer(0)
    for _ in range(4):
        writer.write(1, bytes(1000))
    parts, offset = ffi.new("part[1]"), ffi.new("uint64_t *")
    body = ffi.new("char[]", 1000)
    parts[0].bytes, parts[0].length = body, 1000
    third_s, long_ns = 300_000_000, 5_000_000_000
    assert lib.writer_write(writer._handle, 1, parts, 1, long_ns) == lib.RING_INTERRUPTED
    assert lib.writer_reserve(writer._handle, 1000, third_s, offset) == lib.RING_FULL
    assert ring.stats().lanes[0].full_events == 1, "all one wait"
    for _ in range(2):
        with pytest.raises(RingFull):
            writer.write(1, bytes(1000))
    assert ring.stats().lanes[0].full_events == 3


def test_a_writer_at_a_full_lane_is_woken_by_a_release(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    consumer = ring.consumer(0, bell)

    def fill() -> None:
        with ring.writer(0) as writer:
            for tag in range(40):
                writer.write(tag, bytes(1000), timeout=30.0)

    process = FORK.Process(target=fill)
    process.start()
    until("the lane to be full", lambda: ring.stats().lanes[0].full_events)
    seen: list[int] = []
    while len(seen) < 40:
        wait([consumer], 1.0)
        seen += [tag for _, tag, _ in consumer.read()]
        consumer.release()
    process.join(30)
    assert process.exitcode == 0
    assert seen == list(range(40))
    stats = ring.stats().lanes[0]
    assert stats.full_events > 0
    assert stats.full_seconds > 0
    assert stats.high_water > 3000


@pytest.mark.parametrize(("wanted", "wakes"), [(1040, True), (1041, False)])
def test_a_release_wakes_a_writer_once_there_is_what_it_waits_for(
    make_ring: MakeRing, bell: Doorbell, wanted: int, wakes: bool
) -> None:
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    writer.write(1, bytes(1024))
    with open(f"/dev/shm/{ring.name}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[ROOM] = 1
        memory[ROOM + 8 : ROOM + 16] = wanted.to_bytes(8, "little")
        consumer.read()
        consumer.release()
        assert memory[ROOM] == (not wakes)


def test_a_writer_waits_for_its_frame_and_an_eighth_of_the_lane(make_ring: MakeRing) -> None:
    ring = make_ring()
    writer = ring.writer(0)
    for _ in range(4):
        writer.write(1, bytes(1000))  # 1024 with its header and padding
    with open(f"/dev/shm/{ring.name}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:

        def wanted() -> int:
            with pytest.raises(RingFull):
                writer.write(1, bytes(500), timeout=0.01)
            return int.from_bytes(memory[ROOM + 8 : ROOM + 16], "little")

        assert until("the writer to park", wanted) == 528 + 512
        assert memory[ROOM] == 0


def test_a_reservation_at_a_full_lane_is_woken_by_a_release(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    for tag in range(4):
        writer.write(tag, bytes(1000))

    def reserve() -> None:
        writer.reserve(1000, timeout=60.0)[:3] = b"now"
        writer.commit(4, 3)

    thread = threading.Thread(target=reserve)
    thread.start()
    until("the lane to be full", lambda: ring.stats().lanes[0].full_events)
    assert [tag for _, tag, _ in consumer.read()] == [0, 1, 2, 3]
    consumer.release()
    thread.join()
    assert [(tag, bytes(body)) for _, tag, body in consumer.read()] == [(4, b"now")]


def test_an_idle_wait_burns_no_cpu(make_ring: MakeRing, bell: Doorbell) -> None:
    consumer = make_ring().consumer(0, bell)
    wait([consumer], 0.1)
    used = time.process_time()
    for _ in range(3):
        wait([consumer], 1.0)
    assert time.process_time() - used < 0.15  # three seconds of sleep; spinning would use all of them


def test_a_second_thread_is_refused(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    for _ in range(4):
        writer.write(1, bytes(1000))

    def write_to_the_end() -> None:
        with pytest.raises(RingFull):
            writer.write(1, bytes(1000), timeout=2)

    thread = threading.Thread(target=write_to_the_end)

    def refused() -> bool:
        try:
            writer.write(1, bytes(1000))
        except WriterBusy:
            return True
        except RingFull:  # the other one does not wait yet
            return False
        return False

    thread.start()
    until("a refusal", refused)
    calls: list[Callable[[], object]] = [
        writer.cancel,
        lambda: writer.commit(1, 0),
        lambda: writer.reserve(0),
    ]
    for call in (*calls, writer.close):
        with pytest.raises(WriterBusy, match="another thread is writing"):
            call()
    thread.join()
    consumer.read()
    consumer.release()
    parks = ring.stats().consumers[0].parks
    thread = threading.Thread(target=lambda: wait([consumer], 1.0))
    thread.start()
    until("the reader to park", lambda: ring.stats().consumers[0].parks > parks)
    for refused_too in (consumer.read, consumer.release, consumer.tails, consumer.close, ring.close):
        with pytest.raises(ConsumerBusy, match="consumer 0 or its doorbell: another thread"):
            refused_too()
    with pytest.raises(ConsumerBusy):
        wait([consumer], 1.0)
    bell.ring()
    thread.join()


def test_a_wait_keeps_its_consumers_whatever_becomes_of_the_list(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring(consumers=2)
    waiting = [ring.consumer(0, bell), ring.consumer(1, bell)]
    second = weakref.ref(waiting[1])
    thread = threading.Thread(target=wait, args=(waiting, 1.0))
    thread.start()
    until("the wait to sleep", lambda: ring.stats().consumers[1].parks)
    waiting.pop()  # the last reference of ours: its memory must not go while the wait sleeps on it
    assert second() is not None
    bell.ring()
    thread.join()
    until("the wait to let go of it", lambda: second() is None)


def test_a_consumer_keeps_the_doorbell_that_it_was_made_with(
    make_ring: MakeRing, bell: Doorbell, name: str
) -> None:
    first = Doorbell.create(f"{name}.bell-first")
    consumer = make_ring().consumer(0, first)
    kept = weakref.ref(first._bell)
    assert consumer.doorbell is first
    consumer.doorbell = bell
    first.close()
    del first
    assert kept() is not None
    with pytest.raises(RingClosed):
        wait([consumer], 1.0)
    del consumer
    assert kept() is None


@pytest.mark.parametrize("limit", [no_more_files, no_more_memory])
def test_a_doorbell_that_there_was_no_room_for_is_rung_as_soon_as_there_is(
    make_ring: MakeRing, bell: Doorbell, limit: Callable[[], AbstractContextManager[None]]
) -> None:
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    with (
        open(f"/dev/shm/{ring.name}", "r+b") as segment,
        open(f"/dev/shm/{bell.name}", "r+b") as doorbell,
        mmap.mmap(segment.fileno(), 0) as memory,
        mmap.mmap(doorbell.fileno(), 0) as word,
    ):

        def rung_for_a_frame() -> bool:
            memory[PARKED] = 1
            writer.write(1, b"")
            return bool(word[128])

        with limit():
            rung = rung_for_a_frame()
        assert not rung
        assert rung_for_a_frame()
    assert len(consumer.read()) == 2


def test_a_child_that_was_forked_out_of_a_write_cannot_use_the_handle(
    make_ring: MakeRing, bell: Doorbell
) -> None:
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    for _ in range(4):
        writer.write(1, bytes(1000))
    thread = threading.Thread(target=writer.write, args=(2, bytes(1000)), kwargs={"timeout": 60.0})
    thread.start()
    until("the write to wait", lambda: ring.stats().lanes[0].full_events)

    def child() -> None:
        with pytest.raises(RingClosed):
            writer.write(3, b"")
        ring.close()

    process = FORK.Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert len(consumer.read()) == 4
    consumer.release()
    thread.join()
    assert [tag for _, tag, _ in consumer.read()] == [2]


def test_ringing_by_hand_ends_a_wait(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    consumer = ring.consumer(0, bell)
    returned: list[bool] = []

    def waiting() -> None:
        while not returned:
            returned.append(wait([consumer], 1.0))

    thread = threading.Thread(target=waiting)
    thread.start()
    until("the reader to park", lambda: ring.stats().consumers[0].parks)
    bell.ring()
    thread.join()
    assert returned == [False]
    bell.close()
    with pytest.raises(RingClosed):
        bell.ring()
