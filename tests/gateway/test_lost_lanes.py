"""What a gateway does about a lane that is lost, when memory runs out as it is about to do it."""

from collections.abc import Iterator
from typing import Any

import pytest
from outfeed.gateway.damage import Damage
from outfeed.gateway.lanes import Lost
from outfeed.ingress.routes import RouteTable
from outfeed.ring.board import Board
from outfeed.sink import Error

from tests.instances import small_config


class Lanes:
    """Lanes of which some are found corrupt, each told once."""

    def __init__(self, *lost: Lost) -> None:
        self.found = [*lost]

    def look(self) -> list[Lost]:
        found, self.found = self.found, []
        return found


class Reader:
    """A reader that finds no memory the first time it is to end anything."""

    lost_shards: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.told: list[tuple[str, int | None]] = []
        self.memory = False

    def fail(self, error: Error, *, abort: str, rank: int | None) -> None:
        if not self.memory:
            self.memory = True
            raise MemoryError
        self.told.append((error.message.partition(";")[0], rank))

    def cut_off(self, shards: frozenset[int]) -> None:
        assert not shards


class Ingress:
    routes = RouteTable(0, 1, 4)


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create(small_config("lanes"))
    yield made
    made._segment.unlink()
    made.close()


@pytest.mark.parametrize(
    ("lanes", "told"),
    [
        (Lanes(Lost("rank 0's", 0), Lost("rank 1's", 1)), [("rank 0's", 0), ("rank 1's", 1)]),
        (Lanes(Lost("its own", None)), [("its own", None)]),
    ],
    ids=["ranks'", "its own"],
)
def test_whom_a_lost_lane_may_have_cost_something_ends_when_there_is_memory_again(
    board: Board, lanes: Any, told: list[tuple[str, int | None]]
) -> None:
    reader: Any = Reader()
    egress: Any = None
    ingress: Any = Ingress()
    damage = Damage(board, egress, lanes, reader, ingress)
    with pytest.raises(MemoryError):
        damage.look()
    assert reader.told == []
    for _ in range(2):
        damage.look()
        assert reader.told == told, "once"
