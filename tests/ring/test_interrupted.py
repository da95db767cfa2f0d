"""A Ctrl-C at any line: whoever goes on afterwards finds everything as free as it was."""

from collections.abc import Callable

import pytest
from outfeed.ring import Doorbell, Ring, consumer, ring, writer

from tests.interrupted import interrupted

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
