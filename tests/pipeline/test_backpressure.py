"""Back-pressure end to end: whoever is slow holds up only what depends on it, nothing grows, all resumes."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from outfeed.gateway.front import Front
from outfeed.ring import RingFull
from outfeed.sidecar import FinishReason
from outfeed.sink import Done, Error

from tests.eventually import until

from .commands import shard_pids
from .rig import Rig, rest_of, running_rig

ASKED_S = 0.2
# The push may come back late on a busy machine; it must not wait for the reader, which would be for ever.
GENEROUS_S = 30.0


@pytest.fixture
def rig(small_tokenizer: Path) -> Iterator[Rig]:
    with running_rig("press", small_tokenizer, "--shards", "2") as rig:
        yield rig


def push_until_full(rig: Rig, streams: list[object], ids: list[int]) -> int:
    """Push one step after the other until one does not fit; return how many did."""
    for pushed in range(1_000_000):
        began = time.monotonic()
        try:
            rig.port.push_tokens(
                [stream.route for stream in streams],  # type: ignore[attr-defined]
                ids * len(streams),
                [len(ids)] * len(streams),
                timeout=ASKED_S,
            )
        except RingFull:
            assert ASKED_S <= time.monotonic() - began < GENEROUS_S
            return pushed
    raise AssertionError("a million steps fitted somewhere")


def stand_still(go_on: threading.Event) -> None:
    go_on.wait(600)


def test_a_reader_that_stands_still_stops_the_scheduler_and_nothing_is_lost(rig: Rig) -> None:
    ids = rig.encode("Fluß 강물 ")
    streams = rig.submit(16)
    go_on = threading.Event()
    rig.front.reader.call(lambda: stand_still(go_on))
    pushed = push_until_full(rig, [*streams], ids)
    assert pushed > 0
    go_on.set()
    rig.push(streams, [], FinishReason.length(len(ids) * pushed))
    for stream in streams:
        text, got, (end,) = rest_of(stream)
        assert text == "Fluß 강물 " * pushed
        assert got == ids * pushed
        assert isinstance(end, Done)


def test_a_shard_that_stands_still_stops_the_scheduler_and_nothing_is_lost(rig: Rig) -> None:
    ids = rig.encode("川は流れる。")
    streams = rig.submit(16)
    pid = shard_pids(rig.name)[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        pushed = push_until_full(rig, [*streams], ids)
    finally:
        os.kill(pid, signal.SIGCONT)
    rig.push(streams, [], FinishReason.length(1))
    assert {rest_of(stream)[0] for stream in streams} == {"川は流れる。" * pushed}


def test_a_client_that_never_reads_is_aborted_and_the_others_go_on(small_tokenizer: Path) -> None:
    with running_rig("slow", small_tokenizer) as rig:
        rig.front.close()
        rig.front = Front.attach(rig.name, tokenizer=rig.tokenizer, sink_bytes=2000)
        ids = rig.encode("on and on ")
        lagging, reading = rig.submit(2)
        text = ""
        for _ in range(400):
            rig.push([lagging, reading], ids)
            item = reading.source.receive_sync(60)
            assert not isinstance(item, Error), item
            text += item.event.text  # type: ignore[union-attr]
            rig.receive()
        until("the abort", lambda: rig.receive() == [] and rig.aborted == [lagging.route])
        rig.push([reading], [], FinishReason.length(1))
        assert text + rest_of(reading)[0] == "on and on " * 400
        *_, (end,) = rest_of(lagging)
        assert isinstance(end, Error)
        assert end.type == "client_too_slow"


def test_ten_thousand_lagging_clients_cost_their_bytes_and_no_more(small_tokenizer: Path) -> None:
    """What waits is merged: ten times the steps cost ten times the text, not ten times the objects."""
    large = [f"--{ring}-bytes={1 << 24}" for ring in ("request", "control", "step", "egress")]
    with running_rig("many", small_tokenizer, *large) as rig:
        streams = [stream for _ in range(10) for stream in rig.submit(1000)]
        routes = np.array([stream.route for stream in streams], dtype=np.uint64)
        ids = np.full(len(streams), rig.encode("a")[0], dtype=np.int32)

        def push(steps: int, in_all: int) -> None:
            for _ in range(steps):
                rig.port.push_tokens(routes, ids, timeout=60)
            rows = in_all * len(streams)
            until("all rows", lambda: rig.front.reader.statistics().delivered == rows)

        push(20, in_all=20)
        before = anonymous_bytes()
        push(100, in_all=120)
        grown = anonymous_bytes() - before
        # 100 more tokens a client: 1 byte of text and 4 of id each, kept for the client and for a restore.
        content = len(streams) * 100 * (1 + 4 + 4)
        assert grown < 6 * content, (grown, content)
        rig.port.push_tokens(
            routes, ids, finishes={row: FinishReason.length(121) for row in range(len(streams))}
        )
        assert {rest_of(stream)[0] for stream in streams} == {"a" * 121}


def anonymous_bytes() -> int:
    """Return this process's own memory."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")
