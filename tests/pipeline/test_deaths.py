"""Who dies, and what a stream sees of it (docs/design.md, section 5). The test is scheduler and gateway."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from outfeed.gateway.front import Front, Health
from outfeed.ingress.errors import Unavailable
from outfeed.ring.board import Role
from outfeed.ring.names import segment_name
from outfeed.sidecar import Control as ControlRequest
from outfeed.sidecar import FinishReason, SchedulerPort
from outfeed.sink import Done, Error, Frame, Item

from tests.eventually import until

from .commands import is_alive, shard_pids
from .rig import Rig, rest_of, running_rig

TEXT = "Ströme reißen nie: 강물이 흐른다 👩‍👩‍👧, 川は流れる. STOP? نهر — and on it flows, STOP here."


@pytest.fixture
def rig(small_tokenizer: Path) -> Iterator[Rig]:
    with running_rig("death", small_tokenizer, "--shards", "2", "--drain-seconds", "86400") as rig:
        yield rig


def one_end(end: Item, kind: type[Item], status: int | None = None) -> None:
    assert isinstance(end, kind), end
    if status is not None:
        assert isinstance(end, Error)
        assert end.status == status


@pytest.mark.parametrize("when", range(0, 64, 9))
def test_a_shard_dies_and_its_streams_go_on_byte_for_byte(rig: Rig, when: int) -> None:
    """Cut anywhere: inside characters, inside what might become a stop, before the first token."""
    ids = rig.encode(TEXT)
    streams = rig.submit(6, stop=["STOP here", "flows, STOP", "ST!"])
    for at, token in enumerate(ids):
        if at == when:
            pid = rig.kill_shard(0)
        rig.push(streams, [token])
    rig.push(streams, rig.encode("\n"), FinishReason.length(len(ids) + 1))
    for stream in streams:
        text, got, (end,) = rest_of(stream)
        assert text == TEXT + "\n"
        assert got == ids + rig.encode("\n")
        one_end(end, Done)
    rig.until_replaced(0, pid)
    assert rig.aborted == []


def test_a_shard_is_replaced_whatever_its_row_on_the_board_says(rig: Rig) -> None:
    streams = rig.submit(6)
    rig.push(streams, rig.encode("before, "))
    with open(f"/dev/shm/{segment_name(rig.name, 'board')}", "r+b") as file:
        for word in (3, 29, 30):  # shard 0's epoch, behind the launcher's row and the scheduler's
            file.seek(65536 + 256 * 2 + 8 * word)
            file.write(b"\xff" * 8)
    pid = rig.kill_shard(0)
    rig.until_replaced(0, pid)
    rig.push(streams, rig.encode("after"), FinishReason.length(2))
    assert {rest_of(stream)[0] for stream in streams} == {"before, after"}


def test_both_shards_die_at_once(rig: Rig) -> None:
    ids = rig.encode(TEXT)
    streams = rig.submit(8)
    rig.push(streams, ids[:10])
    for shard in (0, 1):
        rig.kill_shard(shard)
    for token in ids[10:]:
        rig.push(streams, [token])
    rig.push(streams, [], FinishReason.stop("x"))
    assert {rest_of(stream)[0] for stream in streams} == {TEXT}


def test_a_shard_dies_again_and_again_also_while_its_requests_are_being_restored(rig: Rig) -> None:
    ids = rig.encode(TEXT)
    streams = rig.submit(40)
    killed: set[int] = set()
    for at, token in enumerate(ids):
        if at % 8 == 0 and len(killed) < 6:
            # The board names a new shard as soon as it runs, which is before it has been handed anything.
            until("a new shard 1", lambda: (pid := shard_pids(rig.name)[1]) not in killed and is_alive(pid))
            killed.add(shard_pids(rig.name)[1])
            rig.kill_shard(1)
        rig.push(streams, [token])
    rig.push(streams, [], FinishReason.length(len(ids)))
    assert {rest_of(stream)[0] for stream in streams} == {TEXT}
    assert len(killed) == 6


def test_a_request_that_ends_while_its_shard_is_dead_ends_once(rig: Rig) -> None:
    (stream,) = rig.submit()
    rig.push([stream], rig.encode("bye"))
    shard = (stream.route >> 20) & 0xFF
    rig.kill_shard(shard)
    rig.push([stream], [], FinishReason.length(3))
    text, _, (end,) = rest_of(stream)
    assert text == "bye"
    one_end(end, Done)


def test_a_stopped_shard_is_killed_and_replaced(small_tokenizer: Path) -> None:
    with running_rig("hang", small_tokenizer, "--shards", "1", "--heartbeat-limit", "0.5") as rig:
        streams = rig.submit(3)
        rig.push(streams, rig.encode("before, "))
        pid = rig.kill_shard(0, signal.SIGSTOP)
        rig.push(streams, rig.encode("after"), FinishReason.length(2))
        assert {rest_of(stream)[0] for stream in streams} == {"before, after"}
        rig.until_replaced(0, pid)


def test_shards_are_replaced_on_sighup_and_no_request_notices(rig: Rig) -> None:
    before = shard_pids(rig.name)
    streams, ids = rig.submit(6), rig.encode(TEXT)
    rig.push(streams, ids[:20])
    rig.launcher.send_signal(signal.SIGHUP)
    replaced = lambda: not set(before) & set(shard_pids(rig.name))  # noqa: E731
    for token in ids[20:]:
        rig.push(streams, [token])
    until("both shards to be replaced", replaced)
    rig.push(streams, [], FinishReason.length(len(ids)))
    assert {rest_of(stream)[0] for stream in streams} == {TEXT}


def test_the_scheduler_dies_and_its_requests_end_with_503(rig: Rig) -> None:
    """The first scheduler is another process, so that it can be killed; then one comes back."""
    rig.port.close()
    until("no scheduler", lambda: _refused(rig))
    code = (
        "import sys, time; from outfeed.sidecar import SchedulerPort\n"
        "with SchedulerPort.attach(sys.argv[1]) as port:\n"
        "    while port.alive:\n"
        "        for m in port.recv(): port.push_tokens([m.route], [65])\n"
        "        port.wait(0.1)\n"
    )
    scheduler = subprocess.Popen([sys.executable, "-c", code, rig.name])
    row = rig.front.board.row(Role.SCHEDULER)
    until("the scheduler", lambda: (owner := row.owner) is not None and owner.pid == scheduler.pid)
    until("it to be seen", lambda: not _refused(rig))
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 9}}
    (stream,) = asyncio.run(rig.front.submit(body))
    assert isinstance(stream.source.receive_sync(60), Frame)
    scheduler.kill()
    scheduler.wait()
    _, _, (end,) = rest_of(stream)
    one_end(end, Error, 503)
    rig.port = SchedulerPort.attach(rig.name)
    until("it to be seen", lambda: not _refused(rig))
    rig.receive()
    (stream,) = rig.submit()
    rig.push([stream], rig.encode("again"), FinishReason.length(1))
    assert rest_of(stream)[0] == "again"


def _refused(rig: Rig) -> bool:
    try:
        for stream in asyncio.run(rig.front.submit({"input_ids": [1]})):
            stream.close()
    except Unavailable:
        return True
    return False


def test_a_gateway_dies_and_each_of_its_requests_is_aborted_once(rig: Rig) -> None:
    """The gateway is another process, killed; the next one starts clean, in the same place."""
    rig.front.close()
    code = (
        "import asyncio, sys, time; from outfeed.gateway.front import Front\n"
        "async def main():\n"
        "    front = Front.attach(sys.argv[1])\n"
        "    streams = await front.submit({'input_ids': [[1]] * 20})\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    gateway = subprocess.Popen([sys.executable, "-c", code, rig.name], stdout=subprocess.PIPE)
    assert gateway.stdout is not None
    assert gateway.stdout.readline() == b"ready\n"
    routes: list[int] = []
    until("its requests", lambda: routes.extend(rig.receive()) or len(routes) == 20)  # type: ignore[func-returns-value]
    gateway.kill()
    gateway.communicate()
    until("its aborts", lambda: rig.receive() == [] and len(rig.aborted) >= 20)
    assert sorted(rig.aborted) == sorted(routes)
    rig.front = Front.attach(rig.name, tokenizer=rig.tokenizer)
    (stream,) = rig.submit()
    rig.port.push_tokens(routes, [65] * 20)
    rig.push([stream], rig.encode("mine"), FinishReason.length(1))
    assert rest_of(stream)[0] == "mine"
    assert sorted(rig.aborted) == sorted(routes)


def test_a_gateway_replaced_at_once_still_aborts_what_the_dead_one_had(rig: Rig) -> None:
    streams = rig.submit(5)
    routes = sorted(stream.route for stream in streams)
    _forget_without_goodbye(rig.front)
    rig.front = Front.attach(rig.name, tokenizer=rig.tokenizer)
    until("the aborts", lambda: rig.receive() == [] and len(rig.aborted) >= 5)
    assert sorted(rig.aborted) == routes


def _forget_without_goodbye(front: Front) -> None:
    """Take a front's rings away as its death would: no abort, no farewell."""
    front._stop = True
    front._bell.ring()
    front._thread.join()
    for ring in front._rings.values():
        ring.close()
    front._bell.close()


def test_the_launcher_dies_and_every_stream_ends(rig: Rig) -> None:
    streams = rig.submit(4)
    rig.launcher.kill()
    rig.launcher.wait()
    for stream in streams:
        _, _, (end,) = rest_of(stream)
        one_end(end, Error, 503)
    until("the port to notice", lambda: not rig.port.alive)
    with pytest.raises(Unavailable, match="gone or stopping"):
        asyncio.run(rig.front.submit({"input_ids": [1]}))


def test_a_gateway_that_can_open_no_more_files_serves_on(rig: Rig) -> None:
    """Its clients' connections have used up what it may open: that comes and goes, and its reader stays."""
    (stream,) = rig.submit()
    rig.push([stream], rig.encode("before, "))
    row = rig.front.board.row(Role.READER)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        for _ in range(3):
            seen = row.heartbeat_ns
            until("a heartbeat", lambda seen=seen: row.heartbeat_ns > seen)  # type: ignore[misc]
        assert rig.port.alive
        rig.receive()
        rig.push([stream], rig.encode("meanwhile, "))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    rig.push([stream], rig.encode("after"), FinishReason.length(3))
    assert rest_of(stream)[0] == "before, meanwhile, after"


def test_draining_finishes_what_runs_and_takes_nothing_new(rig: Rig) -> None:
    (stream,) = rig.submit()
    rig.push([stream], rig.encode("half, "))
    rig.launcher.send_signal(signal.SIGTERM)
    until("new requests to be refused", lambda: _refused(rig))
    assert rig.launcher.poll() is None
    rig.push([stream], rig.encode("whole"), FinishReason.length(2))
    assert rest_of(stream)[0] == "half, whole"
    assert rig.launcher.wait(60) == 0


def test_shards_are_replaced_on_sighup_in_a_drain_too(rig: Rig) -> None:
    before = shard_pids(rig.name)
    (stream,) = rig.submit()
    rig.push([stream], rig.encode("half, "))
    rig.launcher.send_signal(signal.SIGTERM)
    until("the drain to begin", lambda: _refused(rig))
    rig.launcher.send_signal(signal.SIGHUP)
    until("both shards to be replaced", lambda: not set(before) & set(shard_pids(rig.name)))
    rig.push([stream], rig.encode("whole"), FinishReason.length(2))
    assert rest_of(stream)[0] == "half, whole"
    assert rig.launcher.wait(60) == 0


@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGINT, None])
def test_a_drain_is_over_when_it_is_told_again_or_when_its_time_is_up(
    small_tokenizer: Path, again: signal.Signals | None
) -> None:
    """What still runs then ends with a 503."""
    seconds = "86400" if again else "0.2"
    with running_rig("drain", small_tokenizer, "--shards", "1", "--drain-seconds", seconds) as rig:
        (stream,) = rig.submit()
        rig.launcher.send_signal(signal.SIGTERM)
        until("the drain to begin", lambda: _refused(rig))
        if again:
            assert rig.launcher.poll() is None
            rig.launcher.send_signal(again)
        assert rig.launcher.wait(60) == 0
        (end,) = rest_of(stream)[2]
        one_end(end, Error, 503)


def test_a_vanished_client_is_aborted_once(rig: Rig) -> None:
    streams = rig.submit(10)
    routes = sorted(stream.route for stream in streams)
    for stream in streams:
        stream.close()
        stream.close()
    until("the aborts", lambda: rig.receive() == [] and len(rig.aborted) >= 10)
    rig.port.push_tokens(routes, [65] * 10)
    until("nothing to be live", lambda: rig.front.ingress.live() == 0)
    assert sorted(rig.aborted) == routes


def test_a_control_request_goes_all_the_way_round(rig: Rig) -> None:
    answer: list[bytes] = []
    asked = threading.Thread(target=lambda: answer.append(asyncio.run(rig.front.control("health"))))
    asked.start()
    got: list[Any] = []
    until("the control request", lambda: bool(got.extend(rig.port.recv()) or got))  # type: ignore[func-returns-value]
    rig.port.push_result(got[0].route, b"\x00fine")
    asked.join(60)
    assert answer == [b"\x00fine"]


def test_health_goes_all_the_way_round_and_names_the_sick_part(rig: Rig) -> None:
    answering = threading.Event()

    def answer() -> None:
        while not answering.wait(0.01):
            for message in rig.port.recv():
                assert isinstance(message, ControlRequest)
                rig.port.push_result(message.route, b"{}")

    def ask(timeout: float) -> Health:
        answering.clear()
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            return asyncio.run(rig.front.health(timeout))
        finally:
            answering.set()
            thread.join()

    well = ask(60)
    assert well.healthy, well
    assert all(took is not None for took in well.round_trip_ms)
    pid = rig.kill_shard(1, signal.SIGSTOP)
    ill = ask(0.5)
    os.kill(pid, signal.SIGCONT)
    assert not ill.healthy
    assert [part.split(":")[0] for part in ill.sick] == ["shard 1"]
    assert ill.round_trip_ms[0] is not None
    assert ill.round_trip_ms[1] is None
    rig.port.close()
    until("no scheduler", lambda: _refused(rig))
    gone = asyncio.run(rig.front.health(0.5))
    assert [part.split(":")[0] for part in gone.sick] == ["scheduler 0"]


def test_rows_pushed_before_a_shard_ran_are_not_lost(rig: Rig) -> None:
    """The step ring keeps what nobody has read yet."""
    streams = rig.submit(4)
    pids = [rig.kill_shard(shard, signal.SIGSTOP) for shard in (0, 1)]
    for token in (ids := rig.encode(TEXT)):
        rig.push(streams, [token])
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    rig.push(streams, [], FinishReason.length(len(ids)))
    assert {rest_of(stream)[0] for stream in streams} == {TEXT}
