"""The supervisor by itself, over children that do as told: whom it replaces, and when it gives up."""

import os
import signal
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
from outfeed.ring.board import Board, Role, State
from outfeed.shards import supervisor as under_test
from outfeed.shards.supervisor import RestartPolicy, ShardsFailed, Supervisor

from tests.eventually import until
from tests.instances import small_config

Make = Callable[..., Supervisor]


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create(small_config("supervisor", shards=2, heartbeat_limit_s=60))
    yield made
    made._segment.unlink()
    made.close()


@pytest.fixture
def make(board: Board) -> Iterator[Make]:
    made: list[Supervisor] = []

    def supervisor(run: Callable[[int], None], policy: RestartPolicy | None = None) -> Supervisor:
        made.append(Supervisor(board, run, policy))
        return made[-1]

    yield supervisor
    for one in made:
        one.stop(grace_s=0.0)


def runs(board: Board, *, rows: int = 0, beats: bool = True) -> Callable[[int], None]:
    """A shard that comes up, handles that many rows, and lives until it is told to end."""

    def run(shard: int) -> None:
        row = board.row(Role.SHARD, shard)
        row.claim(State.RUNNING)
        row.put("rows", rows)
        while True:
            if beats:
                row.beat()
            time.sleep(0.01)

    return run


def pid_of(board: Board, shard: int) -> int:
    owner = board.row(Role.SHARD, shard).owner
    return 0 if owner is None else owner.pid


def up(supervisor: Supervisor) -> bool:
    supervisor.tend()
    return supervisor.running


def tend_for_ever(supervisor: Supervisor) -> None:
    while True:
        supervisor.tend()


def kill(supervisor: Supervisor, board: Board, shard: int) -> None:
    """Kill a shard, and tend until its death is known."""
    epoch = board.row(Role.SHARD, shard).epoch
    os.kill(pid_of(board, shard), signal.SIGKILL)

    def known() -> bool:
        supervisor.tend()
        return board.row(Role.SHARD, shard).epoch > epoch

    until("its death to be known", known)


def test_a_shard_that_dies_is_replaced_and_its_neighbour_is_not(board: Board, make: Make) -> None:
    supervisor = make(runs(board, rows=1))
    assert not supervisor.running
    until("the shards to run", lambda: up(supervisor))
    assert supervisor.due_in() is None
    before = [pid_of(board, shard) for shard in (0, 1)]
    kill(supervisor, board, 0)
    assert board.row(Role.SHARD, 0).epoch == 1
    until("the shard to be replaced", lambda: up(supervisor))
    after = [pid_of(board, shard) for shard in (0, 1)]
    assert after[0] != before[0]
    assert after[1] == before[1]
    assert board.row(Role.SHARD, 1).epoch == 0


def test_one_that_had_worked_is_replaced_at_once_however_often(board: Board, make: Make) -> None:
    supervisor = make(runs(board, rows=1), RestartPolicy(strikes=2, pause_s=100.0, pause_limit_s=100.0))
    for _ in range(4):
        until("the shards to run", lambda: up(supervisor))
        kill(supervisor, board, 1)
    assert board.row(Role.SHARD, 1).epoch == 4


def test_one_that_ran_a_while_has_no_strikes_any_more(
    board: Board, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = make(runs(board), RestartPolicy(strikes=2, pause_s=0.001))
    until("the shards to run", lambda: up(supervisor))
    kill(supervisor, board, 0)  # the first strike
    until("the shards to run", lambda: up(supervisor))
    monkeypatch.setattr(under_test, "HEALTHY_AFTER_S", 0.0)
    kill(supervisor, board, 0)
    monkeypatch.undo()
    until("the shards to run", lambda: up(supervisor))
    kill(supervisor, board, 0)  # the first again
    until("the shards to run", lambda: up(supervisor))
    with pytest.raises(ShardsFailed, match=r"shard 0 died 2 times in a row .*was killed"):
        kill(supervisor, board, 0)


def test_one_that_cannot_start_any_more_is_not_taken_for_one_that_had_worked(
    board: Board, make: Make
) -> None:
    """Its predecessor had; the board still says so when a new one dies before it has claimed its row."""
    works = runs(board, rows=1)

    def run(shard: int) -> None:
        if board.row(Role.SHARD, shard).epoch:
            raise SystemExit(7)  # no file left to open, say
        works(shard)

    supervisor = make(run, RestartPolicy(strikes=3, pause_s=200.0, pause_limit_s=400.0))
    until("the shards to run", lambda: up(supervisor))
    kill(supervisor, board, 0)
    assert supervisor._children[0].pid, "the first is replaced at once"

    def buried_again() -> bool:
        supervisor.tend()
        return board.row(Role.SHARD, 0).epoch == 2

    until("the next to have died", buried_again)
    due = supervisor.due_in()
    assert due is not None
    assert due > 100.0


def test_pauses_double_up_to_their_limit(board: Board, make: Make) -> None:
    supervisor = make(runs(board), RestartPolicy(strikes=9, pause_s=100.0, pause_limit_s=150.0))
    child = supervisor._children[0]
    until("the shards to run", lambda: up(supervisor))
    for longest in (100.0, 150.0, 150.0):
        kill(supervisor, board, 0)
        due = supervisor.due_in()
        assert due is not None
        assert longest - 30 < due <= longest
        supervisor.tend()
        assert not child.pid, "it waits"
        child.start_at = 0.0
        assert supervisor.due_in() == 0.0
        until("the shards to run", lambda: up(supervisor))


def test_one_that_never_ran_is_not_tried_again(make: Make) -> None:
    def cannot(shard: int) -> None:
        raise SystemExit(7)

    supervisor = make(cannot)

    with pytest.raises(
        ShardsFailed, match=r"shard [01] \(pid \d+\) could not start: it exited with status 7"
    ):
        tend_for_ever(supervisor)


def test_one_that_was_told_to_end_before_it_ran_is_tried_again(board: Board, make: Make) -> None:
    """By a service manager, say, that tells the whole group: the launcher will hear it, too."""
    works = runs(board)

    def run(shard: int) -> None:
        if not board.row(Role.SHARD, shard).epoch:
            os.kill(os.getpid(), signal.SIGTERM)
        works(shard)

    supervisor = make(run)
    until("the shards to run", lambda: up(supervisor))
    assert [board.row(Role.SHARD, shard).epoch for shard in (0, 1)] == [1, 1]


@pytest.mark.parametrize("word", [0, 1 << 62])
def test_one_whose_heart_stops_is_killed_whatever_its_word_says(board: Board, make: Make, word: int) -> None:
    board.config = msgspec.structs.replace(board.config, heartbeat_limit_s=0.2)
    supervisor = make(runs(board, rows=1, beats=False))
    until("the shards to run", lambda: up(supervisor))
    pid = pid_of(board, 0)
    row = board.row(Role.SHARD, 0)
    row._words[row._base + 1] = word

    def replaced() -> bool:
        return up(supervisor) and pid_of(board, 0) != pid

    until("it to be replaced", replaced)
    assert row.epoch >= 1


def test_one_that_is_silent_as_it_starts_is_tried_again_until_its_strikes_are_used_up(
    board: Board, make: Make
) -> None:
    board.config = msgspec.structs.replace(board.config, heartbeat_limit_s=0.05)
    supervisor = make(lambda shard: time.sleep(600), RestartPolicy(strikes=3, pause_s=0.0))

    with pytest.raises(ShardsFailed, match="died 3 times in a row"):
        tend_for_ever(supervisor)


def test_one_that_was_silent_for_long_has_not_run_for_as_long(
    board: Board, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second of silence is not the second after which strikes are forgotten."""
    monkeypatch.setattr("outfeed.shards.supervisor.HEALTHY_AFTER_S", 0.5)
    board.config = msgspec.structs.replace(board.config, heartbeat_limit_s=0.6)
    supervisor = make(runs(board, beats=False), RestartPolicy(strikes=2, pause_s=0.0))

    with pytest.raises(ShardsFailed, match="died 2 times in a row"):
        tend_for_ever(supervisor)


def test_one_that_is_killed_for_its_silence_is_killed_once(
    board: Board, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may take a while to be gone: a busy machine, or a process in the middle of a page fault."""
    board.config = msgspec.structs.replace(board.config, heartbeat_limit_s=0.1)
    supervisor = make(runs(board, rows=1, beats=False))
    until("the shards to run", lambda: up(supervisor))
    killed: list[int] = []

    def both_killed() -> bool:
        supervisor.tend()
        return len(killed) == 2

    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, number: killed.append(pid))
        until("both to be killed", both_killed)
        for _ in range(10):
            supervisor.tend()
    assert sorted(killed) == sorted(child.pid for child in supervisor._children)
    assert caplog.text.count("no heartbeat") == 2
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    until("others to run", lambda: up(supervisor) and pid_of(board, 0) not in killed)


def test_one_whose_heart_beats_is_let_live_whatever_its_word_says(board: Board, make: Make) -> None:
    supervisor = make(runs(board))
    until("the shards to run", lambda: up(supervisor))
    row, child = board.row(Role.SHARD, 0), supervisor._children[0]
    pid = pid_of(board, 0)
    beats: set[int] = set()
    while len(beats) < 20:
        row._words[row._base + 1] = 0
        child.heard -= board.config.heartbeat_limit_s / 3
        supervisor.tend()
        beats.add(until("its heart to beat", lambda: row.heartbeat_ns))
        supervisor.tend()
    assert (pid_of(board, 0), row.epoch) == (pid, 0)


def test_those_that_stood_still_with_their_supervisor_are_let_live(
    board: Board, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that is paused. One that goes on standing still afterwards is hung."""
    supervisor = make(runs(board, rows=1))
    until("the shards to run", lambda: up(supervisor))
    pids = [pid_of(board, shard) for shard in (0, 1)]
    really, limit, skipped = time.monotonic, board.config.heartbeat_limit_s, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: really() + skipped)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    skipped += 100 * limit
    supervisor.tend()
    os.kill(pids[1], signal.SIGCONT)

    def found() -> bool:
        nonlocal skipped
        beat = board.row(Role.SHARD, 1).heartbeat_ns
        until("the other's heart to beat", lambda: board.row(Role.SHARD, 1).heartbeat_ns != beat)
        skipped += limit / 4
        supervisor.tend()
        return board.row(Role.SHARD, 0).epoch == 1

    until("the one that stands still to be found", found, limit=100 * limit)
    until("the shards to run", lambda: up(supervisor))
    assert pid_of(board, 0) != pids[0]
    assert (pid_of(board, 1), board.row(Role.SHARD, 1).epoch) == (pids[1], 0)


def test_shards_are_replaced_one_after_the_other_when_asked(board: Board, make: Make) -> None:
    supervisor = make(runs(board), RestartPolicy(strikes=1))  # it is no strike
    until("the shards to run", lambda: up(supervisor))
    before = [pid_of(board, shard) for shard in (0, 1)]
    supervisor.roll()

    def both() -> bool:
        supervisor.tend()
        down = sum(
            not (child.pid and pid_of(board, child.shard) == child.pid) for child in supervisor._children
        )
        assert down <= 1
        return supervisor.running and not any(pid in before for pid in (pid_of(board, 0), pid_of(board, 1)))

    until("both to be new", both)
    assert [board.row(Role.SHARD, shard).epoch for shard in (0, 1)] == [1, 1]
    after = [pid_of(board, shard) for shard in (0, 1)]
    for _ in range(20):
        supervisor.tend()
    assert [pid_of(board, shard) for shard in (0, 1)] == after, "once"


def test_one_that_takes_its_time_to_start_is_waited_for_before_the_next_is_asked(
    board: Board, make: Make
) -> None:
    gate, opens = os.pipe()
    works = runs(board)

    def run(shard: int) -> None:
        if board.row(Role.SHARD, shard).epoch:
            os.read(gate, 1)
        works(shard)

    def starts() -> bool:
        supervisor.tend()
        return supervisor._children[0].pid not in (first, 0)

    supervisor = make(run)
    until("the shards to run", lambda: up(supervisor))
    first, second = (child.pid for child in supervisor._children)
    supervisor.roll()
    until("the first one's successor to start", starts)
    for _ in range(20):
        supervisor.tend()
    assert (supervisor._children[1].pid, supervisor._children[1].told) == (second, False)
    os.write(opens, b"..")
    until("both to be new", lambda: up(supervisor) and supervisor._children[1].pid != second)
    for fd in (gate, opens):
        os.close(fd)


def test_one_that_takes_its_time_to_end_is_waited_for_before_the_next_is_asked(
    board: Board, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = make(runs(board))
    until("the shards to run", lambda: up(supervisor))
    before = [pid_of(board, shard) for shard in (0, 1)]
    asked: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, number: asked.append(pid))
        supervisor.roll()
        for _ in range(10):
            supervisor.tend()
    assert asked == before[:1]
    os.kill(asked[0], signal.SIGKILL)
    until(
        "both to be new",
        lambda: up(supervisor) and not {pid_of(board, shard) for shard in (0, 1)} & set(before),
    )


def test_stopping_ends_those_that_listen_and_those_that_do_not(board: Board, make: Make) -> None:
    def deaf(shard: int) -> None:
        if shard:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        runs(board)(shard)

    supervisor = make(deaf)
    until("the shards to run", lambda: up(supervisor))
    pids = [child.pid for child in supervisor._children]
    supervisor.stop(grace_s=0.1)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not supervisor.running


def test_a_fork_that_is_refused_is_tried_again_and_given_up_in_the_end(
    board: Board, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = make(runs(board, rows=1), RestartPolicy(strikes=3, pause_s=0.001))

    def refused(main: Callable[[], None]) -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(under_test, "fork_child", refused)
    supervisor.tend()
    supervisor._children[1].start_at = supervisor._children[0].start_at = 0.0
    supervisor.tend()
    assert [child.strikes for child in supervisor._children] == [2, 2]
    monkeypatch.undo()
    for child in supervisor._children:
        child.start_at = 0.0
    until("the shards to run", lambda: up(supervisor))
    monkeypatch.setattr(under_test, "fork_child", refused)

    def until_it_gives_up() -> None:
        for _ in range(9):
            if supervisor._children[0].pid:
                kill(supervisor, board, 0)
            else:
                supervisor.tend()
            supervisor._children[0].start_at = 0.0

    with pytest.raises(ShardsFailed, match=r"died 3 times in a row .*could not be forked: .*unavailable"):
        until_it_gives_up()
