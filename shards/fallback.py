"""Decoding with the tokenizer itself, for decoders that have no table (WordPiece, CTC, BPE with suffixes).

The text of a new token is what decoding it after a few tokens of context adds to decoding the context alone.
Context is a handful of tokens, and so is what waits for the rest of a character: every id is decoded a
bounded number of times, and text flows whatever comes, an endless run of U+FFFD included.

Knows the tokenizer's `decode`; must not know rows, stops or frames.
"""

import logging
from typing import TYPE_CHECKING

from .errors import is_crash
from .pipeline import BYTE_TOKEN, names
from .table import decoder_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

# Ids that wait because the text so far ends in U+FFFD, or has not grown; a character takes at most 4.
MAX_PENDING = 8
# Of them, the last ones may be the beginning of a character.
OPEN = 3
MAX_CONTEXT = 16
# A run of byte tokens waits for its end, which decides what its first byte becomes; but no longer than this.
MAX_RUN = 256
REPLACEMENT = "\ufffd"


class TokenizerText:
    """A tokenizer, and which of its ids are text at all."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        # A piece that is in a Unigram vocabulary twice is told under one of its ids.
        ids = {
            *tokenizer.get_vocab(with_added_tokens=True).values(),
            *range(tokenizer.get_vocab_size(with_added_tokens=False)),
        }
        tokens = {token: content for token in ids if (content := tokenizer.id_to_token(token)) is not None}
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        self._known = set(tokens)
        self._plain = {token for token, content in tokens.items() if content not in special}
        bytes_of = {
            token: int(match[1], 16)
            for token, content in tokens.items()
            if (match := BYTE_TOKEN.fullmatch(content))
        }
        self._inside = {token for token, byte in bytes_of.items() if 0x80 <= byte <= 0xBF}
        self._runs = set(bytes_of) if "ByteFallback" in names(decoder_of(tokenizer)) else set()
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
        return token in (self._plain if skip_special else self._known)

    def in_run(self, token: int) -> bool:
        """Whether an id is a byte of a run, which is text only if all of it is UTF-8."""
        return token in self._runs

    def closes(self, token: int) -> bool:
        """Whether nothing behind an id can change the text up to it: it ends a run, and is in none."""
        return bool(self._runs) and token not in self._runs

    def before_run(self, ids: list[int]) -> list[int]:
        """Return ids without the run that they end in."""
        end = len(ids)
        while end and ids[end - 1] in self._runs:
            end -= 1
        return ids[:end]

    def decode(self, ids: list[int]) -> str:
        """Return the tokenizer's text for ids that all are text."""
        self.work += len(ids)
        try:
            text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        except BaseException as error:
            if not is_crash(error):
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
        waiting = len(self._pending)
        # A run's last byte decides what its first becomes. A long one gives out its whole characters.
        in_run = self._text.in_run(token)
        if in_run and waiting < MAX_RUN:
            return ""
        closed = self._text.closes(token)
        for done in range(waiting, waiting - OPEN - 1 if in_run else waiting - 1, -1):
            added = self._added(done)
            if added and (closed or not added.endswith(REPLACEMENT)):
                self._advance(done)
                return added
        return "" if waiting < MAX_PENDING else self._let_go()

    def _let_go(self) -> str:
        """Return the text of all that waits but the last few: it may be no character's beginning at all."""
        text = self._text.decode(self._context + self._pending)
        last = done = len(self._pending) - OPEN
        head = self._text.decode(self._context + self._pending[:done])
        # Not in the middle of a character that the last few complete.
        while done > last - OPEN and not text.startswith(head):
            done -= 1
            head = self._text.decode(self._context + self._pending[:done])
        if not text.startswith(head):
            done = last
        return self._take(done)

    def flush(self) -> str:
        """Return what still waits, as it is: the request is over."""
        return self._take(len(self._pending)) if self._pending else ""

    def _take(self, done: int) -> str:
        added = self._added(done)
        self._advance(done)
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

    def _added(self, done: int) -> str:
        """Return what the first `done` of the ids that wait add to the context's text."""
        text, prefix = self._text.decode(self._context + self._pending[:done]), self._prefix
        if text.startswith(prefix):
            return text[len(prefix) :]
        if self._text.in_run(self._pending[0]) and not prefix.endswith(REPLACEMENT):
            # They broke the run that the context ends in. What it said stays said: each of them is U+FFFD.
            before = self._text.before_run(self._context)
            broken = self._text.decode(before + self._pending[:done])
            return broken[len(self._text.decode(before)) :]
        # The context ended inside a character that is whole now: the character is the output's, what stands
        # before it is not.
        same = 0
        while same < min(len(text), len(prefix)) and text[same] == prefix[same]:
            same += 1
        return text[max([same, *(len(told) for told in self._shorter if text.startswith(told))]) :]
