"""Who lost the last row to a damaged frame: found by having no other for a while."""

from outfeed.ring.suspects import SILENT_S, Suspects


def test_only_who_says_nothing_more_is_given_up() -> None:
    came = {1: 10, 2: 20, 3: 0, 4: 40}
    suspects = Suspects(lambda: list(came), came.get)
    assert suspects.silent(0.0) == []
    assert not suspects.any
    suspects.damaged()
    assert suspects.any
    assert suspects.silent(1.0) == []
    came[2] += 1  # has a row
    del came[4]  # ends
    came[5] = 0  # comes, and cannot have lost anything
    assert suspects.silent(1.0 + SILENT_S / 2) == []
    assert suspects.silent(1.0 + SILENT_S) == [1, 3]
    assert suspects.silent(9.0 + SILENT_S) == []
    assert not suspects.any


def test_a_frame_that_is_damaged_meanwhile_is_looked_into_next() -> None:
    came = {1: 10, 2: 20}
    suspects = Suspects(lambda: list(came), came.get)
    suspects.damaged()
    assert suspects.silent(0.0) == []
    came.update({1: 11, 2: 21})
    suspects.damaged()
    assert suspects.silent(SILENT_S) == []
    assert suspects.silent(SILENT_S) == []
    came[1] = 12
    assert suspects.silent(2 * SILENT_S) == [2]


def test_nobody_live_is_nobody_to_watch() -> None:
    suspects = Suspects(list, lambda route: None)
    suspects.damaged()
    assert suspects.silent(0.0) == []
    assert not suspects.any
