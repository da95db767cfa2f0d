"""Names, rings and doorbells that clean up after themselves."""

import itertools
import os
from collections.abc import Callable, Iterator

import pytest
from outfeed.ring import Doorbell, Ring, segment

_count = itertools.count()


@pytest.fixture
def name() -> Iterator[str]:
    """A segment name of this test alone; whatever starts with it is gone afterwards."""
    prefix = f"outfeed-test-{os.getpid()}-{next(_count)}"
    yield prefix
    for left in segment.listed(prefix):
        segment.unlink(left)


@pytest.fixture
def bell(name: str) -> Iterator[Doorbell]:
    with Doorbell.create(f"{name}.bell") as made:
        yield made


@pytest.fixture
def make_ring(name: str) -> Iterator[Callable[..., Ring]]:
    made: list[Ring] = []

    def make(lanes: int = 1, consumers: int = 1, capacity: int = 4096) -> Ring:
        ring = Ring.create(f"{name}.r{len(made)}", lanes=lanes, consumers=consumers, capacity=capacity)
        made.append(ring)
        return ring

    yield make
    for ring in made:
        ring.close()
        ring.unlink()
