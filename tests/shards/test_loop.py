"""The shard loop on real rings: the order rule, routing, failing what it must, waiting for readers."""

import logging
from collections.abc import Callable

import numpy as np
import pytest
from outfeed.ring.batch import Batch
from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import (
    TAG_OF,
    DecodeOptions,
    ErrorFrame,
    Forget,
    Handover,
    Message,
    Restore,
    Restored,
    Result,
    Tag,
    encode,
)
from outfeed.ring.route import make_route
from outfeed.shards.decoder import Decoder
from outfeed.shards.loop import Stopped
from outfeed.shards.table import TokenTable

from .rig import ROUTE, Rig


def only_batch(heard: list[Batch | Message | Handover]) -> Batch:
    (batch,) = heard
    assert isinstance(batch, Batch)
    return batch


def test_a_step_becomes_a_frame_with_text(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.register(ROUTE)
    rig.push([(ROUTE, 0, [65, 66])])
    assert rig.shard.turn()
    batch = only_batch(rig.hear())
    assert batch.routes.tolist() == [ROUTE]
    assert batch.ids.tolist() == [65, 66]
    assert batch.generated.tolist() == [2]
    assert batch.text
    assert batch.stamp_ns == 1
    assert not rig.shard.turn()


def test_a_registration_behind_the_step_on_its_own_ring_is_seen_first(make_rig: Callable[..., Rig]) -> None:
    """The order rule: control is drained after the step ring's mark was taken, before a step is read."""
    rig = make_rig()
    rig.push([(ROUTE, 0, [65])])
    rig.register(ROUTE)
    rig.shard.turn()
    assert only_batch(rig.hear()).rows == 1


def test_a_step_beyond_the_mark_waits_for_the_next_turn(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    late = make_route(0, 0, 6, 1)
    drain = rig.shard._drain_control

    def drain_then_more() -> bool:
        busy = drain()
        if rig.shard.decoder.live == 1:
            # Between draining control and reading steps a new request registers and gets its first row.
            rig.register(late)
            rig.push([(late, 0, [66])])
        return busy

    rig.register(ROUTE)
    rig.push([(ROUTE, 0, [65])])
    rig.shard._drain_control = drain_then_more  # type: ignore[method-assign]
    rig.shard.turn()
    assert only_batch(rig.hear()).routes.tolist() == [ROUTE]
    rig.shard.turn()
    assert only_batch(rig.hear()).routes.tolist() == [late]


def test_rows_go_to_their_readers_and_other_shards_rows_to_nobody(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    mine = [make_route(reader, 0, slot, 1) for slot, reader in enumerate((0, 1, 0, 1))]
    other = make_route(0, 1, 9, 1)
    rig.register(*mine, other)
    rig.push([(mine[0], 0, [65]), (other, 0, [66]), *((route, 0, [67]) for route in mine[1:])])
    rig.shard.turn()
    assert only_batch(rig.hear(0)).routes.tolist() == [mine[0], mine[2]]
    assert only_batch(rig.hear(1)).routes.tolist() == [mine[1], mine[3]]


def test_a_finished_row_carries_its_reason_and_loses_its_stop_token(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.register(ROUTE)
    rig.push([(ROUTE, 0, [65, 66])], [(0, FinishReason.stop(66))])
    rig.shard.turn()
    batch = only_batch(rig.hear())
    assert batch.ids.tolist() == [65]
    assert batch.generated.tolist() == [2]
    assert [reason.to_json() for _, reason in batch.finishes] == [{"type": "stop", "matched": 66}]


def test_results_and_errors_pass_through_to_their_reader(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    route = make_route(1, 0, 3, 1)
    messages: list[Message] = [
        Result(route, b"answer"),
        ErrorFrame(route, 503, "gone", "no scheduler"),
        Result(make_route(1, 1, 3, 1), b"another shard's"),
    ]
    for message in messages:
        rig.steps.write(TAG_OF[type(message)], encode(message))
    rig.shard.turn()
    assert rig.hear(1) == messages[:2]
    assert rig.hear(0) == []


def test_unknown_and_forgotten_requests_are_dropped(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.register(ROUTE)
    rig.say(Forget(ROUTE))
    rig.push([(ROUTE, 0, [65]), (make_route(0, 0, 7, 2), 0, [66])])
    rig.shard.turn()
    assert rig.hear() == []
    assert rig.shard.decoder.statistics.stale_rows == 2
    assert rig.shard.decoder.live == 0


def test_only_an_answer_to_its_own_take_over_counts(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    """RESTORED frames come out of shared memory: those that nobody waits for say nothing and are not kept."""
    rig = make_rig()

    def restored(reader: int, epoch: int) -> None:
        rig.controls[reader].write(Tag.RESTORED, encode(Restored(reader, 0, epoch)))

    for epoch in range(1000):
        restored(0, epoch)
    rig.shard.turn()
    restored(1, 4)
    restored(1, 5)
    with caplog.at_level(logging.ERROR):
        rig.shard.take_over(5, lambda: [0, 1], limit_s=0.2)
    assert "goes on without readers [0]" in caplog.text
    assert rig.shard._restored == {1}


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


def test_a_doubled_row_is_not_decoded_twice(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.register(ROUTE)
    for row in ((ROUTE, 0, [65, 66]), (ROUTE, 0, [65, 66]), (ROUTE, 2, [67])):
        rig.push([row])
        rig.shard.turn()
    heard = rig.hear()
    assert [batch.first.tolist() for batch in heard if isinstance(batch, Batch)] == [[0], [2]]
    assert rig.shard.decoder.statistics.doubled == 1


def test_a_damaged_step_fails_the_live_requests_it_names(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    stranger = make_route(0, 0, 99, 4)
    rig.register(ROUTE)
    body = bytearray(b"".join(Rig.frame([(ROUTE, 0, [65]), (stranger, 0, [66])])))
    body[-1] ^= 0x40
    rig.steps.write(Tag.BATCH, bytes(body))
    rig.shard.turn()
    (error,) = rig.hear()
    assert isinstance(error, ErrorFrame)
    assert (error.route, error.status, error.running) == (ROUTE, 500, True)


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


@pytest.mark.parametrize("body", [b"", b"\0" * 7, b"\xff" * 64])
def test_rubbish_costs_itself_alone(make_rig: Callable[..., Rig], body: bytes) -> None:
    rig = make_rig()
    rig.register(ROUTE)
    for tag in (Tag.BATCH, Tag.RESULT, Tag.GENERATE, 77):
        rig.steps.write(tag, body)
        rig.control.write(tag, body)
    rig.push([(ROUTE, 0, [65])])
    rig.shard.turn()
    assert only_batch(rig.hear()).rows == 1
    assert rig.shard.statistics.unnamed_bad_frames == 8


def test_stop_strings_beyond_the_limit_fail_the_request(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.register(ROUTE, options=DecodeOptions(stop=["x" * 40000, "y" * 40000]))
    rig.shard.turn()
    (error,) = rig.hear()
    assert isinstance(error, ErrorFrame)
    assert (error.status, error.type, error.running) == (400, "bad_request", True)
    assert "80000 UTF-8 bytes" in error.message


def test_rows_too_many_for_one_frame_are_split(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(capacity=4096)
    routes = [make_route(0, 0, slot, 1) for slot in range(64)]
    rig.register(*routes)
    rig.push([(route, 0, [65 + slot % 20] * 3) for slot, route in enumerate(routes)])
    assert [route for batch in turn_and_hear(rig) for route in batch.routes.tolist()] == routes


def test_a_row_too_large_for_any_frame_fails_its_request(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(capacity=4096)
    rig.register(ROUTE)
    rig.push([(ROUTE, 0, [65] * 2000)])
    rig.shard.turn()
    (error,) = rig.hear()
    assert isinstance(error, ErrorFrame)
    assert (error.route, error.type) == (ROUTE, "row_too_large")


def turn_and_hear(rig: Rig) -> list[Batch]:
    """Turn until nothing is left, reading whenever the shard waits for room."""
    got: list[Batch] = []

    def beat() -> None:
        rig.beats += 1
        if rig.shard.statistics.waits:
            got.extend(batch for batch in rig.hear() if isinstance(batch, Batch))

    rig.shard._beat = beat
    while rig.shard.turn():
        pass
    return got + [batch for batch in rig.hear() if isinstance(batch, Batch)]


def said_by(batches: list[Batch]) -> dict[int, int]:
    """How many tokens each request said; each of its rows follows on the one before it."""
    said: dict[int, int] = {}
    for batch in batches:
        columns = (batch.routes.tolist(), batch.first.tolist(), batch.generated.tolist())
        for route, first, made in zip(*columns, strict=True):
            assert first == said.get(route, 0)
            said[route] = first + made
    return said


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
        rig.push([(ROUTE, at, [65]), (other, at, [66])])
    rig.shard.turn()
    before, answer, between, rejected, after = rig.hear()
    assert isinstance(before, Batch)
    assert before.generated.tolist() == [2, 2]
    assert answer == Result(control, b"answer")
    assert isinstance(between, Batch)
    assert between.first.tolist() == [2, 2]
    assert isinstance(rejected, ErrorFrame)
    assert (rejected.route, rejected.type) == (ROUTE, "bad_frame")
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
