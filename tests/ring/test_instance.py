"""An instance: made whole or not at all, found by name, removed when nobody lives."""

import fcntl
import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from outfeed.ring import Doorbell, Ring, segment
from outfeed.ring.board import Board, InstanceConfig, Phase, Role
from outfeed.ring.errors import BadCapacity, LockHeld, NoRoom
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
from tests.instances import small_config, unique
from tests.limits import at_most_files, locks

LAUNCHER = 4  # the word of the header that names it


def test_names_lead_back_to_their_instance() -> None:
    assert split_name(segment_name("a-1", "step")) == ("a-1", "step")
    assert split_name(doorbell_name("a-1", "shard0")) == ("a-1", "bell-shard0")
    assert split_name("outfeed-UPPER.step") is None
    assert split_name("psm_1234") is None


@pytest.mark.parametrize("name", ["", "A", "-a", "a b", "a/b", "a.b", "x" * 33, "ä", "a\n"])
def test_an_unusable_instance_id_is_refused(name: str) -> None:
    with pytest.raises(BadInstanceName, match="a-z, 0-9"):
        check_instance(name)


@pytest.mark.parametrize("what", ["shards", "readers", "ranks"])
def test_an_instance_that_nobody_could_attach_to_is_not_made(what: str) -> None:
    wanted = small_config("ring", **{what: 65})
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes another user's files")
@pytest.mark.parametrize("what", ["board", "step"])
def test_what_another_user_has_or_left_is_not_named(instance: Instance, what: str) -> None:
    """Who takes that name for one that runs is refused there: nobody can tell whether it does."""
    theirs = unique("theirs")
    file = Path("/dev/shm", segment_name(theirs, what))
    file.write_bytes(b"theirs")
    os.chown(file, 12345, 12345)
    try:
        assert theirs not in running()
        with pytest.raises(InstanceGone) as refused:
            Instance.attach("nobody")
        assert instance.name in str(refused.value)
        assert theirs not in str(refused.value)
        assert theirs not in sweep_dead()
        assert file.exists()
    finally:
        file.unlink()


def test_a_dead_instance_that_somebody_still_has_open_is_not_named(straggler: Ring) -> None:
    assert of(straggler) not in running()
    with pytest.raises(InstanceGone, match="no instance 'nobody'") as refused:
        Instance.attach("nobody")
    assert of(straggler) not in str(refused.value)


def test_a_sweep_leaves_the_living_alone(instance: Instance) -> None:
    before = leftovers(instance.name)
    assert instance.name not in sweep_dead()
    assert leftovers(instance.name) == before


def made_by_another(wanted: InstanceConfig) -> int:
    """Have a process make an instance, which it has until it is killed; return its pid."""
    made = os.pipe()
    pid = os.fork()
    if pid == 0:
        kept = None
        try:
            kept = Instance.create(wanted)
            os.write(made[1], b"m")
            signal.pause()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
        del kept
    os.close(made[1])
    assert os.read(made[0], 1) == b"m"
    os.close(made[0])
    return pid


def test_what_a_killed_launcher_left_is_found_and_removed_by_the_next() -> None:
    wanted = small_config("ring")
    pid, shm = made_by_another(wanted), segment.folder()
    fcntl.flock(shm, fcntl.LOCK_EX)  # the next may be a start in another test
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(leftovers(wanted.instance)) == 5
    with pytest.raises(InstanceGone, match="is dead"):
        Instance.attach(wanted.instance)
    os.close(shm)
    again = Instance.create(wanted)
    again.remove()
    again.close()
    assert leftovers(wanted.instance) == []


def test_an_instance_that_cannot_fit_leaves_nothing() -> None:
    wanted = small_config("ring", egress_bytes=1 << 30, readers=64, shards=64)
    with pytest.raises((NoRoom, BadCapacity)):
        Instance.create(wanted)
    assert leftovers(wanted.instance) == []


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
    wanted = small_config("ring", shards=3, readers=2)
    with pytest.raises(NoRoom, match=f"instance {wanted.instance!r} needs .* where 1000 are free") as refused:
        Instance.create(wanted)
    assert refused.value.free == 1000
    assert leftovers(wanted.instance) == []


@pytest.fixture
def straggler() -> Iterator[Ring]:
    """What this process has of an instance whose launcher was killed; without it any start would sweep it."""
    wanted = small_config("ring")
    pid = made_by_another(wanted)
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
    assert instance not in sweep_dead()
    assert Path("/dev/shm", board).exists()
    straggler.close()
    until("it to be swept", lambda: (sweep_dead(), leftovers(instance))[1] == [])


def test_a_start_waits_for_processes_that_notice_later_that_their_launcher_is_dead(straggler: Ring) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            straggler.close()
        time.sleep(seconds)

    again = Instance.create(small_config("ring", instance=of(straggler)), nap)
    assert naps[:3] == [0.02] * 3
    again.remove()
    again.close()


def test_a_process_that_never_lets_go_of_a_dead_instance_is_an_error_that_names_what_it_has(
    straggler: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outfeed.ring.instance.STRAGGLERS_S", 0.0)
    instance = of(straggler)
    with pytest.raises(InstanceRunning, match=rf"dead, but .*fuser -v /dev/shm/outfeed-{instance}\.\*"):
        Instance.create(small_config("ring", instance=instance))


def test_a_name_that_no_start_makes_free_is_an_error_that_names_it() -> None:
    wanted = small_config("ring")
    folder = Path("/dev/shm", segment_name(wanted.instance, "step"))
    folder.mkdir()
    with pytest.raises(FileExistsError, match=f"taken.*: end who has it, or remove it.*: '{folder}'"):
        Instance.create(wanted)
    assert folder.is_dir()
    assert leftovers(wanted.instance) == []
    folder.rmdir()


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
    before, wanted = leftovers(instance.name), small_config("ring")
    shm = segment.folder()
    fcntl.flock(shm, fcntl.LOCK_SH)
    for attempt in (lambda: Instance.create(wanted), instance.remove, sweep_dead):
        with pytest.raises(LockHeld, match=r"^/dev/shm: "):
            attempt()
    os.close(shm)
    assert (leftovers(instance.name), leftovers(wanted.instance)) == (before, [])


class Told(Exception):
    """Who waits was told to stop."""


def stop(_: float) -> None:
    raise Told


def test_who_waits_for_others_may_be_told_to_stop(straggler: Ring) -> None:
    with pytest.raises(Told):
        Instance.create(small_config("ring", instance=of(straggler)), stop)
    shm, wanted = segment.folder(), small_config("ring")
    fcntl.flock(shm, fcntl.LOCK_SH)
    for attempt in (lambda: Instance.create(wanted, stop), lambda: sweep_dead(stop)):
        with pytest.raises(Told):
            attempt()
    os.close(shm)
    assert leftovers(wanted.instance) == []


def test_an_instance_that_finds_too_few_files_leaves_nothing() -> None:
    """Not even when there is none left to look at the folder with."""
    wanted = small_config("ring")
    for limit in range(1000):
        made = None
        with suppress(OSError), at_most_files(limit):
            made = Instance.create(wanted)
        if made is not None:
            made.remove()
            made.close()
            assert limit > 10
            return
        assert leftovers(wanted.instance) == []
    pytest.fail("no limit was enough")


def test_a_ring_that_was_made_and_cannot_be_used_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    attached, so_far = Ring.__init__, itertools.count()

    def find_no_memory(ring: Ring, opened: segment.Segment) -> None:
        if next(so_far) == 2:
            raise MemoryError
        attached(ring, opened)

    monkeypatch.setattr(Ring, "__init__", find_no_memory)
    wanted = small_config("ring")
    with pytest.raises(MemoryError):
        Instance.create(wanted)
    assert leftovers(wanted.instance) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError("not so")])
def test_whatever_ends_the_making_of_an_instance_leaves_nothing_and_is_said_as_it_is(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(_: InstanceConfig) -> Board:
        raise error

    monkeypatch.setattr(Board, "create", fail)
    monkeypatch.setattr("outfeed.ring.instance.free_bytes", lambda: 0)
    wanted = small_config("ring")
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
def test_a_launcher_lets_go_of_the_rings_once_others_have_them(board_too: bool) -> None:
    instance = Instance.create(small_config("ring", shards=3, readers=2))
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
    instance.board.close()
    segment.sweep(segment_name(instance.name, ""))


def test_a_ring_has_lanes_for_who_writes_it_and_cursors_for_who_reads_it() -> None:
    sizes = {
        "request_bytes": 1 << 13,
        "control_bytes": 1 << 14,
        "step_bytes": 1 << 15,
        "egress_bytes": 1 << 16,
    }
    made = Instance.create(small_config("ring", shards=3, readers=2, ranks=4, **sizes))
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


def test_who_removes_its_instance_leaves_a_later_one_of_that_name(instance: Instance) -> None:
    """Somebody took it for dead and removed its files by hand, and another was started."""
    for what in leftovers(instance.name):
        segment.unlink(what)
    later = Instance.create(instance.config)
    there = leftovers(instance.name)
    instance.remove()
    assert leftovers(instance.name) == there
    later.remove()
    later.close()
    assert leftovers(instance.name) == []


def test_an_instance_ends_when_its_launcher_begins_to_stop_it(instance: Instance) -> None:
    seen = Instance.attach(instance.name)
    assert seen.alive
    instance.board.phase = Phase.STOPPING
    assert not seen.alive
    instance.remove()
    with pytest.raises(InstanceGone, match=rf"{instance.name!r} has ended: its segment \S+\.step is gone"):
        seen.step()
    seen.close()
