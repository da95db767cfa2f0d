"""Any bytes in a segment: an error that names lane and position, or a quarantined lane; nothing worse.

The C fuzzer goes deeper; here the same is asked of the Python API, in any environment.
"""

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outfeed.ring import Consumer, CorruptLane, Doorbell, LaneWriter, Ring, RingError, RingFull, segment, wait

from tests.eventually import until

MakeRing = Callable[..., Ring]
PAGE = 4096
LANE, CONSUMER, HEAD, RECORD = 512, 384, 128, 16


@contextmanager
def raw(ring: Ring) -> Iterator[mmap.mmap]:
    """The segment's bytes, as another process would scribble over them."""
    with open(Path("/dev/shm") / ring.name, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        yield memory


def area_of(ring: Ring, lane: int) -> int:
    tables = PAGE + ring.lanes * LANE + ring.consumers * CONSUMER + ring.lanes * ring.consumers * HEAD
    return -(-tables // PAGE) * PAGE + lane * ring.capacity


def heads_of(ring: Ring) -> int:
    return PAGE + ring.lanes * LANE + ring.consumers * CONSUMER


@pytest.mark.parametrize(
    ("what", "offset", "value"),
    [
        ("body too long for the lane", 0, struct.pack("<I", 1 << 31)),
        ("body longer than a quarter", 0, struct.pack("<I", 1025)),
        ("body beyond the tail", 0, struct.pack("<I", 600)),
        ("unknown flag", 5, b"\x02"),
        ("padding that does not fill the area", 5, b"\x01"),
        ("reserved bits", 6, b"\x01\x00"),
        ("another position's seq", 8, struct.pack("<Q", 4096)),
    ],
)
def test_a_bad_record_costs_its_lane_and_no_other(
    make_ring: MakeRing, bell: Doorbell, what: str, offset: int, value: bytes
) -> None:
    ring = make_ring(lanes=2)
    first, second, consumer = ring.writer(0), ring.writer(1), ring.consumer(0, bell)
    first.write(1, b"good")
    first.write(2, b"bad")
    first.write(3, b"unreachable")
    second.write(4, b"other lane")
    with raw(ring) as memory:
        memory.seek(area_of(ring, 0) + 32 + offset)
        memory.write(value)
    assert sorted(tag for _, tag, _ in consumer.read()) == [1, 4], what
    assert wait([consumer], 0.0)
    with pytest.raises(CorruptLane, match="lane 0 is corrupt at position 32") as caught:
        consumer.read()
    assert (caught.value.ring, caught.value.lane, caught.value.position) == (ring.name, 0, 32)
    assert consumer.read() == []
    second.write(5, b"goes on")
    assert [tag for _, tag, _ in consumer.read()] == [5]
    with pytest.raises(CorruptLane):
        first.write(6, b"to nobody")
    assert ring.stats().lanes[0].quarantined == 32
    first.close()
    with pytest.raises(CorruptLane):
        ring.writer(0)
    consumer.close()
    with pytest.raises(CorruptLane):
        ring.consumer(0, bell).read()


def test_a_frame_that_is_made_padding_is_not_passed_over(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    for tag in range(1, 5):
        writer.write(tag, bytes(ring.capacity // 4 - RECORD))
    with raw(ring) as memory:
        memory[area_of(ring, 0) + 3 * ring.capacity // 4 + 5] = 1
    assert [tag for _, tag, _ in consumer.read()] == [1, 2, 3]
    with pytest.raises(CorruptLane, match=f"position {3 * ring.capacity // 4}"):
        consumer.read()


@pytest.mark.parametrize("tail", [8, 17, 1 << 40, (1 << 64) - 16, 1 << 63])
def test_a_bad_tail(make_ring: MakeRing, bell: Doorbell, tail: int) -> None:
    ring = make_ring()
    consumer = ring.consumer(0, bell)
    with raw(ring) as memory:
        memory[PAGE : PAGE + 8] = struct.pack("<Q", tail)
    with pytest.raises(CorruptLane):
        consumer.read()
    with pytest.raises(CorruptLane):
        ring.writer(0)


def test_a_tail_that_went_back_behind_what_was_read_is_a_bad_one(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    writer.write(1, b"")
    writer.write(2, b"")
    assert len(consumer.read()) == 2
    with raw(ring) as memory:
        memory[PAGE : PAGE + 8] = struct.pack("<Q", RECORD)
    with pytest.raises(CorruptLane, match="position 16"):
        consumer.read()


def test_a_head_and_a_tail_that_are_wrong_alike_cost_the_lane(make_ring: MakeRing, bell: Doorbell) -> None:
    """There is nothing between them to read, of which that would be seen."""
    ring = make_ring()
    with raw(ring) as memory:
        memory[PAGE : PAGE + 8] = memory[heads_of(ring) : heads_of(ring) + 8] = struct.pack("<Q", 8)
    with pytest.raises(CorruptLane, match="position 8"):
        ring.consumer(0, bell).read()


def test_a_lane_that_another_closed_is_something_to_read_of(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    consumer = ring.consumer(0, bell)
    assert not consumer.pending()
    with raw(ring) as memory:
        memory[PAGE + 136 : PAGE + 144] = struct.pack("<Q", 33)
    assert consumer.pending()
    with pytest.raises(CorruptLane, match="position 32"):
        consumer.read()
    assert not consumer.pending()


def test_any_head_of_a_cursor_that_is_opening_is_a_full_lane(make_ring: MakeRing) -> None:
    ring = make_ring()
    writer = ring.writer(0)
    with raw(ring) as memory:
        memory[PAGE + LANE + 136] = 2
        memory[heads_of(ring) : heads_of(ring) + 8] = struct.pack("<Q", 1 << 20)
    assert full(ring, writer) == ring.capacity // 528
    assert ring.stats().lanes[0].quarantined is None


def test_a_bad_tail_is_refused_by_a_writer_whom_no_cursor_holds_back(make_ring: MakeRing) -> None:
    ring = make_ring()
    ring.detach_consumer(0)
    with raw(ring) as memory:
        memory[PAGE : PAGE + 8] = struct.pack("<Q", 4096 - 8)
    with pytest.raises(CorruptLane, match="position 4088"):
        ring.writer(0)


@pytest.mark.parametrize("head", [8, 1 << 20, (1 << 64) - 16])
def test_a_bad_head_is_found_by_the_writer_and_by_its_next_owner(
    make_ring: MakeRing, bell: Doorbell, head: int
) -> None:
    ring = make_ring()
    writer = ring.writer(0)
    with raw(ring) as memory:
        memory[heads_of(ring) : heads_of(ring) + 8] = struct.pack("<Q", head)
    for _ in range(3):  # as far as is known to be free, heads are not looked at
        writer.write(1, bytes(1000))
    writer.write(1, bytes(900))
    with pytest.raises(CorruptLane):
        writer.write(1, bytes(1000))
    with pytest.raises(CorruptLane):
        ring.consumer(0, bell).read()


def full(ring: Ring, writer: LaneWriter) -> int:
    """Write until the lane is full; return how many frames it took."""
    for count in range(100):
        try:
            writer.write(count, bytes(500))
        except RingFull:
            return count
    raise AssertionError("the lane never fills")


@pytest.mark.parametrize("say", ["release", "wait"])
@pytest.mark.parametrize("state", [1, 2, 77], ids=["detached", "opening", "nothing"])
def test_a_cursor_says_again_that_it_is_open(
    make_ring: MakeRing, bell: Doorbell, state: int, say: str
) -> None:
    """Taken for detached it would be overrun, and its lanes be corrupt."""
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    with raw(ring) as memory:
        memory[PAGE + LANE + 136 : PAGE + LANE + 140] = struct.pack("<I", state)
        if say == "release":
            consumer.release()
        else:
            wait([consumer], 0.01)
        assert memory[PAGE + LANE + 136 : PAGE + LANE + 140] == bytes(4)
    frames = full(ring, writer)
    assert [tag for _, tag, _ in consumer.read()] == list(range(frames))
    consumer.release()
    writer.write(1, b"")


@pytest.mark.parametrize("say", ["release", "wait"])
def test_a_lane_that_looks_full_for_a_head_that_was_written_over_does_not_stay_so(
    make_ring: MakeRing, bell: Doorbell, say: str
) -> None:
    """Its consumer has nothing to read, and so nothing to release, that would move it."""
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    full(ring, writer)
    consumer.read()
    consumer.release()
    with raw(ring) as memory:
        memory[heads_of(ring) : heads_of(ring) + 8] = bytes(8)
    assert full(ring, writer) == 0
    if say == "release":
        consumer.release()
    else:
        wait([consumer], 0.01)
    assert full(ring, writer) > 0


@pytest.mark.parametrize(("offset", "value"), [(140, b"\x07"), (144, b"?"), (150, b"\xff")])
def test_a_cursor_that_goes_to_sleep_says_again_which_doorbell_it_has(
    make_ring: MakeRing, bell: Doorbell, offset: int, value: bytes
) -> None:
    ring = make_ring()
    consumer = ring.consumer(0, bell)
    with raw(ring) as memory:
        memory[PAGE + LANE + offset : PAGE + LANE + offset + 1] = value
        wait([consumer], 0.01)
        turn = memory[PAGE + LANE + 140]
        assert turn % 2 == 0
        assert memory[PAGE + LANE + 144 : PAGE + LANE + 208] == bell.name.encode().ljust(64, b"\0")
        wait([consumer], 0.01)
        assert memory[PAGE + LANE + 140] == turn, "said once"


def test_a_quarantine_ends_a_writers_wait_for_room(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    writer = ring.writer(0)
    for _ in range(3):
        writer.write(1, bytes(1000))
    writer.write(1, bytes(900))
    pid = os.fork()
    if pid == 0:
        with Ring.attach(ring.name) as again:
            while not again.stats().lanes[0].full_events:
                pass
            with raw(again) as memory:
                memory[area_of(again, 0) + 8 : area_of(again, 0) + 9] = b"\x01"
            try:
                again.consumer(0, bell).read()
            except CorruptLane:
                os._exit(0)
        os._exit(1)
    with pytest.raises(CorruptLane):
        writer.write(1, bytes(1000), timeout=60.0)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_writer_that_sleeps_at_a_lane_is_woken_when_it_is_closed(
    make_ring: MakeRing, bell: Doorbell
) -> None:
    ring = make_ring(lanes=2)
    writer, consumer = ring.writer(1), ring.consumer(0, bell)
    writer.write(1, b"")
    with raw(ring) as memory:
        memory[area_of(ring, 1)] = 255
        parked = slice(PAGE + 256, PAGE + 2 * LANE, LANE)
        memory[parked] = b"\1\1"
        with pytest.raises(CorruptLane):
            consumer.read()
        assert memory[parked] == b"\1\0"


def test_a_quarantine_between_reserve_and_commit_ends_the_reservation(make_ring: MakeRing) -> None:
    ring = make_ring()
    writer = ring.writer(0)
    writer.reserve(100)
    with raw(ring) as memory:
        memory[PAGE + 136 : PAGE + 144] = struct.pack("<Q", 33)
    for attempt in (lambda: writer.commit(1, 100), lambda: writer.write(1, b"x"), lambda: writer.reserve(1)):
        with pytest.raises(CorruptLane, match="position 32"):
            attempt()


def test_a_doorbell_name_from_shared_memory_is_only_ever_a_name(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    real = Path(f"/dev/shm/{bell.name}").read_bytes()
    files = {
        "short": b"",  # ringing it would be a SIGBUS
        "long": real + b"\0",
        "wide": real,  # anybody may have made it
        "none": bytes(len(real)),  # somebody's file, which a ring would change
        "foreign": real,
        "elsewhere": real,
    }
    paths = {what: Path(f"/dev/shm/{bell.name}.{what}") for what in files}
    for what, content in files.items():
        paths[what].touch(mode=0o600)
        paths[what].write_bytes(content)
    paths["wide"].chmod(0o666)
    link = Path(f"/dev/shm/{bell.name}.link")
    link.symlink_to(paths["elsewhere"])
    with suppress(OSError):  # who is not root cannot give a file away, and cannot open who else's is private
        os.chown(paths["foreign"], 1, -1)
    if paths["foreign"].stat().st_uid == os.geteuid():
        del files["foreign"], paths["foreign"]
    names = [path.name.encode() for what, path in paths.items() if what != "elsewhere"]
    names += [
        f"../shm/{paths['elsewhere'].name}".encode(),
        b"x" * 64,
        b"y" * 63,
        b"",
        b"a b",
        b"/" + bell.name.encode(),
    ]
    names += [ring.name.encode(), link.name.encode()]
    descriptors = len(os.listdir("/proc/self/fd"))
    try:
        for name in names:
            point_at(ring, name)
            writer.write(1, b"")
            assert len(consumer.read()) == 1
            consumer.release()
    finally:
        link.unlink()
    assert {what: path.read_bytes() for what, path in paths.items()} == files
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert f"{bell.name}." not in Path("/proc/self/maps").read_text()


def test_a_doorbell_is_held_until_the_next_one_and_without_a_descriptor(
    make_ring: MakeRing, bell: Doorbell
) -> None:
    ring = make_ring()
    writer, _consumer = ring.writer(0), ring.consumer(0, bell)
    other = Path(f"/dev/shm/{bell.name}.other")
    other.touch(mode=0o600)
    other.write_bytes(Path(f"/dev/shm/{bell.name}").read_bytes())
    descriptors = len(os.listdir("/proc/self/fd"))
    for name in (other.name, bell.name, other.name, "none"):
        point_at(ring, name.encode())
        writer.write(1, b"")
        assert (other.name in Path("/proc/self/maps").read_text()) == (name == other.name)
        assert len(os.listdir("/proc/self/fd")) <= descriptors


def point_at(ring: Ring, bell_name: bytes) -> None:
    """Change the name of cursor 0's doorbell, and say that its owner sleeps."""
    block = PAGE + ring.lanes * LANE
    with raw(ring) as memory:
        memory[block + 144 : block + 208] = bell_name.ljust(64, b"\0")
        turn = struct.unpack_from("<I", memory, block + 140)[0]
        memory[block + 140 : block + 144] = struct.pack("<I", turn + 2)
        memory[block : block + 4] = struct.pack("<I", 1)


WORDS = (0, 1, 2, 3, 4, 0x81, 0xA5A5A5A5, 0xFFFFFFFF)


def is_parked(ring: Ring) -> bool:
    return ring.stats().consumers[0].parked


def comes_to_know(consumer: Consumer) -> bool:
    return any(wait([consumer], 1.0) for _ in range(30))


def test_any_bytes_in_a_doorbell_delay_a_wake_up_at_most(make_ring: MakeRing, name: str) -> None:
    """All at once: a word that says nothing of its sleeper costs the sleep's whole second."""
    rings = [make_ring() for _ in WORDS]
    with ExitStack() as stack, ThreadPoolExecutor(len(WORDS)) as threads:
        bells = [stack.enter_context(Doorbell.create(f"{name}.bell{word:x}")) for word in WORDS]
        consumers = [ring.consumer(0, bell) for ring, bell in zip(rings, bells, strict=True)]
        waits = [threads.submit(comes_to_know, consumer) for consumer in consumers]
        for ring, bell, word in zip(rings, bells, WORDS, strict=True):
            writer = ring.writer(0)
            until("the wait to sleep", partial(is_parked, ring))
            with open(f"/dev/shm/{bell.name}", "r+b") as file:
                file.seek(8)  # beyond its magic, without which it would not even be rung
                file.write(b"\xa5" * 120 + struct.pack("<I", word) + b"\xa5" * 124)
            writer.write(1, b"")
        assert all(one.result() for one in waits)
        assert [len(consumer.read()) for consumer in consumers] == [1] * len(WORDS)


def test_any_statistics_are_only_numbers(make_ring: MakeRing) -> None:
    ring = make_ring(lanes=2, consumers=2)
    with raw(ring) as memory:
        memory[PAGE : area_of(ring, 0)] = b"\xff" * (area_of(ring, 0) - PAGE)
    stats = ring.stats()
    assert stats.lanes[0].used == 0
    assert stats.lanes[0].owner is not None
    assert not stats.lanes[0].owner.alive()


words = st.one_of(
    st.integers(0, (1 << 64) - 1),
    st.sampled_from(
        [0, 1, 8, 15, 16, 17, 4095, 4096, 4097, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1]
    ),
)
steps = st.one_of(
    st.tuples(st.just("word"), st.integers(0, 2047), words),
    st.tuples(st.just("bytes"), st.integers(0, 16000), st.binary(min_size=1, max_size=24)),
    st.tuples(st.just("write"), st.integers(0, 1), st.integers(0, 1024)),
    st.tuples(st.just("read"), st.integers(0, 1), st.integers(1, 64)),
    st.tuples(st.just("claim"), st.integers(0, 3), st.just(0)),
)


@settings(max_examples=150)
@given(st.lists(steps, max_size=40))
def test_no_bytes_do_worse_than_an_error(program: list[tuple[str, int, int | bytes]]) -> None:
    name = f"outfeed-test-untrusted-{os.getpid()}"
    ring = Ring.create(name, lanes=2, consumers=2, capacity=4096)
    bells = [Doorbell.create(f"{name}.bell-{index}") for index in range(2)]
    try:
        writers, consumers = (
            [ring.writer(lane) for lane in range(2)],
            [ring.consumer(index, bells[index]) for index in range(2)],
        )
        with raw(ring) as memory:
            for what, where, value in program:
                try:
                    if what == "word" and isinstance(value, int):
                        memory[where * 8 : where * 8 + 8] = struct.pack("<Q", value)
                    elif what == "bytes" and isinstance(value, bytes):
                        memory[where : where + len(value)] = value
                    elif what == "write" and isinstance(value, int):
                        writers[where].write(value % 256, bytes(value))
                    elif what == "read" and isinstance(value, int):
                        for lane, tag, body in consumers[where].read(value):
                            assert 0 <= lane < 2
                            assert 0 <= tag < 256
                            assert len(bytes(body)) <= 1024
                        consumers[where].release()
                    elif where < 2:
                        writers[where].close()
                        writers[where] = ring.writer(where)
                    else:
                        consumers[where - 2].close()
                        consumers[where - 2] = ring.consumer(where - 2, bells[where - 2])
                except (RingError, RingFull):
                    pass
    finally:
        ring.close()
        for bell in bells:
            bell.close()
        segment.sweep(name)
