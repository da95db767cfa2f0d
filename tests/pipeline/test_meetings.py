"""Two things that happen to a gateway at once, in the order that is worst: no request waits for ever, or runs
for nobody."""

import asyncio
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from outfeed.sink import Error, SinkSender

from tests.eventually import LIMIT_S, until

from .commands import launched, unique
from .rig import Rig, rest_of

NUMBERS = itertools.count()
BODY = {"input_ids": [1], "sampling_params": {"max_new_tokens": 9}}


@pytest.fixture(scope="module")
def shared(small_tokenizer: Path) -> Iterator[Rig]:
    instance = unique("meetings", NUMBERS)
    with launched(instance, "--tokenizer", str(small_tokenizer), "--shards", "1") as launcher:
        rig = Rig(instance, small_tokenizer, launcher)
        yield rig
        rig.close()


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    yield shared
    until("nothing to be live", lambda: shared.receive() == [] and shared.front.ingress.live() == 0)
    shared.aborted.clear()


def test_a_request_that_is_aborted_on_its_way_to_the_scheduler_does_not_run_for_nobody(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shard is cut off: the reader aborts it as it is registered. It goes on before the reader does."""
    reader = rig.front.reader
    register, abort = reader.register, reader._on_abort
    aborted, submitted = threading.Event(), threading.Event()

    def register_and_abort(route: int, rid: str, sender: SinkSender) -> None:
        register(route, rid, sender)
        reader.abort(route, "shard cut off", Error(503, "shard_cut_off", "lost"))
        assert aborted.wait(LIMIT_S)

    def abort_and_wait(route: int, rid: str, reason: str) -> None:
        abort(route, rid, reason)
        aborted.set()
        assert submitted.wait(LIMIT_S)

    monkeypatch.setattr(reader, "register", register_and_abort)
    monkeypatch.setattr(reader, "_on_abort", abort_and_wait)
    (stream,) = asyncio.run(rig.front.submit(BODY))
    submitted.set()
    (end,) = rest_of(stream)[2]
    assert isinstance(end, Error)
    assert end.type == "shard_cut_off"
    rig.receive()
    assert not rig.port.is_live(stream.route)
