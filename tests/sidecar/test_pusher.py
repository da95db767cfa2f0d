"""The C base of a StepWriter by itself: what it is bound to, and that it lets go of it."""

import os
import sys

import numpy as np
import pytest
from outfeed.ring import Doorbell, Ring
from outfeed.ring.frames import Tag
from outfeed.ring.route import make_route
from outfeed.sidecar._push import Pusher
from outfeed.sidecar.rows import RowTable
from outfeed.sidecar.steps import StepWriter


def bound(memory: bytearray) -> Pusher:
    """One that must not push: its addresses are none."""
    pusher = Pusher()
    pusher._bind(2, (1, 1, 1, 1, memoryview(memory)), (1, 1, 1, 1))
    return pusher


def push(pusher: Pusher) -> None:
    pusher.push(np.ones(1, np.uint64), np.ones(1, np.int32), None, b"\x90", 0.0)


def test_it_pushes_nowhere_until_it_is_bound() -> None:
    pusher = Pusher()
    with pytest.raises(RuntimeError, match="not bound to a lane"):
        push(pusher)
    with pytest.raises(BufferError):
        pusher._bind(2, (1, 1, 1, 1, memoryview(bytes(8))), (1, 1, 1, 1))  # which cannot be written to
    with pytest.raises(RuntimeError, match="not bound to a lane"):
        push(pusher)


def test_it_is_bound_once() -> None:
    first, second = bytearray(8), bytearray(8)
    pusher = bound(first)
    with pytest.raises(RuntimeError, match="once"):
        pusher._bind(2, (1, 1, 1, 1, memoryview(second)), (1, 1, 1, 1))
    second.append(0)
    with pytest.raises(BufferError):
        first.append(0)


def test_a_second_binding_that_is_refused_changes_nothing() -> None:
    name, route, table = f"outfeed-t-pusher-{os.getpid()}", make_route(0, 0, 1, 1), RowTable(1, 64)
    table.open(route, 0)
    with (
        Ring.create(name, lanes=1, consumers=1, capacity=4096) as ring,
        Doorbell.create(f"{name}.bell") as bell,
        ring.consumer(0, bell) as shard,
        ring.writer(0) as lane,
    ):
        ring.unlink()
        steps = StepWriter(lane, table)
        with pytest.raises(RuntimeError, match="once"):
            steps._bind(9, (1, 1, 1, 1, memoryview(bytearray(8))), (1, 1, 1, 1))
        steps.push(np.array([route], np.uint64), np.ones(1, np.int32), None, b"\x90", 0.0)
        assert [tag for _, tag, _ in shard.read()] == [Tag.BATCH]


def test_its_memory_is_its_owners_again_and_nothing_of_it_stays() -> None:
    memory = bytearray(8)

    def come_and_go() -> tuple[int, int]:
        for _ in range(1000):
            bound(memory)
        return sys.getallocatedblocks(), sys.getrefcount(Pusher)

    come_and_go()
    blocks, references = come_and_go()
    more_blocks, more_references = come_and_go()
    assert more_blocks - blocks < 500
    assert more_references - references < 500
    memory.append(0)
