"""What a gateway says of its instance: each part that is missing, by name, and only while it is."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from outfeed.gateway.backend import FrontBackend
from outfeed.ring.board import Phase

from tests.eventually import until

from .commands import shard_pids
from .rig import Rig, running_rig


@pytest.fixture
def rig(small_tokenizer: Path) -> Iterator[Rig]:
    with running_rig("health", small_tokenizer, "--shards", "2") as rig:
        yield rig


def test_a_shard_that_is_dead_is_named_until_it_is_replaced(rig: Rig) -> None:
    backend = FrontBackend(rig.front)
    assert backend.trouble() is None
    rig.launcher.send_signal(signal.SIGSTOP)  # nobody replaces it
    try:
        rig.kill_shard(1)
        until("it to be missed", lambda: backend.trouble() == "detokenizer shard 1 has died")
        assert "shard 1: has died" in str(asyncio.run(backend.check(0.2)))
    finally:
        rig.launcher.send_signal(signal.SIGCONT)
    until("it to be well again", lambda: backend.trouble() is None)
    assert len(shard_pids(rig.name)) == 2


def test_a_scheduler_that_has_not_come_or_has_gone_is_named(rig: Rig) -> None:
    backend = FrontBackend(rig.front)
    rig.port.close()
    assert backend.trouble() == "scheduler 0 is not running"
    assert str(asyncio.run(backend.check(0.2))) == "scheduler 0: is not running", "and no shard is blamed"


def test_an_instance_that_drains_stops_or_is_gone_says_so(rig: Rig) -> None:
    backend = FrontBackend(rig.front)
    (stream,) = rig.submit()  # so that the drain has something to wait for
    until("the gateway to say so", lambda: rig.front._row.get("live") == 1)
    rig.launcher.send_signal(signal.SIGTERM)
    until("it to drain", lambda: rig.front.board.phase == Phase.DRAINING)
    assert backend.trouble() == "the instance is draining"
    rig.launcher.send_signal(signal.SIGKILL)
    rig.launcher.wait()
    until("it to be gone", lambda: backend.trouble() == "the instance is gone or stopping")
    assert "launcher 0: is gone or stopping" in str(asyncio.run(backend.check(0.2)))
    stream.close()


def test_the_figures_of_a_gateways_own_ring_are_its_own(rig: Rig) -> None:
    """All gateways' figures are in a scrape: what is one's own has its number, the rest is there once."""
    backend = FrontBackend(rig.front)
    rings = {one.labels["ring"] for one in backend.readings() if one.name == "ring_depth_bytes"}
    assert rings == {"request", "control", "step"}
    own = [one for one in backend.own_readings() if one.name == "ring_depth_bytes"]
    assert [one.labels for one in own] == [
        {"ring": "egress", "lane": str(shard), "reader": "0"} for shard in range(2)
    ]
