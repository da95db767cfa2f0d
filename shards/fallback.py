"""Decoding with the tokenizer itself, for decoders that have no table (WordPiece, CTC, BPE with suffixes).

The text of a new token is what decoding it after a few tokens of context adds to decoding the context alone.
Context is a handful of tokens, and so is what waits for the rest of a character: every id is decoded a
bounded number of times, and text flows whatever comes, an endless run of U+FFFD included.

Knows the tokenizer's `decode`; must not know rows, stops or frames.
"""

import logging
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .pipeline import BYTE_TOKEN

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

# Ids that wait because the text so far ends in U+FFFD, or has not grown; a character takes at most 4.
MAX_PENDING = 8
# Of them, the last ones may be the beginning of a character.
OPEN = 3
MAX_CONTEXT = 16
REPLACEMENT = "\ufffd"


class TokenizerText:
    """A tokenizer, and which of its ids are text at all."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self._known: NDArray[np.bool_] = np.zeros(max(vocab.values(), default=-1) + 1, dtype=np.bool_)
        self._known[list(vocab.values())] = True
        self._plain = self._known.copy()
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        for content, token in vocab.items():
            if content in special:
                self._plain[token] = False
        bytes_of = {
            token: int(match[1], 16) for s, token in vocab.items() if (match := BYTE_TOKEN.fullmatch(s))
        }
        self._inside = {token for token, byte in bytes_of.items() if 0x80 <= byte <= 0xBF}
        self.work = 0
        """Ids decoded so far: what the cost is linear in."""

    def stream(self, skip_special: bool, prompt: list[int], whole: bool = True) -> "TextStream":
        """Return the text of a request that follows `prompt`: all of it, or (not `whole`) its last ids."""
        return TextStream(self, skip_special, prompt, whole)

    def last(self, ids: list[int], count: int, whole: bool = True) -> list[int]:
        """Return the last `count` ids or a few less: none that end a character which began before them.

        Byte fallback makes a run of byte tokens U+FFFD throughout when it begins inside a character.
        """
        start = max(0, len(ids) - count)
        if start or not whole:
            most = start + OPEN
            while start < min(most, len(ids)) and ids[start] in self._inside:
                start += 1
        return ids[start:]

    def with_beginning(self, ids: list[int], start: int) -> list[int]:
        """Return ids from `start` on, with those before it that began a character which they end."""
        least = max(0, start - OPEN)
        while start > least and ids[start] in self._inside:
            start -= 1
        return ids[start:]

    def is_text(self, token: int, skip_special: bool) -> bool:
        """Whether an id reaches the decoder: known, and not skipped."""
        kinds = self._plain if skip_special else self._known
        return 0 <= token < len(kinds) and bool(kinds[token])

    def decode(self, ids: list[int]) -> str:
        """Return the tokenizer's text for ids that all are text."""
        self.work += len(ids)
        try:
            text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        except BaseException as error:
            # The library's crashes derive from BaseException, under a name that it does not export.
            if type(error).__name__ != "PanicException":
                raise
            log.error("the tokenizer crashed in its own decode of %s: %s", ids, error)
            return ""
        return text

    def token_text(self, token: int) -> str:
        """Return one token's text on its own; "" for an id that is none."""
        return self.decode([token]) if self.is_text(token, False) else ""


class TextStream:
    """One request's text, token by token. What it returns depends on the ids alone, not on how they came."""

    __slots__ = ("_context", "_pending", "_prefix", "_shorter", "_skip", "_text")

    def __init__(self, text: TokenizerText, skip_special: bool, prompt: list[int], whole: bool) -> None:
        self._text = text
        self._skip = skip_special
        known = [token for token in prompt if text.is_text(token, skip_special)]
        self._context = text.last(known, MAX_CONTEXT, whole)
        self._prefix = text.decode(self._context) if self._context else ""
        # What the prompt says if its last ids only began a character: byte fallback has made U+FFFD of the
        # characters before it, too.
        self._shorter: list[str] = []
        if self._prefix.endswith(REPLACEMENT):
            self._shorter = [text.decode(self._context[:-k]) for k in range(1, OPEN + 1)]
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """Return the text that a token brings out, "" while it has to wait."""
        if not self._text.is_text(token, self._skip):
            return ""
        self._pending.append(token)
        text = self._text.decode(self._context + self._pending)
        added = self._after_prefix(text)
        if added and not added.endswith(REPLACEMENT):
            self._advance(len(self._pending))
            return added
        if len(self._pending) < MAX_PENDING:
            return ""
        # It may be no character's beginning at all: let go of all but the last few, and not in the middle of
        # a character that the last few complete.
        last = done = len(self._pending) - OPEN
        head = self._text.decode(self._context + self._pending[:done])
        while done > 1 and not text.startswith(head):
            done -= 1
            head = self._text.decode(self._context + self._pending[:done])
        if not text.startswith(head):
            done, head = last, self._text.decode(self._context + self._pending[:last])
        added = self._after_prefix(head)
        self._advance(done)
        return added

    def flush(self) -> str:
        """Return what still waits, as it is: the request is over."""
        if not self._pending:
            return ""
        added = self._after_prefix(self._text.decode(self._context + self._pending))
        self._advance(len(self._pending))
        return added

    def _advance(self, done: int) -> None:
        past = self._context + self._pending[:done]
        head = self._text.with_beginning(past, len(self._context))
        self._pending = self._pending[done:]
        self._shorter = []
        context = self._text.decode(head)
        if not context:
            # Tokens without text are no context: the next one would look like the text's first.
            head = self._text.last(past, MAX_CONTEXT)
            context = self._text.decode(head)
        self._context, self._prefix = head, context

    def _after_prefix(self, text: str) -> str:
        prefix = self._prefix
        if text.startswith(prefix):
            return text[len(prefix) :]
        # The context ended inside a character that is whole now: the character is the output's, what stands
        # before it is not.
        same = 0
        while same < min(len(text), len(prefix)) and text[same] == prefix[same]:
            same += 1
        return text[max([same, *(len(told) for told in self._shorter if text.startswith(told))]) :]
