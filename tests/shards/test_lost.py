"""What a shard does about lanes that are lost and answers that do not fit: the rest goes on."""

import logging
from collections.abc import Callable

import pytest
from outfeed.ring.batch import Batch
from outfeed.ring.frames import Restored, Tag, encode
from outfeed.ring.route import make_route

from .damage import scribble
from .rig import Rig

MINE, OTHERS = make_route(0, 0, 5, 1), make_route(1, 0, 5, 1)


@pytest.mark.parametrize(
    ("word", "steps_before"),
    [("quarantine", 0), ("quarantine", 1), ("tail", 0), ("head", 0), ("head", 1)],
)
def test_a_corrupt_egress_lane_costs_its_reader_alone(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture, word: str, steps_before: int
) -> None:
    """Found when the lane is claimed, at a write, or when there seems to be no room in it."""
    rig = make_rig(capacity=4096)
    rig.register(MINE, OTHERS)
    said: list[int] = []
    for first in range(100):
        if first == steps_before:
            scribble(rig.rings["egress0"], word)
        rig.push([(MINE, first, [65]), (OTHERS, first, [65])])
        rig.shard.turn()
        said += [at for batch in rig.hear(1) if isinstance(batch, Batch) for at in batch.first.tolist()]
    assert said == list(range(100))
    assert rig.rings["step"].stats().consumers[0].lag == 0
    assert rig.shard.statistics.corrupt_lanes == 1
    assert sum("without reader 0" in record.message for record in caplog.records) == 1


def test_a_new_shard_does_not_wait_for_a_reader_whose_lane_is_corrupt(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    """That reader gets no TAKEOVER, so it will say no RESTORED."""
    rig = make_rig()
    scribble(rig.rings["egress0"], "quarantine")
    rig.controls[1].write(Tag.RESTORED, encode(Restored(1, 0, 4)))
    with caplog.at_level(logging.ERROR):
        rig.shard.take_over(4, lambda: [0, 1], limit_s=1.0)
    assert "no RESTORED" not in caplog.text
    assert "without reader 0" in caplog.text
    rig.register(OTHERS)
    rig.push([(OTHERS, 0, [65])])
    rig.shard.turn()
    assert [type(heard).__name__ for heard in rig.hear(1)] == ["Takeover", "Batch"]
