"""A scheduler of two ranks, one of which dies. The test is rank 0 and gateway, rank 1 another process."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from outfeed.gateway.front import Stream
from outfeed.ingress.errors import Unavailable
from outfeed.ring.board import Role
from outfeed.sidecar import FinishReason, SchedulerPort
from outfeed.sink import Error, Frame

from tests.eventually import LIMIT_S, until

from .rig import Rig, rest_of, running_rig

TEXT = "Ströme reißen nie: 강물이 흐른다 👩‍👩‍👧"
GONE = Error(503, "scheduler_gone", "the scheduler went away; send the request again")
# It takes on the routes of each line that it is told, and pushes one token of each; it stops what it is to.
RANK_1 = """
import sys, threading
from outfeed.sidecar import Abort, Generate, SchedulerPort
lines = iter(sys.stdin.readline, "")
with SchedulerPort.attach(sys.argv[1], rank=1) as port:
    def live():
        while port.alive:
            for message in port.recv():
                print(type(message).__name__, message.route, flush=True)
            port.wait(0.05)
    for line in lines:
        if line == "live\\n":
            live()
        routes = [int(word) for word in line.split()]
        for route in routes:
            port.adopt(Generate(route, "", b"\\1\\0\\0\\0", {}))
        port.push_tokens(routes, [65] * len(routes))
"""


@pytest.fixture
def rig(small_tokenizer: Path) -> Iterator[Rig]:
    with running_rig("ranks", small_tokenizer, "--shards", "2", "--ranks", "2") as rig:
        yield rig


@contextmanager
def rank_1(rig: Rig) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", RANK_1, rig.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        row = rig.front.board.row(Role.SCHEDULER, 1)
        until("rank 1 to attach", lambda: (owner := row.owner) is not None and owner.pid == process.pid)
        until("the gateway to see it", lambda: 1 in rig.front._ranks.present)
        yield process
    finally:
        process.kill()
        process.communicate()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def hand_on(process: subprocess.Popen[str], streams: list[Stream]) -> None:
    """Have rank 1 take them on; each has had a token of it."""
    tell(process, " ".join(str(stream.route) for stream in streams))
    for stream in streams:
        assert isinstance(stream.source.receive_sync(LIMIT_S), Frame)


def begin(rig: Rig, streams: list[Stream]) -> list[int]:
    """Have rank 0 take them on and push the first half of the text; return the rest of it."""
    ids = rig.encode(TEXT)
    rig.adopt(*streams)
    for token in ids[: len(ids) // 2]:
        rig.push(streams, [token])
    rig.let_the_shards_have_it()
    return ids[len(ids) // 2 :]


def test_rank_1_dies_and_what_rank_0_runs_goes_on_byte_for_byte(rig: Rig) -> None:
    with rank_1(rig) as other:
        streams = rig.submit(9)
        here, there, nowhere = streams[:4], streams[4:8], streams[8]
        rest = begin(rig, here)
        hand_on(other, there)
        other.kill()
        other.wait()
        for stream in [*there, nowhere]:
            assert rest_of(stream)[2] == [GONE], "its own, and what nobody has said that it runs"
        until("the aborts", lambda: rig.receive() or len(rig.aborted) >= 5)
        assert sorted(rig.aborted) == sorted(stream.route for stream in [*there, nowhere])
        for token in rest[:-1]:
            rig.push(here, [token])
        rig.push(here, rest[-1:], FinishReason.length(9))
        assert {rest_of(stream)[0] for stream in here} == {TEXT}
    with rank_1(rig) as other:  # one that comes back is used
        hand_on(other, rig.submit(2))


def test_a_shard_dies_and_whose_rank_each_request_is_is_still_known(rig: Rig) -> None:
    with rank_1(rig) as other:
        streams = rig.submit(8)
        here, there = streams[:4], streams[4:]
        rest = begin(rig, here)
        hand_on(other, there)
        rig.until_replaced(0, rig.kill_shard(0))
        other.kill()
        other.wait()
        assert [rest_of(stream)[2] for stream in there] == [[GONE]] * 4
        rig.push(here, rest, FinishReason.length(9))
        assert {rest_of(stream)[0] for stream in here} == {TEXT}


def test_rank_0_dies_and_what_it_has_handed_on_ends_everywhere(rig: Rig) -> None:
    """Nobody could tell the next rank 0 of it: rank 1 is told that it runs for nobody."""
    with rank_1(rig) as other:
        streams = rig.submit(4)
        begin(rig, streams[:2])
        hand_on(other, streams[2:])
        tell(other, "live")
        rig.port.close()
        assert [rest_of(stream)[2] for stream in streams] == [[GONE]] * 4
        assert other.stdout is not None
        told = {other.stdout.readline() for _ in streams[2:]}
        assert told == {f"Abort {stream.route}\n" for stream in streams[2:]}
        rig.port = SchedulerPort.attach(rig.name)
        board = rig.front.board
        until("nothing to be live", lambda: not any(row.get("live") for row in board.rows(Role.SCHEDULER)))

        def is_served() -> bool:
            try:
                asyncio.run(rig.front.submit({"input_ids": [1]}))[0].close()
            except Unavailable:
                return False
            return True

        until("the next rank 0 to be seen", is_served)
