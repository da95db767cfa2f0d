"""How the ranks of a replay scheduler share requests, and what becomes of them when one goes away."""

import os
import socket
from collections.abc import Iterator

import pytest
from outfeed.ring.board import Role
from outfeed.ring.frames import Abort, Control, Generate
from outfeed.ring.route import make_route
from outfeed.sidecar import SchedulerPort
from outfeed.sidecar.replay_ranks import Handing, Received, Taking, sharing

from tests.eventually import until

from .conftest import Bench
from .test_port import generate

ROUTES = [make_route(0, 0, slot, 1) for slot in range(1, 9)]


@pytest.fixture
def ranks() -> int:
    return 3


@pytest.fixture
def ports(bench: Bench) -> Iterator[list[SchedulerPort]]:
    ports = [SchedulerPort.attach(bench.name, rank=rank) for rank in range(3)]
    yield ports
    for port in ports:
        port.close()


@pytest.fixture
def hands(ports: list[SchedulerPort]) -> Iterator[Handing]:
    made = sharing(ports[0], 0)
    assert isinstance(made, Handing)
    yield made
    made.close()


@pytest.fixture
def takes(ports: list[SchedulerPort], hands: Handing) -> Iterator[list[Taking]]:
    """Ranks 1 and 2, connected."""
    made = [connected(port, hands, rank) for rank, port in enumerate(ports[1:], 1)]
    yield made
    for taking in made:
        taking.close()


def connected(port: SchedulerPort, hands: Handing, rank: int) -> Taking:
    taking = sharing(port, rank)
    assert isinstance(taking, Taking)
    before = len(hands._others)

    def is_there() -> bool:
        taking.share(port, [])
        hands._look()
        return len(hands._others) > before

    until("the rank to be connected", is_there)
    return taking


def taken(port: SchedulerPort, taking: Taking, count: int) -> list[object]:
    """Wait until rank 0's word has come; return what it was."""
    got: list[object] = []

    def have_come() -> bool:
        got.extend(taking.share(port, []))
        return len(got) >= count

    until("what was handed on", have_come)
    return got


def test_each_rank_has_its_share_and_adopts_it(
    bench: Bench, ports: list[SchedulerPort], hands: Handing, takes: list[Taking]
) -> None:
    sent = [generate(route) for route in ROUTES[:6]]
    bench.send(*sent)
    kept = hands.share(ports[0], ports[0].recv())
    got = [
        list[object](kept),
        *(taken(port, taking, 2) for port, taking in zip(ports[1:], takes, strict=True)),
    ]
    assert [len(each) for each in got] == [2, 2, 2]
    assert sorted(m.route for each in got for m in each) == ROUTES[:6]  # type: ignore[attr-defined]
    for port in ports:
        port._beat_due = 0
        assert port.alive
    assert [row.get("live") for row in bench.instance.board.rows(Role.SCHEDULER)] == [2, 2, 2]


def test_every_rank_hears_of_an_abort_and_only_rank_0_of_an_operation(
    bench: Bench, ports: list[SchedulerPort], hands: Handing, takes: list[Taking]
) -> None:
    bench.send(*(generate(route) for route in ROUTES[:3]))
    hands.share(ports[0], ports[0].recv())
    aborts, operation = [Abort(route) for route in ROUTES[:3]], Control(ROUTES[4], "c", "health")
    bench.send(*aborts, operation)
    assert hands.share(ports[0], ports[0].recv()) == [*aborts, operation]
    for port, taking in zip(ports[1:], takes, strict=True):
        (request, *heard) = taken(port, taking, 4)
        assert isinstance(request, Generate)
        assert heard == aborts
        assert not port.is_live(request.route)


def test_a_rank_that_takes_nothing_gets_no_more_than_its_socket_and_one_request_hold(
    ports: list[SchedulerPort], hands: Handing, takes: list[Taking]
) -> None:
    ids = bytes(4 << 18)
    sent = [Generate(make_route(0, 0, slot, 1), "", ids, {}) for slot in range(32)]
    kept = hands.share(ports[0], sent)
    assert len(kept) > len(sent) / 2, "in turn it would be a third"
    assert all(0 < len(other.unsent) < 2 * len(ids) for other in hands._others)
    got: list[Received] = []

    def all_have_come() -> bool:
        hands.share(ports[0], [])
        for port, taking in zip(ports[1:], takes, strict=True):
            got.extend(taking.share(port, []))
        return len(kept) + len(got) >= len(sent)

    until("what waited to be taken", all_have_come)
    assert sorted(message.route for message in [*kept, *got]) == [message.route for message in sent]


def test_a_rank_that_takes_nothing_is_told_of_every_abort_and_few_wait_for_it(
    ports: list[SchedulerPort], hands: Handing, takes: list[Taking]
) -> None:
    """It gets no more requests, so only the first abort of each slot can be of one that it has."""
    ids = bytes(4 << 18)
    sent = [Generate(make_route(0, 0, slot, 1), "", ids, {}) for slot in range(32)]
    kept = {message.route for message in hands.share(ports[0], sent)}
    unsent = [len(other.unsent) for other in hands._others]
    for generation in range(1, 500):
        aborts = [Abort(make_route(0, 0, slot, generation), "rid") for slot in range(32)]
        assert hands.share(ports[0], aborts) == aborts
    assert [len(other.unsent) for other in hands._others] == unsent
    assert [len(other.aborts) for other in hands._others] == [32, 32]
    got: list[Received] = []

    def all_has_come() -> bool:
        hands.share(ports[0], [])
        for port, taking in zip(ports[1:], takes, strict=True):
            got.extend(taking.share(port, []))
        return not any(other.is_behind for other in hands._others) and len(kept) + len(got) >= 32 + 64

    until("all of it", all_has_come)
    theirs = {message.route for message in got if isinstance(message, Generate)}
    assert theirs | kept == {message.route for message in sent}
    assert theirs <= {message.route for message in got if isinstance(message, Abort)}
    assert not any(port.is_live(route) for port in ports[1:] for route in theirs)


def test_who_is_gone_gets_nothing_and_who_comes_back_does(
    bench: Bench, ports: list[SchedulerPort], hands: Handing, takes: list[Taking]
) -> None:
    takes[0].close()
    bench.send(*(generate(route) for route in ROUTES[:4]))
    kept = hands.share(ports[0], ports[0].recv())
    got = taken(ports[2], takes[1], 4 - len(kept))
    assert len(kept) + len(got) == 4
    back = connected(ports[1], hands, 1)
    bench.send(*(generate(route) for route in ROUTES[4:7]))
    hands.share(ports[0], ports[0].recv())
    taken(ports[1], back, 1)
    back.close()


def test_a_rank_that_does_not_read_keeps_nobody_waiting(
    bench: Bench, ports: list[SchedulerPort], hands: Handing, takes: list[Taking]
) -> None:
    """Its socket is full: the rest waits here, and comes when it reads again."""
    large = [Generate(route, "", bytes(4 << 18), {}) for route in ROUTES[:3]]
    kept = hands.share(ports[0], large)
    hands.share(ports[0], [Abort(route) for route in ROUTES])
    assert all(other.is_behind for other in hands._others)
    slept: list[float] = []
    got: list[object] = []

    def all_has_come() -> bool:
        hands.share(ports[0], [])
        got.extend(takes[0].share(ports[1], []))
        got.extend(takes[1].share(ports[2], []))
        return len(got) == 2 + 2 * len(ROUTES) and not any(other.is_behind for other in hands._others)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ports[0], "wait", slept.append)
        hands.wait(ports[0], 0.5)
        until("all of it", all_has_come)
        hands.wait(ports[0], 0.5)
    assert len(kept) == 1
    assert slept == [0.05, 0.5]


def test_the_next_rank_0_is_found_and_half_a_word_of_the_last_one_is_forgotten(
    bench: Bench, ports: list[SchedulerPort], hands: Handing, takes: list[Taking]
) -> None:
    hands._others[0].link.send(b"half a word")
    hands.close()
    until("it to be seen", lambda: takes[0].share(ports[1], []) == [] and takes[0]._link is None)
    takes[0].wait(ports[1], 0.0)
    following = Handing(takes[0]._name)

    def is_there() -> bool:
        takes[0].share(ports[1], [])
        following._look()
        return following._others != []

    until("it to find the next one", is_there)
    abort = Abort(ROUTES[0])
    following.share(ports[0], [abort])
    assert taken(ports[1], takes[0], 1) == [abort]
    following.close()


@pytest.mark.parametrize("when", ["before it is taken", "as it is adopted"])
def test_what_comes_from_a_rank_0_that_is_gone_runs_for_nobody(
    bench: Bench,
    ports: list[SchedulerPort],
    hands: Handing,
    takes: list[Taking],
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    """Its gateway ends it with that rank 0, and may be gone as well; the next rank 0 has not heard of it."""
    bench.send(*(generate(route) for route in ROUTES[:3]))
    hands.share(ports[0], ports[0].recv())
    adopt = ports[1].adopt

    def next_rank_0() -> None:
        hands.close()
        ports[0].close()
        ports[0] = SchedulerPort.attach(bench.name)

    def adopt_late(message: Generate | Abort) -> None:
        monkeypatch.undo()
        hands.share(ports[0], [Abort(ROUTES[7])])  # the last that it says
        next_rank_0()
        adopt(message)

    if when == "as it is adopted":
        monkeypatch.setattr(ports[1], "adopt", adopt_late)
    else:
        next_rank_0()
    until(
        "the end to be seen", lambda: takes[0].share(ports[1], ports[1].recv()) == [] and not takes[0]._link
    )
    assert not any(ports[1].is_live(route) for route in ROUTES)
    ports[1]._look_due = 0
    assert [message for message in ports[1].recv() if isinstance(message, Generate)] == []


def test_another_user_takes_part_on_neither_side(
    ports: list[SchedulerPort], hands: Handing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may have a name that nobody has is not asked."""
    link = socket.socket(socket.AF_UNIX)
    link.connect(hands._listener.getsockname())
    taking = sharing(ports[1], 1)
    assert isinstance(taking, Taking)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    hands._look()
    assert hands._others == []
    assert link.recv(1) == b""
    assert taking.share(ports[1], []) == []
    assert taking._link is None
    link.close()


@pytest.mark.parametrize("ranks", [1])
def test_who_is_alone_shares_with_nobody(bench: Bench) -> None:
    with SchedulerPort.attach(bench.name) as port:
        assert sharing(port, 0) is None
