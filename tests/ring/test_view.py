"""A frame's body as `read` gives it: whatever takes a buffer takes it, and it never outlives its memory."""

import contextlib
import gc
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outfeed.ring import Doorbell, Ring, View, segment

MakeRing = Callable[..., Ring]
BODY = bytes(range(200, 216))


Read = Callable[..., list[View]]


@pytest.fixture
def read(make_ring: MakeRing, bell: Doorbell) -> Read:
    """Write bodies, return the views of them; what was read before is released."""
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)

    def read(*bodies: bytes) -> list[View]:
        consumer.release()
        for body in bodies:
            writer.write(1, body)
        return [view for _, _, view in consumer.read()]

    return read


@pytest.fixture
def view(read: Read) -> View:
    (view,) = read(BODY)
    return view


@pytest.mark.parametrize(
    "copy",
    [
        bytes,
        bytearray,
        lambda view: memoryview(view).tobytes(),
        lambda view: b"".join([view]),
        lambda view: np.frombuffer(view, np.uint8).tobytes(),
        lambda view: np.asarray(memoryview(view)).tobytes(),
        lambda view: struct.pack("<4I", *struct.unpack_from("<4I", view)),
        lambda view: int.from_bytes(view, "big").to_bytes(16, "big"),
        lambda view: bytes(view[:5]) + view[5:].tobytes(),
        lambda view: bytes(view[at] for at in range(len(view))),
    ],
)
def test_whatever_takes_a_buffer_takes_a_view(view: View, copy: Callable[[Any], bytes]) -> None:
    assert copy(view) == BODY


def test_a_view_can_be_written_to_another_lane(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring(lanes=2)
    consumer = ring.consumer(0, bell)
    ring.writer(0).write(3, BODY)
    [(_, tag, view)] = consumer.read()
    ring.writer(1).write(tag, b"<", view, b">")
    [(lane, tag, passed_on)] = consumer.read()
    assert (lane, tag, bytes(passed_on)) == (1, 3, b"<" + BODY + b">")


def test_nobody_writes_through_a_view(view: View) -> None:
    assert memoryview(view).readonly
    with pytest.raises(TypeError):
        view[0] = 1  # type: ignore[index]
    with pytest.raises(TypeError):
        memoryview(view)[0] = 1
    with pytest.raises((TypeError, BufferError)):
        struct.pack_into("<I", view, 0, 1)
    assert not np.frombuffer(memoryview(view), np.uint8).flags.writeable


def test_a_view_copies_nothing(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    ring.writer(0).write(1, BODY)
    [(_, _, view)] = ring.consumer(0, bell).read()
    other = segment.attach(ring.name)
    other.memory[other.memory.find(BODY)] = 7
    other.close()
    assert bytes(view) == b"\x07" + BODY[1:]


def test_a_view_compares_as_its_bytes_and_is_no_key(view: View) -> None:
    assert view == BODY
    assert view == BODY
    assert view == memoryview(BODY)
    assert view == view[:]
    assert view != BODY[1:]
    assert view != "text"
    with pytest.raises(TypeError, match="not supported"):
        _ = view < BODY  # type: ignore[operator]
    with pytest.raises(TypeError, match="unhashable"):
        hash(view)


def test_two_views_of_equal_bodies_are_equal(read: Read) -> None:
    one, two, third = read(b"same", b"same", b"other")
    assert one == two
    assert one != third


def test_a_view_says_what_it_is_and_comes_only_from_a_read(view: View) -> None:
    assert repr(view) == "<View of 16 bytes>"
    with pytest.raises(TypeError, match="cannot create"):
        View()
    with pytest.raises(TypeError, match="not an acceptable base type"):
        type("Mine", (View,), {})


def test_items_and_slices_are_a_memoryviews(read: Read) -> None:
    @given(st.data(), st.binary(max_size=64))
    def check(data: st.DataObject, body: bytes) -> None:
        (view,) = read(body)
        part = data.draw(st.slices(len(body)))
        assert view[part] == memoryview(body)[part]
        for at in range(-len(body), len(body)):
            assert view[at] == body[at]
        for beyond in (len(body), -len(body) - 1):
            with pytest.raises(IndexError):
                view[beyond]

    check()


def test_views_outlive_the_ring_they_came_from(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring()
    ring.writer(0).write(1, b"still here")
    [(_, _, body)] = ring.consumer(0, bell).read()
    ring.close()
    ring.unlink()
    del ring
    gc.collect()
    assert bytes(body) == b"still here"
    array = np.frombuffer(memoryview(body), np.uint8)
    del body
    gc.collect()
    assert array.tobytes() == b"still here"


def test_a_view_that_goes_leaves_nothing(read: Read) -> None:
    def turn() -> None:
        for view in read(*[BODY] * 20):
            assert bytes(view[2:]) == BODY[2:]
            assert view == BODY
            with contextlib.suppress(IndexError):
                view[99]

    def held() -> tuple[int, int]:
        return sys.getallocatedblocks(), sys.getrefcount(View)

    turn()
    blocks, references = held()
    for _ in range(50):
        turn()
    assert held()[1] == references
    assert held()[0] - blocks < 500, "of 1000 views"
