"""The kernel by itself: what a hostile frame asks of it costs what its bytes cost, and no more."""

import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from outfeed.ring.batch import Batch, Core
from outfeed.ring.route import make_route
from outfeed.shards.errors import BadRegistration
from outfeed.shards.kernel import DROPPED, END, END_STRING, END_TOKENS, Failure, Finish, Kernel, Ready
from outfeed.shards.table import TokenTable
from tokenizers import Tokenizer, decoders, models

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


def test_a_plan_keeps_what_is_decoded_then(table_of: Tables, tokenizer_of: Tokenizers) -> None:
    """Row by row: whose it is, whether it follows on, what ended its request, its stop tokens."""
    vocab = tokenizer_of("bytelevel_added").get_vocab()
    a, b = vocab["a"], vocab["b"]
    ours, ended, other = (make_route(0, 0, slot, 1) for slot in (5, 6, 7))
    shards, readers, stale = make_route(0, 1, 5, 1), make_route(1, 0, 5, 1), make_route(0, 0, 5, 2)
    told: list[tuple[int, int, list[int], int]] = [
        # route, first, ids, kept
        (stale, 0, [a], DROPPED),
        (readers, 0, [a], DROPPED),
        (shards, 0, [a], DROPPED),
        (ended, 0, [a], DROPPED),
        (ours, 0, [a, a], 2),
        (ours, 1, [a], DROPPED),  # said before
        (ours, 2, [b], 1),
        (other, 0, [a], 1),
        (ours, 3, [b, a, b], 1),  # ends, with two stop tokens
        (ours, 6, [b], DROPPED),
        (other, 2, [a], DROPPED),  # the one before it is lost
        (other, 1, [a], DROPPED),
    ]
    kernel = Kernel(table_of("bytelevel_added").buffer)
    for route in {row[0] for row in told} - {stale}:
        kernel.register(route, 0, [], b"", 0)
    kernel.end(ended)
    routes, firsts, ids, kept = zip(*told, strict=True)
    none, counts = np.zeros(len(told), "<u4"), np.array([len(row) for row in ids], "<u4")
    joined = np.array([token for row in ids for token in row], "<i4")
    core = Batch(0, np.array(routes, "<u8"), np.array(firsts, "<u4"), counts, none, joined).core
    ends = [Finish(8, END_TOKENS, np.array([a, b], "<i4").tobytes())]
    assert kernel.plan(core, 0, 0, ends).tolist() == list(kept)
    made = kernel.decode(core, 0, 0, ends)
    assert made.source.tolist() == [row for row, keep in enumerate(kept) if keep != DROPPED]
    assert made.counts.tolist() == [keep for keep in kept if keep != DROPPED]
    assert made.generated.tolist() == [2, 1, 1, 3]
    assert kernel.totals()["tokens"] == 7


def test_a_step_may_be_of_any_size_after_one_of_any_other(table_of: Tables) -> None:
    kernel = Kernel(table_of("bytelevel_added").buffer)
    for rows in range(1, 90):
        routes = np.array([make_route(0, 0, row, rows) for row in range(rows)], "<u8")
        for route in routes.tolist():
            kernel.register(route, 0, [], b"", 0)
        prompts, ids = np.arange(7, 7 + rows, dtype="<u4"), np.arange(3, 3 + rows, dtype="<i4")
        none, ones = np.zeros(rows, "<u4"), np.ones(rows, "<u4")
        made = kernel.decode(Batch(0, routes, none, ones, prompts, ids).core, 0, 0, [])
        assert (made.routes == routes).all()
        assert (made.first == none).all()
        assert (made.counts == ones).all()
        assert (made.generated == ones).all()
        assert (made.prompt_tokens == prompts).all()
        assert (made.ids == ids).all()
        assert made.source.tolist() == list(range(rows))


def test_steps_that_found_no_memory_leave_each_next_one_whole(
    table_of: Tables, tokenizer_of: Tokenizers, tmp_path: Path
) -> None:
    """However much had grown for it when the memory ended: that lies elsewhere now."""
    if shutil.which("gcc") is None:
        pytest.skip("left out: gcc is not installed")
    here, library, table = Path(__file__).parent, tmp_path / "growth.so", tmp_path / "table"
    flags = ["-std=c11", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *flags, here / "c" / "growth.c", "-o", library], check=True)
    table.write_bytes(table_of("bytelevel_added").buffer)
    token = tokenizer_of("bytelevel_added").get_vocab()["a"]
    done = subprocess.run(
        [sys.executable, here / "growing.py", library, table, str(token)],
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= len(("columns", "routes", "failures", "stops", "ids", "token_ends"))


def test_a_step_tells_which_other_readers_have_rows_in_it(table_of: Tables) -> None:
    readers = [255, 0, 63, 64, 200, 64]
    routes = [make_route(reader, 0, 5, 1) for reader in readers] + [make_route(7, 1, 5, 1)]
    kernel = Kernel(table_of("bytelevel_added").buffer)
    made = kernel.decode(step(routes, [0] * len(routes), np.zeros(0, "<i4")), 0, 64, [])
    assert made.shared
    assert made.other_readers == [0, 63, 200, 255]
    assert not kernel.decode(step(routes[3:4], [0], np.zeros(0, "<i4")), 0, 64, []).shared


def test_work_is_a_tokens_own_its_bytes_and_those_that_are_searched(
    table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    kernel = Kernel(table_of("bytelevel_added").buffer)
    ids = np.full(9, tokenizer_of("bytelevel_added").get_vocab()["a"], "<i4")
    kernel.register(1, 0, [], b"", 0)
    kernel.register(2, 0, [b"stop"], b"", 0)
    for route, work, text in ((1, 18, 9), (2, 18 + 27, 18)):
        kernel.decode(step([route], [9], ids), 0, 0, [])
        assert (kernel.totals()["work"], kernel.totals()["text_bytes"]) == (work, text)


def test_rows_are_merged_up_to_just_the_limit(table_of: Tables, tokenizer_of: Tokenizers) -> None:
    kernel, route = Kernel(table_of("bytelevel_added").buffer), make_route(0, 0, 5, 1)
    kernel.register(route, 0, [], b"", 0)
    ones, ids = np.ones(6, "<u4"), np.full(6, tokenizer_of("bytelevel_added").get_vocab()["a"], "<i4")
    core = Batch(0, np.full(6, route, "<u8"), np.arange(6, dtype="<u4"), ones, ones, ids).core
    assert kernel.decode(core, 0, 0, [], merge=10).counts.tolist() == [2, 2, 2]  # a token takes 4 bytes and 1


def test_requests_have_so_many_pages_and_give_them_back() -> None:
    """What names requests all over the place costs memory, but not all of the machine's."""
    kernel = Kernel(None)
    routes = [make_route(page >> 12, 0, (page & 0xFFF) << 8, 1) for page in range(8193)]
    for route in routes[:-1]:
        assert kernel.register(route, 0, [], b"", 0)
    with pytest.raises(MemoryError, match="no memory for another request"):
        kernel.register(routes[-1], 0, [], b"", 0)
    assert kernel.register(routes[0] + 1, 0, [], b"", 0)  # has a page already
    assert kernel.forget(routes[1])
    assert kernel.register(routes[-1], 0, [], b"", 0)
    assert (kernel.live, kernel.totals()["pages"]) == (8193, 8192)
    for route in (*routes, routes[0] + 1):
        assert kernel.forget(route) == (route != routes[1])
    assert (kernel.live, kernel.totals()["pages"]) == (0, 0)


@pytest.mark.parametrize(
    ("stops", "fits"),
    [([b"a"] * 256, True), ([b"a"] * 257, False), ([b"a" * 65536], True), ([b"a" * 65536, b"b"], False)],
)
def test_stop_strings_have_limits(stops: list[bytes], fits: bool) -> None:
    kernel = Kernel(None)
    if fits:
        assert kernel.register(1, 0, stops, b"", 0)
    else:
        with pytest.raises(BadRegistration, match="at most 256 of 65536 bytes together"):
            kernel.register(1, 0, stops, b"", 0)
    assert kernel.live == fits


def test_a_request_is_registered_once_and_has_a_route() -> None:
    kernel = Kernel(None)
    with pytest.raises(MemoryError, match="code"):
        kernel.register(0, 0, [], b"", 0)
    assert kernel.register(1, 0, [b"stop"], b"", 0)
    assert not kernel.register(1, 0, [], b"", 0)
    assert (kernel.totals()["live"], kernel.totals()["pages"]) == (1, 1)
    none = np.zeros(0, "<i4")
    made = kernel.decode(step([0, 2], [0, 0], none), 0, 0, [], Ready(b"", np.zeros(2, "<u4")))
    assert (made.rows, made.stale_rows) == (0, 2)
    assert kernel.look(0) is None
    assert not kernel.forget(0)


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


@pytest.mark.parametrize("ends", [False, True])
def test_a_text_that_no_frame_has_room_for_fails_its_request_alone(
    ends: bool, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    """Also where its last token is none, and so needs no room."""
    vocab = tokenizer_of("bytelevel_added").get_vocab()
    size = (64 << 20) // 40 + 2
    kernel = Kernel(table_of("bytelevel_added").buffer)
    for route in (1, 2, 3):
        kernel.register(route, 0, [], b"", 0)
    ids = np.full(size + 2, vocab["x" * 40], "<i4")
    ids[0], ids[-2], ids[-1] = vocab["a"], -1, vocab["b"]
    core, finishes = step([1, 2, 3], [1, size, 1], ids), [Finish(1, END, b"")] if ends else []
    made = kernel.decode(core, 0, 0, finishes)
    assert made.failures == [Failure(2, 0, 0, size, True)]
    assert (made.routes.tolist(), bytes(made.text)) == ([1, 3], b"ab")
    assert kernel.decode(core, 0, 0, []).doubled == 3  # it has ended


def test_matched_ids_are_no_text_to_be_found(table_of: Tables, tokenizer_of: Tokenizers) -> None:
    """Even where their bytes spell some of it."""
    vocab = tokenizer_of("bytelevel_added").get_vocab()
    kernel = Kernel(table_of("bytelevel_added").buffer)
    kernel.register(1, 0, [], b"", 0)
    ids = np.array([vocab[letter] for letter in "xabcd"], "<i4")
    made = kernel.decode(step([1], [5], ids), 0, 0, [Finish(0, END_TOKENS, b"abcd")])
    assert (bytes(made.text), made.counts.tolist()) == (b"xabcd", [5])


def test_joined_steps_have_neither_ready_made_text_nor_ends_of_tokens(table_of: Tables) -> None:
    core, ready = step([1], [1], np.zeros(1, "<i4")), Ready(b"", np.zeros(2, "<u4"))
    kernel = Kernel(table_of("bytelevel_added").buffer)
    for more in ({"ready": ready}, {"token_ends": True}):
        with pytest.raises(MemoryError, match="cannot be decoded"):
            kernel.decode(core, 0, 0, [], merge=100, **more)


def test_a_prompt_may_be_said_to_be_longer_than_any() -> None:
    assert Kernel(None).register(make_route(0, 0, 5, 1), 0, [], b"", 1 << 40)


def test_a_token_longer_than_most_is_told_whole(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["x" * 5000])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Kernel(TokenTable.compile(tmp_path).buffer).token_text(0) == "x" * 5000


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


def test_what_fills_a_body_up_is_nothing_that_was_there_before(
    table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    """Behind the header and behind the text: an earlier frame's bytes are not for this one's reader."""
    a = tokenizer_of("bytelevel_added").get_vocab()["a"]
    kernel = Kernel(table_of("bytelevel_added").buffer)
    for route, size in ((1, 100), (2, 1)):
        kernel.register(route, 0, [], b"", 0)
        made = kernel.decode(step([route], [size], np.full(size, a, "<i4")), 0, 0, [])
        assert made.text_bytes == size
        kernel.pack(b"\xff" * 100)
    body = bytes(kernel.pack(b"\xff"))
    header, text = body[16 : body.index(b"\2\0\0\0\0\0\0\0")], body[-4:]
    assert header.rstrip(b"\0") == b"\xff"
    assert text == b"a\0\0\0"
