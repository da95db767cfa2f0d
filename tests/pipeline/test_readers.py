"""Gateway processes find a reader that is free, or say who has it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from outfeed.gateway.readers import NoReader, attach_reader
from outfeed.ring.board import Role, State
from outfeed.ring.instance import Instance, InstanceGone, leftovers

from tests.eventually import LIMIT_S
from tests.instances import small_config, unique

from .commands import launched

ME = os.getpid()


@pytest.fixture
def three(small_tokenizer: Path) -> Iterator[str]:
    """An instance with room for three gateways."""
    instance = unique("readers")
    with launched(instance, "--tokenizer", str(small_tokenizer), "--readers", "3"):
        yield instance
    assert leftovers(instance) == []


def test_each_gateway_becomes_the_first_reader_that_is_free(three: str) -> None:
    fronts = [attach_reader(three) for _ in range(3)]
    assert [front.routes.reader for front in fronts] == [0, 1, 2]
    with pytest.raises(NoReader) as caught:
        attach_reader(three)
    taken = ", ".join(f"{number} by pid {ME}" for number in range(3))
    assert f"every reader of instance '{three}' is taken ({taken})" in str(caught.value)
    assert "start the instance with --readers 4" in str(caught.value)
    fronts[1].close()
    with attach_reader(three) as again:
        assert again.routes.reader == 1
    fronts[0].close()
    fronts[2].close()


def test_a_reader_that_is_asked_for_is_given_or_said_to_be_taken(three: str) -> None:
    with attach_reader(three, 1) as front:
        assert front.routes.reader == 1
        with pytest.raises(NoReader, match=rf"reader 1 is taken by pid {ME}; free: 0, 2; .*--readers 4"):
            attach_reader(three, 1)
    with attach_reader(three, 1) as front:
        assert front.routes.reader == 1
    for number in (3, 64, -1):
        with pytest.raises(NoReader, match=rf"has 3 reader\(s\), numbers 0 to 2, and no reader {number}"):
            attach_reader(three, number)


def test_where_the_largest_instance_is_full_another_one_is_advised() -> None:
    instance = Instance.create(small_config("readers", lane_bytes=1 << 12, readers=64, shards=1))
    try:
        for row in instance.board.rows(Role.READER):
            row.claim(State.RUNNING)
        with pytest.raises(NoReader, match=r"63 by pid \d+\): an instance has room for no more"):
            attach_reader(instance.name)
    finally:
        instance.remove()
        instance.close()


def test_an_instance_that_is_not_there_is_said(three: str) -> None:
    with pytest.raises(InstanceGone, match=three):
        attach_reader("t-nobody-here")


def test_gateways_that_start_together_do_not_meet(three: str) -> None:
    command = [sys.executable, "-m", "outfeed.gateway.server", "--instance", three, "--port", "0"]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    try:
        said = [process.stdout.readline() for process in started if process.stdout is not None]
        found = [re.search(r"gateway (\d+) of", line) for line in said]
        assert sorted(int(one[1]) for one in found if one) == [0, 1, 2], said
        named = subprocess.run(
            [*command, "--reader", "2"], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert named.returncode == 2
        assert "reader 2 is taken by pid" in named.stderr
        assert "free: none" in named.stderr
    finally:
        for process in started:
            process.send_signal(signal.SIGINT)
        ends = [process.wait(LIMIT_S) for process in started]
        for process in started:
            process.communicate()
    assert ends == [0, 0, 0]
