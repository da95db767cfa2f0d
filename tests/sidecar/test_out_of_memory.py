"""Memory that runs out in a scheduler: a step is handed over, with the ends in it, or it is refused."""

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from outfeed.ring.batch import decode_batch
from outfeed.ring.frames import Abort, Generate, Live, Tag
from outfeed.ring.route import make_route
from outfeed.sidecar import FinishReason, SchedulerPort, tallies
from outfeed.sidecar import port as port_module

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
            port._table.open_received(route, 0)
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
        steps = [decode_batch(body) for _, tag, body in bench.shard.read() if tag == Tag.BATCH]
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


def test_what_found_no_memory_for_its_abort_is_aborted_when_there_is_some(
    bench: Bench, port: SchedulerPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gateway sees that a frame was dropped, and says what it has."""

    class NoMemory:
        def __init__(self, route: int) -> None:
            raise MemoryError

    bench.send(Generate(GOING_ON, "a", b"", {}), Generate(ENDING, "b", b"", {}))
    assert len(port.recv()) == 2
    with monkeypatch.context() as patched:
        patched.setattr(port_module, "Abort", NoMemory)
        bench.send(Live(0, 0, 64, [GOING_ON]))
        assert port.recv() == []
    assert port._row.get("bad_frames") == 1
    bench.send(Live(0, 0, 64, [GOING_ON]))
    assert port.recv() == [Abort(ENDING)]
    assert (port.is_live(GOING_ON), port.is_live(ENDING)) == (True, False)


@pytest.mark.parametrize(
    "call",
    [
        lambda port: port.alive,
        lambda port: port.recv(),
        lambda port: port.wait(0),
        lambda port: port.push_tokens([GOING_ON], [7]),
    ],
    ids=["alive", "recv", "wait", "push_tokens"],
)
def test_a_tally_that_finds_no_memory_is_told_at_the_next_look(
    bench: Bench,
    port: SchedulerPort,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[SchedulerPort], object],
) -> None:
    """It goes with the heartbeat, whoever calls: no call of the scheduler's fails for it."""

    def no_memory(rank: int, rows: object) -> None:
        raise MemoryError

    port.adopt(Generate(GOING_ON, "", b"", {}))
    port._tallies.say_adopted(0)
    assert [tag for _, tag, _ in bench.shard.read()] == [Tag.TALLY]
    port._tallies.begin()
    port._beat_due = 0
    with monkeypatch.context() as patched:
        patched.setattr(tallies, "Tally", no_memory)
        call(port)
    assert Tag.TALLY not in [tag for _, tag, _ in bench.shard.read()]
    assert port.alive
    assert [tag for _, tag, _ in bench.shard.read()] == [Tag.TALLY]
