"""Every argument is checked at the door, with a message that holds the value; nothing is written then."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from outfeed.ring import Doorbell, Ring, RingError, wait
from outfeed.ring._core import ffi, lib

MakeRing = Callable[..., Ring]


@pytest.fixture
def ring(make_ring: MakeRing) -> Ring:
    return make_ring(lanes=2)


@pytest.mark.parametrize("tag", [-1, 256, 1 << 40])
def test_a_tag_is_a_byte(ring: Ring, tag: int) -> None:
    writer = ring.writer(0)
    with pytest.raises(ValueError, match=rf"tag {tag} \(expected 0-255\)"):
        writer.write(tag, b"x")
    writer.reserve(8)
    with pytest.raises((ValueError, OverflowError)):
        writer.commit(tag, 8)
    assert ring.stats().lanes[0].frames == 0


@pytest.mark.parametrize(
    ("part", "error"),
    [("text", "not a C-contiguous buffer"), (7, "not a C-contiguous"), (np.arange(8)[::2], "C-contiguous")],
)
def test_a_part_is_a_contiguous_buffer(ring: Ring, part: Any, error: str) -> None:
    writer = ring.writer(0)
    with pytest.raises(ValueError, match=f"part 1 .*{error}"):
        writer.write(1, b"good", part)
    assert ring.stats().lanes[0].frames == 0


def test_many_parts_are_one_frame_and_too_many_are_refused(ring: Ring, bell: Doorbell) -> None:
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    for count in (15, 16, 17, 256):
        parts = [bytearray([number % 256]) for number in range(count)]
        writer.write(1, *parts)
        [(_, _, body)] = consumer.read()
        assert bytes(body) == b"".join(parts)
    with pytest.raises(ValueError, match=r"257 parts.*at most 256"):
        writer.write(1, *[b"x"] * 257)


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), 3601])
def test_a_timeout_is_finite_and_not_negative(ring: Ring, timeout: float) -> None:
    writer = ring.writer(0)
    with pytest.raises(ValueError, match="expected 0 to 3600 seconds"):
        writer.write(1, b"", timeout=timeout)
    with pytest.raises(ValueError, match="expected 0 to 3600 seconds"):
        writer.reserve(1, timeout=timeout)


def test_a_timeout_may_be_an_hour(ring: Ring) -> None:
    writer = ring.writer(0)
    writer.write(1, b"", timeout=3600)
    writer.reserve(1, timeout=3600)


def test_a_call_must_be_one(ring: Ring) -> None:
    writer: Any = ring.writer(0)
    with pytest.raises(TypeError, match="needs a tag"):
        writer.write()
    with pytest.raises(TypeError, match="takes no keyword 'wait'"):
        writer.write(1, b"", wait=1)
    with pytest.raises(TypeError):
        writer.write("1", b"")
    with pytest.raises(ValueError, match="size -1"):
        writer.reserve(-1)


def test_a_commit_that_is_refused_leaves_the_reservation_open_and_nothing_to_read(
    ring: Ring, bell: Doorbell
) -> None:
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    writer.reserve(4)[:] = b"good"
    for refused in (-1, -(1 << 70)):
        with pytest.raises(ValueError, match=f"size {refused}"):
            writer.commit(1, refused)
    assert consumer.read() == []
    writer.commit(1, 4)
    assert [(tag, bytes(body)) for _, tag, body in consumer.read()] == [(1, b"good")]


@pytest.mark.parametrize("limit", [0, -1, 4097, 1 << 40])
def test_a_read_has_a_limit(ring: Ring, bell: Doorbell, limit: int) -> None:
    consumer = ring.consumer(0, bell)
    with pytest.raises(ValueError, match="expected 1 to 4096 frames"):
        consumer.read(limit)


def test_upto_has_one_position_per_lane(ring: Ring, bell: Doorbell) -> None:
    consumer: Any = ring.consumer(0, bell)
    with pytest.raises(ValueError, match="3 positions; this ring has 2 lanes"):
        consumer.read(upto=[0, 0, 0])
    with pytest.raises(OverflowError):
        consumer.read(upto=[0, -1])
    with pytest.raises(TypeError):
        consumer.read(upto=5)
    with pytest.raises(TypeError, match="item 1 is no Consumer"):
        wait([consumer, object()], 0.0)  # type: ignore[list-item]


def test_lanes_and_consumers_are_counted(ring: Ring, bell: Doorbell) -> None:
    for lane in (-1, 2):
        with pytest.raises(IndexError, match="lanes 0 to 1"):
            ring.writer(lane)
    for index in (-1, 1):
        with pytest.raises(IndexError, match="consumers 0 to 0"):
            ring.consumer(index, bell)
        with pytest.raises(IndexError, match="consumers 0 to 0"):
            ring.detach_consumer(index)


def test_the_core_counts_for_itself_and_nobody_owns_nothing(ring: Ring) -> None:
    writer, reader = ffi.new("lane_writer **"), ffi.new("lane_reader **")
    for lane, mine in ((ring.lanes, 5), (0, 0)):
        assert lib.writer_claim(ring._ring, lane, 0, mine, writer) == lib.RING_ARGUMENT
    for index, mine in ((ring.consumers, 5), (0, 0)):
        assert lib.reader_claim(ring._ring, index, 0, mine, b"bell", reader) == lib.RING_ARGUMENT
        assert lib.consumer_detach(ring._ring, index, 0, mine) == lib.RING_ARGUMENT
    assert (writer[0], reader[0]) == (ffi.NULL, ffi.NULL)
    assert lib.ring_lane_stats(ring._ring, ring.lanes, ffi.new("lane_stats *")) == lib.RING_ARGUMENT
    assert (
        lib.ring_consumer_stats(ring._ring, ring.consumers, ffi.new("consumer_stats *")) == lib.RING_ARGUMENT
    )


def test_parts_whose_lengths_add_up_to_little_only_in_64_bits_are_too_large(ring: Ring) -> None:
    writer, parts, byte = ring.writer(0), ffi.new("part[2]"), ffi.new("char[16]")
    for part, length in zip(parts, (16, 2**64 - 8), strict=True):
        part.bytes, part.length = byte, length
    assert lib.writer_write(writer._handle, 1, parts, 2, 0) == lib.RING_TOO_LARGE
    assert ring.stats().lanes[0].frames == 0


def test_a_closed_ring_says_so(ring: Ring, bell: Doorbell) -> None:
    ring.close()
    ring.close()
    calls: list[Callable[[], object]] = [
        ring.stats,
        lambda: ring.writer(0),
        lambda: ring.consumer(0, bell),
        lambda: ring.detach_consumer(0),
    ]
    for call in calls:
        with pytest.raises(RingError, match="is closed"):
            call()


@pytest.mark.parametrize("text", ["x" * 63, "azAZ09-_.", "a", "9-"])
def test_a_doorbells_name_is_a_files(ring: Ring, bell: Doorbell, text: str) -> None:
    ring.consumer(0, named(bell, text)).close()


@pytest.mark.parametrize("text", ["", "x" * 64, "x" * 65, "-a", "_a", ".a", *(f"a{c}" for c in " /:@[`{é")])
def test_a_doorbells_name_that_is_none_claims_nothing(ring: Ring, bell: Doorbell, text: str) -> None:
    with pytest.raises(RingError, match="code -14"):
        ring.consumer(0, named(bell, text))
    ring.consumer(0, bell).close()


def named(bell: Doorbell, text: str) -> Any:
    """A doorbell, but for its name."""
    return SimpleNamespace(name=text, _bell=bell._bell, _base=bell._base)


@pytest.mark.parametrize("spin", [-1e-9, 0.0101, float("nan")])
def test_a_spin_is_short(name: str, spin: float) -> None:
    with pytest.raises(ValueError, match=r"expected 0 to 0\.01 seconds"):
        Doorbell.create(f"{name}.spin", longest_spin=spin)
    for longest in (0.0, 0.01):
        Doorbell.create(f"{name}.spin", longest_spin=longest).close()
