"""Memory that runs out in the middle of a row: it is delivered whole or not at all."""

import pytest
from outfeed.sink import ChunkEvent, reader
from outfeed.sink._deliver import deliver
from outfeed.sink.live import Live

from .front import Front, step
from .material import Row

_testcapi = pytest.importorskip("_testcapi", reason="this Python was built without its test modules")

ROUTE = 1 << 36


def test_whichever_allocation_fails_ids_and_event_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = at = 0

    def counted(live: Live) -> tuple[int, int, int]:
        waiting = [event for event in live.channel.fresh if isinstance(event, ChunkEvent)]
        return live.next, len(live.ids) // 4, sum(event.generated for event in waiting)

    def failing(*arguments: object) -> int:
        nonlocal failed
        _testcapi.set_nomemory(at, at + 1)
        try:
            return deliver(*arguments)  # type: ignore[arg-type]
        except MemoryError:
            failed += 1
            return 0
        finally:
            _testcapi.remove_mem_hooks()

    monkeypatch.setattr(reader, "deliver", failing)
    for at in range(1, 40):  # noqa: B007  # `failing` reads it
        front = Front()
        front.open(ROUTE)
        front.arrive(step(Row(ROUTE, 0, [7] * 100, 100, 9, "é" * 100, None)))
        assert counted(front.reader._live[ROUTE]) in ((0, 0, 0), (100, 100, 100))
    assert 3 < failed < 39, "some of them are the core's, the last ones come after it"
