"""The shard loop on real rings: the order rule, who gets which rows."""

from collections.abc import Callable

from outfeed.ring.batch import Batch
from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import (
    TAG_OF,
    ErrorFrame,
    Forget,
    Message,
    Result,
    encode,
)
from outfeed.ring.route import make_route

from .rig import ROUTE, Rig, only_batch


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


def test_a_long_backlog_is_no_silence(make_rig: Callable[..., Rig]) -> None:
    """The heartbeat goes on between the steps of one turn."""
    rig = make_rig()
    rig.register(ROUTE)
    for first in range(200):
        rig.push([(ROUTE, first, [65])])
    rig.shard.turn()
    assert rig.beats >= 3


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


def test_a_doubled_row_is_not_decoded_twice(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.register(ROUTE)
    for row in ((ROUTE, 0, [65, 66]), (ROUTE, 0, [65, 66]), (ROUTE, 2, [67])):
        rig.push([row])
        rig.shard.turn()
    heard = rig.hear()
    assert [batch.first.tolist() for batch in heard if isinstance(batch, Batch)] == [[0], [2]]
    assert rig.shard.decoder.statistics.doubled == 1
