"""Every message frame: out as it went in, or a rejection."""

import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outfeed.ring import frames
from outfeed.ring.frames import (
    SEAL_BYTES,
    TAG_OF,
    Abort,
    Attach,
    BadFrame,
    Control,
    DecodeOptions,
    ErrorFrame,
    Forget,
    Generate,
    Handover,
    Live,
    LogprobOptions,
    Message,
    Register,
    Restore,
    Restored,
    Result,
    Standing,
    Tag,
    Takeover,
    Tally,
    decode,
    encode,
    seal,
    tally_rows,
)

from tests.waiting_thread import waiting_thread

ROUTE = (7 << 36) | 42
OPTIONS = DecodeOptions(stop=["END", "漢"], stop_token_ids=[0, 2], stop_regex=["a+"], detect_stops=True)
MESSAGES: list[Message] = [
    Result(ROUTE, b"\x00\xff"),
    ErrorFrame(ROUTE, 500, "decode", "bad \u6f22", running=True),
    Generate(
        ROUTE, "rid", b"\x01\0\0\0", {"temperature": 0.5, "stop": None}, LogprobOptions(True, 5, [1, 2])
    ),
    Control(2**64 - 1, "", "health"),
    Abort(1),
    Register(ROUTE, "r" * 1000, OPTIONS, b"\0" * 256, 4096),
    Restore(ROUTE, "rid", OPTIONS, b"", 3, b"\x01\0\0\0\xff\xff\xff\xff", 11),
    Forget(ROUTE),
]

HANDOVERS: list[Handover] = [
    Takeover(3, 1 << 62),
    Restored(7, 3, 5),
    Attach(7),
    Live(7, 0, 64, [ROUTE, 2**64 - 1]),
    Tally(1, [(ROUTE, 5, Standing.RUNNING), (2**64 - 1, 2**32 - 1, Standing.ENDED)]),
]


def fields_of(message: Message | Handover) -> list[Any]:
    fields: list[Any] = msgspec.msgpack.decode(encode(message)[:-SEAL_BYTES])
    return fields


def body_of(tag: Tag, fields: list[Any]) -> bytes:
    return seal(tag, msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("message", [*MESSAGES, *HANDOVERS], ids=lambda message: type(message).__name__)
class TestEachMessage:
    def test_comes_out_as_it_went_in(self, message: Message | Handover) -> None:
        assert decode(TAG_OF[type(message)], memoryview(encode(message))) == message

    def test_owns_its_bytes(self, message: Message | Handover) -> None:
        body = bytearray(encode(message))
        decoded = decode(TAG_OF[type(message)], memoryview(body))
        body[:] = bytes(len(body))
        assert decoded == message

    def test_tolerates_fields_of_a_later_version(self, message: Message | Handover) -> None:
        body = body_of(TAG_OF[type(message)], [*fields_of(message), "new", 1])
        assert decode(TAG_OF[type(message)], body) == message

    def test_cut_short_is_none(self, message: Message | Handover) -> None:
        body = encode(message)
        for size in range(len(body)):
            with pytest.raises(BadFrame, match=f"{TAG_OF[type(message)].name} frame of {size} bytes"):
                decode(TAG_OF[type(message)], body[:size])

    def test_every_bit_matters(self, message: Message | Handover) -> None:
        """A flipped bit of a prompt's ids is no range error, and must not reach a scheduler."""
        body = encode(message)
        for bit in range(len(body) * 8):
            damaged = bytearray(body)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(BadFrame, match="was changed, torn or cut off"):
                decode(TAG_OF[type(message)], bytes(damaged))

    def test_is_no_frame_of_another_tag(self, message: Message | Handover) -> None:
        for tag in set(Tag) - {TAG_OF[type(message)]}:
            with pytest.raises(BadFrame):
                decode(tag, encode(message))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_route_zero_is_nobodys(message: Message) -> None:
    tag = TAG_OF[type(message)]
    with pytest.raises(BadFrame, match="route 0 is not in"):
        decode(tag, body_of(tag, [0, *fields_of(message)[1:]]))


@pytest.mark.parametrize(
    ("tag", "fields", "says"),
    [
        (Tag.ERROR, [5, 200, "x", "y"], "status 200 is not in 400..599"),
        (Tag.ERROR, [5, "500", "x", "y"], "Expected `int`, got `str`"),
        (Tag.GENERATE, [5, "r", b"\0" * 5, {}], "input_ids has 5 bytes, not a multiple of 4"),
        (Tag.REGISTER, [5, "r", [], b"\0" * 3, 1], "prompt_tail has 3 bytes"),
        (Tag.REGISTER, [5, "r", [], b"\0" * 260, 65], "prompt_tail has 65 ids, more than the last 64"),
        (Tag.RESTORE, [5, "r", [], b"\0" * 260, 65, b"", 0], "prompt_tail has 65 ids"),
        (Tag.REGISTER, [5, "r", [], b"", -1], "prompt_tokens -1 is negative"),
        (Tag.RESTORE, [5, "r", [], b"", 1, b"\0", 0], "ids has 1 bytes"),
        (Tag.RESTORE, [5, "r", [], b"", 1, b"", -2], "text_bytes -2 is negative"),
        (Tag.REGISTER, [5, "r", [1], b"", 1], "Expected `bool`, got `int`"),
        (Tag.LIVE, [0, 5, 4, []], "slots 5 to 4 are not in 0..1048576"),
        (Tag.LIVE, [0, 0, (1 << 20) + 1, []], "slots 0 to 1048577 are not in"),
        (Tag.LIVE, [256, 0, 1, []], "not in the ranges of a shard, a reader"),
        (Tag.ATTACH, [-1], "not in the ranges of a shard, a reader"),
        (Tag.TAKEOVER, [256, 1], "not in the ranges of a shard, a reader"),
        (Tag.RESTORED, [0, -1, 1], "not in the ranges of a shard, a reader"),
        (Tag.TAKEOVER, [0, -1], "not in the ranges of a shard, a reader"),
        (Tag.TALLY, [0, [[0, 1, 1]]], "not a route, a number of tokens and a standing"),
        (Tag.TALLY, [0, [[1, 1 << 32, 1]]], "not a route, a number of tokens and a standing"),
        (Tag.TALLY, [0, [[1, 1, 4]]], "not a route, a number of tokens and a standing"),
    ],
)
def test_ranges_and_types(tag: Tag, fields: list[object], says: str) -> None:
    with pytest.raises(BadFrame, match=says):
        decode(tag, body_of(tag, fields))


@pytest.mark.parametrize(
    ("tag", "fields"),
    [
        (Tag.ERROR, [1, 400, "x", "y"]),
        (Tag.ERROR, [(1 << 64) - 1, 599, "x", "y"]),
        (Tag.LIVE, [255, 5, 5, []]),
        (Tag.LIVE, [0, 1 << 20, 1 << 20, []]),
        (Tag.TALLY, [255, [[1, (1 << 32) - 1, 2], [(1 << 64) - 1, 0, 0]]]),
        (Tag.TAKEOVER, [255, 0]),
        (Tag.RESTORE, [5, "r", [], b"\0" * 256, 0, b"", 0]),
    ],
)
def test_the_ends_of_each_range_are_in_it(tag: Tag, fields: list[object]) -> None:
    assert TAG_OF[type(decode(tag, body_of(tag, fields)))] is tag


def test_what_a_frame_leaves_out_at_its_end_has_a_default() -> None:
    plain = DecodeOptions(True, True, False, [], [], [], False, False, 0)
    assert decode(Tag.REGISTER, body_of(Tag.REGISTER, [5, "r", [], b"", 1])) == Register(
        5, "r", plain, b"", 1
    )
    nothing = LogprobOptions(False, 0, [], -1, False, False)
    generate = decode(Tag.GENERATE, body_of(Tag.GENERATE, [5, "r", b"", {}]))
    assert generate == Generate(5, "r", b"", {}, nothing, True)
    error = decode(Tag.ERROR, body_of(Tag.ERROR, [5, 500, "x", "y"]))
    assert error == ErrorFrame(5, 500, "x", "y", running=False)
    assert decode(Tag.CONTROL, body_of(Tag.CONTROL, [5, "r", "health"])) == Control(5, "r", "health", b"")
    assert decode(Tag.ABORT, body_of(Tag.ABORT, [5])) == Abort(5, "")


def test_no_tag_no_message() -> None:
    for tag in (Tag.BATCH, 0, 6, 255):
        with pytest.raises(BadFrame, match=f"tag {int(tag)} is no message frame"):
            decode(tag, b"")


@given(st.sampled_from(sorted(TAG_OF.values())), st.binary(max_size=200))
@settings(max_examples=300)
def test_any_bytes_are_a_message_or_a_bad_frame(tag: Tag, body: bytes) -> None:
    for candidate in (body, seal(tag, body)):
        with suppress(BadFrame):
            assert type(decode(tag, candidate)) in TAG_OF


def test_a_tally_of_as_many_rows_as_fit_a_frame_fits_it() -> None:
    for room in (1024, 1 << 16):
        rows = [(2**64 - 1, 2**32 - 1, Standing.ENDED)] * tally_rows(room)
        assert room * 0.9 < len(encode(Tally(255, [*rows]))) <= room


def test_a_message_is_sealed_and_read_without_letting_go_of_the_interpreter() -> None:
    """A gateway's other thread would take it, and giving it back takes longer than the whole message."""
    sent = Abort(ROUTE, "r1")
    with waiting_thread() as turns:
        for _ in range(100):
            time.sleep(0)
            before = turns()
            for _ in range(100):
                assert decode(Tag.ABORT, encode(sent)) == sent
            assert turns() == before


def test_nesting_without_end_is_refused() -> None:
    body = msgspec.msgpack.encode([5, "r", b""])[:-2] + b"\xc4\0" + b"\x81\xa1a" * 100_000
    with pytest.raises(BadFrame):
        decode(Tag.GENERATE, seal(Tag.GENERATE, b"\x95" + body[1:]))


@pytest.fixture
def scribbled(monkeypatch: pytest.MonkeyPatch) -> memoryview:
    """An ABORT in a lane whose writer changes its route as soon as somebody decodes it."""
    lane = bytearray(encode(Abort(ROUTE)))

    def scribble_first(body: bytes) -> Abort:
        lane[:] = encode(Abort(ROUTE + 1))
        return msgspec.msgpack.decode(body, type=Abort)

    monkeypatch.setitem(frames._decoders, Tag.ABORT, SimpleNamespace(decode=scribble_first))
    return memoryview(lane)


def test_a_body_is_read_from_the_lane_once(scribbled: memoryview) -> None:
    assert decode(Tag.ABORT, scribbled) == Abort(ROUTE)
