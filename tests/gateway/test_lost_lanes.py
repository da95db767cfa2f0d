"""What a gateway does about a lane that is lost, when memory runs out as it is about to do it."""

from collections.abc import Iterator
from typing import Any

import pytest
from outfeed.gateway.damage import Damage
from outfeed.ingress.routes import RouteTable
from outfeed.ring.board import Board
from outfeed.sink import Error

from tests.instances import small_config


class Lanes:
    """Lanes of which some are found corrupt, each told once."""

    def __init__(self, *lost: str, fatal: str | None = None) -> None:
        self.found, self.fatal = [*lost], fatal

    def look(self) -> list[str]:
        found, self.found = self.found, []
        return found


class Reader:
    """A reader that finds no memory the first time it is to end anything."""

    lost_shards: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.told: list[str] = []
        self.memory = False

    def doubt(self) -> None:
        self._tell("doubt")

    def fail(self, error: Error, *, abort: str) -> None:
        self._tell(error.message)

    def cut_off(self, shards: frozenset[int]) -> None:
        assert not shards

    def _tell(self, what: str) -> None:
        if not self.memory:
            self.memory = True
            raise MemoryError
        self.told.append(what)


class Ingress:
    routes = RouteTable(0, 1, 4)


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create(small_config("lanes"))
    yield made
    made.unlink()
    made.close()


@pytest.mark.parametrize(
    ("lanes", "told"),
    [
        (Lanes("rank 0's", "rank 1's"), ["doubt", "doubt"]),
        (Lanes("its own", fatal="its own"), ["its own; the request may have been lost with it"]),
    ],
    ids=["one of several", "the only one"],
)
def test_whom_a_lost_lane_may_have_cost_something_ends_when_there_is_memory_again(
    board: Board, lanes: Any, told: list[str]
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
