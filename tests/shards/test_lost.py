"""What a shard does about what is lost on its way to it: a registration, a gateway, a whole lane."""

import logging
from collections.abc import Callable

import pytest
from outfeed.ring.batch import Batch
from outfeed.ring.frames import (
    TAG_OF,
    Attach,
    DecodeOptions,
    Forget,
    Handover,
    Message,
    Register,
    Restored,
    Tag,
    Takeover,
    encode,
)
from outfeed.ring.route import make_route
from outfeed.shards.errors import Stopped

from .damage import scribble
from .rig import Rig, flipped

MINE, OTHERS = make_route(0, 0, 5, 1), make_route(1, 0, 5, 1)


def said(rig: Rig, reader: int) -> list[str]:
    return [type(heard).__name__ for heard in rig.hear(reader)]


def lose(rig: Rig, message: Message | Handover, reader: int = 0, bit: int = 100) -> None:
    """A gateway says this, and one bit of it changes in the ring."""
    rig.controls[reader].write(TAG_OF[type(message)], flipped(encode(message), bit))


@pytest.mark.parametrize("bit", range(0, 30 * 8, 23))
def test_a_registration_that_was_damaged_is_made_again_before_its_first_row(
    make_rig: Callable[..., Rig], bit: int
) -> None:
    """Whatever it names now. Nobody else is troubled, and nothing is lost."""
    rig = make_rig()
    rig.register(MINE, OTHERS)
    rig.push([(MINE, 0, [65]), (OTHERS, 0, [65])])
    rig.shard.turn()
    lost = make_route(0, 0, 6, 1)
    rig.live[lost] = Register(lost, "rid", DecodeOptions(), b"", 0)
    lose(rig, rig.live[lost], bit=bit)
    rig.push([(lost, 0, [66]), (MINE, 1, [65]), (OTHERS, 1, [65])])
    rig.shard.turn()
    assert said(rig, 1) == ["Batch", "Batch"]
    _, takeover, batch = rig.hear(0)
    assert isinstance(takeover, Takeover)
    assert isinstance(batch, Batch)
    assert batch.routes.tolist() == [lost, MINE]


def test_the_end_of_a_request_that_was_damaged_is_heard_all_the_same(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    other = make_route(0, 0, 6, 1)
    rig.register(MINE, other, OTHERS)
    rig.shard.turn()
    del rig.live[MINE]
    lose(rig, Forget(MINE))
    rig.shard.turn()
    assert [rig.shard.decoder.knows(route) for route in (MINE, other, OTHERS)] == [False, True, True]


def test_a_restore_that_was_damaged_is_asked_for_again(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.live[MINE] = Register(MINE, "rid", DecodeOptions(), b"", 0)
    asked: list[int] = []
    restore = rig.restore

    def damaged_at_first(reader: int, epoch: int) -> None:
        asked.append(epoch)
        if len(asked) == 1:
            lose(rig, rig.live[MINE])
            rig.controls[reader].write(Tag.RESTORED, encode(Restored(reader, 0, epoch)))
        else:
            restore(reader, epoch)

    rig.restore = damaged_at_first  # type: ignore[method-assign]
    rig.shard.take_over([0])
    assert len(set(asked)) == len(asked) == 2
    assert rig.shard.decoder.knows(MINE)


def test_a_take_over_that_nobody_heard_is_said_again(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.shard._restore_limit_s = 1.0
    rig.live[MINE] = Register(MINE, "rid", DecodeOptions(), b"", 0)
    restore, asked = rig.restore, []

    def deaf_at_first(reader: int, epoch: int) -> None:
        asked.append(epoch)
        if len(asked) == 2:
            restore(reader, epoch)

    rig.restore = deaf_at_first  # type: ignore[method-assign]
    rig.shard.take_over([0])
    assert rig.shard.decoder.knows(MINE)


def test_only_an_answer_to_its_own_take_over_counts(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    """RESTORED frames come out of shared memory: those that nobody waits for say nothing and are not kept."""
    rig = make_rig()
    rig.deaf = {0}
    rig.shard._restore_limit_s = 0.1
    for epoch in range(1000):
        rig.control.write(Tag.RESTORED, encode(Restored(0, 0, epoch)))
    rig.controls[1].write(Tag.RESTORED, encode(Restored(1, 1, 4)))
    with caplog.at_level(logging.ERROR):
        rig.shard.take_over([0, 1])
    assert "goes on without readers [0]" in caplog.text


def test_who_answers_too_late_has_its_rows_counted(make_rig: Callable[..., Rig]) -> None:
    """What came for it meanwhile is lost: a tally tells whom that cost something."""
    rig = make_rig()
    rig.deaf = {0}
    rig.shard._restore_limit_s = 0.05
    rig.shard.take_over([0])
    epochs = [heard.epoch for heard in rig.hear(0) if isinstance(heard, Takeover)]
    rig.push([(MINE, 0, [65])])
    assert rig.shard.turn()
    assert rig.damages == 0
    for epoch in epochs:
        rig.control.write(Tag.RESTORED, encode(Restored(0, 0, epoch)))
    rig.shard.turn()
    assert rig.damages == 1


def test_who_was_late_once_is_not_waited_for_again(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked, and once more. When another one is asked later, that one's answer is enough."""
    rig = make_rig()
    rig.deaf = {0}
    rig.shard._restore_limit_s = 0.4
    rig.shard.take_over([0])
    assert said(rig, 0) in (["Takeover"], ["Takeover"] * 2)
    lose(rig, Register(OTHERS, "rid", DecodeOptions(), b"", 0), reader=1)
    rig.shard.turn()
    assert said(rig, 1) == ["Takeover"]
    assert caplog.text.count("goes on without readers [0]") == 1


def test_a_new_shard_that_is_told_to_end_waits_for_nobody(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.deaf = {0}
    rig.shard._restore_limit_s = 3600.0
    rig.shard._stopping = lambda: rig.beats > 2
    with pytest.raises(Stopped):
        rig.shard.take_over([0])


def test_what_was_restored_ends_with_its_gateway(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    for route in (MINE, OTHERS):
        rig.live[route] = Register(route, "rid", DecodeOptions(), b"", 0)
    rig.shard.take_over([0, 1])
    rig.shard.forget_reader(0)
    assert [rig.shard.decoder.knows(route) for route in (MINE, OTHERS)] == [False, True]


def test_what_is_restored_unasked_is_taken(make_rig: Callable[..., Rig]) -> None:
    """It may be the answer to a shard that died before it had heard it."""
    rig = make_rig()
    rig.live[MINE] = Register(MINE, "rid", DecodeOptions(), b"", 0)
    rig.restore(0, epoch=1)
    rig.push([(MINE, 0, [65])])
    rig.shard.turn()
    assert said(rig, 0) == ["Batch"]


def test_a_gateway_that_dies_while_it_is_asked_is_not_waited_for(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()
    rig.deaf = {0}
    rig.shard._lives = lambda reader: rig.beats == 0
    with caplog.at_level(logging.ERROR):
        rig.shard.take_over([0])
    assert "no RESTORED" not in caplog.text


def test_a_new_shard_does_not_wait_for_a_reader_whose_lane_is_corrupt(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    """That reader gets no TAKEOVER, so it will say no RESTORED."""
    rig = make_rig()
    scribble(rig.rings["egress0"], "quarantine")
    rig.deaf = {0}
    with caplog.at_level(logging.ERROR):
        rig.shard.take_over([0, 1])
    assert "no RESTORED" not in caplog.text
    assert "without reader 0" in caplog.text
    rig.register(OTHERS)
    rig.push([(OTHERS, 0, [65])])
    rig.shard.turn()
    assert said(rig, 1) == ["Takeover", "Batch"]


def test_a_corrupt_control_lane_costs_its_gateway_alone(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    """It will send no FORGET and no RESTORED: its requests are dropped, and no new shard waits for it."""
    rig = make_rig()
    rig.register(MINE, OTHERS)
    rig.shard.turn()
    scribble(rig.rings["control"], "quarantine")
    rig.deaf = {0}
    with caplog.at_level(logging.ERROR):
        rig.shard.take_over([0, 1])
    assert "no RESTORED" not in caplog.text
    assert (rig.shard.decoder.knows(MINE), rig.shard.decoder.knows(OTHERS)) == (False, True)


def test_a_new_shard_does_not_wait_for_what_a_new_gateway_has_not_got(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    """Shard and gateway died together: the dead gateway had read the TAKEOVER, its successor says ATTACH."""
    rig = make_rig()
    rig.deaf = {0}
    old, new = make_route(0, 0, 5, 1), make_route(0, 0, 6, 1)
    rig.register(old)
    rig.controls[0].write(Tag.ATTACH, encode(Attach(0)))
    rig.register(new)
    with caplog.at_level(logging.ERROR):
        rig.shard.take_over([0])
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
    ],
    ids=["attach", "forget", "a refused registration"],
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
    assert rig.damages == 1


def test_a_new_shard_is_not_told_restored_by_another_gateways_lane(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()
    rig.shard._restore_limit_s = 0.05
    rig.restore = lambda reader, epoch: rig.controls[1].write(  # type: ignore[method-assign]
        Tag.RESTORED, encode(Restored(reader, 0, epoch))
    )
    with caplog.at_level(logging.ERROR):
        rig.shard.take_over([0])
    assert "without readers [0]: no RESTORED" in caplog.text
