"""What of a request takes long, on threads: reading it, tokenizing its texts, analysing its stop patterns.

Long calls into the tokenizer are made through its batch methods: `Tokenizer.encode` and `decode` keep the GIL
for as long as they take, which is a second for a megabyte, and nothing else of the process runs meanwhile.
"""

import asyncio
import functools
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from .entries import KEY_ENTRIES
from .errors import BadRequest, Unavailable
from .request import (
    MAX_ENTRIES,
    GenerateRequest,
    Model,
    Ready,
    Tokenizer,
    decode_body,
    parse_generate,
    ready,
    too_long,
)
from .sampling import WHERE, brings_new_patterns

MAX_WAITING_TEXTS = 4096
SHORT_CHARACTERS = 256
"""Texts this short together are tokenized at once: that takes less than waking a thread and the way back."""
GROUP_CHARACTERS = 4096
"""What a thread is woken for, when many texts are short."""
SHORT_BODY = 256 << 10
"""Bytes of a body that is read where it is."""
MANY_ENTRIES = 16_384
"""Entries of a request, ids mostly, that are checked where it is; more are on a thread."""
NOT_IN_UTF8: Final = frozenset(map(chr, (0xC0, 0xC1, *range(0xF5, 0x100))))
"""Bytes that no UTF-8 text has, as byte-level tokens spell them."""
NFC_SHRINKS: Final = 3
"""How many times shorter NFC can make a text's UTF-8 at most (UAX #15)."""

Result = TypeVar("Result")


class Tokenize:
    """Turns texts into ids, long ones on a few threads of its own: no event loop waits for a long prompt,
    nor for the analysis of a stop pattern.

    At most `waiting` texts and requests are queued or in work; one more is Unavailable at once. Texts that
    have `short` characters together are tokenized where they are.
    """

    def __init__(
        self,
        model: Model,
        *,
        threads: int = 2,
        waiting: int = MAX_WAITING_TEXTS,
        short: int = SHORT_CHARACTERS,
    ) -> None:
        self._model = model
        self._short = short
        self._limit = waiting
        self._in_work = 0
        self._measuring = threading.Lock()
        self._measured = False
        self._longest: int | None = None
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="outfeed-tokenize")
        # Of its own, so that a body that is soon read need not wait for long texts.
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="outfeed-body")

    async def read(self, raw: bytes | bytearray, max_bytes: int) -> Any:
        """Read a body as `decode_body` does, on a thread if it is long. Raises BadRequest, Unavailable.

        However long the context is, two prompts that fill it are not too many entries, nor is a bias for each
        token of the vocabulary.
        """
        ids, biases = 2 * self._model.context_length, (1 + KEY_ENTRIES) * self._model.vocab_size
        entries = max(MAX_ENTRIES, ids + SHORT_BODY, biases + SHORT_BODY)
        decode = functools.partial(decode_body, raw, max_bytes=max_bytes, max_entries=entries)
        return await self.aside(decode, len(raw))

    async def aside(self, work: Callable[[], Result], size: int) -> Result:
        """Do `work` for a body of `size` bytes: on a thread if that is long. Raises Unavailable."""
        if size <= SHORT_BODY:
            return work()

        def call(work: Callable[[], Result]) -> Result:
            return work()

        (done,) = await self._on_threads("requests wait to be read", call, [work], self._reading)
        return done

    async def parse(self, body: Any) -> GenerateRequest:
        """Check a body as `parse_generate` does, on a thread if it has stop patterns that are not known yet,
        or very many entries.

        Raises BadRequest, Unavailable.
        """
        if type(body) is not dict or not (brings_new_patterns(body.get(WHERE)) or _has_many_entries(body)):
            return parse_generate(body, self._model)
        check = functools.partial(parse_generate, model=self._model)
        (request,) = await self._on_threads("requests wait to be checked", check, [body])
        return request

    async def ready(self, request: GenerateRequest) -> list[Ready]:
        """Tokenize a request's texts and check every prompt. Raises BadRequest, Unavailable."""
        texts = [prompt.text for prompt in request.prompts if prompt.text is not None]
        found = iter(await self.encode(texts, "text")) if texts else iter(())
        done = []
        for prompt in request.prompts:
            ids = prompt.ids if prompt.ids is not None else next(found)
            done.append(ready(prompt, ids, request.stream, self._model))
        return done

    async def encode(self, texts: list[str], field: str, *, special: bool = True) -> list[list[int]]:
        """Return the ids of each text; `special`: with the tokens that the tokenizer puts around a text.

        Raises BadRequest about `field` for a text that the context cannot hold, Unavailable.
        """
        tokenizer = self._tokenizer(field)
        if sum(map(len, texts)) <= self._short:
            self._admit(len(texts), "texts wait to be tokenized")
            # Not through the batch method: that would wake threads of the tokenizer's own.
            short = (tokenizer.encode(text, add_special_tokens=special) for text in texts)
            return [self._ids(one, field) for one in short]
        encode = functools.partial(self._encode_long, tokenizer, field, special)
        groups = _grouped(texts)
        found = await self._on_threads("texts wait to be tokenized", encode, groups, count=len(texts))
        return [ids for group in found for ids in group]

    async def decode(self, prompts: list[list[int]], field: str) -> list[str]:
        """Return the text of each list of ids. Raises BadRequest about `field`, Unavailable."""
        tokenizer = self._tokenizer(field)

        def decode(ids: list[int]) -> str:
            return tokenizer.decode_batch([ids])[0]

        return await self._on_threads("texts wait to be tokenized", decode, prompts)

    def close(self) -> None:
        """Stop the threads; texts in work are finished, queued ones dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._reading.shutdown(wait=True, cancel_futures=True)

    def _tokenizer(self, field: str) -> Tokenizer:
        if self._model.tokenizer is None:
            raise BadRequest(field, "needs a tokenizer, and this server runs without one; send input_ids")
        return self._model.tokenizer

    def _encode_long(
        self, tokenizer: Tokenizer, field: str, special: bool, texts: list[str]
    ) -> list[list[int]]:
        found = []
        for text in texts:
            self._must_fit(tokenizer, field, text)
            # Each by itself: a tokenizer that pads makes the texts of a batch equally long.
            (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=special)
            found.append(self._ids(encoded, field))
        return found

    def _ids(self, encoded: Any, field: str) -> list[int]:
        """Return the ids of what was encoded, without a list of millions where thousands can be taken."""
        if len(encoded) >= self._model.context_length:
            raise too_long(field, len(encoded), self._model)
        ids: list[int] = encoded.ids
        return ids

    def _must_fit(self, tokenizer: Tokenizer, field: str, text: str) -> None:
        """Refuse a text that is too long however it is tokenized, before that is done."""
        context = self._model.context_length
        if len(text) <= context:
            return
        with self._measuring:
            if not self._measured:
                self._longest, self._measured = longest_token(tokenizer), True
        if self._longest is None:
            return
        most, size = context * self._longest, len(text.encode())
        if size > most:
            raise BadRequest(
                field,
                f"has {size} UTF-8 bytes; this model's maximum context length is {context} tokens, which are "
                f"{most} bytes at most ({self._longest} in the longest): shorten it",
            )

    def _admit(self, count: int, what: str) -> None:
        if self._in_work + count > self._limit:
            raise Unavailable(f"{self._in_work} {what}, at most {self._limit} may; try again soon")

    async def _on_threads(
        self,
        what: str,
        work: Callable[[Any], Result],
        parts: Sequence[Any],
        pool: ThreadPoolExecutor | None = None,
        count: int | None = None,
    ) -> list[Result]:
        """Do `work(part)` for each; their number, or `count`, counts until all are done or nobody waits."""
        count = len(parts) if count is None else count
        self._admit(count, what)
        self._in_work += count
        loop = asyncio.get_running_loop()
        running: list[asyncio.Future[Result]] = []
        try:
            # In here: there may be no thread left to start.
            running.extend(loop.run_in_executor(pool or self._pool, work, part) for part in parts)
            return list(await asyncio.gather(*running))
        finally:
            for one in running:
                one.cancel()  # what was not begun when another failed, or the client left
            self._in_work -= count


def _grouped(texts: list[str]) -> list[list[str]]:
    """Put short texts that follow each other together: a thread's waking takes as long as some of them."""
    groups: list[list[str]] = []
    room = 0
    for text in texts:
        room -= len(text)
        if room < 0 or not groups:
            groups.append([])
            room = GROUP_CHARACTERS - len(text)
        groups[-1].append(text)
    return groups


def _has_many_entries(body: dict[str, Any]) -> bool:
    """Whether the lists and objects of a body have very many entries, however they are nested."""
    left = MANY_ENTRIES
    level: list[Any] = [body]
    while level:
        deeper: list[Any] = []
        for one in level:
            left -= len(one)
            if left < 0:
                return True
            entries = one.values() if type(one) is dict else one
            if not {list, dict}.isdisjoint(map(type, entries)):  # a long list of ids is passed over in C
                deeper += [entry for entry in entries if type(entry) is list or type(entry) is dict]
        level = deeper
    return False


def longest_token(tokenizer: Any) -> int | None:
    """Return how many UTF-8 bytes of text one of its tokens can stand for at most; None if nobody knows.

    Known of byte-level BPE whose text nothing is taken out of before it is tokenized: everywhere else (an
    unknown token, a normalizer that strips) a token may stand for a text of any length.
    """
    try:
        if not _keeps_all_text(tokenizer):
            return None
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        tokens = [tokenizer.id_to_token(token) for token in range(size)]
    except (AttributeError, TypeError, ValueError):
        return None  # not a tokenizer of a kind that can be looked into
    if None in tokens:
        return None  # ids with gaps: some token is beyond them
    # Byte-level tokens spell each byte with a character of one or two bytes: this is no less than the text.
    return _shrinks(tokenizer.normalizer) * max(len(token.encode()) for token in tokens)


def _keeps_all_text(tokenizer: Any) -> bool:
    if tokenizer.truncation is not None or not _shrinks(tokenizer.normalizer):
        return False
    steps = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    alphabet = {step["type"] for step in steps}
    if "ByteLevel" not in alphabet or not alphabet <= {"ByteLevel", "Split", "Digits"}:
        return False
    if any(step.get("behavior") == "Removed" for step in steps) or type(tokenizer.model).__name__ != "BPE":
        return False
    if any(one.lstrip or one.rstrip for one in tokenizer.get_added_tokens_decoder().values()):
        return False  # such a token swallows the spaces beside it
    known = (tokenizer.token_to_id(character) for character in _byte_characters())
    return None not in known  # a byte without a token would be dropped


def _byte_characters() -> list[str]:
    from tokenizers import pre_tokenizers

    return [one for one in pre_tokenizers.ByteLevel.alphabet() if one not in NOT_IN_UTF8]


def _shrinks(normalizer: Any) -> int:
    """Return how many times shorter a normalizer makes a text at most; 0 if nobody knows."""
    kinds = [step["type"] for step in _steps(normalizer, "normalizers")]
    if set(kinds) <= {"NFC"}:
        return NFC_SHRINKS if kinds else 1
    return 0


def _steps(part: Any, inner: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or a pre-tokenizer, those of sequences one by one."""
    if part is None:
        return []

    def flat(state: dict[str, Any]) -> list[dict[str, Any]]:
        return [one for step in state[inner] for one in flat(step)] if inner in state else [state]

    return flat(json.loads(part.__getstate__()))
