"""A port's life beside what it pushes: what others see of it, and what it leaves to the next one."""

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from outfeed.ring import Ring
from outfeed.ring.board import Phase, Role, State
from outfeed.ring.frames import Abort, Attach, Tag, encode
from outfeed.ring.instance import Instance, InstanceGone
from outfeed.sidecar import LaneOwned, RingFull, SchedulerPort, WriterBusy

from tests.limits import locks

from .conftest import Bench
from .test_port import A, B, generate


@pytest.fixture
def port(bench: Bench) -> Iterator[SchedulerPort]:
    with SchedulerPort.attach(bench.name) as port:
        yield port


def test_it_says_what_the_instance_was_started_with(bench: Bench, port: SchedulerPort) -> None:
    assert port.config == bench.instance.config


CALLS: dict[str, Callable[[SchedulerPort], object]] = {
    "alive": lambda port: port.alive,
    "recv": lambda port: port.recv(),
    "wait": lambda port: port.wait(0),
    "push": lambda port: port.push_tokens([A], [1]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_whatever_a_scheduler_calls_is_its_heartbeat_when_one_is_due(
    bench: Bench, port: SchedulerPort, call: Callable[[SchedulerPort], object]
) -> None:
    bench.send(generate(A))
    port.recv()
    row = bench.instance.board.row(Role.SCHEDULER)
    port._beat_due = 1 << 62
    before = row.heartbeat_ns
    call(port)
    assert row.heartbeat_ns == before
    port._beat_due = 0
    call(port)
    assert before < row.heartbeat_ns < port._beat_due


@pytest.mark.parametrize("ask", ["recv", "wait"])
def test_what_was_received_is_handled_when_the_scheduler_asks_again(bench: Bench, ask: str) -> None:
    bench.send(generate(A), generate(B))
    with SchedulerPort.attach(bench.name) as port:
        assert port.recv(limit=1) == [generate(A)]
        assert port.recv() == [generate(B)] if ask == "recv" else port.wait(60)
    with SchedulerPort.attach(bench.name) as port:
        assert port.recv() == [generate(B)]


def test_another_rank_receives_nothing_and_sleeps_its_waits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.send(generate(A))
    slept: list[float] = []
    with SchedulerPort.attach(bench.name, rank=1) as port:
        monkeypatch.setattr(time, "sleep", slept.append)
        assert not port.wait(0.25)
        assert not port.wait(60)
        assert port.recv() == []
    assert slept == [0.25, 1.0]


def test_a_scheduler_that_is_started_first_waits_for_its_instance(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    attach = Instance.attach

    def not_yet(name: str) -> Instance:
        if len(slept) < 3:
            raise InstanceGone(name)
        return attach(name)

    monkeypatch.setattr(Instance, "attach", not_yet)
    monkeypatch.setattr(time, "sleep", slept.append)
    with SchedulerPort.attach(bench.name, timeout=60) as port:
        assert port.alive
        bench.instance.board.phase = Phase.STOPPING
        assert not port.alive


def test_who_comes_after_another_one_is_counted_as_its_replacement(bench: Bench) -> None:
    row = bench.instance.board.row(Role.SCHEDULER)
    assert row.epoch == 0
    for times in range(3):
        with SchedulerPort.attach(bench.name):
            assert (row.epoch, row.state) == (times, State.RUNNING)
        assert row.state == State.STOPPED


def test_a_port_shows_its_last_counts_when_it_closes(bench: Bench, port: SchedulerPort) -> None:
    bench.send(generate(A), generate(B), Abort(B))
    port.recv()
    port._beat_due = 1 << 62
    port.push_tokens([A], [1, 2], [2])
    row = bench.instance.board.row(Role.SCHEDULER)
    assert (row.get("tokens"), row.get("aborts")) == (0, 1)
    port.close()
    assert (row.get("frames"), row.get("rows"), row.get("tokens")) == (1, 1, 2)


def test_a_port_that_is_closed_uses_nothing_of_the_instance(bench: Bench) -> None:
    """What is mapped goes with the port itself."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(bench.name)

    before = locks(), mapped()
    for rank in (0, 1):
        port = SchedulerPort.attach(bench.name, rank=rank)
        assert (locks(), mapped()) > before
        port.close()
        assert locks() == before[0]
        del port
        assert mapped() == before[1]


@pytest.mark.parametrize(("rank", "why"), [(0, LaneOwned), (2, IndexError)])
def test_who_cannot_attach_uses_nothing_of_the_instance(
    bench: Bench, port: SchedulerPort, rank: int, why: type[Exception]
) -> None:
    before = locks()
    with pytest.raises(why) as refused:
        SchedulerPort.attach(bench.name, rank=rank)
    assert locks() == before, f"while {refused!r} is held, with all that was made"


@pytest.mark.parametrize("ring", ["step", "request"])
def test_who_could_not_attach_may_attach_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, ring: str
) -> None:
    """At once, while it still looks at why."""

    def refused(instance: Instance) -> Ring:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Instance, ring, refused)
        with pytest.raises(OSError, match="Too many open files") as held:
            SchedulerPort.attach(bench.name)
    with SchedulerPort.attach(bench.name) as port:
        assert port.alive
    assert held.value.errno == errno.EMFILE


def test_a_port_in_which_another_thread_pushes_is_closed_when_that_has_ended(
    bench: Bench, port: SchedulerPort
) -> None:
    bench.send(generate(A))
    port.recv()
    with contextlib.suppress(RingFull):
        while True:
            port.push_tokens([A], [1] * 1000, [1000])
    pushing = threading.Thread(
        target=lambda: port.push_tokens([A], [1] * 1000, [1000], timeout=60), daemon=True
    )
    pushing.start()
    while True:
        try:
            port.push_tokens([A], [1])
        except RingFull:
            continue  # the other thread does not wait yet
        except WriterBusy:
            break
    with pytest.raises(WriterBusy):
        port.close()
    assert port.alive
    bench.shard.read()
    bench.shard.release()
    pushing.join()
    port.close()
    assert not port.alive
    assert bench.instance.board.row(Role.SCHEDULER).state == State.STOPPED


def test_aborts_made_up_for_a_gateway_are_counted(bench: Bench, port: SchedulerPort) -> None:
    bench.send(generate(A), generate(B))
    port.recv()
    bench.gateway.write(Tag.ATTACH, encode(Attach(0)))
    assert sorted(message.route for message in port.recv()) == [A, B]
    assert bench.instance.board.row(Role.SCHEDULER).get("aborts") == 2
