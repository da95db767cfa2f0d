"""The table: what it reads, what it refuses, that it is proved, and that it is shared."""

import json
import logging
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outfeed.ring import NoRoom, segment
from outfeed.shards import pipeline, proof, table
from outfeed.shards.decoder import Decoder
from outfeed.shards.errors import TableError, TokenizerFileError
from outfeed.shards.fallback import TokenizerText
from outfeed.shards.kernel import Kernel
from outfeed.shards.proof import disagreement
from outfeed.shards.table import TokenTable
from tokenizers import Tokenizer, decoders, models

from tests.instances import unique

from .conftest import WITH_TABLE
from .driver import Driver
from .tokenizers_here import TEXT, deepseek

Tables = Callable[[str], TokenTable]


@pytest.fixture
def name() -> Iterator[str]:
    name = f"outfeed-{unique('table')}"
    yield name
    segment.unlink(name)


# ---- files


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        (b"", "not a usable"),
        (b"not json", "not a usable"),
        (b"{}", "not a usable"),
        (b'{"version": "1.0", "model": {"type": "Unheard"}}', "not a usable"),
        (b"\xff\xfe\0\0", "not a usable"),
        # A normalizer that the library crashes at.
        (b'{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}', "charsmap"),
    ],
)
def test_a_missing_or_broken_file_is_named_with_its_fault(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TokenizerFileError, match=says) as raised:
        TokenTable.compile(path)
    assert str(path) in str(raised.value)


def test_a_file_cut_short_is_refused(tmp_path: Path, tokenizer_path: Callable[[str], Path]) -> None:
    whole = tokenizer_path("metaspace_bpe").read_bytes()
    path = tmp_path / "tokenizer.json"
    for size in (10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(TokenizerFileError):
            TokenTable.compile(path)


def test_a_folder_means_the_file_in_it(tmp_path: Path, tokenizer_path: Callable[[str], Path]) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_path("no_decoder").read_bytes())
    assert TokenTable.compile(tmp_path).meta.vocab == 5


def test_python_packs_a_table_of_the_sizes_that_c_reads() -> None:
    assert (table._HEADER.size, table._LONG_ENTRY.size) == (table.HEADER_BYTES, table.ENTRY_BYTES)
    short = table._entry(b"x" * table.INLINE, False, 0, bytearray(), {})
    assert (len(short), short[0]) == (table.ENTRY_BYTES, table.INLINE)


# ---- the proof


@pytest.mark.parametrize("name_of", WITH_TABLE[1:])
def test_a_changed_table_is_found_out(
    name_of: str, table_of: Tables, tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    right = table_of(name_of)
    tokenizer = tokenizer_of(name_of)
    known = [
        token for token in range(right.meta.vocab) if tokenizer.decode([token], skip_special_tokens=False)
    ]
    for token in (known[0], known[len(known) // 2], known[-1]):
        wrong = bytearray(right.buffer)
        entry = table.HEADER_BYTES + table.ENTRY_BYTES * token
        wrong[entry : entry + 4] = bytes((1, table.KNOWN | table.CLEAN, 7, 0))
        fault = disagreement(TokenTable(bytes(wrong), right.meta), tokenizer)
        assert fault is not None
        assert "the table says" in fault


@pytest.mark.parametrize(
    ("token", "byte", "bit"),
    [("<|end|>", 1, table.SPECIAL), ("a", 1, table.SPECIAL), ("<|end|>", 2, 0x01)],
    ids=["special, said to be plain", "plain, said to be special", "a special token's text"],
)
def test_a_table_is_right_for_who_skips_special_tokens_and_for_who_does_not(
    token: str, byte: int, bit: int, table_of: Tables, tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    """Each of these faults shows to one of the two alone."""
    right, tokenizer = table_of("bytelevel_added"), tokenizer_of("bytelevel_added")
    wrong = bytearray(right.buffer)
    wrong[table.HEADER_BYTES + table.ENTRY_BYTES * tokenizer.get_vocab()[token] + byte] ^= bit
    assert disagreement(right, tokenizer) is None
    assert disagreement(TokenTable(bytes(wrong), right.meta), tokenizer) is not None


@pytest.mark.parametrize("first", [True, False])
def test_each_token_is_proved_as_the_first_and_behind_another(
    first: bool,
    table_of: Tables,
    tokenizer_of: Callable[[str], Tokenizer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not left to chance: a vocabulary has more tokens than random sequences try."""
    monkeypatch.setattr(proof, "SEQUENCES", 0)
    right, tokenizer = table_of("metaspace_unigram"), tokenizer_of("metaspace_unigram")
    for token in range(0, right.meta.vocab, 9):
        wrong = bytearray(right.buffer)
        entry = table.HEADER_BYTES + table.ENTRY_BYTES * (token + first * right.meta.vocab)
        wrong[entry : entry + 3] = bytes((1, table.KNOWN | table.CLEAN, 7))
        assert disagreement(TokenTable(bytes(wrong), right.meta), tokenizer) is not None, token


def test_a_vocabulary_of_special_tokens_alone_has_a_table(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    made = TokenTable.compile(tmp_path)
    assert (made.fallback, made.is_special(0)) == (False, True)


def test_a_table_that_disagrees_is_not_used_and_the_log_says_so(
    tokenizer_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pipeline, "byte_level", lambda token: token.encode())
    with caplog.at_level(logging.WARNING):
        made = TokenTable.compile(tokenizer_path("bytelevel_added"))
    assert made.fallback
    assert "disagrees with the tokenizer" in caplog.text
    assert "decoding with the tokenizer itself" in caplog.text
    # And the text is right all the same.
    tokenizer = Tokenizer.from_file(str(tokenizer_path("bytelevel_added")))
    ids = tokenizer.encode("naïve 漢字 👍🏽", add_special_tokens=False).ids
    assert Driver(made).stream(ids, [1, 2, 5]).text.decode() == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("decoder", "table_made"),
    [
        ({"type": "Fuse"}, True),
        ({"type": "Sequence", "decoders": []}, True),
        ({"type": "Replace", "pattern": {"Regex": "▁+"}, "content": " "}, True),
        ({"type": "Replace", "pattern": {"Regex": "▁"}, "content": "\\1"}, True),
        (
            {
                "type": "Sequence",
                "decoders": [
                    {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]},
                    {"type": "Fuse"},
                ],
            },
            True,
        ),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True}, True),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}, True),
        ({"type": "ByteFallback"}, True),
        ({"type": "Strip", "content": "t", "start": 2, "stop": 0}, True),
        (
            {
                "type": "Sequence",
                "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}],
            },
            False,
        ),
        (
            {
                "type": "Sequence",
                "decoders": [
                    {"type": "Fuse"},
                    {"type": "Replace", "pattern": {"String": "ab"}, "content": "c"},
                ],
            },
            False,
        ),
        (
            {
                "type": "Sequence",
                "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 256, "stop": 0}],
            },
            False,
        ),
        (
            {
                "type": "Sequence",
                "decoders": [
                    {"type": "ByteFallback"},
                    {"type": "Replace", "pattern": {"String": "é"}, "content": "e"},
                ],
            },
            False,
        ),
        ({"type": "BPEDecoder", "suffix": "</w>"}, False),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, False),
    ],
)
def test_every_decoder_is_compiled_right_or_left_to_the_tokenizer(
    decoder: dict[str, object], table_made: bool, tmp_path: Path, tokenizer_path: Callable[[str], Path]
) -> None:
    parsed = json.loads(tokenizer_path("metaspace_bpe").read_text())
    parsed["decoder"] = decoder
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(parsed))
    made = TokenTable.compile(path)
    assert made.fallback is not table_made
    tokenizer = Tokenizer.from_file(str(path))
    ids = tokenizer.encode("the quick the  fox", add_special_tokens=False).ids
    driver = Driver(made)
    for cuts in ([], list(range(1, len(ids)))):
        assert driver.stream(ids, cuts).text.decode() == tokenizer.decode(ids)


def test_each_token_is_stripped_of_no_more_than_was_asked(tmp_path: Path) -> None:
    words = ["tttxttt", "ttx", "xtt", "x"]
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="x"))
    tokenizer.decoder = decoders.Strip("t", 2, 1)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    made = TokenTable.compile(tmp_path)
    assert not made.fallback
    assert Driver(made).stream([0, 1, 2, 3, 0], [2]).text == b"txttxxtxtxtt"
    assert tokenizer.decode([0, 1, 2, 3, 0]) == "txttxxtxtxtt"


def test_a_tokenizer_that_crashes_is_refused(tmp_path: Path, tokenizer_path: Callable[[str], Path]) -> None:
    parsed = json.loads(tokenizer_path("metaspace_bpe").read_text())
    parsed["decoder"] = {"type": "Strip", "content": "t", "start": 1, "stop": 1}  # of "t" alone: a crash
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(parsed))
    with pytest.raises(TokenizerFileError, match="crashes in its own decode"):
        TokenTable.compile(path)


def test_a_crash_in_the_fallback_costs_its_token_alone(tokenizer_path: Callable[[str], Path]) -> None:
    parsed = json.loads(tokenizer_path("metaspace_bpe").read_text())
    parsed["decoder"] = {"type": "Strip", "content": "t", "start": 1, "stop": 1}
    tokenizer = Tokenizer.from_str(json.dumps(parsed))
    vocab = tokenizer.get_vocab()
    crash, plain = vocab["t"], vocab["e"]
    stream = TokenizerText(tokenizer).stream(True, [])
    made = "".join([stream.add(token) for token in (plain, crash, plain)]) + stream.flush()
    assert made.startswith("e")


# ---- sharing


def test_a_shared_table_decodes_the_same(name: str, table_of: Tables) -> None:
    made = table_of("metaspace_bpe")
    shared = made.share(name)
    found = TokenTable.attach(name)
    assert found.meta == made.meta
    ids = list(range(300, 340))
    want = Driver(made).stream(ids, [3, 9]).text
    assert Driver(found).stream(ids, [3, 9]).text == want
    assert Driver(shared).stream(ids, [3, 9]).text == want


def test_a_shared_table_cannot_be_written(name: str, table_of: Tables) -> None:
    shared = table_of("no_decoder").share(name)
    with pytest.raises(TypeError):
        shared.buffer[70] = 1  # type: ignore[index]


def test_attaching_loads_no_tokenizer(name: str, table_of: Tables) -> None:
    table_of("bytelevel_added").share(name)
    script = (
        "import sys; from outfeed.shards.shard import run_shard; from outfeed.shards.table import TokenTable;"
        "from outfeed.shards.decoder import Decoder;"
        f"Decoder(TokenTable.attach({name!r})); sys.exit('tokenizers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_what_is_no_table_is_refused(name: str, table_of: Tables) -> None:
    with pytest.raises(FileNotFoundError):
        TokenTable.attach(name)
    segment.create(name, 4096, lambda memory: None)
    with pytest.raises(TableError, match=name):
        TokenTable.attach(name)
    whole = bytes(table_of("no_decoder").buffer)
    TokenTable.open(whole)
    for wrong in (
        whole[:40],
        whole[:-1],
        b"X" + whole[1:],
        whole[:8] + b"\x09" + whole[9:],
        whole[:-1] + b"x",  # the end of what it says about itself
    ):
        with pytest.raises(TableError):
            TokenTable.open(wrong)


def test_a_table_too_large_for_shared_memory_says_so(name: str) -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return 1 << 50

    with pytest.raises(NoRoom):
        TokenTable(Huge(), table.Meta("", "", "")).share(name)


def test_a_decoder_without_table_loads_its_tokenizer(table_of: Tables) -> None:
    made = table_of("ctc")
    assert made.fallback
    assert Decoder(made).token_text(2) == "a"


def test_a_decoder_without_table_takes_no_other_tokenizer_than_its_own(
    tmp_path: Path, tokenizer_path: Callable[[str], Path]
) -> None:
    """A shard that is started again later would decode the rest of a stream with another vocabulary."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer_path("ctc").read_bytes())
    made = TokenTable.compile(path)
    assert Decoder(made).token_text(2) == "a"
    path.write_bytes(tokenizer_path("wordpiece").read_bytes())
    with pytest.raises(TokenizerFileError, match="has changed since this instance started") as raised:
        Decoder(made)
    assert str(path) in str(raised.value)
    path.write_bytes(tokenizer_path("ctc").read_bytes())
    assert Decoder(made).token_text(2) == "a"


# ---- a token's own bytes


def test_the_bytes_of_a_texts_tokens_are_the_texts() -> None:
    made = TokenTable.compile(deepseek())
    tokenizer = Tokenizer.from_file(str(deepseek()))
    for text in [*TEXT, "𓀀𓁨 half a hieroglyph is no character"]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(made.bytes_of(token) or b"" for token in ids) == text.encode()


@pytest.mark.parametrize("which", WITH_TABLE)
def test_every_token_has_bytes_and_nothing_else_has(
    which: str, table_of: Tables, tokenizer_of: Callable[[str], Tokenizer], name: str
) -> None:
    tokenizer = tokenizer_of(which)
    shared = table_of(which).share(name)
    copied = TokenTable.read(name)
    decoder = Decoder(copied)
    special = {token for token, made in tokenizer.get_added_tokens_decoder().items() if made.special}
    vocab = max(tokenizer.get_vocab().values()) + 1
    for token in [*range(vocab), -1, vocab, 1 << 30]:
        found = copied.bytes_of(token)
        assert found == shared.bytes_of(token)
        assert copied.is_special(token) == (token in special)
        if token < 0 or tokenizer.id_to_token(token) is None:
            assert found is None
        else:
            assert found is not None
            assert found.decode(errors="replace").lstrip(" ") == decoder.token_text(token).lstrip(" ")


def test_a_long_token_has_its_bytes_where_the_first_token_differs(tmp_path: Path) -> None:
    words = ["a", "b" * 40, "c" * 50]
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    made = TokenTable.compile(tmp_path)
    assert [made.bytes_of(token) for token in range(3)] == [f" {word}".encode() for word in words]


HEADER = (
    "magic",
    "version",
    "ids",
    "firsts",
    "meta_len",
    "blob_len",
    "strip_count",
    "strip_char",
    "strip_len",
)


@pytest.mark.parametrize(
    ("field", "value", "fits"),
    [
        ("magic", b"OUTFEEDU", False),
        ("version", table.VERSION - 1, False),
        ("version", table.VERSION + 1, False),
        ("ids", 1 << 28, False),
        ("firsts", 1, False),
        ("meta_len", None, False),
        ("blob_len", None, False),
        ("blob_len", (1 << 64) - 64, False),
        ("strip_count", 256, False),
        ("strip_count", 255, True),
        ("strip_len", 0, False),
        ("strip_len", 5, False),
        ("strip_len", 4, True),
    ],
)
def test_a_header_that_does_not_fit_is_refused(
    table_of: Tables, field: str, value: int | bytes | None, fits: bool
) -> None:
    """None: one more than there is. Everything lies where the header says, so it is all that is looked at."""
    good = bytes(table_of("bytelevel_added").buffer)
    fields: dict[str, Any] = dict(zip(HEADER, table._HEADER.unpack_from(good), strict=True))
    fields |= {"strip_count": 1, "strip_len": 1}
    Kernel(table._HEADER.pack(*fields.values()) + good[table.HEADER_BYTES :])
    fields[field] = fields[field] + 1 if value is None else value
    if field == "firsts":
        fields["blob_len"] -= table.ENTRY_BYTES  # so that it is as long as it says
    raw = table._HEADER.pack(*fields.values()) + good[table.HEADER_BYTES :]
    if fits:
        Kernel(raw)
    else:
        with pytest.raises(TableError):
            Kernel(raw)


def test_a_table_that_is_cut_off_or_not_aligned_is_refused(table_of: Tables) -> None:
    good = bytes(table_of("bytelevel_added").buffer)
    for size in (0, 1, table.HEADER_BYTES - 1, table.HEADER_BYTES, len(good) - 1):
        with pytest.raises(TableError):
            Kernel(good[:size])
    with pytest.raises(TableError):
        Kernel(memoryview(b"\0" + good)[1:])


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 1 << 31), ((1 << 32) - 16, 32), ((1 << 32) - 1, (1 << 32) - 1), (0, 14)]
)
def test_a_long_token_that_is_not_in_the_table_is_none(table_of: Tables, offset: int, length: int) -> None:
    raw = bytearray(table_of("bytelevel_added").buffer)
    raw[64:80] = table._LONG_ENTRY.pack(table.LONG, table.KNOWN | table.CLEAN, 0, offset, length, 0)
    kernel = Kernel(bytes(raw))
    assert kernel.token_text(0) == ""
    assert kernel.decode_each(np.zeros(2, np.int32), np.ones(2, np.uint32), 0)[0] == b""


def test_a_damaged_table_has_no_bytes_outside_itself(table_of: Tables) -> None:
    good = table_of(WITH_TABLE[0])
    rng = random.Random(3)
    for _ in range(40):
        raw = bytearray(good.buffer)
        for _ in range(200):
            raw[rng.randrange(64, len(raw))] = rng.randrange(256)
        damaged = TokenTable(bytes(raw), good.meta)
        for token in range(0, good.meta.vocab, 7):
            found = damaged.bytes_of(token)
            assert found is None or len(found) <= len(raw)
