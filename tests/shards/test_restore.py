"""A new shard goes on where the dead one's readers are, byte for byte; logprob columns come along."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from outfeed.ring.batch import decode_batch, encode_batch
from outfeed.ring.family_makers import flat_family, ragged_family
from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import DecodeOptions, Restore
from outfeed.ring.route import make_route
from outfeed.shards.decoder import Decoder
from outfeed.shards.kernel import Kernel, Ready
from outfeed.shards.table import TokenTable
from tokenizers import Tokenizer

from .conftest import NAMES
from .driver import READER, SHARD, Driver, i32
from .tokenizers_here import TEXT, byte_ids

Tables = Callable[[str], TokenTable]
Tokenizers = Callable[[str], Tokenizer]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stops", [[], ["zzz", "and agaix", "naïves", "👨‍👩‍👧x", ". "]])
def test_a_stream_cannot_tell_that_its_shard_was_replaced(
    name: str, stops: list[str], table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    table, tokenizer = table_of(name), tokenizer_of(name)
    rng = random.Random(name)
    options = DecodeOptions(stop=stops)
    for text in TEXT:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        want = Driver(table).stream(ids, [], options=options).text
        for _ in range(3):
            driver = Driver(table)
            route = driver.start(options)
            at = 0
            while at < len(ids):
                if rng.random() < 0.5:
                    driver = driver.restore_into(table, route, options)
                step = min(rng.randint(1, 4), len(ids) - at)
                end = {route: FinishReason.length(len(ids))} if at + step == len(ids) else None
                driver.step([(route, ids[at : at + step])], end)
                at += step
            assert driver.heard[route].text == want


def test_what_takes_a_tokenizer_long_is_no_silence(table_of: Tables) -> None:
    """A few hundred thousand ids take seconds to restore without a table: no reason to be killed."""
    beats: list[None] = []
    decoder = Decoder(table_of("wordpiece"), beat=lambda: beats.append(None))
    assert beats, "between loading it and reading its vocabulary"
    beats.clear()
    count = 20_000
    decoder.restore(
        Restore(make_route(READER, SHARD, 5, 1), "", DecodeOptions(), b"", 0, i32([7] * count), 0)
    )
    assert len(beats) > count / 1000


def test_the_prompt_is_context_again(table_of: Tables, tokenizer_of: Tokenizers) -> None:
    table, tokenizer = table_of("metaspace_bpe"), tokenizer_of("metaspace_bpe")
    ids = tokenizer.encode("the fox jumps over", add_special_tokens=False).ids
    for at in range(1, len(ids) - 1):
        driver = Driver(table)
        route = driver.start(prompt=ids[:at])
        driver = driver.restore_into(table, route, prompt=ids[:at])
        driver.step([(route, ids[at : at + 1])])
        driver = driver.restore_into(table, route, prompt=ids[:at])
        driver.step([(route, ids[at + 1 :])], {route: FinishReason.length(1)})
        want = tokenizer.decode(ids)[len(tokenizer.decode(ids[:at])) :]
        assert driver.heard[route].text.decode() == want


@pytest.mark.parametrize("less", [1, 3, 100])
@pytest.mark.parametrize("held", ["", " three"])
def test_text_that_was_made_but_not_delivered_comes_first(
    held: str, less: int, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    """Also before what is held because it could become a stop string."""
    table, tokenizer = table_of("deepseek"), tokenizer_of("deepseek")
    ids = tokenizer.encode("one two three END", add_special_tokens=False).ids
    options = DecodeOptions(stop=[f"{held} ENDE"])
    driver = Driver(table)
    route = driver.start(options)
    text = tokenizer.decode(ids[:-1]).removesuffix(held)
    have = max(0, len(text) - less)
    driver.decoder.restore(Restore(route, "rid", options, b"", 0, i32(ids[:-1]), have))
    driver._next[route] = driver.heard[route].generated = len(ids) - 1
    driver.step([(route, ids[-1:])])
    driver.step([(route, [])], {route: FinishReason.length(1)})
    assert driver.heard[route].text.decode() == tokenizer.decode(ids)[have:]


def test_text_that_was_delivered_is_not_sent_again(table_of: Tables, tokenizer_of: Tokenizers) -> None:
    table, tokenizer = table_of("deepseek"), tokenizer_of("deepseek")
    ids = tokenizer.encode("one two three four", add_special_tokens=False).ids
    driver = Driver(table)
    route = driver.start()
    have = len(tokenizer.decode(ids[:3])) + 2
    driver.decoder.restore(Restore(route, "rid", DecodeOptions(), b"", 0, i32(ids[:3]), have))
    driver._next[route] = driver.heard[route].generated = 3
    driver.step([(route, ids[3:])])
    assert driver.heard[route].text.decode() == tokenizer.decode(ids)[have:]


def test_a_restore_behind_what_is_known_changes_nothing(table_of: Tables, tokenizer_of: Tokenizers) -> None:
    """The new shard read the registration itself, and rows after it, before the reader's RESTORE came."""
    table, tokenizer = table_of("deepseek"), tokenizer_of("deepseek")
    ids = tokenizer.encode("one two three four", add_special_tokens=False).ids
    driver = Driver(table)
    route = driver.start()
    driver.step([(route, ids[:3])])
    driver.decoder.restore(Restore(route, "rid", DecodeOptions(), b"", 0, i32(ids[:1]), 3))
    driver.step([(route, ids[3:])])
    assert driver.heard[route].text.decode() == tokenizer.decode(ids)
    assert driver.failures == []


def test_registering_twice_keeps_the_first(table_of: Tables) -> None:
    driver = Driver(table_of("deepseek"))
    route = driver.start(DecodeOptions(stop=["x"]))
    driver.step([(route, [100])])
    driver.decoder.register(driver.registration(route))
    driver.step([(route, [101])])
    assert driver.failures == []
    assert driver.decoder.live == 1


@pytest.mark.parametrize(
    ("stop", "pattern", "places", "text"),
    [
        (["four five"], "nine{3}", range(1, 5), b"one two three "),
        ([], "two three f..r", range(1, 4), b"one two three four"),
    ],
    ids=["string", "pattern"],
)
def test_a_stop_that_began_before_the_take_over_is_found_by_the_next_shard(
    table_of: Tables, tokenizer_of: Tokenizers, stop: list[str], pattern: str, places: range, text: bytes
) -> None:
    table, tokenizer = table_of("deepseek"), tokenizer_of("deepseek")
    options = DecodeOptions(stop=stop, stop_regex=[pattern], detect_stops=True)
    ids = tokenizer.encode("one two three four five six", add_special_tokens=False).ids
    for at in places:
        driver = Driver(table)
        route = driver.start(options)
        driver.step([(route, ids[:at])])
        driver = driver.restore_into(table, route, options)
        driver.step([(route, ids[at:])])
        assert driver.heard[route].text == text
        assert driver.heard[route].ended_here


@pytest.mark.parametrize(
    ("delivered", "rows"),
    [
        (0, ["ab", "", "é", "c", "d"]),  # all of it is owed, once
        (1, ["b", "", "é", "c", "d"]),
        (2, ["", "", "é", "c", "d"]),
        (3, ["", "", "", "c", "d"]),  # a part of a character, and the rest of it is nobody's
        (4, ["", "", "", "c", "d"]),
        (5, ["", "", "", "", "d"]),
    ],
)
def test_a_restored_stream_goes_on_where_its_client_is(
    delivered: int, rows: list[str], table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    """However many bytes that is, behind or ahead of what the ids make: nobody waits for a stop string."""
    of_byte = byte_ids(tokenizer_of("bytelevel_added"))
    a, b, open_byte, rest, c, d = (of_byte[byte] for byte in "abécd".encode())
    driver = Driver(table_of("bytelevel_added"))
    route = driver.start()
    driver.decoder.restore(Restore(route, "rid", DecodeOptions(), b"", 0, i32([a, b]), delivered))
    driver._next[route] = driver.heard[route].generated = 2
    for token in (None, open_byte, rest, c, d):
        driver.step([(route, [] if token is None else [token])])
    assert driver.heard[route].pieces == rows


def test_what_was_delivered_did_not_stop(table_of: Tables, tokenizer_of: Tokenizers) -> None:
    """Whatever it says: the request goes on, and stops at the next one."""
    vocab = tokenizer_of("bytelevel_added").get_vocab()
    a, b, c = (vocab[letter] for letter in "abc")
    driver, options = Driver(table_of("bytelevel_added")), DecodeOptions(stop=["b"], detect_stops=True)
    route = driver.start(options)
    driver.decoder.forget(route)
    driver.decoder.restore(Restore(route, "rid", options, b"", 0, i32([a, b, a]), 3))
    driver._next[route] = driver.heard[route].generated = 3
    driver.step([(route, [c, b, c])])
    assert (driver.heard[route].text, driver.heard[route].ids) == (b"c", [c, b])
    assert driver.heard[route].finish == FinishReason.stop("b")


def test_ready_made_text_that_is_not_all_there_restores_nothing() -> None:
    kernel = Kernel(None)
    for lens, restored in (([1, 1, 0], b"ab"), ([1, 2, 0], None), ([2**32 - 1, 2**32 - 1, 0], None)):
        kernel.register(1, 0, [], b"", 0)
        ready = Ready(b"ab", np.array(lens, "<u4"))
        if restored is None:
            with pytest.raises(MemoryError, match="2 ids cannot be restored"):
                kernel.restore(1, i32([5, 6]), 2, ready)
        else:
            assert kernel.restore(1, i32([5, 6]), 2, ready)[0] == restored
            kernel.forget(1)
            kernel.register(1, 0, [], b"", 0)
            assert kernel.restore(1, i32([5, 6]), 1, ready)[0] == restored[:1]
        kernel.forget(1)


# ---- columns that pass through


@pytest.mark.parametrize("name", ["deepseek", "wordpiece"])
def test_logprob_columns_go_with_their_rows_and_texts_to_who_asked(
    name: str, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    tokenizer = tokenizer_of(name)
    a, b, c, d = tokenizer.encode("alpha beta gamma delta", add_special_tokens=False).ids[:4]
    driver = Driver(table_of(name))
    quiet = driver.start()
    asked = driver.start(DecodeOptions(return_text_in_logprobs=True))
    gone = driver.start()
    driver.decoder.forget(gone)
    routes = np.array([gone, quiet, asked], dtype=np.uint64)
    ones, zeros = np.ones(3, dtype=np.uint32), np.zeros(3, dtype=np.uint32)
    families = [
        flat_family([(0, [-0.5], [a]), (1, [-1.5], [b]), (2, [-2.5], [c])]),
        None,
        ragged_family([(2, [([-2.5, -3.5], [c, d])])]),
        None,
        None,
        None,
        None,
    ]
    parts = encode_batch(1, routes, zeros, ones, zeros, np.array([a, b, c], np.int32), families=families)
    batch = decode_batch(memoryview(b"".join(bytes(part) for part in parts)))
    decoded = driver.decoder.decode(batch, SHARD, READER).rows.batch()
    assert decoded.routes.tolist() == [quiet, asked]
    flat, top = decoded.families[0], decoded.families[2]
    assert flat is not None
    assert flat.rows.tolist() == [0, 1]
    assert flat.values.tolist() == [-1.5, -2.5]
    assert top is not None
    assert top.rows.tolist() == [1]
    assert decoded.texts is not None
    assert decoded.texts.rows.tolist() == [1]
    assert decoded.texts.as_dict() == {token: tokenizer.decode([token]) for token in (c, d)}


@pytest.mark.parametrize("name", NAMES)
def test_a_tokens_own_text_is_the_tokenizers(name: str, table_of: Tables, tokenizer_of: Tokenizers) -> None:
    tokenizer = tokenizer_of(name)
    driver = Driver(table_of(name))
    vocab = max(tokenizer.get_vocab().values()) + 1
    rng = random.Random(5)
    for token in [*rng.choices(range(vocab), k=300), *range(min(300, vocab)), vocab, -1]:
        want = tokenizer.decode([token], skip_special_tokens=False) if token >= 0 else ""
        assert driver.decoder.token_text(token) == want


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (DecodeOptions(stop=["delta"], detect_stops=True), 4),
        (DecodeOptions(stop_regex=["gam+a"], detect_stops=True), 3),
        (DecodeOptions(stop=["nothing"], detect_stops=True), 6),
    ],
)
@pytest.mark.parametrize("name", ["deepseek", "wordpiece"])
def test_logprobs_behind_a_stop_that_the_shard_found_are_dropped(
    name: str, options: DecodeOptions, kept: int, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    """In each family a position for each id that is left; of other rows, and of the prompt, all of them."""
    words = ["one", " one", " gamma", " delta", " one", " one"]
    ids = [tokenizer_of(name).encode(word, add_special_tokens=False).ids[0] for word in words]
    driver = Driver(table_of(name))
    other, cut = driver.start(), driver.start(options)
    values = [-float(n) for n in range(6)]
    tops = [([value] * (n % 3), [7] * (n % 3)) for n, value in enumerate(values)]
    families = [
        flat_family([(0, values, ids), (1, values, ids)]),
        flat_family([(1, [-9.0] * 20, range(20))]),
        ragged_family([(0, tops), (1, tops)]),
        None,
        ragged_family([(1, tops)]),
        None,
        None,
    ]
    routes = np.array([other, cut], dtype=np.uint64)
    twice, zeros = np.full(2, 6, dtype=np.uint32), np.zeros(2, dtype=np.uint32)
    parts = encode_batch(1, routes, zeros, twice, zeros, np.array(ids * 2, np.int32), families=families)
    batch = decode_batch(memoryview(b"".join(bytes(part) for part in parts)))
    made = driver.decoder.decode(batch, SHARD, READER).rows
    decoded = decode_batch(memoryview(b"".join(bytes(part) for part in made.encode())))
    assert decoded.counts.tolist() == [6, kept]
    flat, prompt, top, _, asked, *_ = decoded.families
    assert flat is not None
    assert prompt is not None
    assert top is not None
    assert asked is not None
    assert flat.ids is not None
    assert flat.counts.tolist() == [6, kept]
    assert flat.ids.tolist() == ids + ids[:kept]
    assert flat.values.tolist() == values + values[:kept]
    assert prompt.counts.tolist() == [20]
    lengths = [n % 3 for n in range(6)]
    assert top.lengths is not None
    assert top.lengths.tolist() == lengths + lengths[:kept]
    assert len(top.values) == sum(lengths + lengths[:kept])
    assert asked.counts.tolist() == [kept]
