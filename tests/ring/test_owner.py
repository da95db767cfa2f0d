"""Who owns something, and whether it lives: told also when nothing more can be opened."""

import subprocess
import sys

import pytest
from outfeed.ring.owner import Owner

from tests.limits import no_more_files


def test_the_living_and_the_dead_are_told_apart_without_a_file() -> None:
    me = Owner.me()
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child = Owner.of(other.pid)
    assert child is not None
    with no_more_files():
        with pytest.raises(OSError, match="Too many open files"), open("/proc/self/stat"):
            pass
        assert me.alive()
        assert child.alive()
    other.communicate()
    with no_more_files():
        assert not child.alive()
    assert not child.alive()


@pytest.mark.parametrize("word", [1, 1 << 42, (1 << 64) - 1, 0x0123456789ABCDEF])
def test_any_word_names_somebody_who_can_be_asked_after(word: int) -> None:
    owner = Owner.unpack(word)
    assert owner is not None
    assert not owner.alive()
    with no_more_files():
        assert owner.alive() in (True, False)
