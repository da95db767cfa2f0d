"""Memory that runs out as a request begins or ends: its place is given back, and it runs for nobody."""

from contextlib import suppress
from typing import Any

import pytest
from outfeed.gateway.front import Front
from outfeed.ingress import register
from outfeed.ingress.register import Ingress
from outfeed.ingress.request import Model, Ready, parse_generate, ready
from outfeed.ingress.routes import RouteTable
from outfeed.ring.frames import Tag
from outfeed.sink import Error, Reader

from tests.limits import failing_at
from tests.sink.front import FakeEgress, waiting

from .fake import VOCABULARY, WordTokenizer

SLOTS = 4
MODEL = Model(VOCABULARY, 4096, WordTokenizer())


class Lane:
    """A lane that keeps what kinds of frames are written to it."""

    max_frame = 4096

    def __init__(self) -> None:
        self.tags: list[int] = []

    def write(self, tag: int, /, *parts: Any, timeout: float = 0.0) -> None:
        self.tags.append(tag)


class Gateway(Front):
    """A front with nothing real around it, whose reader turns when it is told to."""

    def __init__(self) -> None:
        self.lane = Lane()
        self._sink_bytes = 1 << 20
        self.routes = RouteTable(0, 1, SLOTS)
        self.ingress = Ingress(Lane(), self.lane, self.routes)
        egress: Any = FakeEgress()
        self.reader = Reader(egress, self.ingress.abort, self.ingress.end)

    def _must_serve(self) -> None:
        pass

    def nothing_is_left(self) -> bool:
        free, live = len(self.routes._free), self.reader.statistics().live
        names = len(self.ingress._by_rid), len(self.ingress._submitted), len(self.ingress._unforgotten)
        return (self.ingress.live(), self.routes.loads(), free, live, names) == (0, [0], SLOTS, 0, (0, 0, 0))


@pytest.fixture(autouse=True)
def _frames_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """msgspec may crash where it finds no memory."""
    monkeypatch.setattr(register, "encode", lambda message: b"")


def prompt() -> Ready:
    one = parse_generate({"input_ids": [1, 2, 3], "rid": "r"}, MODEL).prompts[0]
    assert one.ids is not None
    return ready(one, one.ids, True, MODEL)


def test_whichever_allocation_fails_a_request_begins_or_leaves_nothing() -> None:
    wanted = prompt()

    def fails(at: int) -> bool:
        gateway, stream = Gateway(), None
        with suppress(MemoryError, RuntimeError), failing_at(at):  # RuntimeError: without memory for a lock
            stream = gateway._start(wanted)
        begun = stream is not None
        if stream is not None:
            stream.close()
        del stream
        gateway.reader.drain()
        assert gateway.nothing_is_left(), f"allocation {at}"
        came, ended = gateway.lane.tags.count(Tag.GENERATE), gateway.lane.tags.count(Tag.ABORT)
        assert came == ended, f"allocation {at}"
        assert not begun or came == 1
        return not begun

    failed = [fails(at) for at in range(1, 120)]
    assert failed.count(True) > 10
    assert not failed[-1], "the last ones come after it"


def test_a_place_that_is_not_given_back_for_want_of_memory_is_given_back_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = Gateway()

    def without_memory(*arguments: Any, **more: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(gateway.lane, "write", without_memory)
        patched.setattr(gateway.routes, "release", without_memory)
        with pytest.raises(MemoryError):
            gateway._start(prompt())
        gateway.reader.drain()
        assert gateway.ingress.live() == 1
    gateway.reader.drain()
    assert gateway.nothing_is_left()
    assert gateway.lane.tags == []


@pytest.mark.parametrize("aborted", [True, False])
def test_whichever_allocation_fails_an_ended_request_gives_its_place_back(aborted: bool) -> None:
    wanted, gone = prompt(), Error(503, "gone", "gone")

    def fails(at: int) -> bool:
        gateway = Gateway()
        stream = gateway._start(wanted)
        gateway.reader.fail(gone, abort=aborted)
        with suppress(MemoryError), failing_at(at):
            gateway.reader.drain()
        missed = not gateway.nothing_is_left()
        gateway.reader.drain()
        assert gateway.nothing_is_left(), f"allocation {at}"
        assert waiting(stream.source) == [gone]
        assert gateway.lane.tags == [Tag.GENERATE, *([Tag.ABORT] if aborted else [])]
        return missed

    failed = [fails(at) for at in range(1, 80)]
    assert failed.count(True) > 1, "how many there are depends on the Python"
    assert not failed[-1], "the last ones come after it"
