"""A frame is damaged in a running instance: who lost something ends, and nobody else notices."""

import asyncio
import itertools
import mmap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from outfeed.gateway.front import Answered, Stream
from outfeed.ring.board import Role
from outfeed.ring.frames import Buffer, Tag
from outfeed.ring.names import segment_name
from outfeed.sidecar import Control, FinishReason
from outfeed.sink import Done, Error

from tests.eventually import until

from .rig import Rig, rest_of, running_rig

BODY = {"input_ids": [1, 2, 3, 4], "sampling_params": {"max_new_tokens": 9}}
LAST = FinishReason.length(2)


@pytest.fixture(scope="module")
def shared(small_tokenizer: Path) -> Iterator[Rig]:
    with running_rig("damage", small_tokenizer, "--shards", "1") as rig:
        yield rig


@pytest.fixture
def rig(shared: Rig) -> Rig:
    """One instance for all: whatever is damaged, it goes on."""
    shared.aborted.clear()
    return shared


def next_frame(rig: Rig, ring: str) -> Callable[[int], None]:
    """Return what waits for the next frame of a ring of one lane, and flips a bit of its body."""
    stats = rig.front.ring_stats()[ring]
    area, at = 8192, stats.lanes[0].tail & (stats.capacity - 1)

    def flip(bit: int) -> None:
        until("the frame", lambda: rig.front.ring_stats()[ring].lanes[0].tail != stats.lanes[0].tail)
        path = f"/dev/shm/{segment_name(rig.name, ring)}"
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            size = int.from_bytes(memory[area + at : area + at + 4], "little")
            memory[area + at + 16 + bit // 8 % size] ^= 1 << bit % 8

    return flip


def keep_receiving(rig: Rig, what: str, condition: Callable[[], bool]) -> None:
    """A scheduler's loop, without a step."""

    def met() -> bool:
        rig.receive()
        return condition()

    until(what, met)


def end_of(rig: Rig, stream: Stream) -> Error:
    """Wait for the error that ends a stream; the scheduler runs meanwhile."""
    keep_receiving(rig, "the stream to end", lambda: stream.route not in rig.front.reader._live)
    (end,) = rest_of(stream)[2]
    assert isinstance(end, Error)
    return end


def goes_on(rig: Rig, *streams: Stream) -> None:
    rig.push(list(streams), rig.encode("!"), LAST)
    for stream in streams:
        (end,) = rest_of(stream)[2]
        assert isinstance(end, Done)


@pytest.mark.parametrize("bit", [3, 77, 150, 222])
def test_a_request_that_was_damaged_ends_alone(rig: Rig, bit: int) -> None:
    """One that has rows, one that waits in the scheduler's queue and one behind the damage go on."""
    running, queued = rig.submit(2)
    rig.push([running], rig.encode("a"))
    flip = next_frame(rig, "request")
    (lost,) = asyncio.run(rig.front.submit(BODY))
    (behind,) = asyncio.run(rig.front.submit(BODY))
    flip(bit)
    end = end_of(rig, lost)
    assert (end.status, end.type) == (500, "frame_lost")
    goes_on(rig, running, queued, behind)


def test_a_control_request_that_was_damaged_ends_with_an_error(rig: Rig) -> None:
    flip = next_frame(rig, "request")

    async def ask() -> None:
        asking = asyncio.create_task(rig.front.control("health", timeout=60))
        await asyncio.to_thread(flip, 40)
        while not asking.done():
            assert not any(isinstance(message, Control) for message in rig.port.recv())
            await asyncio.sleep(0.01)
        await asking

    with pytest.raises(Answered, match="frame_lost"):
        asyncio.run(ask())


def test_an_abort_that_was_damaged_comes_all_the_same(rig: Rig) -> None:
    gone, stays = rig.submit(2)
    flip = next_frame(rig, "request")
    gone.close()
    flip(40)
    keep_receiving(rig, "the abort to come again", lambda: bool(rig.aborted))
    assert rig.aborted == [gone.route]
    goes_on(rig, stays)


@pytest.mark.parametrize("bit", [5, 90, 170])
def test_a_registration_that_was_damaged_costs_nobody_anything(rig: Rig, bit: int) -> None:
    (running,) = rig.submit()
    rig.push([running], rig.encode("a"))
    rig.let_the_shards_have_it()
    rig.stop_shards()
    flip = next_frame(rig, "control")
    (damaged,) = asyncio.run(rig.front.submit(BODY))
    flip(bit)
    keep_receiving(rig, "the request to come", lambda: rig.port._table.knows(damaged.route))
    rig.push([running, damaged], rig.encode("b"))
    rig.go_on_shards()
    goes_on(rig, running, damaged)


def damage_the_last_step(rig: Rig, ended: Stream, others: list[Stream], bit: int) -> None:
    """The step in which `ended` ends, and the others have a token, is damaged."""
    rig.let_the_shards_have_it()
    rig.stop_shards()
    flip = next_frame(rig, "step")
    streams = [ended, *others]
    rig.port.push_tokens([stream.route for stream in streams], [65] * len(streams), finishes={0: LAST})
    flip(bit)


@pytest.mark.parametrize("die", [False, True], ids=["", "the shard dies of it, too"])
def test_a_damaged_step_ends_those_in_it_alone(rig: Rig, die: bool) -> None:
    """Its last row, and no other: who waits for a first row, or had none in that step, goes on."""
    ended, another, absent, queued = rig.submit(4)
    rig.push([ended, another, absent], rig.encode("a"))
    damage_the_last_step(rig, ended, [another], 333)
    if die:
        rig.until_replaced(0, rig.kill_shard(0))
    rig.go_on_shards()
    for stream in (ended, another):
        assert end_of(rig, stream).type in ("frame_lost", "gap")
    goes_on(rig, absent, queued)


def test_an_answer_that_was_damaged_on_its_way_out_ends_its_request_alone(rig: Rig) -> None:
    """Between the shard and the gateway: the last row of one."""
    ended, other = rig.submit(2)
    frame = rig.front.reader._frame
    damaged = itertools.count()

    def damages_one(lane: int, tag: int, body: Buffer) -> None:
        if tag == Tag.BATCH and next(damaged) == 0:
            copy = bytearray(body)
            copy[30] ^= 4
            body = bytes(copy)
        frame(lane, tag, body)

    rig.front.reader._frame = damages_one  # type: ignore[method-assign]
    try:
        rig.push([ended], rig.encode("a"), LAST)
        assert end_of(rig, ended).type == "frame_lost"
    finally:
        rig.front.reader._frame = frame  # type: ignore[method-assign]
    goes_on(rig, other)


@pytest.mark.parametrize(
    ("in_header", "in_rows", "value"), [(0, 1, 0), (4, 0, 0), (4, 31, (1 << 64) - 1), (5, 2, 3)]
)
def test_a_word_of_the_board_that_is_written_over_costs_nobody_anything(
    rig: Rig, in_header: int, in_rows: int, value: int
) -> None:
    """One of the header and one of every process's row, the launcher's too."""
    streams = rig.submit(2)
    rig.push(streams, rig.encode("a"))
    board = rig.front.board
    shard = board.row(Role.SHARD).owner
    words = [in_header, *(row._base + in_rows for role in Role for row in board.rows(role))]
    before = [board._words[at] for at in words]
    for at in words:
        board._words[at] = value

    def is_right_again() -> bool:
        now = [board._words[at] for at in words]
        return (
            all(one > was for one, was in zip(now[1:], before[1:], strict=True))
            if in_rows == 1
            else now == before
        )

    keep_receiving(rig, "heartbeats to set the words right", is_right_again)
    assert board.row(Role.SHARD).owner == shard
    assert rig.aborted == []
    goes_on(rig, *streams)


def test_a_shard_that_cannot_have_its_lane_is_known_to_its_gateway(rig: Rig) -> None:
    """A shard that holds its lane is not believed: the board may be what is damaged."""
    (stream,) = rig.submit()
    rig.push([stream], rig.encode("a"))
    rig.let_the_shards_have_it()  # so the shard has its lane, which it takes with the first row
    row = rig.front.board.row(Role.SHARD, 0)
    cut_off = rig.front._damage._cut_off
    row.put("cut_off", 1)
    assert cut_off() == frozenset()
    lanes = rig.front._rings["egress"].stats()
    unowned = replace(lanes, lanes=(replace(lanes.lanes[0], owner=None),))
    egress = rig.front._damage._egress
    not_had: Any = SimpleNamespace(stats=lambda: unowned)
    rig.front._damage._egress = not_had
    try:

        def told() -> bool:
            row.put("cut_off", 1)  # the shard says 0 again, soon
            return stream.route not in rig.front.reader._live

        keep_receiving(rig, "its requests to end", told)
    finally:
        rig.front._damage._egress = egress
    (end,) = rest_of(stream)[2]
    assert isinstance(end, Error)
    until("the shard to be taken for sound again", lambda: not rig.front.reader.lost_shards)
    (stream,) = rig.submit()
    goes_on(rig, stream)
