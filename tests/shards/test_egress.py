"""What a shard writes to its readers: split, waited with, or given up for one reader alone."""

import logging
from collections.abc import Callable

import pytest
from outfeed.ring.batch import Batch
from outfeed.ring.errors import LaneOwned, NotARing
from outfeed.ring.frames import TAG_OF, ErrorFrame, Result, Takeover, encode
from outfeed.ring.route import make_route
from outfeed.ring.writer import LaneWriter
from outfeed.shards.errors import Stopped

from .damage import scribble
from .rig import ROUTE, Rig, only_batch, said_by, turn_and_hear

MINE, OTHERS = make_route(0, 0, 5, 1), make_route(1, 0, 5, 1)


@pytest.mark.parametrize(("count", "tokens"), [(64, 3), (2, 160), (4, 160)])
def test_rows_too_many_for_one_frame_are_split(make_rig: Callable[..., Rig], count: int, tokens: int) -> None:
    rig = make_rig(capacity=4096)
    routes = [make_route(0, 0, slot, 1) for slot in range(count)]
    rig.register(*routes)
    rig.push([(route, 0, [65 + slot % 20] * tokens) for slot, route in enumerate(routes)])
    batches = turn_and_hear(rig)
    assert len(batches) > 1
    assert [route for batch in batches for route in batch.routes.tolist()] == routes


def test_a_row_too_large_for_any_frame_fails_its_request(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(capacity=4096)
    rig.register(ROUTE)
    rig.push([(ROUTE, 0, [65] * 2000)])
    rig.shard.turn()
    (error,) = rig.hear()
    assert isinstance(error, ErrorFrame)
    assert (error.route, error.type) == (ROUTE, "row_too_large")
    rig.push([(ROUTE, 2000, [65])])
    rig.shard.turn()
    assert rig.hear() == [], "it has ended"


def test_a_full_reader_holds_the_shard_back_and_then_all_arrives(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(capacity=4096)
    routes = [make_route(0, 0, slot, 1) for slot in range(32)]
    rig.register(*routes)
    for first in range(100):
        rig.push([(route, first, [65]) for route in routes])
    assert said_by(turn_and_hear(rig)) == dict.fromkeys(routes, 100)
    assert rig.shard.statistics.waits > 0


def test_a_shard_that_waits_for_a_reader_can_be_told_to_stop(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(capacity=4096)
    routes = [make_route(0, 0, slot, 1) for slot in range(32)]
    rig.register(*routes)
    for first in range(100):
        rig.push([(route, first, [65]) for route in routes])
    rig.stop = True
    with pytest.raises(Stopped):
        rig.shard.turn()
    assert rig.beats > 0
    # What was not written was not released: the next shard reads it again.
    assert rig.rings["step"].stats().consumers[0].lag > 0


@pytest.mark.parametrize(
    ("word", "steps_before"),
    [("quarantine", 0), ("quarantine", 1), ("tail", 0), ("head", 0), ("head", 1)],
)
def test_a_corrupt_egress_lane_costs_its_reader_alone(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture, word: str, steps_before: int
) -> None:
    """Found when the lane is claimed, at a write, or when there seems to be no room in it."""
    rig = make_rig(capacity=4096)
    rig.deaf = {0}
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
    assert rig.shard.statistics.no_reader == 100 - rig.rings["egress0"].stats().lanes[0].frames
    rig.shard.try_lanes()  # in vain: a corrupt lane stays so
    assert (rig.shard.statistics.corrupt_lanes, rig.shard.cut_off) == (1, {0})
    assert sum("without reader 0" in record.message for record in caplog.records) == 1


def test_what_is_for_a_dead_reader_is_dropped_once_its_lane_is_full(make_rig: Callable[..., Rig]) -> None:
    """Each frame is one that nobody gets, and none is waited with."""
    rig = make_rig(capacity=4096)
    rig.deaf = {0}
    rig.shard._egress._lives = lambda reader: reader != 0
    rig.register(MINE, OTHERS)
    for first in range(100):
        rig.push([(MINE, first, [65]), (OTHERS, first, [65])])
        rig.shard.turn()
    assert sum(isinstance(batch, Batch) for batch in rig.hear(1)) == 100
    dropped = 100 - rig.rings["egress0"].stats().lanes[0].frames
    assert dropped > 0
    assert rig.shard.statistics.no_reader == rig.shard.statistics.waits == dropped


def test_what_names_a_reader_that_there_is_none_of_is_dropped(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    nobody = Result(make_route(7, 0, 5, 1), b"{}")
    rig.steps.write(TAG_OF[type(nobody)], encode(nobody))
    rig.shard.turn()
    assert (rig.shard.statistics.no_reader, rig.shard.cut_off) == (1, set())


@pytest.mark.parametrize(
    "answer",
    [
        Result(MINE, b"x" * 5000),
        ErrorFrame(MINE, 503, "busy", "no memory: " + "x" * 5000),
        ErrorFrame(MINE, 503, "busy", "\N{EURO SIGN}" * 5000),
        ErrorFrame(MINE, 503, "busy" * 2000, "no memory"),
        ErrorFrame(MINE, 503, "\N{GRINNING FACE}" * 2000, "\N{GRINNING FACE}" * 2000, running=True),
    ],
    ids=["result", "message", "message of wide characters", "type", "type and message"],
)
def test_an_answer_too_large_for_its_reader_becomes_a_short_error(
    make_rig: Callable[..., Rig], answer: Result | ErrorFrame
) -> None:
    """The step lane may be larger than the egress lane: what it took must not be read again and again."""
    rig = make_rig(capacity=4096)
    rig.register(OTHERS)
    rig.steps.write(TAG_OF[type(answer)], encode(answer))
    rig.push([(OTHERS, 0, [65])])
    rig.shard.turn()
    (error,) = rig.hear(0)
    assert isinstance(error, ErrorFrame)
    assert error.route == MINE
    if isinstance(answer, Result):
        assert (error.status, error.type, error.running) == (500, "answer_too_large", False)
        assert "5" in error.message
    else:
        assert (error.status, error.running) == (503, answer.running)
        assert answer.type.startswith(error.type)
        assert answer.message.startswith(error.message)
        assert error.message
    assert [type(heard) for heard in rig.hear(1)] == [Batch]


@pytest.mark.parametrize(
    "character", ["x", "\N{EURO SIGN}", "\N{GRINNING FACE}", pytest.param("\ud800", id="surrogate")]
)
def test_what_a_shard_says_of_a_failure_fits_the_smallest_lane(
    make_rig: Callable[..., Rig],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    character: str,
) -> None:
    # What is logged in a test is sent between pytest's processes, which half a surrogate pair cannot be.
    caplog.set_level(logging.CRITICAL)
    rig = make_rig(capacity=4096)

    def no_memory(*_: object) -> object:
        raise MemoryError(character * 5000)

    monkeypatch.setattr(rig.shard.decoder, "decode", no_memory)
    rig.register(MINE)
    rig.push([(MINE, 0, [65])])
    rig.shard.turn()
    (error,) = rig.hear(0)
    assert isinstance(error, ErrorFrame)
    assert (error.status, error.type) == (500, "not_decoded")


@pytest.mark.parametrize(
    "refusal", [OSError(24, "Too many open files"), NotARing("not a ring"), LaneOwned("it lives")]
)
def test_a_lane_that_cannot_be_had_costs_its_reader_alone_until_it_can(
    make_rig: Callable[..., Rig],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refusal: Exception,
) -> None:
    rig = make_rig()
    opens = rig.shard._egress._open

    def refuses(reader: int) -> LaneWriter | None:
        if reader == 1:
            raise refusal
        return opens(reader)

    monkeypatch.setattr(rig.shard._egress, "_open", refuses)
    rig.register(MINE, OTHERS)
    for first in range(2):
        rig.push([(OTHERS, first, [65]), (MINE, first, [65])])
        rig.shard.turn()
    assert [batch.first.tolist() for batch in rig.hear(0) if isinstance(batch, Batch)] == [[0], [1]]
    assert rig.hear(1) == []
    assert rig.shard.cut_off == {1}
    before = rig.shard.statistics.no_reader
    rig.shard.try_lanes()
    assert rig.shard.cut_off == {1}
    assert sum("without reader 1" in record.message for record in caplog.records) == 1

    # It can be had again: the reader says what it has, and a tally is asked for that ends who lost a row.
    monkeypatch.setattr(rig.shard._egress, "_open", opens)
    asked: list[None] = []
    monkeypatch.setattr(rig.shard, "_damaged", lambda: asked.append(None))
    rig.shard.try_lanes()
    rig.shard.try_lanes()
    assert (rig.shard.cut_off, len(asked)) == (set(), 1)
    rig.push([(OTHERS, 2, [65]), (MINE, 2, [65])])
    rig.shard.turn()
    (takeover, batch) = rig.hear(1)
    assert isinstance(takeover, Takeover)
    assert only_batch([batch]).first.tolist() == [2]
    assert only_batch(rig.hear(0)).first.tolist() == [2]
    assert rig.shard.statistics.no_reader == before


def test_each_reader_that_cannot_be_reached_is_told_apart(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    opens, refused = rig.shard._egress._open, {0, 1}

    def refuses(reader: int) -> LaneWriter | None:
        if reader in refused:
            raise OSError(24, "Too many open files")
        return opens(reader)

    monkeypatch.setattr(rig.shard._egress, "_open", refuses)
    rig.register(MINE, OTHERS)
    rig.push([(MINE, 0, [65]), (OTHERS, 0, [65])])
    rig.shard.turn()
    assert rig.shard.cut_off == {0, 1}
    for reader, left in ((1, {0}), (0, set())):
        refused.discard(reader)
        assert rig.shard._egress.try_again() == [reader]
        assert rig.shard.cut_off == left


def test_each_lane_that_is_corrupt_is_counted(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.deaf = {0, 1}
    for reader in (0, 1):
        scribble(rig.rings[f"egress{reader}"], "quarantine")
    rig.register(MINE, OTHERS)
    rig.push([(MINE, 0, [65]), (OTHERS, 0, [65])])
    rig.shard.turn()
    assert (rig.shard.statistics.corrupt_lanes, rig.shard.cut_off) == (2, {0, 1})


def test_a_lane_that_is_found_corrupt_when_it_is_tried_again_is_not_tried_any_more(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    rig.deaf = {0}
    scribble(rig.rings["egress0"], "quarantine")
    opens = rig.shard._egress._open
    tries: list[int] = []

    def refuses_once(reader: int) -> LaneWriter | None:
        tries.append(reader)
        if len(tries) == 1:
            raise OSError(24, "Too many open files")
        return opens(reader)

    monkeypatch.setattr(rig.shard._egress, "_open", refuses_once)
    rig.register(MINE)
    rig.push([(MINE, 0, [65])])
    rig.shard.turn()
    assert rig.shard.statistics.corrupt_lanes == 0
    for _ in range(3):
        rig.shard.try_lanes()
    assert tries == [0, 0]
    assert (rig.shard.statistics.corrupt_lanes, rig.shard.cut_off) == (1, {0})
