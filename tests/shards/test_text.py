"""The text is the tokenizer's own, whatever the tokenizer and wherever rows are cut."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from outfeed.ring.frames import DecodeOptions
from outfeed.shards.kernel import Kernel
from outfeed.shards.table import TokenTable
from tokenizers import Tokenizer, decoders, models

from .conftest import NAMES, WITH_TABLE
from .driver import Driver, every_cut
from .tokenizers_here import TEXT, byte_ids

Tables = Callable[[str], TokenTable]
Tokenizers = Callable[[str], Tokenizer]


@pytest.mark.parametrize("name", NAMES)
def test_only_sums_over_tokens_get_a_table(name: str, table_of: Tables) -> None:
    assert table_of(name).fallback == (name not in WITH_TABLE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", TEXT)
def test_real_text_cut_anywhere(name: str, text: str, table_of: Tables, tokenizer_of: Tokenizers) -> None:
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode(text, add_special_tokens=False).ids[:24]
    driver = Driver(table_of(name))
    want = tokenizer.decode(ids)
    for cuts in every_cut(len(ids)):
        assert driver.stream(ids, cuts).text.decode() == want


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_random_ids_cut_anywhere(name: str, skip: bool, table_of: Tables, tokenizer_of: Tokenizers) -> None:
    tokenizer, table = tokenizer_of(name), table_of(name)
    rng = random.Random(name)
    vocab = max(tokenizer.get_vocab().values()) + 1
    odd = [*range(min(300, vocab)), *range(max(0, vocab - 20), vocab + 5)]
    options = DecodeOptions(skip_special_tokens=skip)
    driver = Driver(table)
    for _ in range(60):
        ids = [rng.choice(odd) if rng.random() < 0.5 else rng.randrange(vocab) for _ in range(12)]
        want = tokenizer.decode(ids, skip_special_tokens=skip)
        for cuts in (*every_cut(len(ids))[:4], list(range(1, 12))):
            assert driver.stream(ids, cuts, options=options).text.decode() == want, ids


def test_ids_that_are_no_tokens_decode_to_nothing(table_of: Tables, tokenizer_of: Tokenizers) -> None:
    driver = Driver(table_of("deepseek"))
    a, b = tokenizer_of("deepseek").encode("ab cd", add_special_tokens=False).ids[:2]
    heard = driver.stream([-1, a, 129280, 2**31 - 1, -(2**31), b], [1, 2, 3])
    assert heard.text.decode() == tokenizer_of("deepseek").decode([a, b])
    assert len(heard.ids) == heard.generated == 6


@pytest.mark.parametrize("name", ["metaspace_bpe", "metaspace_stripped"])
def test_runs_of_byte_tokens_cut_anywhere(name: str, table_of: Tables, tokenizer_of: Tokenizers) -> None:
    """A run is text or U+FFFD throughout, with a table and without one: its last byte decides."""
    tokenizer = tokenizer_of(name)
    rng, of_byte = random.Random(5), byte_ids(tokenizer)
    words = tokenizer.encode("The quick brown fox", add_special_tokens=False).ids
    driver, broken = Driver(table_of(name)), 0
    for _ in range(60):
        raw = [rng.choice(["e", "\n", "é", "日", "👍"]).encode() for _ in range(rng.randint(1, 12))]
        raw[-1] = raw[-1][: rng.randint(1, 4)]
        ids = [*words, *(of_byte[byte] for byte in b"".join(raw)), *words][: 60 if rng.random() < 0.5 else -4]
        want = tokenizer.decode(ids)
        broken += "\ufffd" in want
        for cuts in ([], list(range(1, len(ids))), [len(ids) // 2]):
            assert driver.stream(ids, cuts).text.decode() == want, ids
    assert 10 < broken < 50


def test_any_bytes_become_what_python_makes_of_them(table_of: Tables, tokenizer_of: Tokenizers) -> None:
    """Every first byte of a character, and what is just in and just out of reach behind it."""
    some = [0, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2, 0xDF, 0xE0, 0xED, 0xF0, 0xF4, 0xFF]
    raw = list(map(bytes, itertools.product(range(0x7F, 0x100), some, some)))
    raw += map(bytes, itertools.product(range(0xEF, 0xF8), some, some, some))
    ids = np.zeros(256, np.int32)
    for byte, token in byte_ids(tokenizer_of("bytelevel_added")).items():
        ids[byte] = token
    lens = np.array([len(spelled) for spelled in raw], np.uint32)
    spelled = ids[np.frombuffer(b"".join(raw), np.uint8)]
    text, ends = Kernel(table_of("bytelevel_added").buffer).decode_each(spelled, lens, 0)
    at = 0
    for spelled_bytes, end in zip(raw, np.cumsum(ends).tolist(), strict=True):
        assert text[at:end].decode() == spelled_bytes.decode(errors="replace")
        at = end


def test_a_byte_token_is_what_the_tokenizer_takes_for_one(tmp_path: Path) -> None:
    """Small letters and a sign are digits to its number parser; what only looks like a byte is text."""
    sun, odd = ["<0xe6>", "<0x97>", "<0xA5>"], ["<0x+A>", "<0x-A>", "<0xG1>", "<0xé>", "<0x041>", "<0x41>a"]
    vocab = {content: token for token, content in enumerate(["a", *sun, *odd])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.decoder = decoders.ByteFallback()
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    table = TokenTable.compile(file)
    assert not table.fallback
    ids = [0, 1, 2, 3, 4, 1, 2, 3, *range(5, len(vocab)), 1, 2, 0]
    assert tokenizer.decode(ids).startswith("a日\n日<0x-A><0xG1>")
    for cuts in every_cut(len(ids)):
        assert Driver(table).stream(ids, cuts).text.decode() == tokenizer.decode(ids)


@pytest.mark.parametrize("strip", [1, 2, 3])
def test_spaces_that_are_stripped_are_the_texts_first_wherever_it_begins(
    strip: int, tmp_path: Path, tokenizer_path: Callable[[str], Path]
) -> None:
    """Behind tokens that have no text, and in tokens that are no more than a space."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path("metaspace_bpe")))
    tokenizer.add_tokens(["~~"])
    steps = [decoders.Replace("~~", ""), decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", strip, 0)])
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    table, vocab, of_byte = TokenTable.compile(file), tokenizer.get_vocab(), byte_ids(tokenizer)
    assert not table.fallback
    nothing, space, e, byte_space = vocab["~~"], vocab["▁"], vocab["e"], of_byte[0x20]
    for ids in (
        [nothing, space, space, e, space],
        [space, nothing, space, space, space, e],
        [nothing, byte_space, nothing, byte_space, space, e],
        [e, space, space],
        [space, e, space, e],
    ):
        for cuts in every_cut(len(ids)):
            assert Driver(table).stream(ids, cuts).text.decode() == tokenizer.decode(ids)
    kernel = Kernel(table.buffer)
    for token in vocab.values():
        assert kernel.token_text(token) == tokenizer.decode([token], skip_special_tokens=False)


def test_a_run_is_whole_up_to_256_bytes_and_then_flows(table_of: Tables, tokenizer_of: Tokenizers) -> None:
    """Past that what is complete is text, whatever comes behind it; an open character goes on."""
    tokenizer = tokenizer_of("metaspace_bpe")
    of_byte, word = byte_ids(tokenizer), tokenizer.encode("the", add_special_tokens=False).ids[-1]
    a, broken, spoken = of_byte[0x61], of_byte[0xFF], tokenizer.decode([of_byte[0x61], word])[1:]
    sun = [of_byte[byte] for byte in "日".encode()]
    for prompt, ids, want in (
        ([], [a] * 255 + [broken], "\ufffd" * 256),
        ([], [a] * 256 + [broken], "a" * 256 + "\ufffd"),
        ([], [a, *sun * 85, *[a] * 255, *sun * 2], "a" + "日" * 85 + "a" * 255 + "日日"),
        ([a], [*sun[1:], broken, word, *sun * 90], "\ufffd" * 3 + spoken + "日" * 90),
        ([a, sun[0]], [*sun[1:], *[a] * 260, broken], "日" + "a" * 253 + "\ufffd" * 8),
    ):
        for cuts in ([], [1, 100, 254, 255, 256, 257]):
            cuts = [cut for cut in cuts if cut < len(ids)]
            heard = Driver(table_of("metaspace_bpe")).stream(ids, cuts, prompt=prompt)
            assert heard.text.decode() == want


@pytest.mark.parametrize("name", ["metaspace_bpe", "metaspace_stripped"])
def test_a_run_is_not_cut_because_a_replacement_character_follows(
    name: str, tmp_path: Path, tokenizer_path: Callable[[str], Path]
) -> None:
    """A token that is U+FFFD is no character's beginning: the run before it has ended, whole or broken."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path(name)))
    tokenizer.add_tokens(["\ufffd"])
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    driver, of_byte = Driver(TokenTable.compile(file)), byte_ids(tokenizer)
    replacement = tokenizer.get_vocab()["\ufffd"]
    for raw in (b"ab cd ef gh\xe6", b"\xe6\x97\xa5ab", b"\xff"):
        ids = [*(of_byte[byte] for byte in raw), replacement, replacement, of_byte[0x61]]
        for cuts in every_cut(len(ids)):
            assert driver.stream(ids, cuts).text.decode() == tokenizer.decode(ids), cuts


def test_a_piece_that_is_in_the_vocabulary_twice(tmp_path: Path) -> None:
    """Both ids are text, with a table and without one."""
    pieces = [("<unk>", 0.0), ("the", 0.0), ("fox", 0.0), ("the", 0.0)]
    for decoder, fallback in ((decoders.Metaspace(), False), (decoders.WordPiece(), True)):
        tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
        tokenizer.decoder = decoder
        file = tmp_path / f"{fallback}.json"
        tokenizer.save(str(file))
        table = TokenTable.compile(file)
        assert table.fallback == fallback
        assert Driver(table).stream([1, 2, 3]).text.decode() == tokenizer.decode([1, 2, 3])


def test_a_vocabulary_with_a_hole_of_billions(tmp_path: Path) -> None:
    """What is kept of it is as large as the file, not as its largest id."""
    near = Tokenizer(models.WordLevel({"the": 0, "fox": 5, "far": 6}, unk_token="the")).to_str()
    file = tmp_path / "hole.json"
    file.write_text(near.replace('"far":6', '"far":3000000000'))
    table = TokenTable.compile(file)
    assert table.fallback
    assert Driver(table).stream([5, 4, 0, -1, 2**31 - 1]).text.decode() == "fox the"
