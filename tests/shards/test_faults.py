"""Each way in which text goes wrong elsewhere, tried here on every kind of tokenizer."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import DecodeOptions
from outfeed.shards.fallback import MAX_CONTEXT, MAX_PENDING, TokenizerText
from outfeed.shards.kernel import Kernel
from outfeed.shards.pipeline import byte_level
from outfeed.shards.table import BYTE, ENTRY_BYTES, HEADER_BYTES, TokenTable
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from .conftest import WITH_TABLE
from .driver import Driver, every_cut
from .tokenizers_here import byte_ids

Tables = Callable[[str], TokenTable]
Tokenizers = Callable[[str], Tokenizer]


# ---- characters in pieces


@pytest.mark.parametrize("name", ["deepseek", "bytelevel_added", "metaspace_bpe"])
@pytest.mark.parametrize(
    "text",
    [
        "안녕하세요 세계",
        "สวัสดีชาวโลก",
        "👨‍👩‍👧‍👦🏳️‍🌈👍🏽",
        "e\u0301 a\u0308 ก็",
        "a\0b\0\0",
        "漢字と仮名",
        "مرحبا بالعالم",
        "𓂀𓃰",
    ],
)
def test_a_character_in_byte_tokens_is_never_doubled_or_lost(
    name: str, text: str, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    of_byte = byte_ids(tokenizer_of(name))
    ids = [of_byte[byte] for byte in text.encode()]
    driver = Driver(table_of(name))
    for cuts in every_cut(len(ids)):
        heard = driver.stream(ids, cuts)
        assert heard.text.decode() == tokenizer_of(name).decode(ids) == text
        assert all("\ufffd" not in piece for piece in heard.pieces)


@pytest.mark.parametrize("name", ["deepseek", "bytelevel_added"])
def test_at_most_three_bytes_wait_in_byte_level_text(
    name: str, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    tokenizer = tokenizer_of(name)
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    special = tokenizer.get_added_tokens_decoder()
    contents = {token: byte_level(content) for content, token in vocab.items() if token not in special}
    rng = random.Random(4)
    driver = Driver(table_of(name))
    route = driver.start()
    fed = b""
    for token in rng.choices(list(contents), k=3000):
        fed += contents[token]
        driver.step([(route, [token])])
        look = driver.decoder._kernel.look(route)
        assert look is not None
        assert look.tail <= 3
        fed_whole = fed[: len(fed) - look.tail]
    assert fed_whole.decode(errors="replace") == driver.heard[route].text.decode()


@pytest.mark.parametrize("name", ["deepseek", "bytelevel_added", "metaspace_bpe"])
@pytest.mark.parametrize(
    "raw",
    [
        b"\xed\xa0\x80",  # a lone surrogate
        b"\xed\xa0\x80\xed\xb0\x80",  # a pair of them
        b"\xc0\x80",  # an overlong NUL
        b"\xf0\x80\x80\xaf",
        b"\xf4\x90\x80\x80",  # above U+10FFFF
        b"\xe2\x82a",
        b"\xf0\x9f\x98",
        b"\xf0\x9f\xe2\x82\xac",
        b"\x80\x80\x80\x80\x80",
        b"\xe2\xe2\xe2\x82\xac\xff",
        b"\xe2\x82\xac\xff",
        bytes(range(256)),
        bytes(range(255, -1, -1)),
    ],
)
def test_ill_formed_bytes_become_what_the_tokenizer_makes_of_them(
    name: str, raw: bytes, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    of_byte = byte_ids(tokenizer_of(name))
    ids = [of_byte[byte] for byte in raw if byte in of_byte]
    driver = Driver(table_of(name))
    want = tokenizer_of(name).decode(ids)
    cuts = every_cut(len(ids)) if len(ids) < 20 else [[], list(range(1, len(ids)))]
    for cut in cuts:
        assert driver.stream(ids, cut).text.decode() == want


def test_incomplete_characters_beside_cjk_come_once(table_of: Tables, tokenizer_of: Tokenizers) -> None:
    """Two steps of incomplete UTF-8 beside CJK text: elsewhere a character is sent twice."""
    of_byte = byte_ids(tokenizer_of("deepseek"))
    cjk = tokenizer_of("deepseek").encode("世界", add_special_tokens=False).ids
    smile = [of_byte[byte] for byte in "😀".encode()]
    ids = [*cjk, *smile, *cjk, *smile[:2], *cjk]
    driver = Driver(table_of("deepseek"))
    for cuts in every_cut(len(ids)):
        assert driver.stream(ids, cuts).text.decode() == "世界😀世界\ufffd世界"


# ---- the prompt


@pytest.mark.parametrize("name", WITH_TABLE)
def test_output_continues_the_prompts_text(name: str, table_of: Tables, tokenizer_of: Tokenizers) -> None:
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode("the fox jumps the fox", add_special_tokens=False).ids
    driver = Driver(table_of(name))
    for at in range(len(ids)):
        want = tokenizer.decode(ids)[len(tokenizer.decode(ids[:at])) :]
        for cuts in ([], [1]):
            heard = driver.stream(ids[at:], cuts, prompt=ids[:at])
            assert heard.text.decode() == want


def test_a_long_prompts_tail_is_no_beginning(table_of: Tables, tokenizer_of: Tokenizers) -> None:
    ids = tokenizer_of("metaspace_bpe").encode("the fox", add_special_tokens=False).ids
    driver = Driver(table_of("metaspace_bpe"))
    special = tokenizer_of("metaspace_bpe").token_to_id("<s>") or 0
    route = driver.start(prompt=[special] * 64, prompt_tokens=5000)
    driver.step([(route, ids)], {route: FinishReason.length(1)})
    assert driver.heard[route].text.decode() == " the fox"
    # A whole prompt without text, on the other hand, leaves the beginning to the output.
    assert driver.stream(ids, prompt=[special] * 64).text.decode() == "the fox"


@pytest.mark.parametrize("name", ["deepseek", "bytelevel_added", "metaspace_bpe"])
def test_a_prompt_that_ends_inside_a_character_neither_leaks_nor_loses(
    name: str, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    of_byte = byte_ids(tokenizer_of(name))
    hello = tokenizer_of(name).encode("the fox", add_special_tokens=False).ids
    euro = [of_byte[byte] for byte in "€".encode()]
    driver = Driver(table_of(name))
    for at in (1, 2):
        prompt = [*hello, *euro[:at]]
        # Output that completes the character: all of it is output.
        for cuts in ([], [1], [2]):
            assert driver.stream([*euro[at:], *euro], cuts, prompt=prompt).text.decode() == "€€"
        # Output that does not: the U+FFFD stands in the prompt's text.
        after = tokenizer_of(name).encode(" fox", add_special_tokens=False).ids[-1:]
        want = tokenizer_of(name).decode([*prompt, *after])
        assert tokenizer_of(name).decode(prompt) + driver.stream(after, prompt=prompt).text.decode() == want
        # Nor is one sent that is U+FFFD itself, spelt out: the prompt's text has it.
        spelt = [of_byte[byte] for byte in "\ufffd".encode()]
        heard = driver.stream([*spelt[at:], *after], prompt=[*hello, *spelt[:at]])
        assert "the fox" + heard.text.decode() == tokenizer_of(name).decode([*hello, *after])
        # Nor when there is no more.
        assert driver.stream([-1], prompt=prompt).text.decode() == ""


def test_wordpieces_of_a_prompt_are_the_outputs_context(table_of: Tables, tokenizer_of: Tokenizers) -> None:
    tokenizer = tokenizer_of("wordpiece")
    ids = tokenizer.encode("unbelievable tokenizers everywhere, truly", add_special_tokens=False).ids
    driver = Driver(table_of("wordpiece"))
    for at in range(len(ids)):
        want = tokenizer.decode(ids)[len(tokenizer.decode(ids[:at])) :]
        assert driver.stream(ids[at:], prompt=ids[:at]).text.decode() == want


# ---- special tokens


@pytest.mark.parametrize("name", ["bytelevel_added", "metaspace_bpe", "metaspace_unigram", "wordpiece"])
@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_skipped_per_request(
    name: str, skip: bool, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    tokenizer = tokenizer_of(name)
    special = [token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special]
    plain = tokenizer.encode("the fox", add_special_tokens=False).ids
    ids = [special[0], *plain[:1], special[-1], *plain, special[0]]
    driver = Driver(table_of(name))
    for cuts in every_cut(len(ids)):
        heard = driver.stream(ids, cuts, options=DecodeOptions(skip_special_tokens=skip))
        assert heard.text.decode() == tokenizer.decode(ids, skip_special_tokens=skip)


# ---- endless U+FFFD: work is counted, not timed


@pytest.mark.parametrize("length", [1000, 8000])
def test_endless_replacement_characters_cost_the_same_each_and_flow(
    length: int, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    of_byte = byte_ids(tokenizer_of("deepseek"))
    driver = Driver(table_of("deepseek"))
    route = driver.start()
    for _ in range(length):
        driver.step([(route, [of_byte[0xE2]])])
    assert len(driver.heard[route].text) == 3 * (length - 1)
    assert driver.decoder.totals()["work"] <= 4 * length


def test_the_fallback_is_linear_and_flows_on_endless_replacement_characters(
    tokenizer_of: Tokenizers,
) -> None:
    """The tokenizer's own stream decodes all that waits again and again; here it is a few ids each."""
    tokenizer = tokenizer_of("deepseek")
    lone = byte_ids(tokenizer)[0xFF]
    text = TokenizerText(tokenizer)
    stream = text.stream(True, [])
    made = ""
    for count in range(1, 4001):
        made += stream.add(lone)
        assert len(made) >= count - MAX_PENDING
    assert made + stream.flush() == "\ufffd" * 4000
    assert text.work <= 4000 * 2 * (MAX_CONTEXT + MAX_PENDING)


def test_tokens_without_text_do_not_pile_up_in_the_fallback(tokenizer_of: Tokenizers) -> None:
    text = TokenizerText(tokenizer_of("ctc"))
    stream = text.stream(True, [])
    assert [stream.add(token) for token in (2, 0, 2)] == ["a", "", "a"]
    assert "".join(stream.add(0) for _ in range(2000)) == ""
    assert text.work <= 2000 * 2 * (MAX_CONTEXT + MAX_PENDING)
    assert stream.add(3) + stream.flush() == "b"


@pytest.mark.parametrize("name", ["deepseek", "bytelevel_added"])
def test_the_fallback_says_what_the_table_says(name: str, tokenizer_of: Tokenizers) -> None:
    """Had the table not been trusted, the text would have been the same."""
    tokenizer = tokenizer_of(name)
    text = TokenizerText(tokenizer)
    rng = random.Random(9)
    bytes_of = list(byte_ids(tokenizer).values())
    for _ in range(100):
        ids = [rng.choice(bytes_of) if rng.random() < 0.6 else rng.randrange(600) for _ in range(30)]
        stream = text.stream(True, [])
        made = "".join([stream.add(token) for token in ids]) + stream.flush()
        assert made == tokenizer.decode(ids)


def test_what_waits_is_not_let_go_of_inside_a_character_that_it_completes() -> None:
    """Eight ids wait, as the text ends inside a character; the fifth begins one that is completed."""
    letters = {byte_level(letter)[0]: letter for letter in pre_tokenizers.ByteLevel.alphabet()}
    pieces = [b"\xc0", b"\xbb", b"\xc4", b" \xec\x98\xa4\xeb", b"\xb1", b"\x84\xb8\xec\x9a", b"\xe6", b"\xa2"]
    names = ["".join(letters[byte] for byte in piece) for piece in pieces]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    stream = TokenizerText(tokenizer).stream(True, [])
    made = "".join(stream.add(token) for token in range(len(names))) + stream.flush()
    assert made == tokenizer.decode(list(range(len(names))))
    assert "오뱄" in made


# ---- a long run of byte tokens


@pytest.mark.parametrize("name", ["metaspace_bpe", "metaspace_stripped"])
def test_a_long_run_of_byte_tokens_flows(name: str, table_of: Tables, tokenizer_of: Tokenizers) -> None:
    """A run is held whole, since its last byte decides what it is; past 256 bytes what is whole flows."""
    of_byte = byte_ids(tokenizer_of(name))
    ids = [of_byte[byte] for byte in "한".encode() * 400]
    driver = Driver(table_of(name))
    before = driver.decoder.totals()["work"]  # of a tokenizer that other tests have, too
    route = driver.start()
    for token in ids:
        driver.step([(route, [token])])
    assert len(driver.heard[route].text) >= len(ids) - 256
    driver.step([(route, [])], {route: FinishReason.length(len(ids))})
    assert driver.heard[route].text.decode() == "한" * 400
    # One that is no text flows, too.
    route = driver.start()
    for _ in range(1000):
        driver.step([(route, [of_byte[0xBF]])])
    assert len(driver.heard[route].text) >= 3 * (1000 - 256)
    assert driver.decoder.totals()["work"] - before <= 20 * (len(ids) + 1000)


# ---- what comes in is not trusted


def test_any_bytes_as_ids_do_no_harm(table_of: Tables) -> None:
    rng = np.random.default_rng(3)
    for name in WITH_TABLE:
        driver = Driver(table_of(name))
        for _ in range(20):
            ids = rng.integers(-(2**31), 2**31, 500).astype(np.int32)
            ids[::3] %= 700
            driver.stream(ids.tolist(), sorted(rng.integers(1, 499, 5).tolist())).text.decode()


@pytest.mark.parametrize("open_bytes", [b"\xe6", b"\xe6\x97", b"\xf0\x9f\x98"])
def test_a_byte_token_behind_a_character_that_others_left_open(
    open_bytes: bytes, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    """No tokenizer has both kinds. A damaged table can, and they are text all the same."""
    of_byte, raw = byte_ids(tokenizer_of("bytelevel_added")), bytearray(table_of("bytelevel_added").buffer)
    raw[HEADER_BYTES + ENTRY_BYTES * of_byte[0xA5] + 1] |= BYTE
    ids = np.array([of_byte[byte] for byte in open_bytes + b"\xa5e"], np.int32)
    text, _ = Kernel(bytes(raw)).decode_each(ids, np.array([len(ids)], np.uint32), 0)
    assert text.decode() == "\ufffde"


@settings(max_examples=200)
@given(data=st.data())
def test_a_damaged_table_is_refused_or_harmless(table_of: Tables, data: st.DataObject) -> None:
    whole = bytearray(table_of("bytelevel_added").buffer)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 63) | st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.integers(0, 255))
    del whole[data.draw(st.just(len(whole)) | st.integers(0, len(whole))) :]
    try:
        kernel = Kernel(bytes(whole))
    except ValueError:
        return
    ids = np.arange(-5, 700, dtype=np.int32)
    text, lens = kernel.decode_each(ids, np.ones(len(ids), dtype=np.uint32), 0)
    assert int(lens.sum()) == len(text)
