"""A shard as a process: it comes up in an instance, decodes, costs little, and ends when told."""

import io
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from outfeed.ring import Doorbell, logs
from outfeed.ring.batch import Batch, decode_batch, encode_batch
from outfeed.ring.board import COUNTERS, Phase, Role, State
from outfeed.ring.frames import DecodeOptions, Register, Restored, Result, Tag, Takeover, decode, encode
from outfeed.ring.instance import Instance, leftovers
from outfeed.ring.names import segment_name
from outfeed.ring.owner import Owner
from outfeed.ring.route import make_route
from outfeed.ring.segment import unlink
from outfeed.shards.decoder import DecoderStatistics
from outfeed.shards.egress import ShardStatistics
from outfeed.shards.shard import _Life, run_shard
from outfeed.shards.supervisor import fork_child
from outfeed.shards.table import TokenTable

from tests.eventually import until
from tests.instances import small_config

SHARDS = 2


@pytest.fixture
def instance(
    table_of: Callable[[str], TokenTable], tokenizer_path: Callable[[str], Path]
) -> Iterator[Instance]:
    tokenizer = str(tokenizer_path("deepseek"))
    made = Instance.create(small_config("shard", lane_bytes=1 << 18, tokenizer=tokenizer, shards=SHARDS))
    table_of("deepseek").share(segment_name(made.name, "tokens"))
    made.board.phase = Phase.RUNNING
    yield made
    made.remove()
    made.close()
    assert leftovers(made.name) == []


@pytest.fixture
def shards(instance: Instance) -> Iterator[list[int]]:
    pids = [fork_child(lambda number=number: run_shard(instance.name, number)) for number in range(SHARDS)]  # type: ignore[misc]
    for number in range(SHARDS):
        row = instance.board.row(Role.SHARD, number)
        until(f"shard {number} to run", lambda row=row: row.state == State.RUNNING)  # type: ignore[misc]
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_rows_go_through_two_shards_each_its_own(instance: Instance, shards: list[int]) -> None:
    routes = [make_route(0, slot % SHARDS, slot, 1) for slot in range(6)]
    with (
        Doorbell.create(instance.bell(Role.READER, 0)) as bell,
        instance.control() as control,
        instance.step() as step,
        instance.egress(0) as egress,
    ):
        reader = egress.consumer(0, bell)
        lane = control.writer(0)
        for route in routes:
            lane.write(Tag.REGISTER, encode(Register(route, "", DecodeOptions(), b"", 0)))
        ones, zeros = np.ones(6, dtype=np.uint32), np.zeros(6, dtype=np.uint32)
        ids = np.full(6, 1000, dtype=np.int32)
        column = np.array(routes, dtype=np.uint64)
        step.writer(0).write(Tag.BATCH, *encode_batch(1, column, zeros, ones, zeros, ids), timeout=10)
        got: list[Batch] = []

        def all_there() -> bool:
            got.extend(decode_batch(bytes(body)) for _, tag, body in reader.read() if tag == Tag.BATCH)
            reader.release()
            return sum(batch.rows for batch in got) == 6

        until("all rows", all_there)
    assert sorted(route for batch in got for route in batch.routes.tolist()) == sorted(routes)
    until(
        "six tokens on the board",
        lambda: sum(row.get("tokens") for row in instance.board.rows(Role.SHARD)) == 6,
    )
    assert all(row.get("table") == 1 for row in instance.board.rows(Role.SHARD))


def test_each_count_of_a_shard_is_on_the_board_under_its_own_name(instance: Instance) -> None:
    row = instance.board.row(Role.SHARD, 0)
    decoded = DecoderStatistics(rows=1, tokens=2, doubled=3, ended=4, stopped=5, stale_rows=14)
    seen = ShardStatistics(steps=6, controls=7, waits=9, wakes=10, errors=11, corrupt_lanes=15, no_reader=16)
    loop: Any = SimpleNamespace(
        statistics=seen, decoder=SimpleNamespace(statistics=decoded, live=12), cut_off={0, 4}
    )
    _Life(instance, row).report(loop)
    assert {name: value for name in COUNTERS if (value := row.get(name))} == {
        "frames": 13,
        "rows": 1,
        "tokens": 2,
        "live": 12,
        "ended": 4,
        "stopped": 5,
        "doubled_rows": 3,
        "stale_rows": 14,
        "errors": 11,
        "full": 9,
        "wakes": 10,
        "corrupt_lanes": 15,
        "no_reader": 16,
        "cut_off": 0b10001,  # a bit for each reader
    }


def test_a_reader_that_was_taken_for_dead_is_asked_for_what_it_has(
    instance: Instance, shards: list[int]
) -> None:
    """Its whole row was written over until its next heartbeat: the shard has forgotten its requests."""
    mine, shard = instance.board.row(Role.READER, 0), instance.board.row(Role.SHARD, 0)
    mine.claim(State.RUNNING)
    nobody = Owner.of(shards[0])
    assert nobody is not None
    asked: list[Takeover] = []
    with (
        Doorbell.create(instance.bell(Role.READER, 0)) as bell,
        instance.control() as control,
        instance.egress(0) as egress,
    ):
        reader, lane = egress.consumer(0, bell), control.writer(0)

        def is_asked() -> bool:
            for number, tag, body in reader.read():
                message = decode(tag, body)
                assert isinstance(message, Takeover)
                asked.extend([message] if number == 0 else ())  # the other shard may have seen it, too
            reader.release()
            return bool(asked)

        lane.write(Tag.REGISTER, encode(Register(make_route(0, 0, 3, 1), "", DecodeOptions(), b"", 0)))
        until("its registration", lambda: shard.get("live") == 1)
        assert not is_asked()
        assert shard.get("bad_frames") == 0
        for at in (0, 31):
            mine._words[mine._base + at] = Owner(nobody.pid, nobody.start + 1).pack()
        until("the shard to forget it", lambda: shard.get("live") == 0)
        mine.beat()
        until("the shard to ask it", is_asked)
        until("a reason for a tally", lambda: shard.get("bad_frames") == 1)
        lane.write(Tag.RESTORED, encode(Restored(0, 0, asked[0].epoch)))
        seen = shard.heartbeat_ns
        until("another look", lambda: shard.heartbeat_ns > seen + 3 * 10**8)
        is_asked()
        assert len(asked) == 1


def test_a_reader_that_seemed_dead_between_two_looks_is_asked_once(instance: Instance) -> None:
    """Frames for it were dropped meanwhile. Its successor had none of them, and is not asked."""
    reader, row = instance.board.row(Role.READER, 0), instance.board.row(Role.SHARD, 0)
    asked: list[int] = []
    loop: Any = SimpleNamespace(doubt=asked.append, forget_reader=lambda reader: None)
    life = _Life(instance, row)
    reader.claim(State.RUNNING)
    life._look_at_readers(loop)
    assert life.lives(0)
    life._look_at_readers(loop)
    assert asked == []
    reader.state = State.STOPPED
    assert not life.lives(0)
    reader.state = State.RUNNING
    for _ in range(2):
        life._look_at_readers(loop)
        assert asked == [0]
    reader.state = State.STOPPED
    assert not life.lives(0)
    successor = Owner.of(os.getppid())
    assert successor is not None
    for at in (0, 31):
        reader._words[reader._base + at] = successor.pack()
    reader.state = State.RUNNING
    assert life.lives(0)
    life._look_at_readers(loop)
    assert asked == [0]


@pytest.mark.parametrize("why", ["no file of its own", "owned"])
def test_a_lane_that_could_not_be_had_is_tried_until_it_can(
    instance: Instance, shards: list[int], why: str
) -> None:
    row = instance.board.row(Role.SHARD, 0)
    egress = Path("/dev/shm") / segment_name(instance.name, "egress0")
    route = make_route(0, 0, 3, 1)

    def held() -> int:
        """Count how often the shard has the reader's ring open; a file may be gone before it is looked at."""
        count = 0
        for file in Path(f"/proc/{shards[0]}/fd").iterdir():
            with suppress(FileNotFoundError):
                count += file.readlink() == egress
        return count

    with instance.control() as control, instance.step() as step, instance.egress(0) as ring:
        if why == "owned":
            owner = ring.writer(0)
        else:
            egress.chmod(0o644)  # a shard takes no segment that others may open
        control.writer(0).write(Tag.REGISTER, encode(Register(route, "", DecodeOptions(), b"", 0)))
        one, zero = np.ones(1, dtype=np.uint32), np.zeros(1, dtype=np.uint32)
        column, ids = np.array([route], dtype=np.uint64), np.array([1000], dtype=np.int32)
        step.writer(0).write(Tag.BATCH, *encode_batch(1, column, zero, one, zero, ids))
        until("the shard to go on without that reader", lambda: row.get("cut_off") == 1)
        before, seen = held(), row.heartbeat_ns  # maybe in the middle of a try, so one more than is kept
        until("several more tries", lambda: row.heartbeat_ns > seen + 10**9)
        until("them to be over, and nothing kept of them", lambda: held() <= before)
        if why == "owned":
            owner.close()
        else:
            egress.chmod(0o600)
        until("the reader to be reached", lambda: row.get("cut_off") == 0)
        assert ring.stats().lanes[0].owner == row.owner
    assert row.get("bad_frames") == 1, "a reason for a tally"


def test_a_shard_lives_for_the_launcher_while_its_decoder_is_at_work(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = instance.board.row(Role.SHARD, 0)

    def works(table: TokenTable, *, readers: int, beat: Callable[[], None]) -> object:
        before = row.heartbeat_ns
        beat()
        raise SystemExit(3 if row.heartbeat_ns > before else 4)

    monkeypatch.setattr("outfeed.shards.shard.Decoder", works)
    pid = fork_child(lambda: run_shard(instance.name, 0))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def test_a_shard_that_ends_gives_back_what_it_wrote(instance: Instance) -> None:
    """Its successor has nothing to take over from the dead. What named no reader was nobody's loss."""
    pid = fork_child(lambda: run_shard(instance.name, 0))
    row = instance.board.row(Role.SHARD, 0)
    until("shard 0 to run", lambda: row.state == State.RUNNING)
    with instance.step() as step, instance.egress(0) as egress:
        lane = step.writer(0)
        for reader in (7, 0):
            lane.write(Tag.RESULT, encode(Result(make_route(reader, 0, 3, 1), b"{}")))
        until("its lane", lambda: egress.stats().lanes[0].owner == row.owner)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert egress.stats().lanes[0].owner is None
    assert (row.get("no_reader"), row.get("cut_off")) == (1, 0)


def test_a_shard_that_decodes_with_the_tokenizer_itself_says_so(
    instance: Instance, table_of: Callable[[str], TokenTable]
) -> None:
    tokens = segment_name(instance.name, "tokens")
    unlink(tokens)
    table_of("wordpiece").share(tokens)
    row = instance.board.row(Role.SHARD, 0)
    row.put("table", 7)
    pid = fork_child(lambda: run_shard(instance.name, 0))
    until("shard 0 to run", lambda: row.state == State.RUNNING)
    assert row.get("table") == 0
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_further_shard_has_little_memory_of_its_own(shards: list[int]) -> None:
    """The table is shared and no tokenizer is loaded: 25 MB is the promise, a fifth of it the custom."""
    lines = Path(f"/proc/{shards[1]}/smaps_rollup").read_text().splitlines()
    private = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    assert private < 25 * 1024


def test_a_shard_ends_with_its_instance(instance: Instance) -> None:
    pid = fork_child(lambda: run_shard(instance.name, 0))
    until("shard 0 to run", lambda: instance.board.row(Role.SHARD, 0).state == State.RUNNING)
    instance.board.phase = Phase.STOPPING
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert instance.board.row(Role.SHARD, 0).state == State.STOPPED


def test_a_shard_that_is_told_to_end_while_it_takes_over_ends_well(
    instance: Instance, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its reader lives and never says RESTORED: the shard waits for that when SIGTERM comes."""
    instance.board.row(Role.READER, 0).claim(State.RUNNING)
    shard = instance.board.row(Role.SHARD, 0)
    shard.count_replacement()
    with Doorbell.create(instance.bell(Role.READER, 0)) as bell, instance.egress(0) as egress:
        reader = egress.consumer(0, bell)
        pid = fork_child(lambda: run_shard(instance.name, 0))
        until("its TAKEOVER", lambda: [tag for _, tag, _ in reader.read()] == [Tag.TAKEOVER])
        assert shard.state != State.RUNNING, "not yet"
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert shard.state == State.STOPPED
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("broken", ["stdout", "stderr", "logging"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_child_never_comes_back_from_its_fork(broken: str, fails: bool) -> None:
    """Whatever cannot be written at its end: it would run on as a second launcher."""

    def main() -> None:
        if broken == "logging":
            logging.shutdown = refuse  # type: ignore[assignment]
        else:
            setattr(sys, broken, Broken())
        if fails:
            raise RuntimeError("main failed")

    before = os.getpid()
    try:
        pid = fork_child(main)
        assert os.getpid() == before
    except BaseException:
        if os.getpid() != before:
            os._exit(99)  # this very test, run on in the child
        raise
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (1 if fails else 0)


def test_a_child_says_all_it_has_to_say_before_it_ends(capfd: pytest.CaptureFixture[str]) -> None:
    """Printed, kept back by the log, and what it fails of."""

    def main() -> None:
        print("printed", end="")
        logs.start("child")
        for again in range(3):
            logging.getLogger("fault").error("fault %d", again)
        raise RuntimeError("main failed")

    assert os.waitstatus_to_exitcode(os.waitpid(fork_child(main), 0)[1]) == 1
    out, err = capfd.readouterr()
    assert out == "printed"
    assert 'event="fault 2"' in err
    assert "RuntimeError: main failed" in err


def test_what_a_child_is_told_its_parent_does_not_hear() -> None:
    """A launcher that asks a shard to end is not asked itself: the pipe that wakes it is its own."""
    (heard, hears), (ready, says) = os.pipe(), os.pipe()
    for fd in (heard, hears):
        os.set_blocking(fd, False)

    def main() -> None:
        told: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
        os.write(says, b"!")
        until("a signal", lambda: told)

    before = signal.set_wakeup_fd(hears, warn_on_full_buffer=False)
    try:
        pid = fork_child(main)
    finally:
        signal.set_wakeup_fd(before)
    os.read(ready, 1)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with pytest.raises(BlockingIOError):
        os.read(heard, 1)
    for fd in (heard, hears, ready, says):
        os.close(fd)


def test_a_child_can_be_ended_before_it_has_said_how() -> None:
    """Its parent hears SIGTERM in a way of its own, which is not the child's."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        pid = fork_child(lambda: time.sleep(60))
    finally:
        signal.signal(signal.SIGTERM, before)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


def test_a_child_leaves_ctrl_c_to_its_parent() -> None:
    """A terminal tells the whole group; the parent ends its children in their order."""
    pid = fork_child(lambda: time.sleep(60))
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


class Broken(io.StringIO):
    def flush(self) -> None:
        raise BrokenPipeError("nobody reads this")


def refuse(*_: object) -> None:
    raise OSError("no log can be closed")


def test_a_shard_that_cannot_run_says_why_in_a_line_of_its_log(capfd: pytest.CaptureFixture[str]) -> None:
    pid = fork_child(lambda: run_shard(f"test-none-{os.getpid()}", 0))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "process=shard0" in line
    assert 'event="shard 0 cannot go on: no instance ' in line
    assert "InstanceGone" in line.partition("trace=")[2]
