"""The lanes a gateway depends on: found corrupt once, and fatal only when nothing else serves."""

import mmap
from collections.abc import Iterator

import pytest
from outfeed.gateway.lanes import LaneWatch, Lost
from outfeed.ring import Ring

from tests.instances import unique

READER = 1


@pytest.fixture
def rings() -> Iterator[dict[str, Ring]]:
    """Two gateways, two ranks."""
    name = f"outfeed-{unique('lanes')}"
    made = {
        what: Ring.create(f"{name}.{what}", lanes=2, consumers=1, capacity=4096)
        for what in ("request", "control", "step")
    }
    yield made
    for ring in made.values():
        ring.unlink()
        ring.close()


def spoil(ring: Ring, lane: int) -> None:
    """Do what a consumer does that finds a lane corrupt: quarantine it."""
    with open(f"/dev/shm/{ring.name}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        at = 4096 + 512 * lane + 136
        memory[at : at + 8] = (65).to_bytes(8, "little")


@pytest.mark.parametrize("ring", ["request", "control"])
def test_a_gateway_cannot_serve_without_its_own_lanes(rings: dict[str, Ring], ring: str) -> None:
    watch = LaneWatch(rings, READER)
    assert (watch.look(), watch.fatal) == ([], None)
    spoil(rings[ring], 0)
    assert (watch.look(), watch.fatal) == ([], None), "that one is another gateway's"
    spoil(rings[ring], READER)
    (found,) = watch.look()
    assert found == Lost(f"the gateway's {ring} lane is corrupt (at position 64)", None)
    assert watch.fatal == found.what
    assert watch.look() == []
    assert watch.lost == [found.what]


def test_one_rank_less_is_told_and_the_last_one_is_fatal(rings: dict[str, Ring]) -> None:
    watch = LaneWatch(rings, READER)
    spoil(rings["step"], 1)
    assert [lost.rank for lost in watch.look()] == [1]
    assert watch.fatal is None
    spoil(rings["step"], 0)
    assert [lost.rank for lost in watch.look()] == [0]
    assert watch.fatal is not None
