"""The board and the instance: made once, found by name, read by anyone, removed when nobody lives."""

import fcntl
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from outfeed.ring import Doorbell, Ring, segment
from outfeed.ring.board import COUNTERS, Board, InstanceConfig, Phase, Role, State
from outfeed.ring.errors import BadCapacity, LockHeld, NoRoom, NotARing, OtherNamespace, WrongVersion
from outfeed.ring.instance import (
    LOOK_EVERY_NS,
    Instance,
    InstanceGone,
    InstanceRunning,
    leftovers,
    running,
    sweep_dead,
)
from outfeed.ring.names import (
    PREFIX,
    BadInstanceName,
    check_instance,
    doorbell_name,
    segment_name,
    split_name,
)
from outfeed.ring.owner import Owner

from tests.eventually import until
from tests.limits import locks

NUMBERS = itertools.count()
LAUNCHER = 4  # the word of the header that names it


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


def scribbled(word: int) -> list[int]:
    """What a word may become: wiped, all ones, one bit of it another, a number, a bit of garbage."""
    return [0, (1 << 64) - 1, word ^ 1, word ^ 1 << 63, 3, 4, 0x9E3779B97F4A7C15]


def test_a_word_of_a_row_that_is_written_over_stops_nobody_and_is_set_right(instance: Instance) -> None:
    seen = Instance.attach(instance.name)
    mine, theirs = instance.board.row(Role.READER, 1), seen.board.row(Role.READER, 1)
    mine.count_replacement()
    mine.claim(State.RUNNING)
    for number, name in enumerate(COUNTERS, 1):
        mine.put(name, number)
    owner, before = mine.owner, list(mine._words[mine._base : mine._base + 32])
    assert before[31] == before[0] != 0
    for at, value in [(at, value) for at, was in enumerate(before) for value in scribbled(was)]:
        theirs._words[theirs._base + at] = value
        assert theirs.serving, f"word {at} is {value:#x}"
        assert theirs.holder == (owner, 1)
        mine.beat()
        after = list(theirs._words[theirs._base : theirs._base + 32])
        assert (after[:1], after[2:]) == (before[:1], before[2:]), f"word {at} was {value:#x}"
        assert before[1] <= after[1] <= time.monotonic_ns()
    seen.close()


def test_whose_a_row_was_stays_known_when_one_of_its_words_is_written_over(instance: Instance) -> None:
    gone = subprocess.Popen(["sleep", "60"])
    owner = Owner.of(gone.pid)
    gone.kill()
    gone.wait()
    assert owner is not None
    row = instance.board.row(Role.SHARD, 0)
    for at in (0, 31):
        row._words[row._base] = row._words[row._base + 31] = owner.pack()
        row._words[row._base + at] = 0
        assert (row.owner, row.alive, row.trouble()) == (owner, False, "has died")


def test_the_launcher_knows_its_phase_by_itself(instance: Instance) -> None:
    seen = Instance.attach(instance.name)
    instance.board.phase = Phase.DRAINING
    seen.board.phase = Phase.STARTING
    assert instance.board.phase == Phase.DRAINING
    instance.board.keep()
    assert seen.board.phase == Phase.DRAINING
    seen.close()


def test_every_process_has_a_row_of_its_own() -> None:
    made = Instance.create(config(shards=3, readers=2, ranks=4))
    rows = [row for role in Role for row in made.board.rows(role)]
    assert [(row._base - rows[0]._base) // 32 for row in rows] == list(range(1 + 4 + 3 + 2))
    assert {row.trouble() for row in rows} == {"is not running"}
    made.remove()
    made.close()


def test_the_launcher_beats_for_a_shard_that_it_is_about_to_fork(instance: Instance) -> None:
    row = instance.board.row(Role.SHARD, 1)
    row.beat()
    assert 0 < row.heartbeat_ns <= time.monotonic_ns()
    assert row.owner is None, "whose row it was is left alone"


def test_a_word_of_header_or_configuration_that_is_written_over_ends_no_instance(instance: Instance) -> None:
    instance.board.phase = Phase.RUNNING
    instance.board.row(Role.LAUNCHER).claim(State.RUNNING)
    seen = Instance.attach(instance.name)
    length = len(msgspec.json.encode(instance.config))
    words = [*range(7), *range(512, 512 + length // 8)]
    before = {at: seen.board._words[at] for at in words}
    for at, value in [(at, value) for at, was in before.items() for value in scribbled(was)]:
        seen.board._words[at] = value
        seen._look_again = 0
        assert seen.alive, f"word {at} is {value:#x}"
        assert (seen.board.phase, instance.board.phase) == (Phase.RUNNING, Phase.RUNNING)
        with suppress(NotARing, WrongVersion, OtherNamespace):  # or the same as ever
            board = Board.attach(instance.name)
            assert board.config == instance.config, f"word {at} is {value:#x}"
            board.close()
        seen.board.keep()  # it is not its to keep
        instance.board.keep()
        assert {at: seen.board._words[at] for at in words} == before
    seen.close()


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
        (4110, b"x", NotARing),
    ],
    ids=[
        "magic",
        "version",
        "rows",
        "config length",
        "pid namespace",
        "config not UTF-8",
        "config not an object",
        "config of another instance",
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
        assert row.get(name) == 3, "it knows by itself how far it had counted"
        row.put(name, 5)
        assert row.get(name) == 5
    row.count_replacement()
    assert row.epoch == 1, "a process that takes a place over must see that it does"
    assert row.state == State.UNKNOWN
    after = instance.board.row(role)  # of who takes its place
    for at in (3, 29, 30):
        after._words[after._base + at] = (1 << 64) - 1
    after.count_replacement()
    after.count("bad_frames")
    assert (after.epoch, after.get("bad_frames")) == (1, 6)


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


@pytest.fixture
def straggler() -> Iterator[Ring]:
    """What this process has of an instance whose launcher was killed; without it any start would sweep it."""
    wanted, made = config(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with Instance.create(wanted).step():
                os.write(made[1], b"m")
                signal.pause()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(made[1])
    assert os.read(made[0], 1) == b"m"
    os.close(made[0])
    ring = Ring.attach(segment_name(wanted.instance, "step"))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    yield ring
    ring.close()
    segment.sweep(segment_name(wanted.instance, ""))


def of(ring: Ring) -> str:
    return ring.name.removeprefix(PREFIX).removesuffix(".step")


def test_a_dead_instance_is_nobodys_once_the_last_process_let_go_of_it(straggler: Ring) -> None:
    instance = of(straggler)
    with pytest.raises(InstanceGone, match=f"instance '{instance}' is dead: its launcher") as refused:
        Instance.attach(instance)
    board = segment_name(instance, "board")
    until(f"the board to be free, while {refused!r} is held", lambda: not segment.in_use(board))
    assert instance in running()
    assert instance not in sweep_dead()
    assert Path("/dev/shm", board).exists()
    straggler.close()
    until("nobody to have it", lambda: instance not in running())
    until("it to be swept", lambda: (sweep_dead(), leftovers(instance))[1] == [])


def test_a_start_waits_for_processes_that_notice_later_that_their_launcher_is_dead(
    straggler: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            straggler.close()

    monkeypatch.setattr(time, "sleep", nap)
    again = Instance.create(config(instance=of(straggler)))
    again.remove()
    again.close()


def test_a_process_that_never_lets_go_of_a_dead_instance_is_an_error_that_names_what_it_has(
    straggler: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outfeed.ring.instance.STRAGGLERS_S", 0.0)
    instance = of(straggler)
    with pytest.raises(InstanceRunning, match=rf"dead, but .*fuser -v /dev/shm/outfeed-{instance}\.\*"):
        Instance.create(config(instance=instance))


def test_a_live_instance_is_refused_at_once(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    attach, looks = Instance.attach, list[str]()

    def look(name: str) -> Instance:
        looks.append(name)
        return attach(name)

    monkeypatch.setattr(Instance, "attach", look)
    before = locks()
    with pytest.raises(InstanceRunning, match="is running already") as refused:
        Instance.create(instance.config)
    assert locks() == before, f"while {refused!r} is held"
    assert len(looks) == 2, "once to see whether it is worth waiting, once to say whose it is"


def test_nothing_is_made_or_removed_while_another_has_the_register(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outfeed.ring.instance.LONGEST_REGISTER_S", 0.0)
    before, wanted = leftovers(instance.name), config()
    shm = segment.folder()
    fcntl.flock(shm, fcntl.LOCK_SH)
    for attempt in (lambda: Instance.create(wanted), instance.remove, sweep_dead):
        with pytest.raises(LockHeld, match=r"^/dev/shm: "):
            attempt()
    os.close(shm)
    assert (leftovers(instance.name), leftovers(wanted.instance)) == (before, [])


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError("not so")])
def test_whatever_ends_the_making_of_an_instance_leaves_nothing_and_is_said_as_it_is(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(_: InstanceConfig) -> Board:
        raise error

    monkeypatch.setattr(Board, "create", fail)
    monkeypatch.setattr("outfeed.ring.instance.free_bytes", lambda: 0)
    wanted = config()
    with pytest.raises((KeyboardInterrupt, ValueError)):
        Instance.create(wanted)
    assert leftovers(wanted.instance) == []


def test_who_asks_for_an_instance_where_none_runs_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outfeed.ring.instance.running", list)
    with pytest.raises(InstanceGone, match=r"no instance 'nobody' is running \(running: none\)"):
        Instance.attach("nobody")


def test_an_instance_that_names_no_launcher_is_gone(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, before = Instance.attach(instance.name), time.monotonic_ns()
    assert seen.alive
    assert before + LOOK_EVERY_NS <= seen._look_again <= time.monotonic_ns() + LOOK_EVERY_NS
    seen.board._words[LAUNCHER] = 0
    with pytest.raises(InstanceGone, match="is dead"):
        Instance.attach(instance.name)
    monkeypatch.setattr(
        "outfeed.ring.instance.time", SimpleNamespace(monotonic_ns=lambda: seen._look_again - 1)
    )
    assert seen.alive, "it does not look every time"
    monkeypatch.undo()
    seen._look_again = 0
    assert not seen.alive
    instance.board.keep()
    seen._look_again = 0
    assert seen.alive
    monkeypatch.setattr(Owner, "alive", lambda _: False)
    seen._look_again = 0
    assert not seen.alive
    seen.close()


@pytest.mark.parametrize("board_too", [False, True])
def test_a_launcher_lets_go_of_the_rings_once_others_have_them(instance: Instance, board_too: bool) -> None:
    board = segment_name(instance.name, "board")
    names = [name for name in leftovers(instance.name) if name != board]
    assert len(names) == 5
    assert all(map(segment.in_use, names))
    inodes = {str(Path("/dev/shm", name).stat().st_ino) for name in names}
    instance.close() if board_too else instance.close_rings()
    until("the rings to be free", lambda: not any(map(segment.in_use, names)))
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert not inodes & {line.split()[4] for line in maps if " /dev/shm/" in line}
    if not board_too:
        assert segment.in_use(board)


def test_a_ring_has_lanes_for_who_writes_it_and_cursors_for_who_reads_it() -> None:
    sizes = {
        "request_bytes": 1 << 13,
        "control_bytes": 1 << 14,
        "step_bytes": 1 << 15,
        "egress_bytes": 1 << 16,
    }
    made = Instance.create(config(shards=3, readers=2, ranks=4, **sizes))
    with made.request() as request, made.control() as control, made.step() as step, made.egress(1) as egress:
        shapes = [(ring.lanes, ring.consumers, ring.capacity) for ring in (request, control, step, egress)]
        assert shapes == [(2, 1, 1 << 13), (2, 3, 1 << 14), (4, 3, 1 << 15), (3, 1, 1 << 16)]
        assert egress.name.endswith("egress1")
    made.remove()
    made.close()


def test_a_removed_instance_leaves_the_doorbells_of_the_living(instance: Instance) -> None:
    mine = Doorbell.create(instance.bell(Role.READER, 0))
    segment.create(instance.bell(Role.READER, 1), 256, lambda _: None).close()
    with instance.step() as step:
        instance.remove()
        assert leftovers(instance.name) == [mine.name]
        assert step.stats().lanes[0].frames == 0
    mine.close()
