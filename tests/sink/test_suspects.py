"""Who hangs on a lost rank: found by having no row for a while, and nobody who vouches."""

from outfeed.sink.suspects import SILENT_S, Suspects


def test_only_who_says_nothing_more_is_given_up() -> None:
    came = {1: 10, 2: 20, 3: 0, 4: 40, 5: 50}
    suspects = Suspects(came.get)
    assert suspects.silent(0.0) == []
    suspects.doubt([*came, 8], 1.0)  # 8 has ended already
    came[2] += 1  # has a row
    del came[4]  # ends
    came[6] = 0  # comes later
    suspects.vouch(5)
    suspects.vouch(7)
    assert suspects.silent(1.0 + SILENT_S / 2) == []
    assert suspects.silent(1.0 + SILENT_S) == [1, 3]
    assert suspects.silent(9.0 + SILENT_S) == []


def test_another_lane_lost_meanwhile_begins_the_watch_again() -> None:
    came = {1: 10, 2: 20}
    suspects = Suspects(came.get)
    suspects.doubt([1, 2], 0.0)
    came.update({1: 11, 2: 21})
    suspects.doubt([1, 2], 5.0)
    assert suspects.silent(SILENT_S) == []
    came[1] = 12
    assert suspects.silent(5.0 + SILENT_S) == [2]
