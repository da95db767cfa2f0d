"""The board: what an instance is and how its processes are, whatever is written over it."""

import subprocess
import time
from array import array
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from outfeed.ring.board import COUNTERS, Board, BoardRow, Phase, Role, State
from outfeed.ring.errors import NotARing, OtherNamespace, WrongVersion
from outfeed.ring.instance import Instance
from outfeed.ring.names import segment_name
from outfeed.ring.owner import Owner

from tests.instances import small_config, unique


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
        row.state = State.RUNNING
        assert (row.owner, row.alive, row.serving, row.trouble()) == (owner, False, False, "has died")


def test_the_launcher_knows_its_phase_by_itself(instance: Instance) -> None:
    seen = Instance.attach(instance.name)
    instance.board.phase = Phase.DRAINING
    seen.board.phase = Phase.STARTING
    assert instance.board.phase == Phase.DRAINING
    instance.board.keep()
    assert seen.board.phase == Phase.DRAINING
    seen.close()


def test_every_process_has_a_row_of_its_own() -> None:
    made = Instance.create(small_config("ring", shards=3, readers=2, ranks=4))
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


def refused(**what: Any) -> bool:
    """Whether there can be no board of such a configuration."""
    try:
        made = Board.create(small_config("limits", **what))
    except ValueError:
        return True
    made._segment.unlink()
    made.close()
    return False


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        *((field, 1, 64) for field in ("shards", "readers", "ranks")),
        *((f"{ring}_bytes", 1 << 12, 1 << 30) for ring in ("request", "control", "step", "egress")),
        ("slots", 1, 1 << 20),
        ("context_length", 1, 1 << 31),
        ("characters_per_token", 1, 65_536),
    ],
)
def test_a_number_that_nobody_could_attach_to_makes_no_board(field: str, least: int, most: int) -> None:
    assert [refused(**{field: number}) for number in (least - 1, least, most, most + 1)] == [
        True,
        False,
        False,
        True,
    ]


def test_what_a_board_cannot_hold_is_not_written() -> None:
    assert [refused(heartbeat_limit_s=limit) for limit in (0, 1e-6, 3600, 3600.5)] == [
        True,
        False,
        False,
        True,
    ]
    assert [refused(served_model_name="m" * size) for size in (0, 1, 256, 257)] == [True, False, False, True]
    name = unique("limits")
    rest = 65536 - 4096 - len(msgspec.json.encode(small_config("", instance=name, tokenizer="")))
    assert not refused(instance=name, tokenizer="t" * rest)
    assert refused(instance=name, tokenizer="t" * (rest + 1))


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


def test_a_process_that_hangs_cannot_be_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    words = memoryview(array("Q", bytes(256)))
    row = BoardRow(words, 0, Role.SHARD, 0)
    assert (row.alive, row.serving, row.trouble()) == (False, False, "is not running")
    row.claim(State.RUNNING)
    assert (row.alive, row.serving, row.trouble()) == (True, True, None)
    hour_later = time.monotonic_ns() + 3600 * 10**9
    with monkeypatch.context() as clock:
        clock.setattr(time, "monotonic_ns", lambda: hour_later)
        assert row.trouble() == "has shown no sign of life for 3600 s"
        assert row.trouble(quiet_s=7200) is None
        row.beat()
        assert row.trouble() is None
    row.beat(7)
    assert row.heartbeat_ns == 7
    row.state = State.STOPPED
    assert (row.alive, row.serving, row.trouble()) == (True, False, "is not running")


def test_how_often_a_process_was_replaced_is_known_though_a_word_of_it_is_written_over() -> None:
    words = memoryview(array("Q", bytes(256)))
    row = BoardRow(words, 0, Role.SHARD, 0)  # the launcher counts before the new process has its row
    row.count_replacement()
    row.count_replacement()
    for at, value in product(range(32), (0, 99)):
        was, words[at] = words[at], value
        assert row.epoch == 2, f"word {at} is {value}"
        words[at] = was
