"""What a gateway sees of the scheduler's ranks on the board."""

from collections.abc import Iterator

import pytest
from outfeed.gateway.ranks import Ranks
from outfeed.ring.board import Board, BoardRow, Role, State

from tests.instances import small_config


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create(small_config("ranks", ranks=2))
    yield made
    made._segment.unlink()
    made.close()


def attach(board: Board, rank: int) -> BoardRow:
    """Take a rank's row as a port does."""
    row = board.row(Role.SCHEDULER, rank)
    if row.owner is not None:
        row.count_replacement()
    row.claim(State.RUNNING)
    return row


def look(ranks: Ranks) -> list[int]:
    """Look who is gone, and deal with it."""
    lost = ranks.look()
    assert ranks.look() == lost, "until it is dealt with"
    ranks.settle()
    return lost


def test_a_rank_comes_and_goes(board: Board) -> None:
    ranks = Ranks(board)
    assert (ranks.received, ranks.moved()) == (False, False)
    other = attach(board, 1)
    assert ranks.moved()
    assert look(ranks) == []
    assert not ranks.received, "rank 0 alone receives"
    attach(board, 0)
    assert look(ranks) == []
    assert ranks.received
    other.state = State.STOPPED
    assert [look(ranks), look(ranks)] == [[1], []]
    assert not ranks.moved(), "who is gone is not asked for again with each request"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_attaches_anew_has_gone_in_between(board: Board, rank: int) -> None:
    attach(board, 0)
    attach(board, 1)
    ranks = Ranks(board)
    attach(board, rank).beat()
    assert ranks.moved()
    assert [look(ranks), look(ranks)] == [[rank], []]
    assert not ranks.moved()


def test_one_that_attaches_anew_while_the_board_is_read_has_moved(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(board, 0)
    ranks = Ranks(board)

    def serving(row: BoardRow) -> bool:
        if row.index == 0:
            attach(board, 0)
        return row.owner is not None

    with monkeypatch.context() as patched:
        patched.setattr(BoardRow, "serving", property(serving))
        ranks.look()
    ranks.settle()
    assert ranks.moved()
    assert look(ranks) == [0]


def test_a_word_of_the_board_that_is_written_over_takes_no_rank_away(board: Board) -> None:
    row = attach(board, 0)
    ranks = Ranks(board)
    for at in range(32):
        board._words[row._base + at] ^= 1 << 40
        assert look(ranks) == [], f"word {at}"
        assert not ranks.moved(), f"word {at}"
        row.beat()
