"""What fails a request in the shard loop, and only that one."""

from collections.abc import Callable

import pytest
from outfeed.ring.batch import Batch
from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import (
    DecodeOptions,
    ErrorFrame,
    Forget,
    Register,
    Restore,
    Standing,
    Tag,
    Tally,
    encode,
)
from outfeed.ring.route import make_route, slot_of
from outfeed.shards.kernel import Kernel
from tokenizers import Tokenizer

from .rig import ROUTE, Rig, flipped


def test_a_gap_fails_its_request_alone(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    other = make_route(0, 0, 6, 1)
    rig.register(ROUTE, other)
    rig.push([(ROUTE, 0, [65]), (other, 0, [65])])
    rig.shard.turn()
    rig.push([(ROUTE, 2, [66]), (other, 1, [66])])
    rig.shard.turn()
    rig.push([(ROUTE, 3, [67])])
    rig.shard.turn()
    first, second, error = rig.hear()
    assert isinstance(first, Batch)
    assert first.rows == 2
    assert isinstance(second, Batch)
    assert second.routes.tolist() == [other]
    assert isinstance(error, ErrorFrame)
    assert (error.route, error.status, error.type, error.running) == (ROUTE, 500, "gap", True)


@pytest.mark.parametrize(
    ("tag", "body"),
    [
        *((Tag.BATCH, flipped(b"".join(Rig.frame([(ROUTE, 1, [65])])), bit)) for bit in range(0, 640, 37)),
        *((Tag.ERROR, flipped(encode(ErrorFrame(ROUTE, 503, "busy", "no")), bit)) for bit in range(0, 80, 7)),
        (Tag.RESULT, encode(ErrorFrame(ROUTE, 503, "busy", "no"))),
        (Tag.BATCH, b""),
        (77, b"".join(Rig.frame([(ROUTE, 1, [65])]))),
        (Tag.GENERATE, encode(Forget(ROUTE))),
    ],
)
def test_a_damaged_step_ends_nobody_and_is_told_before_it_is_released(
    make_rig: Callable[..., Rig], tag: int, body: bytes
) -> None:
    """Whom it names may have lost nothing. Who did shows it by a gap, or is told by the tally."""
    rig = make_rig()
    other = make_route(0, 0, 6, 1)
    rig.register(ROUTE, other)
    rig.push([(ROUTE, 0, [65]), (other, 0, [65])])
    rig.shard.turn()
    rig.steps.write(tag, body)
    rig.push([(other, 1, [65])])
    rig.shard.turn()
    assert [type(heard) for heard in rig.hear()] == [Batch, Batch]
    assert rig.damages == 1


def test_a_tally_is_passed_on_behind_the_rows_before_it(make_rig: Callable[..., Rig]) -> None:
    """What the shard does not run is over: a registration that was refused, say, whose error was lost."""
    rig = make_rig()
    theirs, unknown, control = make_route(1, 0, 5, 1), make_route(0, 0, 6, 1), make_route(0, 0, 7, 1)
    rig.register(ROUTE, theirs)
    rig.push([(ROUTE, 0, [65]), (theirs, 0, [65])])
    rows: list[tuple[int, int, int]] = [
        (ROUTE, 3, Standing.RUNNING),
        (theirs, 1, Standing.ENDED),
        (unknown, 0, Standing.RUNNING),
        (control, 0, Standing.CONTROL),
        (make_route(0, 1, 8, 1), 9, Standing.RUNNING),
    ]
    rig.steps.write(Tag.TALLY, encode(Tally(2, rows)))
    rig.shard.turn()
    batch, tally = rig.hear(0)
    assert isinstance(batch, Batch)
    assert tally == Tally(2, [rows[0], (unknown, 0, Standing.ENDED), rows[3]])
    assert rig.hear(1)[1] == Tally(2, [rows[1]])


def test_a_tally_is_split_for_a_small_lane(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(capacity=4096)
    rows = [(make_route(0, 0, slot, 1 << 27), 1 << 31, Standing.CONTROL) for slot in range(150)]
    rig.steps.write(Tag.TALLY, encode(Tally(0, [*rows])))
    rig.shard.turn()
    heard = [tally for tally in rig.hear() if isinstance(tally, Tally)]
    assert len(heard) > 1
    assert [row for tally in heard for row in tally.rows] == rows


@pytest.mark.parametrize("method", ["register", "restore"])
def test_a_registration_that_cannot_be_made_costs_its_request_alone(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    rig = make_rig()
    other = make_route(0, 0, 6, 1)

    def fails(message: Register | Restore) -> None:
        raise RecursionError("too deep")

    rig.register(other)
    rig.shard.turn()
    monkeypatch.setattr(rig.shard.decoder, method, fails)
    rig.register(ROUTE) if method == "register" else rig.restore(0, 1)
    rig.shard.turn()
    (error,) = rig.hear()
    assert isinstance(error, ErrorFrame)
    failed = ROUTE if method == "register" else other
    assert (error.route, error.status, error.running) == (failed, 500, True)
    assert rig.shard._routes[0] == {slot_of(other): other}, "what was not registered is nobody's"


def test_a_step_that_cannot_be_decoded_costs_its_requests_alone(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    other = make_route(0, 0, 6, 1)
    rig.register(ROUTE, other)
    decode_step = rig.shard.decoder.decode

    def no_memory(batch: Batch, shard: int, reader: int, merge: int) -> object:
        if batch.routes[0] == ROUTE:
            raise MemoryError("none left")
        return decode_step(batch, shard, reader, merge)

    monkeypatch.setattr(rig.shard.decoder, "decode", no_memory)
    rig.push([(ROUTE, 0, [65])])
    rig.shard.turn()
    rig.push([(other, 0, [65])])
    rig.shard.turn()
    error, batch = rig.hear()
    assert isinstance(error, ErrorFrame)
    assert (error.route, error.status) == (ROUTE, 500)
    assert isinstance(batch, Batch)
    assert batch.routes.tolist() == [other]


@pytest.mark.parametrize("how", ["finish", "stop", "gap"])
def test_a_request_hears_of_it_when_its_end_was_decoded_and_could_not_be_said(
    make_rig: Callable[..., Rig],
    tokenizer_of: Callable[[str], Tokenizer],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """Nothing more comes for it: its client would wait for ever."""
    rig = make_rig()
    rig.register(ROUTE, options=DecodeOptions(stop=["b"], detect_stops=True))
    going_on = make_route(0, 0, 6, 1)
    rig.register(going_on)

    def no_memory(kernel: Kernel, header: bytes) -> memoryview:
        raise MemoryError("none left")

    b = tokenizer_of("bytelevel_added").get_vocab()["b"]
    with monkeypatch.context() as patched:
        patched.setattr(Kernel, "pack", no_memory)
        rows = [(ROUTE, 1 if how == "gap" else 0, [b if how == "stop" else 65]), (going_on, 0, [65])]
        rig.push(rows, [(0, FinishReason.length(1))] if how == "finish" else [])
        rig.shard.turn()
    heard = rig.hear()
    assert [error.route for error in heard if isinstance(error, ErrorFrame)] == [ROUTE, going_on]
    assert len(heard) == 2
    rig.push([(ROUTE, 1, [65])])
    rig.shard.turn()
    assert rig.hear() == [], "it is told once"


@pytest.mark.parametrize("body", [b"", b"\0" * 7, b"\xff" * 64])
def test_rubbish_costs_itself_alone(make_rig: Callable[..., Rig], body: bytes) -> None:
    rig = make_rig()
    rig.register(ROUTE)
    rig.deaf = {0}
    rig.shard._restore_limit_s = 0.0
    for tag in (Tag.BATCH, Tag.RESULT, Tag.GENERATE, 77):
        rig.steps.write(tag, body)
        rig.control.write(tag, body)
    rig.push([(ROUTE, 0, [65])])
    rig.shard.turn()
    (batch,) = (heard for heard in rig.hear() if isinstance(heard, Batch))
    assert batch.rows == 1
    assert rig.damages == 8


def test_stop_strings_beyond_the_limit_fail_the_request(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.register(ROUTE, options=DecodeOptions(stop=["x" * 40000, "y" * 40000]))
    rig.shard.turn()
    (error,) = rig.hear()
    assert isinstance(error, ErrorFrame)
    assert (error.status, error.type, error.running) == (400, "bad_request", True)
    assert "80000 UTF-8 bytes" in error.message
