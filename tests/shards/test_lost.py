"""What a shard does about what is lost, lanes, gateways and frames: the rest goes on."""

import logging
from collections.abc import Callable

import pytest
from outfeed.ring import suspects
from outfeed.ring.batch import Batch
from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import (
    TAG_OF,
    Attach,
    DecodeOptions,
    ErrorFrame,
    Forget,
    Register,
    Restored,
    Result,
    Tag,
    Takeover,
    encode,
)
from outfeed.ring.route import make_route

from .damage import scribble
from .rig import Rig

MINE, OTHERS = make_route(0, 0, 5, 1), make_route(1, 0, 5, 1)


@pytest.mark.parametrize(
    ("word", "steps_before"),
    [("quarantine", 0), ("quarantine", 1), ("tail", 0), ("head", 0), ("head", 1)],
)
def test_a_corrupt_egress_lane_costs_its_reader_alone(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture, word: str, steps_before: int
) -> None:
    """Found when the lane is claimed, at a write, or when there seems to be no room in it."""
    rig = make_rig(capacity=4096)
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
    assert rig.shard.statistics.corrupt_lanes == 1
    assert sum("without reader 0" in record.message for record in caplog.records) == 1


def test_a_new_shard_does_not_wait_for_a_reader_whose_lane_is_corrupt(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    """That reader gets no TAKEOVER, so it will say no RESTORED."""
    rig = make_rig()
    scribble(rig.rings["egress0"], "quarantine")
    rig.controls[1].write(Tag.RESTORED, encode(Restored(1, 0, 4)))
    with caplog.at_level(logging.ERROR):
        rig.shard.take_over(4, lambda: [0, 1], limit_s=1.0)
    assert "no RESTORED" not in caplog.text
    assert "without reader 0" in caplog.text
    rig.register(OTHERS)
    rig.push([(OTHERS, 0, [65])])
    rig.shard.turn()
    assert [type(heard).__name__ for heard in rig.hear(1)] == ["Takeover", "Batch"]


def test_a_corrupt_control_lane_costs_its_gateway_alone(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    """It will send no FORGET and no RESTORED: its requests are dropped, and no new shard waits for it."""
    rig = make_rig()
    rig.register(MINE, OTHERS)
    rig.shard.turn()
    scribble(rig.rings["control"], "quarantine")
    rig.controls[1].write(Tag.RESTORED, encode(Restored(1, 0, 4)))
    with caplog.at_level(logging.ERROR):
        rig.shard.take_over(4, lambda: [0, 1], limit_s=1.0)
    assert "no RESTORED" not in caplog.text
    assert (rig.shard.decoder.knows(MINE), rig.shard.decoder.knows(OTHERS)) == (False, True)


def test_a_new_shard_does_not_wait_for_what_a_new_gateway_has_not_got(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    """Shard and gateway died together: the dead gateway had read the TAKEOVER, its successor says ATTACH."""
    rig = make_rig()
    old, new = make_route(0, 0, 5, 1), make_route(0, 0, 6, 1)
    rig.register(old)
    rig.controls[0].write(Tag.ATTACH, encode(Attach(0)))
    rig.register(new)
    with caplog.at_level(logging.ERROR):
        rig.shard.take_over(4, lambda: [0], limit_s=1.0)
    assert "no RESTORED" not in caplog.text
    rig.push([(old, 0, [65]), (new, 0, [66])])
    rig.shard.turn()
    takeover, batch = rig.hear(0)
    assert isinstance(takeover, Takeover)
    assert isinstance(batch, Batch)
    assert batch.routes.tolist() == [new]


@pytest.mark.parametrize(
    ("tag", "body"),
    [
        (Tag.ATTACH, encode(Attach(1))),
        (Tag.FORGET, encode(Forget(OTHERS))),
        (Tag.REGISTER, encode(Register(OTHERS, "rid", DecodeOptions(stop=["x" * 40000] * 2), b"", 0))),
        (Tag.REGISTER, encode(Register(OTHERS, "rid", DecodeOptions(), b"", 0))[:12]),
    ],
    ids=["attach", "forget", "a refused registration", "a registration cut off"],
)
def test_what_one_gateways_lane_says_of_another_costs_nobody_anything(
    make_rig: Callable[..., Rig], tag: Tag, body: bytes
) -> None:
    rig = make_rig()
    rig.register(MINE, OTHERS)
    rig.shard.turn()
    rig.controls[0].write(tag, body)
    rig.push([(MINE, 0, [65]), (OTHERS, 0, [65])])
    rig.shard.turn()
    for reader in (0, 1):
        assert [type(heard) for heard in rig.hear(reader)] == [Batch]
    assert rig.shard.statistics.bad_frames == 1


def test_a_new_shard_is_not_told_restored_by_another_gateways_lane(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()
    rig.controls[1].write(Tag.RESTORED, encode(Restored(0, 0, 4)))
    with caplog.at_level(logging.ERROR):
        rig.shard.take_over(4, lambda: [0], limit_s=0.01)
    assert "without readers [0]: no RESTORED" in caplog.text


def route_flipped(bit: int) -> tuple[int, bytes]:
    """MINE's last step with a bit of its route flipped in the ring."""
    body = bytearray(b"".join(Rig.frame([(MINE, 1, [66])], [(0, FinishReason.length(2))])))
    at = body.index(MINE.to_bytes(8, "little"))
    body[at + bit // 8] ^= 1 << bit % 8
    return Tag.BATCH, bytes(body)


@pytest.mark.parametrize(
    ("tag", "body"),
    [
        *(route_flipped(bit) for bit in range(0, 64, 7)),
        (77, b"".join(Rig.frame([(MINE, 1, [66])]))),
        (Tag.BATCH, b""),
        (Tag.ERROR, encode(ErrorFrame(MINE, 503, "busy", "no memory"))[1:]),
        (Tag.GENERATE, encode(Forget(MINE))),
    ],
)
def test_a_request_whose_last_row_was_damaged_ends(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, tag: int, body: bytes
) -> None:
    """What the frame names is somebody else, or nobody: who has no row after it is found all the same."""
    monkeypatch.setattr(suspects, "SILENT_S", 0.0)
    others = make_route(1, 0, 9, 1)  # more than a bit away
    rig = make_rig()
    rig.register(MINE, others)
    rig.push([(MINE, 0, [65]), (others, 0, [65])])
    rig.shard.turn()
    rig.steps.write(tag, body)
    rig.shard.turn()
    rig.push([(others, 1, [66])])
    rig.shard.turn()
    batch, error = rig.hear(0)
    assert isinstance(batch, Batch)
    assert isinstance(error, ErrorFrame)
    assert (error.route, error.status, error.running) == (MINE, 500, True)
    assert error.type in ("row_lost", "bad_frame")
    assert [heard.first.tolist() for heard in rig.hear(1) if isinstance(heard, Batch)] == [[0], [1]]


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


@pytest.mark.parametrize("character", ["x", "\N{EURO SIGN}", "\N{GRINNING FACE}", "\ud800"])
def test_what_a_shard_says_of_a_failure_fits_the_smallest_lane(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, character: str
) -> None:
    rig = make_rig(capacity=4096)

    def no_memory(*_: object) -> object:
        raise MemoryError(character * 5000)

    monkeypatch.setattr(rig.shard.decoder, "decode", no_memory)
    rig.register(MINE)
    rig.push([(MINE, 0, [65])])
    rig.shard.turn()
    (error,) = rig.hear(0)
    assert isinstance(error, ErrorFrame)
    assert (error.status, error.type) == (500, "bad_frame")
