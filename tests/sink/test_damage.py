"""A damaged frame delivers nothing and ends nobody; a tally then ends who has lost something."""

import re
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outfeed.ring import CorruptLane
from outfeed.ring.batch import decode_batch, encode_batch
from outfeed.ring.checked import BadBatch
from outfeed.ring.families import FAMILIES, Kind
from outfeed.ring.family_makers import flat_family
from outfeed.ring.frames import BadFrame, Standing, Tag, Tally, encode
from outfeed.ring.route import make_route
from outfeed.sink import Done, Error, Frame, Reader, SinkSource

from .front import Front, waiting
from .material import (
    DAMAGES,
    Choose,
    Step,
    check_invariants,
    draw_step,
    header_of,
    pick,
    reseal,
    with_header,
)
from .test_round_trip import Drawn, assert_event


@st.composite
def damaged(draw: Any) -> tuple[Step, bytes]:
    choose: Choose = Drawn(draw)
    step = draw_step(choose)
    body = step.encode()
    for _ in range(choose.integer(1, 2)):
        if len(body) > 16:
            try:
                body = pick(choose, DAMAGES)(choose, body)
            except Exception:  # the damage does not apply to what the first one left
                break
    return step, body


def is_rejected(body: bytes) -> bool:
    try:
        decode_batch(memoryview(body))
    except BadFrame:
        return True
    return False


@given(damaged())
@settings(max_examples=250)
def test_exactly_the_original_or_a_rejection_that_ends_nobody(case: tuple[Step, bytes]) -> None:
    step, body = case
    front = Front()
    sources = [front.open(row.route, first=row.first) for row in step.rows]
    front.arrive(body)
    if not is_rejected(body):
        assert body == step.encode()
        for row, source in zip(step.rows, sources, strict=True):
            assert_event(row, source.receive_nowait())
        return
    assert not any(waiting(source) for source in sources)
    assert (front.ends, front.aborts) == ([], [])
    stats = front.reader.statistics()
    assert (stats.bad_frames, stats.delivered, stats.live) == (1, 0, len(step.rows))


@given(damaged())
@settings(max_examples=250)
def test_with_a_right_check_the_other_checks_hold_alone(case: tuple[Step, bytes]) -> None:
    """Somebody seals nonsense properly: it is rejected, or it is a batch that holds together."""
    step, body = case
    if len(body) < 16:
        return
    body = reseal(body)
    rejected = is_rejected(body)
    if not rejected:
        check_invariants(decode_batch(memoryview(body)))
    front = Front()
    sources = [front.open(row.route, first=row.first) for row in step.rows]
    front.arrive(body)
    assert front.reader.statistics().frames == 1
    for source in sources:
        items = waiting(source)
        if rejected:
            assert not [item for item in items if isinstance(item, Frame | Done)]


@given(st.binary(max_size=400))
@settings(max_examples=200)
def test_any_bytes_are_a_batch_or_a_bad_one(body: bytes) -> None:
    for candidate in (body, reseal(body) if len(body) >= 16 else body):
        try:
            check_invariants(decode_batch(memoryview(candidate)))
        except BadBatch:
            continue


A, B, C, D = (make_route(0, 0, slot, 1) for slot in range(1, 5))


def test_a_tally_ends_who_has_less_than_was_sent() -> None:
    front = Front()
    behind, ended, level, ahead = (front.open(route, first=7) for route in (A, B, C, D))
    rows: list[tuple[int, int, int]] = [
        (A, 8, Standing.RUNNING),
        (B, 7, Standing.ENDED),
        (C, 7, Standing.RUNNING),
        (D, 0, Standing.RECEIVED),  # another rank has its rows
        (make_route(0, 0, 9, 1), 5, Standing.RUNNING),
        (make_route(0, 1, 3, 1), 5, Standing.ENDED),
    ]
    front.arrive(encode(Tally(0, rows)), tag=Tag.TALLY)
    for source in (behind, ended):
        (error,) = waiting(source)
        assert isinstance(error, Error)
        assert (error.status, error.type) == (500, "frame_lost")
    assert waiting(level) == waiting(ahead) == []
    assert front.aborts == [(route, f"rid-{route}") for route in (A, B)]
    assert front.ends == [A, B]
    assert front.reader.statistics().lost == 2


def test_a_tally_speaks_of_its_own_shards_requests_alone() -> None:
    front = Front()
    source = front.open(make_route(0, 1, 1, 1))
    front.arrive(encode(Tally(0, [(make_route(0, 1, 1, 1), 5, Standing.ENDED)])), tag=Tag.TALLY)
    assert waiting(source) == []


def test_who_hangs_on_a_lost_rank_ends_and_who_does_not_goes_on() -> None:
    """Rank 1 is lost: what it has said it runs ends, and what nobody has, since it may be its."""
    front = Front()
    slots = (make_route(0, 0, slot, 1) for slot in range(1, 7))
    of_rank_1, of_rank_2, of_rank_0, with_rows, received, control = routes = [*slots]
    sources = [front.open(route, first=3 if route == with_rows else 0) for route in routes]
    at_rank_0: list[tuple[int, int, int]] = [
        (of_rank_0, 0, Standing.RUNNING),
        (with_rows, 3, Standing.RUNNING),
        *((route, 0, Standing.RECEIVED) for route in (of_rank_1, of_rank_2, received)),
        (control, 0, Standing.CONTROL),
    ]
    front.arrive(encode(Tally(1, [(of_rank_1, 0, Standing.RUNNING)])), tag=Tag.TALLY)
    front.arrive(encode(Tally(2, [(of_rank_2, 0, Standing.RUNNING)])), tag=Tag.TALLY)
    front.arrive(encode(Tally(0, at_rank_0)), tag=Tag.TALLY)
    lost = Error(503, "scheduler_gone", "rank 1 went away")
    front.reader.fail(lost, abort=True, rank=1)
    front.reader.drain()
    assert [waiting(source) for source in sources] == [[lost], [], [], [], [lost], []]
    assert [route for route, _ in front.aborts] == [of_rank_1, received]
    front.reader.fail(lost, abort=True)
    front.reader.drain()
    assert [route for route, _ in front.aborts[2:]] == [of_rank_2, of_rank_0, with_rows, control]


def test_a_shard_that_cannot_reach_the_reader_costs_its_requests_alone() -> None:
    front = Front()
    there = make_route(0, 1, 1, 1)
    gone, other = front.open(there), front.open(A)
    for _ in range(2):
        front.reader.cut_off(frozenset({1}))
    front.reader.drain()
    late = front.open(make_route(0, 1, 2, 1))
    front.reader.drain()
    for source in (gone, late):
        (error,) = waiting(source)
        assert isinstance(error, Error)
        assert (error.status, error.type) == (503, "shard_cut_off")
    assert len(front.aborts) == 2
    front.reader.cut_off(frozenset())
    again = front.open(make_route(0, 1, 3, 1))
    front.reader.drain()
    assert waiting(other) == waiting(again) == []


def test_a_request_that_begins_while_its_shards_others_are_ended_ends_too() -> None:
    """Else it would wait for ever: the reader looks for whose shard is lost once."""
    front = Front()
    first, second = (make_route(0, 1, slot, 1) for slot in (1, 2))
    late: list[SinkSource] = []

    def begin_another(route: int) -> None:
        if route == first:
            late.append(front.open(second))

    front.reader = Reader(front.egress, front.on_abort, begin_another)  # type: ignore[arg-type]
    front.open(first)
    front.reader.cut_off(frozenset({1}))
    front.reader.drain()
    (error,) = waiting(late[0])
    assert isinstance(error, Error)
    assert error.type == "shard_cut_off"


@pytest.mark.parametrize("how", ["cut off", "corrupt"])
def test_whom_a_lost_shard_could_not_end_for_want_of_memory_ends_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    front = Front()
    routes = [make_route(0, 1, slot, 1) for slot in (1, 2, 3)]
    sources = [front.open(route) for route in routes]
    remember = front.reader._remember

    def without_memory(route: int) -> None:
        if route == routes[1]:
            raise MemoryError
        remember(route)

    def corrupt(limit: int) -> NoReturn:
        raise CorruptLane("egress", 1, 64)

    with monkeypatch.context() as patched, suppress(MemoryError):
        patched.setattr(front.reader, "_remember", without_memory)
        if how == "corrupt":
            patched.setattr(front.egress, "read", corrupt)
            front.reader.drain()
        else:
            front.reader.cut_off(frozenset({1}))
    front.reader.cut_off(frozenset({1} if how == "cut off" else ()))
    front.reader.drain()
    assert [[type(item) for item in waiting(source)] for source in sources] == [[Error]] * 3
    assert sorted(front.ends) == sorted(routes)


def test_aborts_are_given_up_when_the_lane_they_go_by_is_corrupt() -> None:
    """The scheduler finds that, too, and stops what came by it; trying again would be for ever."""
    front = Front()
    tried = []

    def corrupt(route: int, rid: str) -> None:
        tried.append(route)
        raise CorruptLane("request", 0, 64)

    front.reader._on_abort = corrupt
    sources = [front.open(route) for route in (11, 12)]
    front.reader.fail(Error(500, "corrupt_lane", "lost"), abort=True)
    for _ in range(3):
        front.reader.drain()
    assert [[type(item) for item in waiting(source)] for source in sources] == [[Error], [Error]]
    assert tried == [11, 12]
    assert front.ends == [11, 12]
    assert front.reader.statistics().aborts_waiting == 0


def sample() -> bytes:
    """Three rows, the middle one with logprobs."""
    families: list[Any] = [None] * FAMILIES
    families[Kind.OUTPUT_LOGPROBS] = flat_family([(1, [-0.5, -1.5], [7, 8])])
    return b"".join(
        encode_batch(
            77,
            np.array([11, 12, 13], "u8"),
            np.array([0, 5, 9], "u4"),
            np.array([2, 0, 1], "u4"),
            np.array([3, 3, 4], "u4"),
            np.array([101, 102, 103], "i4"),
            generated=np.array([2, 1, 1], "u4"),
            text_lens=np.array([1, 2, 3], "u4"),
            text="a\u00e9xyz".encode(),
            families=families,
        )
    )


# header: version, stamp, rows, tokens, finishes, text_bytes, families, texts
@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (0, 2, "version is 2; this side speaks 1"),
        (1, -1, "stamp_ns is -1, not in"),
        (2, 4, "header implies .* bytes, the body has"),
        (1, 2**64 - 1, None),
        (2, 1 << 21, "rows is 2097152, not in 0..1048576"),
        (3, 4, "header implies .* bytes, the body has"),
        (3, 2**63, "tokens is 9223372036854775808, not in"),
        (4, [[3, {}]], "finish reasons: row 3 after row -1, in a batch of 3 rows"),
        (4, [[1, {}], [1, {}]], "finish reasons: row 1 after row 1"),
        (4, [[0, {"type": b"x"}]], "finish reasons: that of row 0 is not JSON"),
        (4, [[0, "stop"]], r"Expected `object`, got `str` - at `\$\[4\]\[0\]\[1\]`"),
        (5, None, "header implies .* bytes, the body has"),
        (5, 2**31, "text_bytes is 2147483648, not in"),
        (5, 2**31 - 1, "header implies .* bytes, the body has"),
        (6, [None], "families has 1 entries, not 0 or 7"),
        (6, [[1, 2, 3]] + [None] * 6, "output_logprobs: 2 positions but 3 entries in its header"),
        (
            6,
            [[1, 2**31, 2**31]] + [None] * 6,
            "output_logprobs: a number in its header is 2147483648, not in",
        ),
        (6, [[1, 2**31 - 1, 2**31 - 1]] + [None] * 6, "header implies .* bytes, the body has"),
        (6, [None, [1, 2, 2]] + [None] * 5, None),
        (7, [0, 0, -1], "token_texts: a number in its header is -1, not in"),
    ],
)
def test_each_header_field_is_checked(place: int, value: Any, says: str | None) -> None:
    header = header_of(sample())
    header[place] = value
    body = reseal(with_header(sample(), header))
    if says is None:
        decode_batch(memoryview(body))
        return
    with pytest.raises(BadBatch, match=says):
        decode_batch(memoryview(body))


# offsets from the end of the header: routes 24, first 12, counts 12, prompts 12, ids 12, generated 12,
# text_lens 12, text 8, then rows 4, counts 4, values 8, ids 8
@pytest.mark.parametrize(
    ("offset", "value", "says"),
    [
        (36, 3, "counts: sum 4, tokens 3"),
        (36, 2**32 - 1, "counts: sum 4294967296, tokens 3"),
        (84, 2, "text_lens: sum 7, text_bytes 6"),
        (96, 0xFFFFFFFF, "text: not UTF-8 at byte 0"),
        (104, 3, "output_logprobs rows: 3 in a batch of 3 rows"),
        (108, 3, "output_logprobs: sum of counts 3, positions 2"),
    ],
)
def test_each_column_is_checked(offset: int, value: int, says: str) -> None:
    body = bytearray(sample())
    data = 16 + body[0] + -body[0] % 8
    body[data + offset : data + offset + 4] = value.to_bytes(4, "little")
    with pytest.raises(BadBatch, match=says):
        decode_batch(memoryview(reseal(bytes(body))))


def test_a_row_may_not_begin_inside_a_character() -> None:
    body = bytearray(sample())
    data = 16 + body[0] + -body[0] % 8
    body[data + 84 : data + 92] = (2).to_bytes(4, "little") + (1).to_bytes(4, "little")
    with pytest.raises(BadBatch, match="text: a part begins inside a character, at byte 2"):
        decode_batch(memoryview(reseal(bytes(body))))


def test_every_single_byte_matters() -> None:
    body = sample()
    decode_batch(memoryview(body))
    for at in range(len(body)):
        damaged = bytearray(body)
        damaged[at] ^= 0xFF
        with pytest.raises(BadBatch, match=re.escape("BATCH ")):
            decode_batch(memoryview(bytes(damaged)))
