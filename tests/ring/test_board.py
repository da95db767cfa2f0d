"""The board and the instance: made once, found by name, read by anyone, removed when nobody lives."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from outfeed.ring import Ring
from outfeed.ring.board import COUNTERS, Board, InstanceConfig, Phase, Role, State
from outfeed.ring.errors import BadCapacity, NoRoom, NotARing, OtherNamespace, WrongVersion
from outfeed.ring.instance import (
    Instance,
    InstanceGone,
    InstanceRunning,
    leftovers,
    running,
    sweep_dead,
)
from outfeed.ring.names import BadInstanceName, check_instance, doorbell_name, segment_name, split_name

NUMBERS = itertools.count()


def config(**more: object) -> InstanceConfig:
    small = {f"{ring}_bytes": 1 << 16 for ring in ("request", "control", "step", "egress")}
    values = {"instance": f"t-board-{os.getpid()}-{next(NUMBERS)}", "tokenizer": "none", **small, **more}
    return InstanceConfig(**values)  # type: ignore[arg-type]


@pytest.fixture
def instance() -> Iterator[Instance]:
    made = Instance.create(config(shards=3, readers=2))
    yield made
    made.remove()
    made.close()


def test_names_lead_back_to_their_instance() -> None:
    assert split_name(segment_name("a-1", "step")) == ("a-1", "step")
    assert split_name(doorbell_name("a-1", "shard0")) == ("a-1", "bell-shard0")
    assert split_name("outfeed-UPPER.step") is None
    assert split_name("psm_1234") is None


@pytest.mark.parametrize("name", ["", "A", "-a", "a b", "a/b", "a.b", "x" * 33, "ä", "a\n"])
def test_an_unusable_instance_id_is_refused(name: str) -> None:
    with pytest.raises(BadInstanceName, match="a-z, 0-9"):
        check_instance(name)


def test_another_process_sees_what_the_instance_is(instance: Instance) -> None:
    seen = Instance.attach(instance.name)
    assert seen.config == instance.config
    assert seen.alive
    assert seen.board.phase == Phase.STARTING
    seen.close()


def test_a_row_belongs_to_its_process_and_is_read_by_all(instance: Instance) -> None:
    seen = Instance.attach(instance.name)
    row = instance.board.row(Role.SHARD, 2)
    assert seen.board.row(Role.SHARD, 2).owner is None
    row.claim(State.RUNNING)
    for number, name in enumerate(COUNTERS):
        row.count(name, number)
    there = seen.board.row(Role.SHARD, 2)
    assert there.alive
    assert there.state == State.RUNNING
    assert [there.get(name) for name in COUNTERS] == list(range(len(COUNTERS)))
    assert not any(seen.board.row(Role.SHARD, other).get(name) for other in (0, 1) for name in COUNTERS)
    seen.close()


def test_a_heartbeat_says_again_whose_the_row_is(instance: Instance) -> None:
    mine, theirs = instance.board.row(Role.READER, 0), instance.board.row(Role.SHARD, 1)
    mine.claim(State.RUNNING)
    owner = mine.owner
    mine._words[mine._base] = (1 << 64) - 1
    assert not mine.alive
    mine.beat()
    assert (mine.owner, mine.alive) == (owner, True)
    # The launcher beats for a shard that it is about to fork: whose row it was is left alone.
    theirs.beat()
    assert theirs.owner is None


def test_an_instance_has_just_the_processes_it_was_started_with(instance: Instance) -> None:
    assert [len(instance.board.rows(role)) for role in Role] == [1, 1, 3, 2]
    with pytest.raises(IndexError, match=r"3 shard process\(es\), no number 3"):
        instance.board.row(Role.SHARD, 3)


@pytest.mark.parametrize("what", ["shards", "readers", "ranks"])
def test_an_instance_that_nobody_could_attach_to_is_not_made(what: str) -> None:
    wanted = config(**{what: 65})
    with pytest.raises(ValueError, match=rf"<= 64.*{what}"):
        Instance.create(wanted)
    assert leftovers(wanted.instance) == []


def test_a_second_instance_of_the_same_name_is_refused(instance: Instance) -> None:
    with pytest.raises(InstanceRunning, match=f"launcher pid {os.getpid()}"):
        Instance.create(instance.config)
    assert instance.name in running()


def test_an_instance_that_is_not_there_is_named_with_those_that_are(instance: Instance) -> None:
    with pytest.raises(InstanceGone, match=f"no instance 'nobody'.*{instance.name}"):
        Instance.attach("nobody")


def test_a_sweep_leaves_the_living_alone(instance: Instance) -> None:
    before = leftovers(instance.name)
    assert instance.name not in sweep_dead()
    assert leftovers(instance.name) == before


def test_what_a_killed_launcher_left_is_found_and_removed_by_the_next() -> None:
    wanted = config()
    code = (
        "import os, signal, sys, msgspec; from outfeed.ring.instance import Instance;"
        "from outfeed.ring.board import InstanceConfig;"
        "i = Instance.create(msgspec.json.decode(sys.argv[1], type=InstanceConfig));"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, msgspec.json.encode(wanted).decode()], check=False)
    assert leftovers(wanted.instance)
    with pytest.raises(InstanceGone, match="is dead"):
        Instance.attach(wanted.instance)
    again = Instance.create(wanted)
    again.remove()
    again.close()
    assert leftovers(wanted.instance) == []


def test_an_instance_that_cannot_fit_leaves_nothing() -> None:
    wanted = config(egress_bytes=1 << 30, readers=64, shards=64)
    with pytest.raises((NoRoom, BadCapacity)):
        Instance.create(wanted)
    assert leftovers(wanted.instance) == []


@pytest.mark.parametrize(
    ("at", "value", "error"),
    [
        (0, b"NOTABORD", NotARing),
        (8, (99).to_bytes(4, "little"), WrongVersion),
        (12, (8).to_bytes(4, "little"), NotARing),
        (16, (1 << 31).to_bytes(4, "little"), NotARing),
        (48, (4026531836).to_bytes(8, "little"), OtherNamespace),
        (4096, b"\xff\xff\xff", NotARing),
        (4096, b"[1,2,", NotARing),
    ],
    ids=[
        "magic",
        "version",
        "rows",
        "config length",
        "pid namespace",
        "config not UTF-8",
        "config not an object",
    ],
)
def test_a_damaged_board_is_refused(
    instance: Instance, at: int, value: bytes, error: type[Exception]
) -> None:
    path = Path("/dev/shm") / segment_name(instance.name, "board")
    with path.open("r+b") as file:
        file.seek(at)
        file.write(value)
    with pytest.raises(error, match="board"):
        Board.attach(instance.name)


def test_words_nobody_defined_read_as_failed_and_stopping(instance: Instance) -> None:
    path = Path("/dev/shm") / segment_name(instance.name, "board")
    with path.open("r+b") as file:
        file.seek(40)
        file.write(b"\xff" * 8)
        file.seek(65536 + 2 * 256 + 16)
        file.write(b"\xff" * 8)
    assert instance.board.phase == Phase.STOPPING
    assert instance.board.row(Role.SHARD, 0).state == State.FAILED


@pytest.mark.parametrize("role", Role)
def test_words_that_were_scribbled_over_can_still_be_counted_on(instance: Instance, role: Role) -> None:
    """Whoever adds to a word does not go down with it."""
    row = instance.board.row(role)
    row.claim(State.RUNNING)
    path = Path("/dev/shm") / segment_name(instance.name, "board")
    with path.open("r+b") as file:
        file.seek(row._base * 8 + 8)
        file.write(b"\xff" * (256 - 8))
    for name in COUNTERS:
        row.count(name, 3)
        assert row.get(name) == 2
        row.put(name, 5)
        assert row.get(name) == 5
    row.count_replacement()
    assert row.epoch == 1, "a process that takes a place over must see that it does"
    assert row.state == State.FAILED


def test_an_instance_without_room_tells_what_was_free_before_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not what its own first rings left: an operator compares it with what df says."""
    create = Ring.create
    made: list[str] = []

    def once(name: str, *, lanes: int, consumers: int, capacity: int) -> Ring:
        if made:
            raise NoRoom(f"segment {name!r}", 1 << 40, 5)
        made.append(name)
        return create(name, lanes=lanes, consumers=consumers, capacity=capacity)

    monkeypatch.setattr(Ring, "create", once)
    monkeypatch.setattr("outfeed.ring.instance.free_bytes", lambda: 5 if made else 1000)
    wanted = config(shards=3, readers=2)
    with pytest.raises(NoRoom, match=f"instance {wanted.instance!r} needs .* where 1000 are free") as refused:
        Instance.create(wanted)
    assert refused.value.free == 1000
    assert leftovers(wanted.instance) == []
