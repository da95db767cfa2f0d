"""Two things that happen to a gateway at once, in the order that is worst: no request waits for ever, or runs
for nobody."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from outfeed.gateway import front
from outfeed.gateway.front import Front, Stream
from outfeed.ingress.register import Ingress
from outfeed.ring.errors import RingFull
from outfeed.ring.instance import Instance
from outfeed.ring.owner import Owner
from outfeed.shards.launcher import _idle
from outfeed.sidecar import FinishReason, Generate, SchedulerPort
from outfeed.sink import Error, SinkSender
from outfeed.sink.live import ReaderStatistics

from tests.eventually import LIMIT_S, until

from .rig import Rig, rest_of, running_rig

GONE = Error(503, "scheduler_gone", "the scheduler went away; send the request again")
BODY = {"input_ids": [1], "sampling_params": {"max_new_tokens": 9}}


@pytest.fixture(scope="module")
def shared(small_tokenizer: Path) -> Iterator[Rig]:
    with running_rig("meetings", small_tokenizer, "--shards", "1", "--ranks", "2") as rig:
        yield rig


@pytest.fixture
def rig(shared: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(front, "IDLE_S", front.RETRY_S)  # it looks as often as a busy one
    yield shared
    until("nothing to be live", lambda: shared.receive() == [] and shared.front.ingress.live() == 0)
    shared.aborted.clear()


def error_of(rig: Rig, stream: Stream) -> Error:
    """Return the error that a stream ends with, while the scheduler goes on."""
    ends: list[object] = []

    def ended() -> bool:
        rig.receive()
        while (item := stream.source.receive_nowait()) is not None:
            ends.append(item)
            if isinstance(item, Error):
                return True
        return False

    until("the stream to end", ended)
    assert isinstance(ends[-1], Error)
    return ends[-1]


def test_a_request_that_is_aborted_on_its_way_to_the_scheduler_does_not_run_for_nobody(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shard is cut off: the reader aborts it as it is registered. It goes on before the reader does."""
    reader = rig.front.reader
    register, abort = reader.register, reader._on_abort
    aborted, submitted = threading.Event(), threading.Event()

    def register_and_abort(route: int, rid: str, sender: SinkSender) -> None:
        register(route, rid, sender)
        reader.abort(route, Error(503, "shard_cut_off", "lost"))
        assert aborted.wait(LIMIT_S)

    def abort_and_wait(route: int, rid: str) -> None:
        abort(route, rid)
        aborted.set()
        assert submitted.wait(LIMIT_S)

    monkeypatch.setattr(reader, "register", register_and_abort)
    monkeypatch.setattr(reader, "_on_abort", abort_and_wait)
    (stream,) = asyncio.run(rig.front.submit(BODY))
    submitted.set()
    (end,) = rest_of(stream)[2]
    assert isinstance(end, Error)
    assert end.type == "shard_cut_off"
    rig.receive()
    assert not rig.port.is_live(stream.route)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("delivered", [False, True])
def test_a_scheduler_that_attaches_anew_in_its_process_knows_nothing_of_what_ran(
    rig: Rig, delivered: bool, rank: int
) -> None:
    """Its loop failed and begins again, sooner than the gateway looks: the same process is on the board."""
    other = SchedulerPort.attach(rig.name, rank=1)
    try:
        until("the gateway to see rank 1", lambda: 1 in rig.front._ranks.present)
        streams = rig.submit(2)
        rig.receive()  # or it would be told again what it has not handled
        for stream in streams:
            other.adopt(Generate(stream.route, "", b"\1\0\0\0", {}))
        if delivered:
            rig.push(streams, rig.encode("so far"), port=[rig.port, other][rank])
            rig.let_the_shards_have_it()
        with rig.front._looking:  # nobody looks in between
            if rank == 0:
                rig.port.close()
                rig.port = SchedulerPort.attach(rig.name)
            else:
                other.close()
                other = SchedulerPort.attach(rig.name, rank=1)
        assert [error_of(rig, stream).type for stream in streams] == ["scheduler_gone"] * 2
        (stream,) = rig.submit()
        rig.push([stream], rig.encode("anew"), FinishReason.length(1))
        assert rest_of(stream)[0] == "anew"
    finally:
        other.close()
        until("the gateway to see rank 1 go", lambda: 1 not in rig.front._ranks.present)


def test_a_request_ends_whose_instance_was_there_at_the_door_and_gone_behind_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader's thread has found it gone, and ended what was live: this one comes a moment later."""
    here = rig.front._thread

    def alive(instance: Instance) -> bool:
        return threading.current_thread() is not here

    with monkeypatch.context() as patched:
        patched.setattr(Instance, "alive", property(alive))
        until("the reader to find it gone", lambda: rig.front._gone)
        (stream,) = asyncio.run(rig.front.submit(BODY))
        assert error_of(rig, stream).type == "instance_gone"
    until("the reader to find it back", lambda: not rig.front._gone)


def test_a_request_ends_whose_scheduler_went_away_when_there_was_no_memory_to_say_so(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = rig.submit(2)
    fail, tried = rig.front.reader.fail, threading.Event()

    def without_memory(error: Error, *, abort: bool = False, rank: int | None = None) -> None:
        if not tried.is_set():
            tried.set()
            raise MemoryError
        fail(error, abort=abort, rank=rank)

    with monkeypatch.context() as patched:
        patched.setattr(rig.front.reader, "fail", without_memory)
        rig.port.close()
        until("the gateway to try", tried.is_set)
        assert [rest_of(stream)[2] for stream in streams] == [[GONE], [GONE]]
    rig.port = SchedulerPort.attach(rig.name)


def test_a_request_is_not_ended_with_a_scheduler_that_it_was_not_submitted_to(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when the next scheduler is known, while the log is told of the one that was lost."""
    streams: list[Stream] = []

    def submit_meanwhile(*said: object) -> None:
        streams.extend(asyncio.run(rig.front.submit(BODY)))

    with monkeypatch.context() as patched:
        patched.setattr(front, "LOOK_S", 1e9)  # the door does not look again by itself
        patched.setattr(front.log, "error", submit_meanwhile)
        rig.front._ranks.present = {0: (Owner(1, 1), 0)}
        rig.front._look()
    rig.front._look()
    (stream,) = streams
    until("the scheduler to receive it", rig.receive)
    rig.push([stream], rig.encode("served"), FinishReason.length(1))
    assert rest_of(stream)[0] == "served"


def test_a_gateway_that_is_closed_while_the_request_ring_is_full_leaves_nothing_running(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot say its aborts any more, and its process lives on: the board says that it stopped."""

    def full(route: int, rid: str) -> None:
        raise RingFull("no room")

    streams = rig.submit(2)
    monkeypatch.setattr(rig.front.reader, "_on_abort", full)
    rig.front.close()
    routes = {stream.route for stream in streams}
    until("the aborts", lambda: rig.receive() or routes <= set(rig.aborted))
    rig.front = Front.attach(rig.name, tokenizer=rig.tokenizer)


def test_a_gateway_whose_first_word_was_damaged_says_what_it_has(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ATTACH is rejected at once: what the one before it had would run on for nobody."""
    monkeypatch.setattr(Ingress, "attach", lambda ingress: rig.port._row.count("bad_frames"))
    monkeypatch.setattr(rig.front.reader, "_on_abort", lambda *abort: None)
    streams = rig.submit(2)
    rig.port._look_due = time.monotonic_ns() + 3600 * 10**9  # it does not see that the one before has gone
    rig.front.close()
    rig.front = Front.attach(rig.name, tokenizer=rig.tokenizer)
    routes = {stream.route for stream in streams}
    until("the aborts", lambda: rig.receive() or routes <= set(rig.aborted))
    rig.port._look_due = 0


def test_a_drain_does_not_end_while_a_gateway_has_yet_to_show_what_came_just_before_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway has counted none; a request comes, then the drain; then the gateway shows its count."""
    statistics = rig.front.reader.statistics
    draining: list[int] = []

    def counted_before_it() -> ReaderStatistics:
        seen = statistics()
        draining.append(time.monotonic_ns())
        return seen

    with monkeypatch.context() as patched:
        patched.setattr(rig.front.reader, "statistics", counted_before_it)
        rig.front._tick()
        assert not _idle(rig.front.instance, max(draining))
    until("it to show that it has none", lambda: _idle(rig.front.instance, max(draining)))
