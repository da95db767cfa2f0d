"""A Ctrl-C at any line: whoever goes on afterwards finds everything as free as it was."""

import os
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from outfeed.ring import Doorbell, Ring, consumer, ring, segment, writer

from tests.interrupted import interrupted
from tests.limits import locks, open_files

MakeRing = Callable[..., Ring]


@pytest.mark.parametrize("what", ["lane", "cursor"])
def test_what_was_being_claimed_belongs_to_nobody(make_ring: MakeRing, bell: Doorbell, what: str) -> None:
    made = make_ring()
    got: list[object] = []

    def claim() -> None:
        got.append(made.writer(0) if what == "lane" else made.consumer(0, bell))

    line = 1
    while interrupted(claim, line, ring, writer, consumer):
        stats = made.stats()
        assert (stats.lanes[0].owner, stats.consumers[0].owner) == (None, None), f"interrupted at line {line}"
        line += 1
    assert line > 10
    assert len(got) == 1


@pytest.mark.parametrize("what", ["made", "attached"])
def test_a_segment_closes_no_file_but_its_own(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time that what is left of it goes, another file may have the number that its own had."""
    finalize = weakref.finalize

    def interrupt(*args: Any) -> None:
        finalize(*args)
        raise KeyboardInterrupt

    whole = segment.create(name, 4096, lambda _: None)
    before = open_files()
    monkeypatch.setattr(segment, "weakref", SimpleNamespace(finalize=interrupt))
    try:
        segment.attach(name) if what == "attached" else segment.create(f"{name}.other", 4096, lambda _: None)
    except KeyboardInterrupt:
        other = os.open(os.devnull, os.O_RDONLY)  # its traceback still has what was half done
    os.close(other)
    assert open_files() == before
    whole.close()


def test_a_segment_that_was_being_made_has_no_name(name: str) -> None:
    got: list[segment.Segment] = []
    line = 1
    while interrupted(lambda: got.append(segment.create(name, 4096, lambda _: None)), line, segment):
        assert segment.listed(name) == [], f"interrupted at line {line}"
        line += 1
    assert line > 10
    assert segment.listed(name) == [name]


def test_what_was_being_reserved_holds_up_no_later_write(make_ring: MakeRing) -> None:
    lane, line = make_ring().writer(0), 1
    got: list[memoryview] = []
    while interrupted(lambda: got.append(lane.reserve(100, timeout=60.0)), line, writer):
        lane.write(1, b"")  # WriterBusy while a reservation is open
        line += 1
    assert line > 10
    assert len(got[0]) == 100
    lane.commit(2, 100)


def test_a_ring_that_was_being_attached_is_not_in_use(make_ring: MakeRing) -> None:
    name, got, line = make_ring().name, list[Ring](), 1
    before = locks()
    while interrupted(lambda: got.append(Ring.attach(name)), line, ring, segment):
        line += 1
    assert line > 10
    got[0].close()
    assert locks() == before
