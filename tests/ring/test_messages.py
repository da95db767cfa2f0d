"""Every message frame: out as it went in, or a rejection that names whom it can."""

from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outfeed.ring import frames
from outfeed.ring.frames import (
    TAG_OF,
    Abort,
    BadFrame,
    Control,
    DecodeOptions,
    ErrorFrame,
    Forget,
    Generate,
    LogprobOptions,
    Message,
    Register,
    Restore,
    Result,
    Tag,
    decode,
    encode,
)

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


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
class TestEachMessage:
    def test_comes_out_as_it_went_in(self, message: Message) -> None:
        assert decode(TAG_OF[type(message)], memoryview(encode(message))) == message

    def test_owns_its_bytes(self, message: Message) -> None:
        body = bytearray(encode(message))
        decoded = decode(TAG_OF[type(message)], memoryview(body))
        body[:] = bytes(len(body))
        assert decoded == message

    def test_tolerates_fields_of_a_later_version(self, message: Message) -> None:
        fields = msgspec.msgpack.decode(encode(message))
        assert decode(TAG_OF[type(message)], msgspec.msgpack.encode([*fields, "new", 1])) == message

    def test_cut_short_names_its_route_once_it_is_there(self, message: Message) -> None:
        body = encode(message)
        route_ends = 1 + len(msgspec.msgpack.encode(message.route))
        for size in range(len(body)):
            with pytest.raises(
                BadFrame, match=f"{TAG_OF[type(message)].name} frame of {size} bytes"
            ) as caught:
                decode(TAG_OF[type(message)], body[:size])
            assert caught.value.routes == ((message.route,) if size >= route_ends else ())

    def test_route_zero_is_nobodys(self, message: Message) -> None:
        fields = msgspec.msgpack.decode(encode(message))
        with pytest.raises(BadFrame, match="route 0 is not in") as caught:
            decode(TAG_OF[type(message)], msgspec.msgpack.encode([0, *fields[1:]]))
        assert caught.value.routes == ()


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
    ],
)
def test_ranges_and_types(tag: Tag, fields: list[object], says: str) -> None:
    with pytest.raises(BadFrame, match=says) as caught:
        decode(tag, msgspec.msgpack.encode(fields))
    assert caught.value.routes == (5,)


def test_no_tag_no_message() -> None:
    for tag in (Tag.BATCH, 0, 5, 255):
        with pytest.raises(BadFrame, match=f"tag {int(tag)} is no message frame"):
            decode(tag, b"")


@given(st.sampled_from(sorted(TAG_OF.values())), st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_message_or_a_bad_frame(tag: Tag, body: bytes) -> None:
    routes: tuple[int, ...] = ()
    try:
        assert type(decode(tag, body)) in TAG_OF
    except BadFrame as error:
        routes = error.routes
    assert all(0 < route < 2**64 for route in routes)


def test_nesting_without_end_is_refused() -> None:
    body = msgspec.msgpack.encode([5, "r", b""])[:-2] + b"\xc4\0" + b"\x81\xa1a" * 100_000
    with pytest.raises(BadFrame):
        decode(Tag.GENERATE, b"\x95" + body[1:])


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


def test_so_is_whom_a_rejection_names(scribbled: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_fault", lambda message: "no good")
    with pytest.raises(BadFrame) as caught:
        decode(Tag.ABORT, scribbled)
    assert caught.value.routes == (ROUTE,)
