"""What a gateway does about damage: what it tells the scheduler, and which shards it passes over."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from outfeed.gateway.damage import Damage
from outfeed.ingress.routes import RouteTable
from outfeed.ring.errors import RingFull
from outfeed.ring.route import shard_of

SLOTS, SHARDS, IN_A_FRAME = 10, 2, 4


@dataclass
class Row:
    """A process's row of the board."""

    index: int = 0
    owner: object = "it"
    bad_frames: int = 0
    cut_off: int = 0

    def get(self, name: str) -> int:
        return int(getattr(self, name))


@dataclass
class Around:
    """What a `Damage` looks at, and what it did: which slots it told the scheduler of."""

    scheduler: Row = field(default_factory=Row)
    shards: list[Row] = field(default_factory=lambda: [Row(shard) for shard in range(SHARDS)])
    routes: RouteTable = field(default_factory=lambda: RouteTable(0, SHARDS, SLOTS))
    told: list[int] = field(default_factory=list)
    full: bool = False
    lost_shards: frozenset[int] = frozenset()

    def cut_off(self, shards: frozenset[int]) -> None:
        self.lost_shards = shards

    def live_from(self, slot: int) -> int:
        if self.full:
            raise RingFull("the request lane")
        self.told.append(slot)
        self.full = len(self.told) == 2  # there is room for two frames, once
        return min(slot + IN_A_FRAME, SLOTS)

    def damage(self) -> Damage:
        board = SimpleNamespace(rows=lambda _: self.shards, row=lambda *_: self.scheduler)
        lanes = [SimpleNamespace(owner=None) for _ in range(SHARDS)]
        egress = SimpleNamespace(stats=lambda: SimpleNamespace(lanes=lanes))
        nothing_lost = SimpleNamespace(look=list, fatal=None)
        me: Any = self
        return Damage(*(board, egress, nothing_lost), me, me)  # type: ignore[arg-type]


def test_a_scheduler_that_rejected_a_frame_is_told_once_what_is_live() -> None:
    around = Around()
    damage = around.damage()
    damage.look()
    assert around.told == [], "it knows all there is"
    for around.scheduler.bad_frames in (1, 2):
        damage.look()
        assert around.told == [0, 4], "its lane is full"
        damage.look()
        assert around.told == [0, 4]
        around.full = False
        for _ in range(2):
            damage.look()
            assert around.told == [0, 4, 8]
        around.told.clear()


def test_what_was_half_told_is_told_anew_when_the_scheduler_rejected_another_frame() -> None:
    around = Around()
    damage = around.damage()
    around.scheduler.bad_frames = 1
    damage.look()
    around.scheduler.bad_frames, around.full = 2, False
    damage.look()
    assert around.told == [0, 4, 0, 4, 8]


@pytest.mark.parametrize("shard", range(SHARDS))
def test_requests_pass_over_a_shard_that_cannot_answer_until_it_can(shard: int) -> None:
    around = Around()
    damage = around.damage()
    around.shards[shard].cut_off = 1 << around.routes.reader
    damage.look()
    assert {shard_of(around.routes.acquire()) for _ in range(4)} == {1 - shard}
    around.shards[shard].cut_off = 0
    damage.look()
    assert shard_of(around.routes.acquire()) == shard
