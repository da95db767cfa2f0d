"""Memory that runs out in a call of the ring: it says so, and nothing is half done or lost."""

import mmap
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import pytest
from outfeed.ring import Consumer, CorruptLane, Doorbell, Ring

from tests.limits import failing_at

MakeRing = Callable[..., Ring]
ALLOCATIONS = range(1, 60)


def runs_out(call: Callable[[], object], at: int) -> bool:
    """Run `call` with its `at`-th allocation failing; whether that came out of it."""
    try:
        with failing_at(at):
            call()
    except MemoryError:
        return True
    return False


@pytest.mark.parametrize("parts", [1, 20])
def test_a_write_says_that_there_is_no_memory_and_not_that_its_parts_are_none(
    make_ring: MakeRing, bell: Doorbell, parts: int
) -> None:
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    failed = 0
    for at in ALLOCATIONS:
        columns = [np.zeros(1) for _ in range(parts)]  # which note what they lent on the first time
        refused = runs_out(lambda: writer.write(1, *columns), at)  # noqa: B023
        assert len(consumer.read()) == (not refused)
        consumer.release()
        failed += refused
    assert parts < failed < len(ALLOCATIONS)


@pytest.mark.parametrize("error", [MemoryError, SystemError])
def test_a_corrupt_lane_is_told_when_there_is_memory_to_say_it(
    make_ring: MakeRing, bell: Doorbell, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    ring = make_ring(lanes=2)
    first, second, consumer = ring.writer(0), ring.writer(1), ring.consumer(0, bell)
    second.write(1, b"a body to be found")
    memory: mmap.mmap = ring._segment.memory
    memory[memory.find(b"a body to be found") - 8] ^= 1

    def no_memory(consumer: Consumer, code: int) -> NoReturn:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Consumer, "_refuse", no_memory)
        for _ in range(2):
            with pytest.raises(error):
                consumer.read()
    assert consumer.pending()
    with pytest.raises(CorruptLane, match="lane 1 is corrupt at position 0"):
        consumer.read()
    first.write(2, b"goes on")
    assert [(lane, tag) for lane, tag, _ in consumer.read()] == [(0, 2)]
    assert not consumer.pending(), "it is told once"
