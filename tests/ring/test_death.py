"""Death at any point: take-over of lanes and cursors, detaching, forks, and kill -9 at random instants."""

import contextlib
import json
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from outfeed.ring import Consumer, Doorbell, LaneOwned, LaneWriter, Owner, Ring, RingClosed, RingFull, wait

MakeRing = Callable[..., Ring]
ROOT = Path(__file__).resolve().parent.parent.parent


def dying(work: Callable[[], object]) -> int:
    """Run `work` in a forked child that is killed holding what it returned; return its pid, reaped."""
    pid = os.fork()
    if pid == 0:
        held = None
        try:
            held = work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
        del held
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    return pid


def test_a_dead_writers_lane_goes_on_where_its_last_whole_frame_ended(
    make_ring: MakeRing, bell: Doorbell
) -> None:
    ring = make_ring()
    consumer = ring.consumer(0, bell)

    def write_two_and_a_half() -> LaneWriter:
        writer = ring.writer(0)
        writer.write(1, b"one")
        writer.write(2, b"two")
        writer.reserve(100)[:] = b"x" * 100
        return writer

    dying(write_two_and_a_half)
    writer = ring.writer(0)
    writer.write(3, b"three")
    assert [(tag, bytes(body)) for _, tag, body in consumer.read()] == [
        (1, b"one"),
        (2, b"two"),
        (3, b"three"),
    ]
    assert ring.stats().lanes[0].takeovers == 1


def test_a_dead_consumers_unreleased_frames_come_again(
    make_ring: MakeRing, bell: Doorbell, name: str
) -> None:
    ring = make_ring()
    writer = ring.writer(0)
    for tag in range(5):
        writer.write(tag, b"")

    def read_some() -> Consumer:
        consumer = ring.consumer(0, Doorbell.create(f"{name}.bell-child"))
        assert len(consumer.read(limit=2)) == 2
        consumer.release()
        assert len(consumer.read()) == 3
        return consumer

    dying(read_some)
    consumer = ring.consumer(0, bell)
    assert [tag for _, tag, _ in consumer.read()] == [2, 3, 4]
    assert ring.stats().consumers[0].takeovers == 1


def test_a_live_owner_elsewhere_is_refused_and_a_zombie_is_not_alive(make_ring: MakeRing) -> None:
    ring = make_ring()
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        held = ring.writer(0)
        os.write(ready[1], b"r")
        os.read(go[0], 1)
        del held
        os.kill(os.getpid(), signal.SIGKILL)
    os.read(ready[0], 1)
    owner = ring.stats().lanes[0].owner
    assert owner is not None
    assert owner.pid == pid
    with pytest.raises(LaneOwned, match=f"process {pid}, which is alive"):
        ring.writer(0)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # dead, not reaped: a zombie
    assert not owner.alive()
    ring.writer(0).write(1, b"taken over")
    os.waitpid(pid, 0)
    for end in (*ready, *go):
        os.close(end)


def test_a_dead_consumer_can_be_detached_and_frees_the_writers(make_ring: MakeRing, name: str) -> None:
    ring = make_ring()
    dying(lambda: ring.consumer(0, Doorbell.create(f"{name}.bell-child")))
    writer = ring.writer(0)
    for _ in range(4):
        writer.write(1, bytes(1000))
    ring.detach_consumer(0)
    for _ in range(20):
        writer.write(1, bytes(1000))
    assert ring.stats().consumers[0].detached
    assert ring.stats().lanes[0].used == 0


def test_a_cursor_whose_taker_died_while_opening_it_costs_no_lane(
    make_ring: MakeRing, bell: Doorbell
) -> None:
    """Its heads lie many lanes behind, which of an open cursor would be a sign of a corrupt lane."""
    ring = make_ring()
    ring.detach_consumer(0)
    writer = ring.writer(0)
    for _ in range(20):
        writer.write(1, bytes(1000))
    state = 4096 + 512 + 136
    with open(f"/dev/shm/{ring.name}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[state : state + 4] = (2).to_bytes(4, "little")  # killed between its looks at the tails
    with pytest.raises(RingFull):
        writer.write(2, bytes(1000))
    consumer = ring.consumer(0, bell)
    assert consumer.read() == []
    writer.write(3, b"after")
    assert [tag for _, tag, _ in consumer.read()] == [3]
    assert ring.stats().lanes[0].quarantined is None


def test_attaching_again_beside_a_busy_writer_costs_no_lane(make_ring: MakeRing, bell: Doorbell) -> None:
    """With many lanes it takes a while, in which one of them may be written round and round."""
    ring = make_ring(lanes=256)
    ring.detach_consumer(0)

    def write_as_fast_as_can_be() -> None:
        writer = ring.writer(128)
        while True:
            with contextlib.suppress(RingFull):
                writer.write(1, bytes(1008))

    process = multiprocessing.get_context("fork").Process(target=write_as_fast_as_can_be, daemon=True)
    process.start()
    for _ in range(500):
        with ring.consumer(0, bell) as consumer:
            for _ in range(3):
                consumer.read()  # raises CorruptLane if the lane is found so
                consumer.release()
        ring.detach_consumer(0)
    process.kill()
    process.join()


def test_a_reused_pid_is_not_mistaken_for_its_owner() -> None:
    me = Owner.me()
    assert me.alive()
    assert Owner.unpack(me.pack()) == me
    assert not Owner(me.pid, me.start + 1).alive()
    assert Owner.unpack(0) is None
    for word in (1, 1 << 63, (1 << 64) - 1):
        stranger = Owner.unpack(word)
        assert stranger is not None
        assert not stranger.alive()


def test_a_process_that_names_itself_oddly_is_still_recognised() -> None:
    script = (
        "import ctypes\n"
        "ctypes.CDLL(None).prctl(15, b') R 1 (', 0, 0, 0)\n"
        "from outfeed.ring import Owner\n"
        "assert Owner.me().alive()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def _in_child(work: Callable[[], None]) -> None:
    context = multiprocessing.get_context("fork")
    process = context.Process(target=work)
    process.start()
    process.join(30)
    assert process.exitcode == 0


def test_handles_are_refused_in_a_forked_child_and_unharmed_by_it(
    make_ring: MakeRing, bell: Doorbell
) -> None:
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    writer.write(1, b"before")

    def in_child() -> None:
        with pytest.raises(RingClosed, match="forked"):
            writer.write(2, b"from the child")
        with pytest.raises(RingClosed, match="forked"):
            consumer.read()
        with pytest.raises(LaneOwned):
            ring.writer(0)
        writer.close()
        consumer.close()
        assert ring.stats().lanes[0].frames == 1

    _in_child(in_child)
    writer.write(3, b"after")
    assert [tag for _, tag, _ in consumer.read()] == [1, 3]


@pytest.mark.parametrize("how", ["closed", "forked"])
def test_no_call_of_a_handle_that_is_refused_does_anything(
    make_ring: MakeRing, bell: Doorbell, how: str
) -> None:
    ring = make_ring()
    writer, consumer = ring.writer(0), ring.consumer(0, bell)
    writer.write(1, b"read before")
    consumer.read()
    writer.reserve(4)
    calls: list[Callable[[], object]] = [
        lambda: writer.write(2, b""),
        lambda: writer.commit(2, 4),
        lambda: writer.reserve(4),
        writer.cancel,
        consumer.read,
        consumer.release,
        consumer.tails,
        consumer.pending,
        lambda: wait([consumer], 0.0),
    ]

    def refused() -> None:
        before = ring.stats()
        for call in calls:
            with pytest.raises(RingClosed):
                call()
        assert ring.stats() == before

    if how == "forked":
        _in_child(refused)
    else:
        writer.close()
        consumer.close()
        refused()


def test_a_forked_child_may_use_lanes_of_its_own(make_ring: MakeRing, bell: Doorbell) -> None:
    ring = make_ring(lanes=2)
    first, consumer = ring.writer(0), ring.consumer(0, bell)

    def in_child() -> None:
        with ring.writer(1) as second:
            second.write(9, b"child")

    _in_child(in_child)
    first.write(8, b"parent")
    assert sorted(tag for _, tag, _ in consumer.read()) == [8, 9]


def test_a_writer_parked_for_a_dead_consumer_is_woken_by_the_take_over(
    make_ring: MakeRing, bell: Doorbell, name: str
) -> None:
    ring = make_ring()
    dying(lambda: ring.consumer(0, Doorbell.create(f"{name}.bell-child")))

    def fill_then_wait(writer: LaneWriter) -> None:
        for tag in range(5):
            writer.write(tag, bytes(1000), timeout=30.0)

    context = multiprocessing.get_context("fork")
    process = context.Process(target=lambda: fill_then_wait(ring.writer(0)))
    process.start()
    while not ring.stats().lanes[0].full_events:
        assert process.is_alive()
    consumer, seen = ring.consumer(0, bell), 0
    while seen < 5:
        seen += len(consumer.read())
        consumer.release()
    process.join(30)
    assert process.exitcode == 0


@pytest.mark.parametrize("how", ["taken over", "attached again", "detached"])
def test_who_gets_a_cursor_wakes_every_writer(
    make_ring: MakeRing, bell: Doorbell, name: str, how: str
) -> None:
    """The one before may have died about to wake them; and they may have waited for it alone."""
    ring = make_ring(lanes=3)
    if how == "attached again":
        ring.detach_consumer(0)
    else:
        dying(lambda: ring.consumer(0, Doorbell.create(f"{name}.bell-child")))
    room_parked = slice(4096 + 256, 4096 + 3 * 512, 512)
    with open(f"/dev/shm/{ring.name}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[room_parked] = b"\1\1\1"
        memory[4096 + 3 * 512] = 1  # the one before slept
        consumer = None
        if how == "detached":
            ring.detach_consumer(0)
        else:
            consumer = ring.consumer(0, bell)
        assert memory[room_parked] == bytes(3)
        assert memory[4096 + 3 * 512] == 0
        if consumer is not None:
            memory[4096 + 3 * 512] = 1
            consumer.close()
            assert memory[4096 + 3 * 512] == 0


def test_who_takes_a_lane_over_rings_for_every_cursor(make_ring: MakeRing, bell: Doorbell, name: str) -> None:
    """The one before may have cleared a flag and died before it rang."""
    ring = make_ring(consumers=2)
    with Doorbell.create(f"{name}.bell-second") as second:
        consumers = [ring.consumer(index, one) for index, one in enumerate((bell, second))]
        dying(lambda: ring.writer(0))
        with open(f"/dev/shm/{ring.name}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory[4096 + 256] = 1  # the one before slept
            ring.writer(0)
            assert memory[4096 + 256] == 0
        for one in (bell, second):
            assert Path(f"/dev/shm/{one.name}").read_bytes()[128] == 1
        del consumers


def test_kill_9_at_random_instants_loses_and_doubles_nothing() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "stress.py"), "ring", "--kills-only", "--json"]
    done = subprocess.run(
        [*command, "--seconds", "4", "--seed", "3"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] > 10
    assert found["sent"] == found["received"] + found["queued"] > 0
    assert (found["lost"], found["doubled"], found["corrupt"], found["hung"]) == (0, 0, 0, 0)


def ring_and_die(name: str) -> None:
    """Leave a doorbell behind, as a killed process does."""

    def ring() -> Doorbell:
        bell = Doorbell.create(name)
        bell.ring()
        return bell

    dying(ring)


def test_a_dead_processs_doorbell_is_adopted_without_needing_room(name: str) -> None:
    """A full /dev/shm must not keep a replacement from starting: nothing new is made."""
    ring_and_die(name)
    left = Path(f"/dev/shm/{name}").stat().st_ino
    with Doorbell.create(name):
        assert Path(f"/dev/shm/{name}").stat().st_ino == left
    assert not Path(f"/dev/shm/{name}").exists()


@pytest.mark.parametrize("left", [b"", b"x", bytes(256), b"\xa5" * 256, b"OUTFBELL"])
def test_what_is_no_doorbell_is_replaced(name: str, left: bytes) -> None:
    path = Path(f"/dev/shm/{name}")
    path.touch(mode=0o600)
    path.write_bytes(left)
    with Doorbell.create(name):
        assert path.read_bytes()[:8] == b"OUTFBELL"
        assert path.stat().st_size == 256


@pytest.fixture
def rival() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Run something in a process that then lives, holding what it got, to the end of the test."""
    pids: list[int] = []

    def start(work: Callable[[], object]) -> None:
        ready, done = os.pipe()
        pid = os.fork()
        if pid == 0:
            held = work()
            os.write(done, b"r")
            signal.pause()
            del held
            os._exit(0)
        pids.append(pid)
        assert os.read(ready, 1) == b"r"
        os.close(ready)
        os.close(done)

    yield start
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_doorbell_goes_to_one_of_two_successors(
    name: str, rival: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes it between this one's look at its dead owner and its claim."""
    ring_and_die(name)
    alive = Owner.alive

    def lose_the_race(owner: Owner) -> bool:
        monkeypatch.setattr(Owner, "alive", alive)
        rival(lambda: Doorbell.create(name))
        return False

    monkeypatch.setattr(Owner, "alive", lose_the_race)
    with pytest.raises(LaneOwned, match="belongs to a live process"):
        Doorbell.create(name)
    assert Path(f"/dev/shm/{name}").exists()  # the winner's is not taken from it


@pytest.mark.parametrize("what", ["lane", "cursor", "detached cursor"])
def test_a_lane_or_cursor_goes_to_one_of_two_successors(
    make_ring: MakeRing,
    bell: Doorbell,
    rival: Callable[[Callable[[], object]], None],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    """Another process takes it between this one's look at its dead owner and its claim."""
    ring, alive = make_ring(), Owner.alive

    def take() -> object:
        return ring.writer(0) if what == "lane" else ring.consumer(0, Doorbell.create(f"{bell.name}-rival"))

    def lose_the_race(owner: Owner) -> bool:
        monkeypatch.setattr(Owner, "alive", alive)
        rival(take)
        return False

    dying(take)
    monkeypatch.setattr(Owner, "alive", lose_the_race)
    attempts: dict[str, Callable[[], object]] = {
        "lane": lambda: ring.writer(0),
        "cursor": lambda: ring.consumer(0, bell),
        "detached cursor": lambda: ring.detach_consumer(0),
    }
    with pytest.raises(LaneOwned, match=r"process \d+, which is alive"):
        attempts[what]()
    stats = ring.stats()
    owner = stats.lanes[0].owner if what == "lane" else stats.consumers[0].owner
    assert owner is not None
    assert owner.alive(), "the winner has it still"
    assert not stats.consumers[0].detached


def test_a_forked_child_that_outlives_its_parent_does_not_keep_the_doorbell(name: str) -> None:
    ready, done = os.pipe()
    parent = os.fork()
    if parent == 0:
        bell = Doorbell.create(name)
        child = os.fork()
        if child == 0:
            signal.pause()
        os.write(done, child.to_bytes(8, "little"))
        signal.pause()
        del bell
        os._exit(0)
    child = int.from_bytes(os.read(ready, 8), "little")
    try:
        with pytest.raises(LaneOwned, match=f"live process \\({parent}\\)"):
            Doorbell.create(name)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        with Doorbell.create(name) as bell:
            bell.ring()
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(ready)
        os.close(done)
