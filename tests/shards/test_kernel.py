"""The kernel by itself: what a hostile frame asks of it costs what its bytes cost, and no more."""

import multiprocessing
from collections.abc import Callable

import numpy as np
import pytest
from outfeed.ring.batch import Batch, Core
from outfeed.ring.route import make_route
from outfeed.shards.kernel import END, END_STRING, Failure, Finish, Kernel, Ready
from outfeed.shards.table import TokenTable
from tokenizers import Tokenizer

Tables = Callable[[str], TokenTable]
Tokenizers = Callable[[str], Tokenizer]
FORK = multiprocessing.get_context("fork")
LIMIT_S = 60.0
"""Thousands of times what it takes; with quadratic costs it would be minutes."""


def step(routes: list[int], counts: list[int], ids: "np.typing.NDArray[np.int32]") -> Core:
    none = np.zeros(len(routes), "<u4")
    return Batch(0, np.array(routes, "<u8"), none, np.array(counts, "<u4"), none, ids).core


def in_time(work: Callable[[], None]) -> None:
    """Do it in a process of its own, which can be ended in the middle of a call."""
    process = FORK.Process(target=work)
    process.start()
    process.join(LIMIT_S)
    process.kill()
    process.join()
    assert process.exitcode == 0


def test_a_stop_string_nearly_found_everywhere(table_of: Tables, tokenizer_of: Tokenizers) -> None:
    size = 4_000_000
    token = tokenizer_of("bytelevel_added").get_vocab()["a"]
    route = make_route(0, 0, 5, 1)

    def work() -> None:
        kernel = Kernel(table_of("bytelevel_added").buffer)
        kernel.register(route, 0, [], b"", 0)
        ids = np.full(size, token, "<i4")
        finish = Finish(0, END_STRING, b"a" * (size // 2) + b"b")
        made = kernel.decode(step([route], [size], ids), 0, 0, [finish])
        assert made.text_bytes == size

    in_time(work)


def test_routes_that_were_chosen_to_meet(table_of: Tables) -> None:
    """A table of routes joins steps; these met in one place of it when places could be foreseen."""
    unmixed = pow(0x9E3779B97F4A7C15, -1, 1 << 64)
    routes = [((at >> 14) << 52 | at & 0x3FFF) * unmixed % (1 << 64) for at in range(1, 300_000)]

    def work() -> None:
        kernel = Kernel(table_of("bytelevel_added").buffer)
        made = kernel.decode(step(routes, [0] * len(routes), np.zeros(0, "<i4")), 0, 0, [], merge=1 << 20)
        assert made.rows == 0

    in_time(work)


def test_ready_made_text_must_say_where_all_of_it_is() -> None:
    kernel = Kernel(None)
    core = step([1], [2], np.zeros(2, "<i4"))
    with pytest.raises(ValueError, match="2 lengths of ready-made text, expected 3"):
        kernel.decode(core, 0, 0, [], Ready(b"", np.zeros(2, "<u4")))


@pytest.mark.parametrize(("lens", "tails"), [([100, 1], [0, 0]), ([1, 1], [100, 0]), ([1, 2], [0, 0])])
def test_ready_made_text_that_is_not_all_there_fails_whose_it_is(lens: list[int], tails: list[int]) -> None:
    """And whoever's comes behind it: nobody gets bytes from beyond the text."""
    kernel = Kernel(None)
    for route in (1, 2, 3):
        kernel.register(route, 0, [], b"", 0)
    ready = Ready(b"abc", np.array([1, *lens, 0, *tails], "<u4"))
    ends = [Finish(row, END, b"") for row in range(3)]
    made = kernel.decode(step([1, 2, 3], [1, 1, 1], np.zeros(3, "<i4")), 0, 0, ends, ready)
    lost = [2, 3] if lens[0] + tails[0] > 2 else [3]
    assert [(failure.route, failure.too_much) for failure in made.failures] == [
        (route, True) for route in lost
    ]
    assert made.routes.tolist() == [route for route in (1, 2, 3) if route not in lost]
    assert bytes(made.text) == b"abc"[: made.rows]


def test_a_text_that_no_frame_has_room_for_fails_its_request_alone(
    table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    vocab = tokenizer_of("bytelevel_added").get_vocab()
    size = (64 << 20) // 40 + 1
    kernel = Kernel(table_of("bytelevel_added").buffer)
    for route in (1, 2, 3):
        kernel.register(route, 0, [], b"", 0)
    ids = np.full(size + 2, vocab["x" * 40], "<i4")
    ids[0], ids[-1] = vocab["a"], vocab["b"]
    core = step([1, 2, 3], [1, size, 1], ids)
    made = kernel.decode(core, 0, 0, [])
    assert made.failures == [Failure(2, 0, 0, size, True)]
    assert (made.routes.tolist(), bytes(made.text)) == ([1, 3], b"ab")
    assert kernel.decode(core, 0, 0, []).doubled == 3  # it has ended


def test_joined_steps_have_neither_ready_made_text_nor_ends_of_tokens(table_of: Tables) -> None:
    core, ready = step([1], [1], np.zeros(1, "<i4")), Ready(b"", np.zeros(2, "<u4"))
    kernel = Kernel(table_of("bytelevel_added").buffer)
    for more in ({"ready": ready}, {"token_ends": True}):
        with pytest.raises(MemoryError, match="cannot be decoded"):
            kernel.decode(core, 0, 0, [], merge=100, **more)


def test_a_kernel_without_a_table_has_no_tokens() -> None:
    with pytest.raises(ValueError, match="no table"):
        Kernel(None).token_text(1)
    with pytest.raises(MemoryError, match="cannot be decoded"):
        Kernel(None).decode(step([1], [1], np.zeros(1, "<i4")), 0, 0, [])


@pytest.mark.parametrize(
    ("at", "rows", "tokens"),
    [(65, 0, 0), (45, 1, 0), (0, 4, 0), (0, 1, 12), (0, 1 << 60, 1), (0, 1, 1 << 62)],
)
def test_columns_that_do_not_lie_in_their_bytes_are_not_looked_at(at: int, rows: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="do not lie in 64 bytes"):
        Kernel(None).decode(Core(bytes(64), at, rows, tokens), 0, 0, [])
