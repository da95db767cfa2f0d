"""Memory that runs out in a scheduler: a step is handed over, with the ends in it, or it is refused."""

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from outfeed.ring.batch import decode_batch
from outfeed.ring.frames import Generate
from outfeed.ring.route import make_route
from outfeed.sidecar import FinishReason, SchedulerPort

from tests.limits import failing_at

from .conftest import Bench

ALLOCATIONS = range(1, 250)
GOING_ON, ENDING = make_route(0, 0, 1, 1), make_route(0, 0, 2, 1)


@pytest.fixture
def port(bench: Bench) -> Iterator[SchedulerPort]:
    with SchedulerPort.attach(bench.name) as port:
        yield port


@pytest.mark.parametrize("times", [1, 1000])
@pytest.mark.parametrize(
    "columns",
    [
        (np.array([GOING_ON, ENDING], np.uint64), np.zeros(4, np.int32), np.array([2, 2], np.uint32)),
        (array("Q", [GOING_ON, ENDING]), array("i", [0] * 4), array("I", [2, 2])),
        ([GOING_ON, ENDING], [0] * 4, [2, 2]),
    ],
    ids=["numpy", "array", "lists"],
)
def test_whichever_allocation_fails_a_step_that_was_refused_did_not_go_out(
    bench: Bench, port: SchedulerPort, columns: tuple[Any, ...], times: int
) -> None:
    """The scheduler pushes it again: its text would come twice. One that is out has ended whom it ends."""
    refused = 0
    for at in ALLOCATIONS:
        for route in (GOING_ON, ENDING):
            port.adopt(Generate(route, "", b"", {}))
        finishes = {1: FinishReason.length(4)}
        port._beat_due = 0
        before = port._table.pushed
        failed = False
        try:
            with failing_at(at, times):
                port.push_tokens(*columns, finishes=finishes)
        except MemoryError:
            failed = True
        steps = [decode_batch(body) for _, _, body in bench.shard.read()]
        bench.shard.release()
        assert len(steps) == (not failed)
        assert port._table.pushed == (
            before[0] + len(steps),
            before[1] + 2 * len(steps),
            before[2] + 4 * len(steps),
        )
        assert port.is_live(GOING_ON)
        assert port.is_live(ENDING) == failed
        refused += failed
    assert 3 < refused < len(ALLOCATIONS), "the last ones come after it"
