"""What a port does when frames were damaged: it finds what it never got, and tells who has lost a row."""

import contextlib
from collections.abc import Iterator

import pytest
from outfeed.ring import RingFull
from outfeed.ring.board import InstanceConfig, Role, State
from outfeed.ring.frames import (
    TAG_OF,
    Abort,
    Attach,
    Control,
    Forget,
    Live,
    Message,
    Result,
    Standing,
    Tag,
    Tally,
    decode,
    encode,
)
from outfeed.ring.route import make_route
from outfeed.sidecar import FinishReason, SchedulerPort
from outfeed.sidecar.port import BEAT_EVERY_NS
from outfeed.sidecar.tallies import TALLIED

from .conftest import Bench
from .test_port import OTHERS, A, B, generate

NEVER_CAME, CONTROL = make_route(0, 0, 0, 1), make_route(0, 0, 4, 1)
AFTER_A = make_route(0, 0, 1, 2)


@pytest.fixture
def port(bench: Bench) -> Iterator[SchedulerPort]:
    with SchedulerPort.attach(bench.name) as port:
        yield port


def beat(port: SchedulerPort) -> None:
    port._beat_due = 0
    assert port.alive


def tallies(bench: Bench) -> list[Tally]:
    heard = [decode(tag, body) for _, tag, body in bench.shard.read() if tag != Tag.BATCH]
    return [tally for tally in heard if isinstance(tally, Tally)]


def say(bench: Bench, live: Live) -> None:
    bench.gateway.write(Tag.LIVE, encode(live))


@pytest.mark.parametrize("role", [Role.SHARD, Role.READER])
@pytest.mark.parametrize("sign", ["rejected", "replaced"])
def test_a_frame_rejected_or_a_process_replaced_is_answered_with_a_tally_once(
    bench: Bench, port: SchedulerPort, role: Role, sign: str
) -> None:
    bench.send(generate(A), generate(B), Control(CONTROL, "rid", "health"))
    bench.other.write(Tag.GENERATE, encode(generate(OTHERS)))
    assert len(port.recv()) == 4
    port.push_tokens([A, B, OTHERS], [7, 8, 9, 9], [1, 1, 2], finishes={1: FinishReason.length(1)})
    beat(port)
    assert tallies(bench) == []
    row = bench.instance.board.row(role, 0)
    row.count("bad_frames") if sign == "rejected" else row.count_replacement()
    for _ in range(3):
        beat(port)
    (tally,) = tallies(bench)
    assert tally.rank == 0
    assert sorted(tally.rows) == sorted(
        [
            (A, 1, Standing.RUNNING),
            (B, 1, Standing.ENDED),
            (CONTROL, 0, Standing.CONTROL),
            (OTHERS, 2, Standing.RUNNING),
        ]
    )


def test_a_tally_goes_on_until_all_is_told(
    bench: Bench, port: SchedulerPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit at a time, and behind a full ring later."""
    monkeypatch.setattr("outfeed.sidecar.tallies.TALLIED", 3)
    routes = [make_route(0, 0, slot, 1) for slot in range(0, 64, 7)]
    bench.send(*(generate(route) for route in routes))
    port.recv()
    bench.instance.board.row(Role.SHARD, 0).count("bad_frames")
    for _ in range(6):
        beat(port)
    heard = tallies(bench)
    assert [len(tally.rows) for tally in heard] == [3, 3, 3, 1]
    assert [route for tally in heard for route, _, _ in tally.rows] == routes


def test_the_default_slots_of_a_gateway_are_told_within_a_second() -> None:
    slots = InstanceConfig(instance="any", tokenizer="any").slots
    assert slots <= TALLIED * (10**9 // BEAT_EVERY_NS)


def test_a_full_ring_puts_a_tally_off(bench: Bench, port: SchedulerPort) -> None:
    bench.send(generate(A))
    port.recv()
    port._beat_due = 1 << 62  # until it is full
    for ids in ([1] * 1000, [1]):
        with contextlib.suppress(RingFull):
            while True:
                port.push_tokens([A], ids, [len(ids)])
    bench.instance.board.row(Role.SHARD, 0).count("bad_frames")
    beat(port)
    told = 0
    while frames := bench.shard.read():
        told += sum(tag == Tag.TALLY for _, tag, _ in frames)
        bench.shard.release()
    assert told == 0
    beat(port)
    assert [tally.rows[0][0] for tally in tallies(bench)] == [A]


def test_a_request_that_never_came_is_told_as_ended(bench: Bench, port: SchedulerPort) -> None:
    bench.send(generate(A))
    port.recv()
    say(bench, Live(0, 0, 64, [A, NEVER_CAME]))
    assert port.recv() == []
    beat(port)
    (tally,) = tallies(bench)
    assert (NEVER_CAME, 0, Standing.ENDED) in tally.rows
    assert (A, 0, Standing.RECEIVED) in tally.rows
    bench.send(generate(B))
    assert [type(message).__name__ for message in port.recv()] == ["Generate"]


def test_what_a_gateway_no_longer_has_is_aborted_once(bench: Bench, port: SchedulerPort) -> None:
    """Its ABORT was damaged. Another gateway's requests, and slots not spoken of, are left alone."""
    beyond = make_route(0, 0, 40, 1)
    bench.send(generate(A), generate(B), generate(beyond))
    bench.other.write(Tag.GENERATE, encode(generate(OTHERS)))
    port.recv()
    for _ in range(2):
        say(bench, Live(0, 0, 40, [A]))
    assert port.recv() == [Abort(B)]
    bench.send(Abort(B))
    assert port.recv() == []
    assert [port.is_live(route) for route in (A, B, beyond, OTHERS)] == [True, False, True, True]


@pytest.mark.parametrize("kind", ["generate", "control"])
@pytest.mark.parametrize("begun", [True, False])
def test_a_request_whose_slot_comes_again_is_aborted_when_its_abort_was_lost(
    bench: Bench, port: SchedulerPort, kind: str, begun: bool
) -> None:
    """No LIVE would miss it: what the port knows of the slot is the next request's from there on."""
    after: Message = generate(AFTER_A) if kind == "generate" else Control(AFTER_A, "rid", "health")
    bench.send(generate(A), generate(B))
    assert len(port.recv()) == 2
    if begun:
        port.push_tokens([A, B], [7, 8])
    bench.gateway.write(Tag.ABORT, b"it was damaged")
    bench.send(after, after)
    assert port.recv() == [Abort(A), after, after]
    assert [port.is_live(route) for route in (A, B, AFTER_A)] == [False, True, True]
    bench.send(Abort(AFTER_A), generate(A))
    assert port.recv() == [Abort(AFTER_A), generate(A)], "it had ended: nobody is told twice"


def end_at_another_rank(bench: Bench, port: SchedulerPort, route: int) -> None:
    """Rank 0 receives a request and hands it on; rank 1 serves it to its end."""
    bench.send(generate(route))
    assert generate(route) in port.recv()
    with SchedulerPort.attach(bench.name, rank=1) as other:
        other.adopt(generate(route))
        other.push_tokens([route], [7], finishes={0: FinishReason.length(1)})


@pytest.mark.parametrize("lost", [None, "another gateway's", "told of since", "before it attached"])
def test_what_another_rank_ended_is_not_aborted_when_its_slot_comes_again(
    bench: Bench, port: SchedulerPort, lost: str | None
) -> None:
    """Its gateway's ABORTs were all read: there was none for it."""
    if lost is not None:
        lane = bench.other if lost == "another gateway's" else bench.gateway
        lane.write(Tag.ABORT, b"it was damaged")
        assert port.recv() == []
    if lost == "told of since":
        say(bench, Live(0, 0, 32, []))
        say(bench, Live(0, 32, 64, []))
    if lost == "before it attached":
        bench.gateway.write(Tag.ATTACH, encode(Attach(0)))
    end_at_another_rank(bench, port, A)
    bench.send(generate(AFTER_A))
    assert port.recv() == [generate(AFTER_A)]


def test_a_gateway_has_told_what_it_has_when_it_has_told_all_of_it(bench: Bench, port: SchedulerPort) -> None:
    bench.send(generate(A))
    bench.gateway.write(Tag.ABORT, b"it was damaged")
    say(bench, Live(0, 32, 63, []))
    bench.send(generate(AFTER_A))
    assert port.recv() == [generate(A), Abort(A), generate(AFTER_A)]


def test_a_request_whose_slot_a_lost_one_has_is_aborted(bench: Bench, port: SchedulerPort) -> None:
    """Its ABORT and the GENERATE behind it were damaged."""
    bench.send(generate(A), generate(B))
    port.recv()
    say(bench, Live(0, 0, 64, [AFTER_A, B]))
    assert port.recv() == [Abort(A)]
    beat(port)
    (tally,) = tallies(bench)
    assert sorted(tally.rows) == sorted([(AFTER_A, 0, Standing.ENDED), (B, 0, Standing.RECEIVED)])


def test_a_gateway_says_nothing_of_anothers_requests(bench: Bench, port: SchedulerPort) -> None:
    bench.other.write(Tag.GENERATE, encode(generate(OTHERS)))
    port.recv()
    say(bench, Live(1, 0, 64, []))
    say(bench, Live(0, 0, 1 << 20, [OTHERS, make_route(0, 0, 1 << 19, 1)]))
    assert port.recv() == []
    assert port.is_live(OTHERS)
    beat(port)
    assert tallies(bench) == []
    assert bench.instance.board.row(Role.SCHEDULER, 0).get("bad_frames") == 1, "that for another reader"


@pytest.mark.parametrize("stray", [Forget(A), Result(A, b"answer"), Tally(0, [(A, 1, 1)])], ids=repr)
def test_what_no_gateway_says_to_a_scheduler_is_dropped(
    bench: Bench, port: SchedulerPort, stray: Forget | Result | Tally
) -> None:
    bench.gateway.write(TAG_OF[type(stray)], encode(stray))
    bench.send(generate(A))
    assert port.recv() == [generate(A)]
    assert bench.instance.board.row(Role.SCHEDULER, 0).get("bad_frames") == 1


@pytest.mark.parametrize("route", [0, 5, 1 << 20])
def test_a_gateway_that_names_what_is_no_route_costs_nobody_what_it_sent(
    bench: Bench, port: SchedulerPort, route: int
) -> None:
    """The frame is sealed and its numbers are in range; it must not come out of `recv` as an exception."""
    bench.send(generate(A))
    say(bench, Live(0, 0, 64, [route, A]))
    bench.send(generate(B))
    assert [message.route for message in port.recv()] == [A, B]


@pytest.mark.parametrize(("ranks", "standing"), [(1, Standing.RUNNING), (2, Standing.RECEIVED)])
def test_a_request_without_a_prompt_is_no_control_request(
    bench: Bench, port: SchedulerPort, standing: Standing
) -> None:
    """As a control request it would be taken to be rank 0's when another rank is lost, and wait for ever."""
    bench.send(generate(A, tokens=0), Control(CONTROL, "rid", "health"))
    port.recv()
    bench.instance.board.row(Role.SHARD, 0).count("bad_frames")
    beat(port)
    (tally,) = tallies(bench)
    assert tally.rows == [(A, 0, standing), (CONTROL, 0, Standing.CONTROL)]


@pytest.mark.parametrize("bit", range(0, 400, 41))
def test_a_damaged_frame_is_counted_and_hands_out_nothing(
    bench: Bench, port: SchedulerPort, bit: int
) -> None:
    body = bytearray(encode(generate(A)))
    body[bit // 8] ^= 1 << bit % 8
    bench.gateway.write(TAG_OF[type(generate(A))], bytes(body))
    bench.send(generate(B))
    assert [message.route for message in port.recv()] == [B]
    assert bench.instance.board.row(Role.SCHEDULER, 0).get("bad_frames") == 1


def test_a_frame_that_finds_no_memory_costs_what_else_was_read_nothing(
    bench: Bench, port: SchedulerPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a damaged one: its gateway sees the count, and ends what the scheduler does not have."""

    def without_memory(tag: int, body: memoryview) -> object:
        message = decode(tag, body)
        if message == generate(B):
            raise MemoryError
        return message

    monkeypatch.setattr("outfeed.sidecar.port.decode", without_memory)
    bench.send(generate(A), generate(B), Control(CONTROL, "rid", "health"))
    assert [message.route for message in port.recv()] == [A, CONTROL]
    assert not port.is_live(B)
    assert bench.instance.board.row(Role.SCHEDULER, 0).get("bad_frames") == 1


def test_a_gateway_that_died_is_looked_at_again_when_there_was_no_memory_for_its_aborts(
    bench: Bench, port: SchedulerPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else was read is handed out, and neither request has ended for nobody to hear of."""

    def without_memory(route: int) -> object:
        if route == B:
            raise MemoryError
        return Abort(route)

    bench.send(generate(A), generate(B))
    assert len(port.recv()) == 2
    row = bench.instance.board.row(Role.READER, 0)
    row.claim(State.STOPPED)
    bench.other.write(Tag.GENERATE, encode(generate(OTHERS)))
    port._look_due = 0
    with monkeypatch.context() as patched:
        patched.setattr("outfeed.sidecar.port.Abort", without_memory)
        assert port.recv() == [generate(OTHERS)]
    assert port.is_live(A)
    assert port.is_live(B)
    port._look_due = 0
    assert port.recv() == [Abort(A), Abort(B)]
    beat(port)
    (tally,) = tallies(bench)
    ended, received = Standing.ENDED, Standing.RECEIVED
    assert sorted(tally.rows) == sorted([(A, 0, ended), (B, 0, ended), (OTHERS, 0, received)]), (
        "in case it lives"
    )
    port._look_due = 0
    assert port.recv() == []
    beat(port)
    assert tallies(bench) == []
