"""What goes wrong in and around a gateway, and that no request waits for ever because of it."""

import asyncio
import errno
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from outfeed.gateway import front
from outfeed.gateway.backend import FrontBackend
from outfeed.gateway.front import TURN_PROMPTS, Answered, Front
from outfeed.ingress.errors import Unavailable
from outfeed.ingress.register import Ingress
from outfeed.ring import Frame, Ring, segment
from outfeed.ring.board import Phase, Role, State
from outfeed.ring.instance import Instance
from outfeed.ring.names import segment_name
from outfeed.sidecar import Abort, FinishReason, Generate
from outfeed.sink import Done, Error, SinkSender

from tests.eventually import LIMIT_S, until

from .rig import Rig, rest_of, running_rig

BODY = {"input_ids": [1], "sampling_params": {"max_new_tokens": 9}}


@pytest.fixture
def rig(small_tokenizer: Path) -> Iterator[Rig]:
    with running_rig("faults", small_tokenizer, "--shards", "1") as rig:
        yield rig


def served(rig: Rig) -> bool:
    """Whether the gateway takes requests."""
    try:
        for stream in asyncio.run(rig.front.submit(BODY)):
            stream.close()
    except Unavailable:
        return False
    return True


# ---- it forks


def test_a_forked_child_cannot_end_its_parents_gateway(rig: Rig) -> None:
    """A server forks, and a child that leaves the `with` block closes the front that it has inherited."""
    (stream,) = asyncio.run(rig.front.submit(BODY))
    child = os.fork()
    if child == 0:
        ended = 1
        try:
            rig.front.close()
            rig.front.close()
            ended = 0
        finally:
            os._exit(ended)
    assert os.waitpid(child, 0)[1] == 0
    assert rig.front.instance.board.row(Role.READER).state == State.RUNNING
    assert rig.front.ingress.live() == 1
    assert [type(message) for message in rig.port.recv()] == [Generate]
    stream.close()
    assert served(rig)


# ---- it has no file left to open


def test_it_knows_the_bytes_of_tokens_when_no_file_can_be_opened_any_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clients have them all; a token is half of a character, which its text does not tell."""
    backend = FrontBackend(rig.front)

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    (half, _) = rig.encode("ö")
    monkeypatch.setattr(os, "open", refuse)
    assert backend.token_bytes(half) == "ö".encode()[:1]
    assert backend.is_special(rig.tokenizer.token_to_id("<|end|>"))
    assert not backend.is_special(half)


def test_a_gateway_started_with_its_instance_knows_the_bytes_of_tokens_later(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """The table is laid out while the instance starts; who came before it must not go without for good."""
    table = Path("/dev/shm", segment_name(rig.name, "tokens"))
    kept = table.rename(table.with_name(f"{table.name}-later"))
    rig.front.board.phase = Phase.STARTING
    backend = FrontBackend(rig.front)
    assert backend.token_bytes(65) is None
    assert caplog.text == "", "nothing is amiss yet"
    kept.rename(table)
    rig.front.board.phase = Phase.RUNNING
    (stream,) = asyncio.run(backend.submit({"input_ids": [1]}))
    stream.close()
    (half, _) = rig.encode("ö")
    assert backend.token_bytes(half) == "ö".encode()[:1]


def test_without_a_table_of_tokens_it_serves_all_the_same(rig: Rig) -> None:
    segment.unlink(segment_name(rig.name, "tokens"))
    backend = FrontBackend(rig.front)
    assert backend.token_bytes(65) is None
    assert not backend.is_special(0)
    assert served(rig)


# ---- it is taken for dead


def test_a_gateway_that_is_taken_for_dead_ends_its_streams_and_serves_again(rig: Rig) -> None:
    """Both of its owner words on the board were written over: the scheduler aborts all that it has."""
    (stream,) = asyncio.run(rig.front.submit(BODY))
    row = rig.front.instance.board.row(Role.READER)
    aborted: list[Abort] = []

    def is_aborted() -> bool:
        if not aborted and row.alive:  # at first, or a heartbeat came first
            row._words[row._base] = row._words[row._base + 31] = (1 << 64) - 1
        aborted.extend(message for message in rig.port.recv() if isinstance(message, Abort))
        return bool(aborted)

    until("the scheduler to take it for dead", is_aborted)
    until("its stream to end", lambda: rig.port.recv() is None or rig.front.ingress.live() == 0)
    (end,) = rest_of(stream)[2]
    assert isinstance(end, Error)
    assert end.type == "frame_lost"
    until("its row to be its own again", lambda: row.alive)
    assert served(rig)


# ---- the scheduler dies while a request is on its way in


def test_a_scheduler_that_dies_while_a_prompt_is_tokenized_is_not_submitted_to(rig: Rig) -> None:
    ready = rig.front.tokenize.ready

    async def ready_after_its_death(request: Any) -> Any:
        rig.port.close()
        until("the gateway to see it", lambda: not rig.front._ranks.received)
        return await ready(request)

    rig.front.tokenize.ready = ready_after_its_death  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="no scheduler"):
        asyncio.run(rig.front.submit(BODY))
    assert rig.front.ingress.live() == 0
    assert rig.front.reader.statistics().live == 0


@pytest.mark.parametrize("operation", ["submit", "control"])
def test_nor_is_one_that_dies_just_before_the_request_is_live(rig: Rig, operation: str) -> None:
    """The gateway ends what is live when it sees the death: this request is not, a moment later it is."""
    register = rig.front.reader.register

    def register_after_its_death(*request: Any) -> None:
        rig.port.close()
        until("the gateway to see it", lambda: not rig.front._ranks.received)
        register(*request)

    rig.front.reader.register = register_after_its_death  # type: ignore[method-assign,assignment]
    with pytest.raises(Unavailable, match="no scheduler"):
        asyncio.run(rig.front.submit(BODY) if operation == "submit" else rig.front.control("health"))
    assert rig.front.ingress.live() == 0
    assert rig.front.reader.statistics().live == 0


def test_a_request_that_is_ended_before_it_is_submitted_says_why(rig: Rig) -> None:
    """Its shard's lane is lost: the reader ends it as soon as it is registered, and its place is free."""
    register = rig.front.reader.register

    def register_and_end(route: int, rid: str, sender: SinkSender) -> None:
        register(route, rid, sender)
        rig.front.reader.abort(route, Error(500, "corrupt_lane", "lost"))
        until("it to be over", lambda: rig.front.ingress.live() == 0)

    rig.front.reader.register = register_and_end  # type: ignore[method-assign]
    (stream,) = asyncio.run(rig.front.submit(BODY))
    (end,) = rest_of(stream)[2]
    assert isinstance(end, Error)
    assert end.type == "corrupt_lane"
    with pytest.raises(Answered, match="corrupt_lane"):
        asyncio.run(rig.front.control("health"))


# ---- it is closed


def test_a_request_that_comes_while_a_gateway_is_closed_is_refused(rig: Rig) -> None:
    """Servers have threads: one may come through the door when what is live has been ended already."""
    fail = rig.front.reader.fail
    refused: list[Unavailable] = []

    def fail_and_submit(error: Error, *, abort: bool = False, rank: int | None = None) -> None:
        fail(error, abort=abort, rank=rank)
        with pytest.raises(Unavailable, match="this gateway is stopping") as why:
            asyncio.run(rig.front.submit(BODY))
        refused.append(why.value)

    rig.front.reader.fail = fail_and_submit  # type: ignore[method-assign]
    (stream,) = rig.submit()
    rig.front.close()
    (end,) = rest_of(stream)[2]
    assert isinstance(end, Error)
    assert (end.status, end.type) == (503, "stopping")
    assert (len(refused), rig.front.reader.statistics().aborts) == (1, 1)
    with pytest.raises(Unavailable, match="this gateway is stopping"):
        asyncio.run(rig.front.control("health"))


def test_closing_a_gateway_ends_its_streams_though_nobody_is_left_to_abort_them(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance ended since the gateway looked the last time."""
    (stream,) = rig.submit()
    monkeypatch.setattr(front, "TICK_S", 1e9)
    monkeypatch.setattr(Instance, "alive", False)
    rig.front.close()
    (end,) = rest_of(stream)[2]
    assert isinstance(end, Error)
    assert end.status == 503
    assert rig.front.reader.statistics().aborts == 0


# ---- a batch is large


def test_a_large_batch_lets_others_have_their_turn_and_is_given_up_with_its_client(rig: Rig) -> None:
    batch = {"input_ids": [[1]] * 300, "sampling_params": {"max_new_tokens": 9}}

    async def turns_beside(submission: asyncio.Future[Any]) -> int:
        turns = 0
        while not submission.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    async def whole() -> None:
        submission = asyncio.ensure_future(rig.front.submit(batch))
        assert await turns_beside(submission) >= 300 // TURN_PROMPTS
        streams = await submission
        assert [len(streams), rig.front.ingress.live()] == [300, 300]
        for stream in streams:
            stream.close()

    async def given_up() -> None:
        submission = asyncio.ensure_future(rig.front.submit(batch))
        while not rig.front.ingress.live():
            await asyncio.sleep(0)
        assert rig.front.ingress.live() < 300
        submission.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submission

    for attempt in (whole, given_up):
        asyncio.run(attempt())
        until("all to be let go", lambda: rig.front.ingress.live() == 0)
        rig.receive()


# ---- a lane is corrupt


def spoil_next_record(rig: Rig, ring: str) -> Callable[[], None]:
    """Return what spoils the record that is written next to a ring of one lane and one consumer."""
    stats = rig.front.ring_stats()[ring]
    at = 8192 + (stats.lanes[0].tail & (stats.capacity - 1))

    def spoil() -> None:
        path = f"/dev/shm/{segment_name(rig.name, ring)}"
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory[at + 8 : at + 16] = b"\x55" * 8

    return spoil


@pytest.mark.parametrize("ring", ["step", "control", "request"])
def test_a_corrupt_lane_ends_all_that_it_may_have_swallowed(rig: Rig, ring: str) -> None:
    """The last step of two requests, or the registration or the submission of a third, is lost: who knows?"""
    streams = rig.submit(2)
    rig.push(streams, rig.encode("before"))
    rig.let_the_shards_have_it()
    rig.stop_shards()
    spoil = spoil_next_record(rig, ring)
    received = {stream.route for stream in streams}
    streams += asyncio.run(rig.front.submit(BODY))
    rig.push(streams[:2], rig.encode("!"), FinishReason.length(2))
    spoil()
    rig.go_on_shards()

    def found() -> bool:
        received.update(rig.receive())
        return rig.front.ring_stats()[ring].lanes[0].quarantined is not None

    until("the lane to be found corrupt", found)
    ends = [rest_of(stream)[2] for stream in streams]
    for (end,) in ends:
        # What had come before the lane was given up is told as it was.
        assert isinstance(end, Done) or (
            isinstance(end, Error) and (end.status, end.type) == (500, "corrupt_lane")
        )
    assert isinstance(ends[2][0], Error)
    if ring == "step":
        assert all(isinstance(end, Error) for (end,) in ends)
    until("nothing to be live at the scheduler", lambda: not still_live(rig, received))
    assert "corrupt" in str(FrontBackend(rig.front).trouble())
    assert any("corrupt" in part for part in asyncio.run(rig.front.health(0.5)).sick)
    assert not served(rig)


def still_live(rig: Rig, routes: set[int]) -> bool:
    routes.update(rig.receive())
    return any(rig.port.is_live(route) for route in routes)


def test_of_several_ranks_the_loss_of_one_ends_what_hangs_on_it_alone(
    small_tokenizer: Path,
) -> None:
    """What another rank has said it runs goes on; of what nobody has, it may have been."""
    with running_rig("faults", small_tokenizer, "--shards", "1", "--ranks", "2") as rig:
        goes_on, hangs = rig.submit(2)
        rig.adopt(goes_on)
        rig.push([goes_on], rig.encode("a"))
        goes_on.source.receive_sync(LIMIT_S)  # so its gateway knows whose it is
        quarantined = 4096 + 512 * 1 + 136  # of lane 1, rank 1's: what a shard writes that finds it corrupt
        path = f"/dev/shm/{segment_name(rig.name, 'step')}"
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory[quarantined : quarantined + 8] = (65).to_bytes(8, "little")
        pushed = itertools.count()

        def is_over() -> bool:
            rig.receive()
            rig.push([goes_on], rig.encode("a"))
            next(pushed)
            return rig.aborted != []

        until("the one without a row to be given up", is_over)
        assert rig.aborted == [hangs.route]
        (end,) = rest_of(hangs)[2]
        assert isinstance(end, Error)
        assert (end.status, end.type) == (500, "corrupt_lane")
        assert FrontBackend(rig.front).trouble() == "scheduler 1 is not running"
        rig.push([goes_on], rig.encode("!"), FinishReason.length(9))
        assert rest_of(goes_on)[0] == "a" * next(pushed) + "!"
        assert served(rig)


@pytest.mark.parametrize("part", ["control", "step"])
def test_who_could_not_attach_may_attach_again(rig: Rig, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, while it still looks at why."""
    rig.front.close()

    def refused(_: object) -> Ring:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Instance, part, refused)
        with pytest.raises(OSError, match="Too many open files") as held:
            Front.attach(rig.name)
    with monkeypatch.context() as patched:
        patched.setattr(Ingress, "attach", lambda _: refused(None))
        with pytest.raises(OSError, match="Too many open files"):
            Front.attach(rig.name)
    rig.front = Front.attach(rig.name)
    assert served(rig)
    assert held.value.errno == errno.EMFILE


# ---- the reader's thread


@pytest.mark.parametrize(("part", "said"), [("_look", True), ("_tick", True), ("_turn", False)])
def test_a_fault_on_the_readers_thread_that_passes_costs_nothing(
    rig: Rig, part: str, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that there is no memory to tell of, nor to call what gives a lock of Python's back."""
    leave = threading.Condition.__exit__

    def silent(*words: object) -> None:
        raise MemoryError

    def kept(condition: threading.Condition, *error: Any) -> None:
        if threading.current_thread() is rig.front._thread:
            raise MemoryError
        leave(condition, *error)

    if not said:
        monkeypatch.setattr(front.log, "error", silent)
        monkeypatch.setattr(threading.Condition, "__exit__", kept)
    (stream,) = rig.submit()
    rig.push([stream], rig.encode("before, "))
    works = getattr(rig.front, part)
    failures: list[OSError] = []

    def fails() -> None:
        failures.append(OSError(24, "Too many open files"))
        raise failures[-1]

    setattr(rig.front, part, fails)
    until("it to fail twice", lambda: len(failures) >= 2)
    setattr(rig.front, part, works)
    rig.push([stream], rig.encode("after"), FinishReason.length(2))
    assert rest_of(stream)[0] == "before, after"


def test_a_reader_that_cannot_read_ends_its_requests_and_says_so_until_it_can(rig: Rig) -> None:
    streams = rig.submit(3)
    read = rig.front.reader._read

    def fails(limit: int, upto: list[int] | None = None) -> list[Frame]:
        raise RuntimeError("no reading today")

    rig.front.reader._read = fails  # type: ignore[method-assign]
    for stream in streams:
        _, _, (end,) = rest_of(stream)
        assert isinstance(end, Error)
        assert (end.status, end.type) == (500, "reader_failed")
    assert "no reading today" in str(FrontBackend(rig.front).trouble())
    health = asyncio.run(rig.front.health(0.5))
    assert not health.healthy
    assert any(part.startswith("gateway: ") for part in health.sick)
    assert not served(rig)
    until("the aborts", lambda: rig.receive() == [] and len(rig.aborted) == 3)
    rig.front.reader._read = read  # type: ignore[method-assign]
    until("it to serve again", lambda: served(rig))
    assert FrontBackend(rig.front).trouble() is None
    (stream,) = rig.submit()
    rig.push([stream], rig.encode("again"), FinishReason.length(1))
    assert rest_of(stream)[0] == "again"
