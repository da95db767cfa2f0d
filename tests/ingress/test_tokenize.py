"""What takes long of a request, and that nothing else waits for it."""

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from outfeed.ingress import tokenize as tokenize_module
from outfeed.ingress.errors import BadRequest, Unavailable
from outfeed.ingress.request import Model, decode_body, parse_generate
from outfeed.ingress.stop_regex import CACHE
from outfeed.ingress.tokenize import Tokenize, longest_token
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

TEXT = ["Nobody waits for this. 川は流れる, naïve e\u0301 👩‍👩‍👧.", "        and so   on\n\n"] * 3


@dataclass
class Encoded:
    """What a text became."""

    ids: list[int]

    def __len__(self) -> int:
        return len(self.ids)


class Words:
    """A tokenizer of a kind: one id per word. Remembers the threads it was called from."""

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.truncation = None

    def encode(self, sequence: str, /, *, add_special_tokens: bool = True) -> Any:
        self.threads.add(threading.current_thread().name)
        self.gate.wait(30)
        return Encoded([len(word) for word in sequence.split()])

    def encode_batch_fast(self, sequences: list[str], /, *, add_special_tokens: bool = True) -> Any:
        return [self.encode(sequence) for sequence in sequences]

    def decode_batch(self, sequences: list[list[int]], /) -> list[str]:
        self.threads.add(threading.current_thread().name)
        return [" ".join("x" * token for token in ids) for ids in sequences]


MODEL = Model(vocab_size=1000, context_length=200, tokenizer=Words())
BARE = Model(vocab_size=1000, context_length=200)


def byte_level() -> Tokenizer:
    """A small tokenizer of the usual kind, with tokens around a text and special ones in it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    return tokenizer


def test_without_a_tokenizer_text_cannot_be_a_prompt() -> None:
    with pytest.raises(BadRequest, match="input_ids"):
        asyncio.run(Tokenize(BARE).ready(parse_generate({"text": "a"}, BARE)))


def test_tokenizing_happens_on_other_threads_and_keeps_the_order() -> None:
    words = Words()
    model = Model(vocab_size=1000, context_length=200, tokenizer=words)
    tokenize = Tokenize(model, short=0)
    texts = [" ".join(["x" * n] * 3) for n in range(1, 30)]
    done = asyncio.run(tokenize.ready(parse_generate({"text": texts}, model)))
    tokenize.close()
    assert [int.from_bytes(one.input_ids[:4], "little") for one in done] == list(range(1, 30))
    assert all(name.startswith("outfeed-tokenize") for name in words.threads)


def test_short_texts_share_a_turn_of_a_thread_and_keep_their_order() -> None:
    words = Words()
    tokenize = Tokenize(Model(vocab_size=1000, context_length=200, tokenizer=words))
    turns: list[int] = []

    def counted(work: Callable[..., Any], texts: list[str]) -> Any:
        turns.append(len(texts))
        return submit(work, texts)

    submit = tokenize._pool.submit
    tokenize._pool.submit = counted  # type: ignore[method-assign, assignment]
    texts = ["", *("x" * (n % 7 + 1) for n in range(1000)), "y" * 5000, "", "z"]
    found = asyncio.run(tokenize.encode(texts, "text"))
    assert found == [[len(text)] if text else [] for text in texts]
    assert sum(turns) == len(texts)
    assert len(turns) <= 5
    tokenize.close()


def test_a_short_text_is_tokenized_at_once() -> None:
    words = Words()
    model = Model(vocab_size=1000, context_length=200, tokenizer=words)
    tokenize = Tokenize(model, short=5)
    for text, here in (("xx yy", True), ("xx yyy", False)):
        words.threads.clear()
        asyncio.run(tokenize.ready(parse_generate({"text": text}, model)))
        assert [name.startswith("outfeed-tokenize") for name in words.threads] == [not here]
    tokenize.close()


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that bodies were checked on, in order."""
    names: list[str] = []

    def watched(body: Any, model: Model) -> Any:
        names.append(threading.current_thread().name)
        return parse_generate(body, model)

    monkeypatch.setattr(tokenize_module, "parse_generate", watched)
    return names


def test_new_patterns_are_analysed_on_another_thread_and_known_ones_at_once(threads: list[str]) -> None:
    tokenize = Tokenize(MODEL)
    CACHE.clear()
    body = {"text": "a", "sampling_params": {"stop_regex": ["END(ING)?", "abc"], "max_new_tokens": 5}}
    batch = {"text": ["a", "b"], "sampling_params": [{}, {"stop_regex": "new{2}", "max_new_tokens": 5}]}
    for one, here in ((body, False), (body, True), ({"text": "a"}, True), (batch, False), (batch, True)):
        threads.clear()
        assert len(asyncio.run(tokenize.parse(one)).prompts) == (2 if one is batch else 1)
        assert [not name.startswith("outfeed-tokenize") for name in threads] == [here]
    with pytest.raises(BadRequest, match="does not compile"):
        asyncio.run(tokenize.parse({"text": "a", "sampling_params": {"stop_regex": "("}}))
    bodies: list[Any] = [
        None,
        [],
        {"sampling_params": 5},
        {"text": "a", "sampling_params": {"stop_regex": 7}},
    ]
    for wrong in bodies:
        with pytest.raises(BadRequest):
            asyncio.run(tokenize.parse(wrong))
    tokenize.close()


def test_too_many_waiting_texts_are_a_503_and_the_places_come_back() -> None:
    words = Words()
    model = Model(vocab_size=1000, context_length=200, tokenizer=words)
    tokenize = Tokenize(model, waiting=2, short=0)

    async def run() -> None:
        words.gate.clear()
        first = asyncio.create_task(tokenize.ready(parse_generate({"text": ["a", "b"]}, model)))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="2 texts wait"):
            await tokenize.ready(parse_generate({"text": "c"}, model))
        words.gate.set()
        await first
        await tokenize.ready(parse_generate({"text": "c"}, model))

    asyncio.run(run())
    tokenize.close()


def test_places_come_back_though_no_thread_could_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine had none left for a while."""
    tokenize = Tokenize(Model(vocab_size=1000, context_length=200, tokenizer=Words()), waiting=1, short=0)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as narrow:
        narrow.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="start new thread"):
            asyncio.run(tokenize.encode(["a"], "text"))
    assert asyncio.run(tokenize.encode(["a"], "text")) != []
    tokenize.close()


def test_an_empty_text_has_no_tokens() -> None:
    tokenize = Tokenize(MODEL)
    with pytest.raises(BadRequest, match="at least one token"):
        asyncio.run(tokenize.ready(parse_generate({"text": " "}, MODEL)))
    tokenize.close()


@dataclass
class Turns:
    """A real tokenizer, and how often the event loop came round during each long call into it."""

    inner: Tokenizer
    turns: int = 0
    during: int = 0

    def encode_batch_fast(self, sequences: list[str], /, *, add_special_tokens: bool = True) -> Any:
        before = self.turns
        found = self.inner.encode_batch_fast(sequences, add_special_tokens=add_special_tokens)
        self.during = self.turns - before
        return found

    def encode(self, sequence: str, /, *, add_special_tokens: bool = True) -> Any:
        before = self.turns
        found = self.inner.encode(sequence, add_special_tokens=add_special_tokens)
        self.during = self.turns - before
        return found

    def decode_batch(self, sequences: list[list[int]], /) -> list[str]:
        before = self.turns
        found: list[str] = self.inner.decode_batch(sequences)
        self.during = self.turns - before
        return found


def test_the_loop_goes_on_while_a_long_text_is_tokenized_and_while_one_is_decoded() -> None:
    turns = Turns(byte_level())
    tokenize = Tokenize(Model(vocab_size=1000, context_length=1 << 20, tokenizer=turns))

    async def run() -> None:
        texts = [TEXT[0] * 4000]
        for work in (
            lambda: tokenize.encode(texts, "text"),
            lambda: tokenize.decode([[5, 6, 7] * 200_000], "echo"),
        ):
            task = asyncio.ensure_future(work())
            while not task.done():
                turns.turns += 1
                await asyncio.sleep(0)
            await task
            assert turns.during > 0

    usual = sys.getswitchinterval()
    sys.setswitchinterval(60)  # from here on a thread loses the GIL only where it gives it up by itself
    try:
        asyncio.run(run())
    finally:
        sys.setswitchinterval(usual)
        tokenize.close()


def test_long_and_short_texts_get_the_ids_that_encode_gives() -> None:
    tokenizer = byte_level()
    texts = [*TEXT, "", "a", "<|begin|>x<|end|>", TEXT[0] * 20]

    async def run(short: int, special: bool) -> list[list[int]]:
        tokenize = Tokenize(Model(vocab_size=1000, context_length=1 << 20, tokenizer=tokenizer), short=short)
        try:
            return await tokenize.encode(texts, "text", special=special)
        finally:
            tokenize.close()

    def same() -> None:
        for special in (True, False):
            want = [tokenizer.encode(text, add_special_tokens=special).ids for text in texts]
            assert asyncio.run(run(0, special)) == asyncio.run(run(1 << 20, special)) == want

    same()
    tokenizer.enable_truncation(7)
    same()
    tokenizer.no_truncation()
    tokenizer.enable_padding(length=40)
    same()


def test_a_text_that_no_tokens_could_make_short_enough_is_refused_before_it_is_tokenized() -> None:
    tokenizer = byte_level()
    longest = longest_token(tokenizer)
    assert longest is not None
    words = Turns(tokenizer)
    context = 50

    async def run() -> None:
        with pytest.raises(BadRequest, match="UTF-8 bytes") as caught:
            await tokenize.encode(["é" * (context * longest // 2 + 1)], "prompt")
        assert caught.value.field == "prompt"
        with pytest.raises(BadRequest, match="maximum context length is 50 tokens"):
            await tokenize.encode(["é" * (context * longest // 2)], "prompt")

    calls = []
    plain = words.encode_batch_fast

    def counted(sequences: list[str], /, *, add_special_tokens: bool = True) -> Any:
        calls.append(len(sequences))
        return plain(sequences, add_special_tokens=add_special_tokens)

    looked_into = _Looked(tokenizer, counted)
    tokenize = Tokenize(Model(vocab_size=1000, context_length=context, tokenizer=looked_into), short=0)
    asyncio.run(run())
    tokenize.close()
    assert calls == [1]


class _Looked:
    """A tokenizer as it is, but for its batch method."""

    def __init__(self, inner: Any, encode_batch_fast: Callable[..., Any]) -> None:
        self._inner = inner
        self.encode_batch_fast = encode_batch_fast

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_no_token_stands_for_more_text_than_the_longest_is_said_to() -> None:
    tokenizer = byte_level()
    longest = longest_token(tokenizer)
    assert longest is not None
    tokens = [tokenizer.id_to_token(token) for token in range(tokenizer.get_vocab_size())]
    assert longest >= max(len(token or "") for token in tokens)
    tokenizer.normalizer = normalizers.NFC()
    shrinking = longest_token(tokenizer)
    assert shrinking is not None
    for text in (*TEXT, "e\u0301" * 9, "\u0390", "\u03b9\u0308\u0301" * 9, "\u212b" * 9):
        assert len(text.encode()) <= shrinking * len(tokenizer.encode(text, add_special_tokens=False).ids)


def _stripping(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])


def _truncating(tokenizer: Tokenizer) -> None:
    tokenizer.enable_truncation(5)


def _splitting_out(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    )


def _swallowing(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])


def _by_words(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()


@pytest.mark.parametrize("change", [_stripping, _truncating, _splitting_out, _swallowing, _by_words])
def test_where_a_token_may_stand_for_any_length_none_is_the_longest(
    change: Callable[[Tokenizer], None],
) -> None:
    tokenizer = byte_level()
    change(tokenizer)
    assert longest_token(tokenizer) is None


def test_a_tokenizer_that_lacks_a_byte_or_knows_the_unknown_has_no_longest_token() -> None:
    assert longest_token(Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))) is None
    bare = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel()
    assert longest_token(bare) is None
    assert longest_token(Words()) is None


def test_texts_that_wait_behind_one_that_is_refused_are_not_tokenized() -> None:
    words = Words()
    inner, refused = words.encode_batch_fast, threading.Event()
    seen: list[str] = []
    long = " " * tokenize_module.GROUP_CHARACTERS  # no two of them go to a thread together

    def gated(sequences: list[str], /, *, add_special_tokens: bool = True) -> Any:
        seen.extend(sequence.strip() for sequence in sequences)
        if seen[-1] == "a":
            refused.wait(30)  # holds the only thread until the refusal of the text before it is out
        return inner(sequences)

    words.encode_batch_fast = gated  # type: ignore[method-assign]
    tokenize = Tokenize(Model(vocab_size=1000, context_length=3, tokenizer=words), threads=1, short=0)

    async def run() -> None:
        with pytest.raises(BadRequest):
            await tokenize.encode([f"a b c d{long}", f"a{long}", *[f"b{long}"] * 99], "text")
        await asyncio.sleep(0)  # the loop calls the rest off in its next turn
        refused.set()
        await tokenize.decode([[1]], "text")  # comes behind whatever was not called off

    asyncio.run(run())
    tokenize.close()
    assert seen[0] == "a b c d"
    assert seen.count("b") < 99, "at most what a thread took while the rest was called off"


def test_what_is_decoded_counts_among_what_waits() -> None:
    words = Words()
    tokenize = Tokenize(Model(vocab_size=1000, context_length=200, tokenizer=words), waiting=2)

    async def run() -> None:
        assert await tokenize.decode([[1, 2], [3]], "echo") == ["x xx", "xxx"]
        with pytest.raises(Unavailable, match="at most 2"):
            await tokenize.decode([[1]] * 3, "echo")

    asyncio.run(run())
    tokenize.close()
    assert all(name.startswith("outfeed-tokenize") for name in words.threads)


def test_a_long_body_is_read_on_a_thread_and_a_short_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def watched(raw: bytes, **limits: int) -> Any:
        threads.append(threading.current_thread().name)
        return decode_body(raw, **limits)

    monkeypatch.setattr(tokenize_module, "decode_body", watched)
    tokenize = Tokenize(MODEL, waiting=1)
    for size, here in ((1000, True), (300_000, False)):
        threads.clear()
        raw = b'{"text": "%b"}' % (b"x" * size)
        assert asyncio.run(tokenize.read(raw, 1 << 20)) == {"text": "x" * size}
        assert [not name.startswith("outfeed-body") for name in threads] == [here]
    with pytest.raises(BadRequest, match="entries"):
        asyncio.run(tokenize.read(b"[%b1]" % (b"1," * (1 << 19)), 16 << 20))
    tokenize.close()
    with pytest.raises(Unavailable, match="wait to be read"):
        asyncio.run(Tokenize(MODEL, waiting=0).read(b" " * 300_000, 1 << 20))


def test_two_prompts_that_fill_the_context_have_few_enough_entries_however_long_it_is() -> None:
    tokenize = Tokenize(Model(vocab_size=10, context_length=1 << 19))
    raw = b'{"input_ids": [%b]}' % b",".join([b"[%b]" % b",".join([b"1"] * ((1 << 19) - 1))] * 2)
    assert len(asyncio.run(tokenize.read(raw, 16 << 20))["input_ids"]) == 2
    tokenize.close()


def test_a_bias_for_each_token_is_few_enough_entries_however_large_the_vocabulary_is() -> None:
    tokenize = Tokenize(Model(vocab_size=200_000, context_length=10))
    bias = b",".join(b'"%d":1' % token for token in range(200_000))
    raw = b'{"text": "x", "sampling_params": {"logit_bias": {%b}}}' % bias
    assert len(asyncio.run(tokenize.read(raw, 16 << 20))["sampling_params"]["logit_bias"]) == 200_000
    tokenize.close()
    smaller = Tokenize(Model(vocab_size=1000, context_length=10))
    with pytest.raises(BadRequest, match="entries, a key counted as 3 more"):
        asyncio.run(smaller.read(raw, 16 << 20))
    smaller.close()


BIAS = {str(token): 1.0 for token in range(20_000)}


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [1] * 20_000},
        {"input_ids": [[1] * 5_000] * 4},
        {"input_ids": [None] * 20_000},
        {"input_ids": [1], "sampling_params": {"logit_bias": BIAS}},
        {"input_ids": [[1]] * 700, "sampling_params": [{"stop": ["a"] * 32}] * 700},
        {"input_ids": [[1]] * 20, "token_ids_logprob": [[1] * 1000] * 20},
        {"input_ids": [1], **BIAS},
    ],
)
def test_very_many_entries_are_checked_on_a_thread(body: dict[str, Any], threads: list[str]) -> None:
    tokenize = Tokenize(Model(vocab_size=10, context_length=1 << 19))
    for given, here in (({"input_ids": [1, 2], "sampling_params": {"stop": ["a"]}}, True), (body, False)):
        threads.clear()
        with contextlib.suppress(BadRequest):
            asyncio.run(tokenize.parse(given))
        assert [not name.startswith("outfeed-tokenize") for name in threads] == [here]
    tokenize.close()
