"""Several ranks: who runs what, how many each has, and what is left when rank 0 goes away."""

from collections.abc import Iterator
from contextlib import suppress

import pytest
from outfeed.ring.board import Role
from outfeed.ring.errors import RingFull
from outfeed.ring.frames import Abort, Standing, Tag, Tally, decode
from outfeed.sidecar import FinishReason, SchedulerPort

from .conftest import Bench
from .test_port import A, B, generate


@pytest.fixture
def port(bench: Bench) -> Iterator[SchedulerPort]:
    with SchedulerPort.attach(bench.name) as port:
        yield port


@pytest.fixture
def other(bench: Bench, port: SchedulerPort) -> Iterator[SchedulerPort]:
    with SchedulerPort.attach(bench.name, rank=1) as other:
        yield other


def receive(port: SchedulerPort) -> list[object]:
    """Receive, and look at who is there."""
    port._look_due = 0
    return [*port.recv()]


def live(bench: Bench, *ports: SchedulerPort) -> list[int]:
    """Return how many requests each rank says that it has."""
    for port in ports:
        port._beat_due = 0
        assert port.alive
    return [row.get("live") for row in bench.instance.board.rows(Role.SCHEDULER)]


def told(bench: Bench) -> list[tuple[int, object]]:
    """Return lane and TALLY, or step, of each frame in the step ring since the last look."""
    frames: list[tuple[int, object]] = [
        (lane, "step" if tag == Tag.BATCH else decode(tag, body)) for lane, tag, body in bench.shard.read()
    ]
    bench.shard.release()
    return frames


def claim(rank: int, *routes: int) -> tuple[int, Tally]:
    return rank, Tally(rank, [(route, 0, Standing.RUNNING) for route in routes])


def test_each_rank_counts_what_it_has_adopted(
    bench: Bench, port: SchedulerPort, other: SchedulerPort
) -> None:
    bench.send(generate(A), generate(B))
    kept, handed_on = port.recv()
    assert live(bench, port, other) == [0, 0], "nobody has said that it runs them"
    port.adopt(kept)  # type: ignore[arg-type]
    other.adopt(handed_on)  # type: ignore[arg-type]
    assert live(bench, port, other) == [1, 1]
    other.push_tokens([B], [1], finishes={0: FinishReason.length(1)})
    bench.send(Abort(A))
    assert port.recv() == [Abort(A)]
    assert live(bench, port, other) == [0, 0]


def test_an_abort_that_is_handed_on_ends_the_request_there(
    bench: Bench, port: SchedulerPort, other: SchedulerPort
) -> None:
    bench.send(generate(A), Abort(A))
    for message in port.recv():
        other.adopt(message)  # type: ignore[arg-type]
    assert not other.is_live(A)
    assert live(bench, port, other) == [0, 0]
    other.push_tokens([A], [1])
    assert other.stale_rows == 1


def test_what_has_ended_is_not_adopted_any_more(bench: Bench, port: SchedulerPort) -> None:
    """Its Abort came in the same `recv`, behind it."""
    bench.send(generate(A), Abort(A))
    for message in port.recv():
        port.adopt(message)  # type: ignore[arg-type]
    assert not port.is_live(A)
    assert live(bench, port) == [0, 0]
    port.push_tokens([A], [1])
    assert told(bench) == [(0, "step")], "nor is it said"


def test_adopting_again_counts_its_tokens_on(bench: Bench, port: SchedulerPort, other: SchedulerPort) -> None:
    other.adopt(generate(A))
    other.push_tokens([A], [1])
    other.adopt(generate(A))
    other.push_tokens([A], [2])
    assert told(bench) == [claim(1, A), (1, "step"), (1, "step")]
    assert other._table.standings(0, 9)[0] == [(A, 2, Standing.RUNNING)]


def test_each_rank_says_what_it_runs_before_its_first_row_or_with_the_heartbeat(
    bench: Bench, port: SchedulerPort, other: SchedulerPort
) -> None:
    bench.send(generate(A))
    port.recv()
    port.adopt(generate(A))
    other.adopt(generate(B))
    live(bench, other)
    port.push_tokens([A], [1])
    port.push_tokens([A], [1])
    other.push_tokens([B], [1])
    frames = told(bench)
    assert [what for lane, what in frames if lane == 0] == [claim(0, A)[1], "step", "step"]
    assert [what for lane, what in frames if lane == 1] == [claim(1, B)[1], "step"]


@pytest.mark.parametrize("ranks", [1])
def test_a_rank_that_is_alone_need_not_say_what_it_runs(bench: Bench, port: SchedulerPort) -> None:
    bench.send(generate(A))
    port.recv()
    port.adopt(generate(A))
    port.push_tokens([A], [1])
    assert told(bench) == [(0, "step")]
    assert live(bench, port) == [1]


def test_a_full_ring_puts_off_what_is_said_and_no_step_passes_it(
    bench: Bench, port: SchedulerPort, other: SchedulerPort
) -> None:
    other._beat_due = 1 << 62
    other.adopt(generate(A))
    other.push_tokens([A], [1])
    for size in (1000, 1):
        with suppress(RingFull):
            while True:
                other.push_tokens([A], [1] * size, [size])
    other.adopt(generate(B))
    with pytest.raises(RingFull):
        other.push_tokens([B], [1])
    live(bench, other)
    assert other._table.standings(0, 9)[0][1] == (B, 0, Standing.RUNNING)
    told(bench)
    other.push_tokens([B], [1])
    assert told(bench) == [claim(1, B), (1, "step")]


@pytest.mark.parametrize("how", ["gone", "anew"])
def test_what_rank_0_had_handed_on_is_aborted_when_it_goes_away(
    bench: Bench, port: SchedulerPort, other: SchedulerPort, how: str
) -> None:
    """Gateways have ended it: it would run for nobody."""
    other.adopt(generate(A))
    assert receive(other) == []
    port.close()
    with SchedulerPort.attach(bench.name) if how == "anew" else port:
        assert receive(other) == [Abort(A)]
        assert receive(other) == []
        assert live(bench, other)[1] == 0


def test_what_the_next_rank_0_hands_on_is_not_taken_for_what_the_last_one_had(
    bench: Bench, port: SchedulerPort, other: SchedulerPort
) -> None:
    """It comes before this rank has looked who is rank 0."""
    other.adopt(generate(A))
    port.close()
    with SchedulerPort.attach(bench.name):
        other.adopt(generate(B))
        assert receive(other) == [Abort(A)]
        assert receive(other) == []
        assert [other.is_live(route) for route in (A, B)] == [False, True]


def test_what_comes_late_of_a_rank_0_that_is_gone_is_aborted_when_the_next_one_comes(
    bench: Bench, port: SchedulerPort, other: SchedulerPort
) -> None:
    port.close()
    assert receive(other) == []
    other.adopt(generate(A))
    assert receive(other) == []
    with SchedulerPort.attach(bench.name):
        assert receive(other) == [Abort(A)]
