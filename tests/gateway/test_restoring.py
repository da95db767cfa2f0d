"""A shard that is new is told what is live, a bit at a time, and once; what cannot be told ends."""

from dataclasses import dataclass, field

import pytest
from outfeed.gateway.restoring import Restoring
from outfeed.ring.errors import CorruptLane, FrameTooLarge, RingError, RingFull
from outfeed.sink import Progress

LIVE = [Progress(route, f"rid {route}", b"", 0) for route in (1, 2, 3)]
Said = tuple[str, int, int]


@dataclass
class Ingress:
    """A control lane: what was written to it, how many frames it still takes, and what it says to more."""

    said: list[Said] = field(default_factory=list)
    room: int = 100
    error: RingError = field(default_factory=lambda: RingFull("the control lane"))
    too_large: int = 0
    """The route whose RESTORE is."""

    def restore(self, route: int, ids: bytes, text_bytes: int) -> None:
        if route == self.too_large:
            raise FrameTooLarge("a RESTORE")
        self._write(("RESTORE", route, text_bytes))

    def restored(self, shard: int, epoch: int) -> None:
        self._write(("RESTORED", shard, epoch))

    def _write(self, frame: Said) -> None:
        if not self.room:
            raise self.error
        self.room -= 1
        self.said.append(frame)


def restores(*routes: int) -> list[Said]:
    return [("RESTORE", route, 0) for route in routes]


@pytest.fixture
def ingress() -> Ingress:
    return Ingress()


@pytest.fixture
def lost() -> list[int]:
    return []


@pytest.fixture
def restoring(ingress: Ingress, lost: list[int]) -> Restoring:
    return Restoring(ingress, lambda route, why: lost.append(route))  # type: ignore[arg-type]


@pytest.mark.parametrize("room", range(5))
def test_a_handover_goes_on_where_the_lane_was_full(
    restoring: Restoring, ingress: Ingress, lost: list[int], room: int
) -> None:
    whole = [*restores(1, 2, 3), ("RESTORED", 7, 99)]
    ingress.room = room
    restoring.begin(7, 99, LIVE)
    assert ingress.said == whole[:room], "at once, as far as there is room"
    assert restoring.go_on() == (room == 4)
    ingress.room = 100
    assert restoring.go_on()
    assert restoring.go_on()
    assert (ingress.said, lost) == (whole, [])


def test_two_shards_each_get_theirs(restoring: Restoring, ingress: Ingress) -> None:
    ingress.room = 1
    restoring.begin(7, 99, LIVE[:2])
    restoring.begin(8, 98, LIVE[2:])
    ingress.room = 100
    assert restoring.go_on()
    assert ingress.said == [*restores(1, 2), ("RESTORED", 7, 99), *restores(3), ("RESTORED", 8, 98)]


def test_one_that_is_replaced_again_gets_it_from_the_start(restoring: Restoring, ingress: Ingress) -> None:
    """What its predecessor was still to get would be told twice, and RESTORED for nobody who asked."""
    ingress.room = 1
    restoring.begin(7, 99, LIVE)
    restoring.begin(7, 100, LIVE[1:])
    ingress.room = 100
    assert restoring.go_on()
    assert ingress.said == [*restores(1), *restores(2, 3), ("RESTORED", 7, 100)]


def test_a_request_that_no_frame_holds_is_lost_alone(
    restoring: Restoring, ingress: Ingress, lost: list[int]
) -> None:
    ingress.too_large = 2
    restoring.begin(7, 99, LIVE)
    assert lost == [2]
    assert ingress.said == [*restores(1, 3), ("RESTORED", 7, 99)]


def test_a_handover_is_given_up_when_it_can_reach_nobody(restoring: Restoring, ingress: Ingress) -> None:
    ingress.room, ingress.error = 1, CorruptLane("control", 1, 64)
    restoring.begin(7, 99, LIVE)
    assert restoring.go_on()
    ingress.room = 100
    assert restoring.go_on()
    assert ingress.said == restores(1), "the lane is lost for good"
