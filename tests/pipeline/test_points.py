"""Kills at named points: a shard dies just there, once, and every stream is still told the truth."""

import sys
from pathlib import Path

import pytest
from outfeed.ring.instance import leftovers
from outfeed.sidecar import FinishReason
from outfeed.sink import Done, Error

from tests.eventually import until

from .commands import launched
from .rig import rest_of, running_rig

FAULTY = str(Path(__file__).with_name("faulty.py"))
TEXT = "Ströme reißen nie: 강물이 흐른다 👩‍👩‍👧, 川は流れる. STOP? نهر — and on it flows, STOP here."


@pytest.mark.parametrize(
    ("point", "number", "kills"),
    [
        ("registered", 2, []),
        ("backlog decoded, not written", 1, []),
        ("backlog decoded, not written", 2, [0]),
        ("backlog written, not released", 1, []),
        ("backlog written, not released", 2, [0, 1]),  # a successor's first frame is its TAKEOVER
        ("decoded, not written", 1, []),
        ("decoded, not written", 25, []),
        ("written, not released", 1, []),
        ("written, not released", 30, []),
        ("one restored", 2, [0]),
        ("one restored", 2, [0, 1]),
        ("all restored", 1, [1]),
        ("all restored", 1, [0, 1]),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else str(value).replace(" ", "_"),
)
def test_a_shard_dies_just_there(
    small_tokenizer: Path, tmp_path: Path, point: str, number: int, kills: list[int]
) -> None:
    """`kills` are shards that are killed first, so that there is something to restore.

    In a backlog, steps lie behind each other when the shard comes to them, and are decoded as one.
    """
    backlog = point.startswith("backlog ")
    point = point.removeprefix("backlog ")
    token = tmp_path / "token"
    token.touch()
    launcher = (sys.executable, FAULTY, point, str(number), str(token))
    with running_rig("point", small_tokenizer, launcher=launcher) as rig:
        ids = rig.encode(TEXT)
        streams = rig.submit(12, stop=["STOP here", "flows, STOP"])
        if backlog:
            rig.stop_shards()
        for at, one in enumerate(ids):
            if at == 20:
                for shard in kills:
                    rig.kill_shard(shard)
            rig.push(streams, [one])
            if not backlog:
                rig.let_the_shards_have_it()
        rig.push(streams, rig.encode("!"), FinishReason.length(len(ids) + 1))
        rig.go_on_shards()
        for stream in streams:
            text, got, (end,) = rest_of(stream)
            assert text == TEXT + "!"
            assert got == ids + rig.encode("!")
            assert isinstance(end, Done)
        assert not token.exists(), "no shard came to the point"
        assert rig.aborted == []


def test_supervisor_and_shard_die_at_once(small_tokenizer: Path, tmp_path: Path) -> None:
    """Nothing can go on then: every stream ends with a 503, nothing survives, the next start is clean."""
    token = tmp_path / "token"
    token.touch()
    launcher = (sys.executable, FAULTY, "supervisor and shard", "1", str(token))
    with running_rig("both", small_tokenizer, launcher=launcher) as rig:
        streams = rig.submit(8)
        for one in rig.encode(TEXT)[:10]:
            rig.push(streams, [one])
        for stream in streams:
            _, _, (end,) = rest_of(stream)
            assert isinstance(end, Error)
            assert end.status == 503
        until("the launcher to be gone", lambda: rig.launcher.poll() is not None)
        until("the port to notice", lambda: not rig.port.alive)
        rig.close()
        with launched(rig.name, "--tokenizer", str(small_tokenizer)):
            pass
        assert leftovers(rig.name) == []
