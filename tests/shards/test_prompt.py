"""The prompt is context: output goes on where it ended, however long it was and wherever it was cut.

A shard has a prompt's last 64 ids. With a token per byte these begin, and end, in the middle of characters.
"""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outfeed.shards.fallback import TokenizerText
from outfeed.shards.table import TokenTable
from tokenizers import Tokenizer, decoders

from .driver import Driver, every_cut
from .tokenizers_here import byte_ids

Tables = Callable[[str], TokenTable]
Tokenizers = Callable[[str], Tokenizer]

CHARACTERS = st.sampled_from(["e", "\n", "é", "မ", "日", "👍", "🏽"])
said_by = cache(TokenizerText)
# Byte fallback and byte-level BPE, with a table and without one; a special token of each, which is skipped.
BYTE_TOKENIZERS = {
    "metaspace_bpe": "</s>",
    "metaspace_stripped": "</s>",
    "bytelevel_added": "<|end|>",
    "bytelevel_replaced": "<|end|>",
}


def said(text: str, of_byte: dict[int, int], special: int, rng: random.Random) -> list[tuple[int, int]]:
    """Return a text as (id, characters that are whole before it), with special tokens anywhere."""
    spoken = []
    for place, character in enumerate(text):
        for byte in character.encode():
            spoken.append((of_byte[byte], place))
            if rng.random() < 0.05:
                spoken.append((special, place))
    return spoken


def beyond_prompt(text: str, spoken: list[tuple[int, int]], at: int, special: int) -> str:
    """The characters that the ids from `at` on begin or complete."""
    return text[next((place for token, place in spoken[at:] if token != special), len(text)) :]


@pytest.mark.parametrize("name", BYTE_TOKENIZERS)
def test_which_of_them_have_a_table(name: str, table_of: Tables) -> None:
    assert table_of(name).fallback == (name in ("metaspace_stripped", "bytelevel_replaced"))


@pytest.mark.parametrize("name", BYTE_TOKENIZERS)
@settings(max_examples=60)
@given(text=st.lists(CHARACTERS, min_size=25, max_size=60).map("".join), seed=st.integers(0, 2**16))
def test_a_prompt_longer_than_what_is_kept_of_it(
    name: str, table_of: Tables, tokenizer_of: Tokenizers, text: str, seed: int
) -> None:
    tokenizer, rng = tokenizer_of(name), random.Random(seed)
    special = tokenizer.get_vocab()[BYTE_TOKENIZERS[name]]
    spoken = said(text, byte_ids(tokenizer), special, rng)
    ids = [token for token, _ in spoken]
    at = rng.randrange(len(ids))
    driver = Driver(table_of(name))
    cuts = [cut for cut in range(1, len(ids) - at) if rng.random() < 0.3]
    heard = driver.stream(ids[at:], cuts, prompt=ids[:at])
    assert heard.text.decode() == beyond_prompt(text, spoken, at, special)


@pytest.mark.parametrize("name", BYTE_TOKENIZERS)
def test_a_broken_prompt_stays_broken(name: str, table_of: Tables, tokenizer_of: Tokenizers) -> None:
    """Only the rest of one character is passed over at the beginning of what is kept: at most three bytes."""
    tokenizer = tokenizer_of(name)
    of_byte = byte_ids(tokenizer)
    ids = [of_byte[0x99]] * 80 + [of_byte[byte] for byte in "e日e".encode()]
    for at in (79, 80):
        heard = Driver(table_of(name)).stream(ids[at:], [2], prompt=ids[:at])
        want = tokenizer.decode(ids)[len(tokenizer.decode(ids[:at])) :]
        assert heard.text.decode() == want


def test_a_prompt_that_is_a_broken_character_has_a_text(table_of: Tables, tokenizer_of: Tokenizers) -> None:
    """So the space that the output begins with is not the text's first."""
    tokenizer = tokenizer_of("metaspace_bpe")
    ids = tokenizer.encode("the", add_special_tokens=False).ids
    assert tokenizer.decode([byte_ids(tokenizer)[0xE6], *ids]) == "\ufffd the"
    heard = Driver(table_of("metaspace_bpe")).stream(ids, prompt=[byte_ids(tokenizer)[0xE6]])
    assert heard.text.decode() == " the"


@pytest.mark.parametrize("strip", [1, 2, 3])
@pytest.mark.parametrize("name", ["metaspace_bpe", "bytelevel_added"])
def test_a_prompt_of_bytes_alone_begins_the_text(
    name: str, strip: int, tmp_path: Path, tokenizer_path: Callable[[str], Path]
) -> None:
    """What spaces it leaves to be stripped is the output's, and none behind a character, a broken one too."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path(name)))
    joined = [tokenizer.decoder] if name == "bytelevel_added" else [decoders.ByteFallback()]
    steps = [decoders.Replace("▁", " "), *joined, decoders.Fuse(), decoders.Strip(" ", strip, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    table, of_byte = TokenTable.compile(tmp_path), byte_ids(tokenizer)
    assert not table.fallback
    ids = [*tokenizer.encode("  the", add_special_tokens=False).ids, of_byte[0x20], of_byte[0x65]]
    for begun in (b" ", b"  ", b"e", b" e", "日".encode(), b"\xe6", b" \xe6"):
        prompt = [of_byte[byte] for byte in begun]
        for cuts in every_cut(len(ids)):
            heard = Driver(table).stream(ids, cuts, prompt=prompt)
            want = tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]
            assert heard.text.decode() == want, begun


@pytest.mark.parametrize("name", ["metaspace_bpe", "metaspace_unigram", "metaspace_stripped"])
def test_what_is_kept_of_a_prompt_may_say_nothing(
    name: str, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    """Its text began all the same: the output's first token is not the text's."""
    tokenizer = tokenizer_of(name)
    word, special = tokenizer.encode("the", add_special_tokens=False).ids[0], tokenizer.get_vocab()["</s>"]
    prompt = [word] * 3 + [special] * 70
    heard = Driver(table_of(name)).stream([word, word], [1], prompt=prompt)
    assert heard.text.decode() == tokenizer.decode([word] * 5)[len(tokenizer.decode([word] * 3)) :]


def test_three_bytes_may_be_the_rest_of_a_character_and_four_are_not(
    table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    tokenizer = tokenizer_of("metaspace_bpe")
    of_byte, word = byte_ids(tokenizer), tokenizer.encode("the", add_special_tokens=False).ids[-1]
    for before, kept in ((b"\xf0", "😀".encode()[1:] + b"e" * 61), (b"\x99", b"\x99" * 4 + b"e" * 60)):
        prompt, ids = [of_byte[byte] for byte in before + kept], [of_byte[0x65], word]
        want = tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]
        assert Driver(table_of("metaspace_bpe")).stream(ids, [1], prompt=prompt).text.decode() == want


@pytest.mark.parametrize("name", ["metaspace_bpe", "metaspace_stripped"])
@pytest.mark.parametrize("rest", [b"\xff", b"a\xe6", b"\xa5\xa5"])
def test_output_that_breaks_the_prompts_run_says_nothing_of_the_prompt_again(
    name: str, rest: bytes, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    """The prompt's text stays as it was: each byte of the output is U+FFFD."""
    tokenizer = tokenizer_of(name)
    of_byte, word = byte_ids(tokenizer), tokenizer.encode("the", add_special_tokens=False).ids[-1]
    ids = [*(of_byte[byte] for byte in rest), word]
    for prompt in ("日e", "e日 e日 e日 e日 e日", "\ufffd", "e\ufffd"):
        for cuts in every_cut(len(ids)):
            heard = Driver(table_of(name)).stream(
                ids, cuts, prompt=[of_byte[byte] for byte in prompt.encode()]
            )
            assert heard.text.decode() == "\ufffd" * len(rest) + tokenizer.decode([of_byte[0x65], word])[1:]


@pytest.mark.parametrize("name", ["bytelevel_added", "bytelevel_replaced"])
@pytest.mark.parametrize("prompt", [b"x\xef\xbf\xbd\xe6\x97", b"x\xff\xe6\x97", b"\xef\xbf\xbd\xe6"])
def test_a_replacement_character_of_the_prompts_own_is_not_said_again(
    name: str, prompt: bytes, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    of_byte = byte_ids(tokenizer_of(name))
    ids = [of_byte[byte] for byte in prompt]
    rest = [of_byte[byte] for byte in "日!".encode()[len(prompt) - prompt.index(0xE6) :]]
    for cuts in ([], [1]):
        assert Driver(table_of(name)).stream(rest, cuts, prompt=ids).text.decode() == "日!"


@pytest.mark.parametrize("name", BYTE_TOKENIZERS)
def test_a_replacement_character_of_the_outputs_own_is_said(
    name: str, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    """Spelled in bytes, whole in the output: none of it is the prompt's."""
    of_byte = byte_ids(tokenizer_of(name))
    ids = [of_byte[byte] for byte in "\ufffd\ufffde".encode()]
    word = tokenizer_of(name).encode("the", add_special_tokens=False).ids
    for prompt in ([], word, [of_byte[0x65]]):
        for cuts in every_cut(len(ids)):
            heard = Driver(table_of(name)).stream(ids, cuts, prompt=prompt)
            assert heard.text.decode() == "\ufffd\ufffde"


@pytest.mark.parametrize("name", BYTE_TOKENIZERS)
@pytest.mark.parametrize("begun", [1, 2])
@pytest.mark.parametrize("text", ["\ufffd日e", "\ufffd"])
def test_a_replacement_character_that_the_prompt_began_is_not_said_again(
    name: str, begun: int, text: str, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    tokenizer = tokenizer_of(name)
    of_byte, word = byte_ids(tokenizer), tokenizer.encode("the", add_special_tokens=False).ids[-1]
    spelled = [*(of_byte[byte] for byte in text.encode()), word]
    for cuts in every_cut(len(spelled) - begun):
        driver = Driver(table_of(name))
        heard = driver.stream(spelled[begun:], cuts, prompt=[of_byte[0x65], *spelled[:begun]])
        assert heard.text.decode() == text[1:] + tokenizer.decode([of_byte[0x65], word])[1:]


@pytest.mark.parametrize("name", ["metaspace_bpe", "metaspace_stripped"])
@pytest.mark.parametrize("rest", [b"\xff", b"e", b"\xe6", b"\x97\xff", b"\x97e\xe6\x97", b""])
def test_output_that_breaks_a_character_of_the_prompts_run_says_its_own_bytes_only(
    name: str, rest: bytes, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    """With a word behind them, with more bytes behind it, and at the end."""
    tokenizer = tokenizer_of(name)
    of_byte, word = byte_ids(tokenizer), tokenizer.encode("the", add_special_tokens=False).ids[-1]
    spelled = [of_byte[byte] for byte in rest]
    for behind in ([], [word], [word, of_byte[0xFF], word]):
        for cuts in every_cut(len(spelled + behind)):
            driver = Driver(table_of(name))
            heard = driver.stream(spelled + behind, cuts, prompt=[of_byte[byte] for byte in b"e\xe6"])
            want = "\ufffd" * len(rest) + tokenizer.decode([of_byte[0x65], *behind])[1:]
            assert heard.text.decode() == want


@pytest.mark.parametrize("name", ["bytelevel_added", "bytelevel_replaced"])
@pytest.mark.parametrize(
    "rest", [b"\xa5e\xe6", b"\xa5\xff", b"\xe6", b"e\xe6\x97", b"\xa5e\xf0\x9f\x91e", b""]
)
def test_a_character_that_the_prompt_began_excuses_no_later_one(
    name: str, rest: bytes, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    """What is broken after it, or left open at the end, is the output's own: it says U+FFFD."""
    of_byte = byte_ids(tokenizer_of(name))
    ids = [of_byte[byte] for byte in rest]
    want = (b"\xe6\x97" + rest).decode(errors="replace").removeprefix("\ufffd")
    for cuts in every_cut(len(ids)):
        heard = Driver(table_of(name)).stream(ids, cuts, prompt=[of_byte[byte] for byte in b"x\xe6\x97"])
        assert heard.text.decode() == want


@pytest.mark.parametrize("name", ["metaspace_bpe", "metaspace_stripped"])
def test_what_broke_a_run_may_be_long_ago(name: str, table_of: Tables, tokenizer_of: Tokenizers) -> None:
    """In the prompt or in the output: the tokenizer makes no text of any byte behind it."""
    of_byte = byte_ids(tokenizer_of(name))
    ids = [of_byte[byte] for byte in b"\xe6e" + "日".encode() * 300]
    for prompt in (0, 1, 2, 62):
        driver = Driver(table_of(name))
        route = driver.start(prompt=ids[:prompt])
        for token in ids[prompt:]:
            driver.step([(route, [token])])
        # Nothing waits: no byte that comes can mend it.
        assert driver.heard[route].text.decode() == "\ufffd" * (len(ids) - prompt)


@pytest.mark.parametrize("name", ["metaspace_bpe", "metaspace_stripped"])
def test_a_character_that_the_prompt_began_may_begin_a_long_run(
    name: str, table_of: Tables, tokenizer_of: Tokenizers
) -> None:
    """Longer than what is held: its beginning is context for the rest, and whole."""
    of_byte = byte_ids(tokenizer_of(name))
    ids = [of_byte[byte] for byte in ("日" * 200).encode()]
    assert Driver(table_of(name)).stream(ids[1:], prompt=ids[:1]).text.decode() == "日" * 200


@settings(max_examples=80)
@given(data=st.data())
def test_without_a_table_it_is_the_same_text(
    table_of: Tables, tokenizer_of: Tokenizers, data: st.DataObject
) -> None:
    """Words and byte tokens, whole characters and pieces of them, in prompts and in outputs."""
    tokenizer = tokenizer_of("metaspace_bpe")
    of_byte = byte_ids(tokenizer)
    word = tokenizer.encode("the", add_special_tokens=False).ids[-1]
    whole = [b"e", "日".encode(), "\ufffd".encode()]
    broken = [b"\xe6", b"\xa5", b"\xef", b"\xef\xbf", b"\xbf\xbd", b"\xff"]
    piece = st.sampled_from([b"", *whole, *whole, *broken])  # b"": the word
    spoken = st.lists(piece, max_size=8).map(
        lambda pieces: [id for piece in pieces for id in ([of_byte[byte] for byte in piece] or [word])]
    )
    often = data.draw(st.sampled_from([0, 0, 20, 90]))
    prompt = data.draw(spoken)
    ids = data.draw(spoken) + [of_byte[byte] for byte in data.draw(st.sampled_from(whole))] * often
    ids += data.draw(spoken)
    kept = prompt[-64:]
    stream = said_by(tokenizer).stream(True, kept, len(prompt) == len(kept))
    made = "".join([stream.add(token) for token in ids]) + stream.flush()
    heard = Driver(table_of("metaspace_bpe")).stream(ids, prompt=prompt)
    assert made == heard.text.decode()
