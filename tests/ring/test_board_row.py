"""One process's row of the board: what others learn of it."""

import time
from array import array
from itertools import product

from outfeed.ring.board import BoardRow, Role, State


def test_a_process_that_hangs_cannot_be_counted_on() -> None:
    words = memoryview(array("Q", bytes(256)))
    row = BoardRow(words, 0, Role.SHARD, 0)
    assert row.trouble() == "is not running"
    row.claim(State.RUNNING)
    assert row.trouble() is None
    words[1] = time.monotonic_ns() - 3600 * 10**9  # its heartbeat
    assert row.trouble() == "has shown no sign of life for 3600 s"
    assert row.trouble(quiet_s=7200) is None
    row.beat()
    assert row.trouble() is None
    row.state = State.STOPPED
    assert row.trouble() == "is not running"


def test_how_often_a_process_was_replaced_is_known_though_a_word_of_it_is_written_over() -> None:
    words = memoryview(array("Q", bytes(256)))
    row = BoardRow(words, 0, Role.SHARD, 0)  # the launcher counts before the new process has its row
    row.count_replacement()
    row.count_replacement()
    for at, value in product(range(32), (0, 99)):
        was, words[at] = words[at], value
        assert row.epoch == 2, f"word {at} is {value}"
        words[at] = was
