"""Waiting: woken across processes, bounded, interruptible, by hand, and never spinning on an idle ring."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from outfeed.ring import Consumer, ConsumerBusy, Doorbell, Ring, RingClosed, RingFull, WriterBusy, wait

from tests.eventually import until

MakeRing = Callable[..., Ring]
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
    assert stats.lanes[0].posts >= 20
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
            wait([consumer], 1.0)
            seen += len(consumer.read())
            consumer.release()
            in_a_row = in_a_row + 1 if ring.stats().consumers[0].parks == before else 0
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
    process.join(30)


def test_a_writer_at_a_full_lane_is_woken_by_a_release(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    consumer = ring.consumer(0, bell)

    def fill() -> None:
        with ring.writer(0) as writer:
            for tag in range(40):
                writer.write(tag, bytes(1000), timeout=30.0)

    process = FORK.Process(target=fill)
    process.start()
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
    with pytest.raises(WriterBusy):
        writer.close()
    thread.join()
    consumer.read()
    consumer.release()
    parks = ring.stats().consumers[0].parks
    thread = threading.Thread(target=lambda: wait([consumer], 1.0))
    thread.start()
    until("the reader to park", lambda: ring.stats().consumers[0].parks > parks)
    with pytest.raises(ConsumerBusy):
        consumer.read()
    with pytest.raises(ConsumerBusy):
        wait([consumer], 1.0)
    bell.ring()
    thread.join()


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
