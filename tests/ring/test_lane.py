"""One lane's life: frames in, frames out, around the end, full, and at every boundary size."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from outfeed.ring import (
    Consumer,
    ConsumerBusy,
    Doorbell,
    FrameTooLarge,
    LaneOwned,
    Ring,
    RingClosed,
    RingError,
    RingFull,
    WriterBusy,
    wait,
)
from outfeed.ring._core import lib

from tests.finalizer import collected

MakeRing = Callable[..., Ring]


def test_a_frame_arrives_as_it_was_written(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    assert consumer.read() == []
    assert not consumer.pending()
    writer.write(7, b"hello")
    assert consumer.pending()
    [(lane, tag, body)] = consumer.read()
    assert (lane, tag, bytes(body)) == (0, 7, b"hello")
    consumer.release()
    assert consumer.read() == []


def test_parts_are_gathered_end_to_end(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    ids = np.arange(5, dtype="<i4")
    writer.write(2, b"ab", bytearray(b"cd"), memoryview(b"xefx")[1:3], ids, b"", timeout=1.0)
    writer.write(3)
    first, second = consumer.read()
    assert bytes(first[2]) == b"abcdef" + ids.tobytes()
    assert (second[1], bytes(second[2])) == (3, b"")


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1007, 1008, 1023, 1024])
def test_every_boundary_size_wraps_cleanly(make_ring: MakeRing, bell: Doorbell, size: int) -> None:
    ring = make_ring(capacity=4096)
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    for turn in range(40):
        body = bytes([turn]) * size
        writer.write(turn, body)
        assert [(tag, bytes(got)) for _, tag, got in consumer.read()] == [(turn, body)]
        consumer.release()


def test_a_frame_above_a_quarter_of_the_lane_is_refused(make_ring: MakeRing) -> None:
    writer = make_ring(capacity=4096).writer(0)
    with pytest.raises(FrameTooLarge, match=r"1025 bytes; at most 1024"):
        writer.write(1, bytes(1025))
    with pytest.raises(FrameTooLarge, match="1025"):
        writer.write(1, bytes(1000), bytes(25))
    with pytest.raises(FrameTooLarge, match="1025"):
        writer.reserve(1025)


def test_a_full_lane_says_so_and_loses_nothing(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring(capacity=4096)
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    for tag in range(64):
        writer.write(tag, bytes(48))
    with pytest.raises(RingFull, match="no room for 48 bytes"):
        writer.write(64, bytes(48))
    with pytest.raises(RingFull, match=r"after waiting 0\.01 s"):
        writer.write(64, bytes(48), timeout=0.01)
    assert [tag for _, tag, _ in consumer.read()] == list(range(64))
    with pytest.raises(RingFull):
        writer.write(64, bytes(48))
    consumer.release()
    writer.write(64, bytes(48))
    assert [tag for _, tag, _ in consumer.read()] == [64]


def test_the_slowest_consumer_holds_the_writer(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring(consumers=2)
    writer, fast = ring.writer(0), ring.consumer(0, bell)
    for _ in range(4):
        writer.write(1, bytes(1008 - 16))
    fast.read()
    fast.release()
    with pytest.raises(RingFull):
        writer.write(1, bytes(64))
    slow = ring.consumer(1, bell)
    assert len(slow.read()) == 4
    slow.release()
    writer.write(1, bytes(64))


def test_reserve_fill_commit(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    view = writer.reserve(100)
    assert len(view) == 100
    assert consumer.read() == []
    with pytest.raises(WriterBusy, match="reservation is open"):
        writer.write(1, b"x")
    with pytest.raises(WriterBusy, match="reservation is open"):
        writer.reserve(1)
    view[:3] = b"abc"
    with pytest.raises(FrameTooLarge):
        writer.commit(9, 101)
    writer.commit(9, 3)
    assert [(tag, bytes(body)) for _, tag, body in consumer.read()] == [(9, b"abc")]
    with pytest.raises(RingError, match="no reservation"):
        writer.commit(9, 3)
    writer.reserve(10)
    writer.cancel()
    writer.write(1, b"after")
    assert [bytes(body) for _, _, body in consumer.read()] == [b"after"]


def test_a_reservation_is_of_any_size_that_a_frame_may_have(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring(capacity=4096)
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    for reserved, used in ((0, 0), (writer.max_frame, writer.max_frame), (1, 0)):
        view = writer.reserve(reserved)
        assert len(view) == reserved
        writer.commit(1, used)
    assert [len(body) for _, _, body in consumer.read()] == [0, 1024, 0]
    for size in (1025, 1 << 70):
        with pytest.raises(FrameTooLarge, match=f"a frame of {size} bytes; at most 1024 fit"):
            writer.reserve(size)
    writer.write(1, b"none is open")


def test_a_reservation_goes_on_after_each_signal_for_what_is_left_of_its_time(
    make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def interrupted(_handle: object, _size: int, timeout_ns: int, _offset: object) -> int:
        asked.append(timeout_ns / 1e9)
        return lib.RING_INTERRUPTED if timeout_ns else lib.RING_FULL  # type: ignore[no-any-return]

    writer, seconds = make_ring().writer(0), itertools.count(0, 25)
    core = {name: getattr(lib, name) for name in dir(lib)}
    monkeypatch.setattr("outfeed.ring.writer.lib", SimpleNamespace(**{**core, "writer_reserve": interrupted}))
    clock = SimpleNamespace(monotonic_ns=lambda: next(seconds) * 10**9)
    monkeypatch.setattr("outfeed.ring.writer.time", clock)
    with pytest.raises(RingFull, match="no room for 8 bytes after waiting 60 s"):
        writer.reserve(8, timeout=60.0)
    assert asked == [60, 35, 10, 0]
    with pytest.raises(RingFull, match="no room for 8 bytes;"):
        writer.reserve(8)
    assert asked[4:] == [0]


def test_lanes_take_turns_and_upto_stops_at_the_tails(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring(lanes=3)
    writers = [ring.writer(lane) for lane in range(3)]
    consumer = ring.consumer(0, bell)
    for tag in range(10):
        writers[0].write(tag, b"")
    writers[1].write(100, b"")
    tails = consumer.tails()
    writers[1].write(101, b"")
    writers[2].write(200, b"")
    seen = consumer.read(limit=6, upto=tails)
    assert {lane for lane, _, _ in seen} == {0, 1}
    seen += consumer.read(upto=tails)
    assert [tag for lane, tag, _ in seen if lane == 0] == list(range(10))
    assert [tag for lane, tag, _ in seen if lane == 1] == [100]
    assert consumer.read(upto=tails) == []
    assert sorted(tag for _, tag, _ in consumer.read()) == [101, 200]


def test_two_writers_or_readers_in_one_place_are_refused(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    with pytest.raises(LaneOwned, match="lane 0 belongs to process"):
        ring.writer(0)
    with pytest.raises(LaneOwned, match="consumer 0 belongs to process"):
        ring.consumer(0, bell)
    with pytest.raises(LaneOwned):
        ring.detach_consumer(0)
    writer.close()
    consumer.close()
    with pytest.raises(RingClosed):
        writer.write(1, b"")
    with pytest.raises(RingClosed):
        consumer.read()
    next_writer, next_consumer = ring.writer(0), ring.consumer(0, bell)
    writer.close()  # not the next one's lane
    consumer.close()
    with pytest.raises(LaneOwned):
        ring.writer(0)
    with pytest.raises(LaneOwned):
        ring.consumer(0, bell)
    next_writer.write(1, b"again")
    assert len(next_consumer.read()) == 1


@pytest.mark.parametrize(
    ("code", "error", "why"),
    [
        (lib.RING_NO_MEMORY, RingError, "there is no memory to claim {}"),
        (lib.RING_OWNED, LaneOwned, "{} changed hands 8 times while it was being claimed"),
    ],
)
def test_what_cannot_be_claimed_says_why(
    make_ring: MakeRing,
    bell: Doorbell,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    error: type[RingError],
    why: str,
) -> None:
    ring = make_ring()
    core = {name: getattr(lib, name) for name in dir(lib)}
    refusing = dict.fromkeys(("writer_claim", "reader_claim", "consumer_detach"), lambda *_: code)
    monkeypatch.setattr("outfeed.ring.ring.lib", SimpleNamespace(**{**core, **refusing}))
    attempts: list[tuple[str, Callable[[], object]]] = [
        ("lane 0", lambda: ring.writer(0)),
        ("consumer 0", lambda: ring.consumer(0, bell)),
        ("consumer 0", lambda: ring.detach_consumer(0)),
    ]
    for what, attempt in attempts:
        with pytest.raises(error, match=f"^ring '{ring.name}': {why.format(what)}"):
            attempt()


def test_what_nobody_holds_any_more_is_free(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    kept = writer.native.memory, consumer.read()
    del writer, consumer
    ring.writer(0).write(1, b"from the next one")
    assert [tag for _, tag, _ in ring.consumer(0, bell).read()] == [1]
    del kept


def test_unreleased_frames_come_again_and_released_ones_do_not(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    for tag in range(3):
        writer.write(tag, b"")
    consumer.read(limit=2)
    consumer.release()
    consumer.read()
    consumer.close()
    assert [tag for _, tag, _ in ring.consumer(0, bell).read()] == [2]


def test_a_detached_cursor_holds_nobody_back_and_starts_afresh(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    writer = ring.writer(0)
    ring.detach_consumer(0)
    for _ in range(200):
        writer.write(1, bytes(500))
    consumer = ring.consumer(0, bell)
    assert consumer.read() == []
    writer.write(2, b"new")
    assert [tag for _, tag, _ in consumer.read()] == [2]


def test_wait_sees_what_is_there_and_gives_up_in_time(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    assert not wait([consumer], 0.01)
    writer.write(1, b"")
    assert wait([consumer], 1.0)
    consumer.read()
    assert not wait([consumer], 0.0)
    bell.ring()
    assert not wait([consumer], 1.0)


@pytest.mark.parametrize("doing", ["read", "release", "close"])
def test_a_finalizer_in_the_middle_of_a_read_takes_nothing_from_it(
    make_ring: MakeRing, bell: Doorbell, doing: str
) -> None:
    refused = 0
    for at in range(1, 200):
        ring = make_ring()
        writer, consumer = ring.writer(0), ring.consumer(0, bell)
        for tag in range(20):
            writer.write(tag, bytes([tag] * 9))
        found: list[int] = []

        def read(consumer: Consumer = consumer, found: list[int] = found) -> None:
            for _, tag, body in consumer.read():
                assert bytes(body) == bytes([tag] * 9)
                found.append(tag)

        def between(consumer: Consumer = consumer, read: Callable[[], None] = read) -> None:
            nonlocal refused
            try:
                read() if doing == "read" else getattr(consumer, doing)()
            except ConsumerBusy:
                refused += 1

        # Python keeps up to 2,000 old tuples for new ones, of which the collector hears nothing.
        drained = [(at, number, None) for number in range(2_500)]
        try:
            due = collected(read, at, between)
        except RingClosed:
            assert doing == "close"
            continue
        finally:
            del drained
        assert found == [*range(20)]
        if not due:
            break
        if doing != "close":
            consumer.release()
            assert consumer.read() == []
    if sys.version_info < (3, 12):  # where a collection can come in C
        assert at > 10
        assert refused > 5 or doing == "close"


WITHOUT_MEMORY = """
import contextlib, resource, sys
from outfeed.ring import Doorbell, Ring

name, frames, size = sys.argv[1], 4000, 1 << 20
with Doorbell.create(name + ".bell") as bell, Ring.create(name, lanes=2, consumers=1, capacity=size) as ring:
    lanes, consumer = (ring.writer(0), ring.writer(1)), ring.consumer(0, bell)
    for number in range(frames):
        lanes[number % 2].write(1, number.to_bytes(4, "little"))
    numbers = lambda found: [int.from_bytes(body, "little") for _, _, body in found]
    seen = numbers(consumer.read(2))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), hard))
    hoard, failed = [], False
    with contextlib.suppress(MemoryError):
        while True:
            hoard.append(bytearray(600))
    try:
        consumer.read(frames)
    except MemoryError:
        failed = True
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert failed, "there was memory left: the test shows nothing"
    assert consumer.pending()
    consumer.release()  # of the first two
    seen += numbers(consumer.read(frames))
    assert sorted(seen) == list(range(frames)), f"{frames - len(seen)} frames are lost"
"""


def test_what_a_read_has_no_memory_for_is_read_again(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMORY, name], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
