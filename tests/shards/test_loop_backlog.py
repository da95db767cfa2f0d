"""Steps that wait for the loop, on real rings: decoded as one, each in its place, none too large."""

from collections.abc import Callable

import numpy as np
import pytest
from outfeed.ring.batch import Batch
from outfeed.ring.frames import (
    DecodeOptions,
    ErrorFrame,
    Restore,
    Result,
    Tag,
    encode,
)
from outfeed.ring.route import make_route
from outfeed.shards.decoder import Decoder
from outfeed.shards.table import TokenTable
from tokenizers import Tokenizer

from .rig import ROUTE, Rig, only_batch, said_by, turn_and_hear


def test_a_backlog_becomes_one_frame_with_a_row_for_each_request(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    other = make_route(0, 0, 6, 1)
    rig.register(ROUTE, other)
    for first in range(0, 40, 2):
        rig.push([(ROUTE, first, [65]), (other, first, [66])])
        rig.push([(other, first + 1, [66]), (ROUTE, first + 1, [65])])
    rig.shard.turn()
    batch = only_batch(rig.hear())
    assert batch.routes.tolist() == [ROUTE, other]
    assert batch.generated.tolist() == [40, 40]
    assert batch.ids.tolist() == [65] * 40 + [66] * 40
    assert rig.shard.statistics.steps == 40


def test_a_step_that_comes_alone_is_not_held_for_others(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.register(ROUTE)
    for first in range(3):
        rig.push([(ROUTE, first, [65])])
        rig.shard.turn()
        assert only_batch(rig.hear()).first.tolist() == [first]


def test_whatever_is_no_plain_step_keeps_its_place_in_a_backlog(make_rig: Callable[..., Rig]) -> None:
    """Rows before it go out before it, rows behind it after it."""
    rig = make_rig()
    other, control = make_route(0, 0, 6, 1), make_route(0, 0, 7, 1)
    rig.register(ROUTE, other)
    for at in range(2):
        rig.push([(ROUTE, at, [65]), (other, at, [66])])
    rig.steps.write(Tag.RESULT, encode(Result(control, b"answer")))
    for at in range(2, 4):
        rig.push([(ROUTE, at, [65]), (other, at, [66])])
    damaged = bytearray(b"".join(Rig.frame([(ROUTE, 4, [65])])))
    damaged[-1] ^= 1
    rig.steps.write(Tag.BATCH, bytes(damaged))
    for at in range(4, 6):
        rig.push([(ROUTE, at + 1, [65]), (other, at, [66])])
    rig.shard.turn()
    before, answer, between, after, gap = rig.hear()
    assert isinstance(before, Batch)
    assert before.generated.tolist() == [2, 2]
    assert answer == Result(control, b"answer")
    assert isinstance(between, Batch)
    assert between.first.tolist() == [2, 2]
    assert isinstance(gap, ErrorFrame)
    assert (gap.route, gap.type) == (ROUTE, "gap")
    assert isinstance(after, Batch)
    assert (after.routes.tolist(), after.first.tolist()) == ([other], [4])


def test_what_a_request_said_before_a_gap_comes_before_the_error(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    other = make_route(0, 0, 6, 1)
    rig.register(ROUTE, other)
    for first in (0, 1, 3, 4):
        rig.push([(ROUTE, first, [65]), (other, min(first, 2), [66])])
    rig.shard.turn()
    said, error = rig.hear()
    assert isinstance(said, Batch)
    assert dict(zip(said.routes.tolist(), said.generated.tolist(), strict=True)) == {ROUTE: 2, other: 3}
    assert isinstance(error, ErrorFrame)
    assert (error.route, error.type) == (ROUTE, "gap")


def test_a_backlog_for_several_readers_reaches_each(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    mine = [make_route(reader, 0, slot, 1) for slot, reader in enumerate((0, 1, 0))]
    rig.register(*mine)
    for first in range(10):
        rig.push([(route, first, [65]) for route in mine])
    rig.shard.turn()
    assert only_batch(rig.hear(0)).routes.tolist() == [mine[0], mine[2]]
    # The lane to the second reader was opened for it: how long its rows may be was not known before.
    heard = rig.hear(1)
    assert sum(int(batch.generated.sum()) for batch in heard if isinstance(batch, Batch)) == 10


@pytest.mark.parametrize("capacity", [4096, 1 << 13, 1 << 16])
def test_a_backlog_fits_the_smallest_lane(make_rig: Callable[..., Rig], capacity: int) -> None:
    """No merged row is ever what makes a frame too large: its request would fail for it."""
    rig = make_rig(capacity=capacity)
    routes = [make_route(0, 0, slot, 1) for slot in range(7)]
    rig.register(*routes)
    for first in range(60):
        rig.push([(route, first * 3, [200, 201, 65]) for route in routes])
    assert said_by(turn_and_hear(rig)) == dict.fromkeys(routes, 180)
    assert rig.shard.statistics.errors == 0


def test_no_request_fails_because_its_rows_were_joined(
    make_rig: Callable[..., Rig], tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    """Tokens with long texts: few enough to be joined, too much for one row of a frame."""
    (long,) = tokenizer_of("deepseek").encode(" " * 128, add_special_tokens=False).ids
    rig = make_rig(capacity=1 << 14, tokenizer="deepseek")
    rig.register(ROUTE)
    for step in range(20):
        rig.push([(ROUTE, 10 * step, [long] * 10)])
    batches = turn_and_hear(rig)
    assert len(batches) < 20
    assert said_by(batches) == {ROUTE: 200}
    assert rig.shard.statistics.errors == 0


def test_a_backlog_that_was_not_released_is_read_again_and_cut_where_the_client_is(
    make_rig: Callable[..., Rig], table_of: Callable[[str], TokenTable]
) -> None:
    """The dead shard wrote a merged frame and died before its steps were released, or before it wrote it."""
    for delivered in range(8):
        rig = make_rig()
        rig.register(ROUTE)
        for first in range(7):
            rig.push([(ROUTE, first, [65 + first])])
        successor = Decoder(table_of("bytelevel_added"))
        ids = np.arange(65, 65 + delivered, dtype="<i4").tobytes()
        text = sum(len(successor.token_text(65 + at).encode()) for at in range(delivered))
        successor.restore(Restore(ROUTE, "rid", DecodeOptions(), b"", 0, ids, text))
        rig.shard.decoder = successor
        rig.shard.turn()
        heard = rig.hear()
        if delivered == 7:
            assert heard == []
            continue
        batch = only_batch(heard)
        assert batch.first.tolist() == [delivered]
        assert batch.ids.tolist() == list(range(65 + delivered, 72))
        assert successor.statistics.doubled == delivered
