"""Decoding with the tokenizer itself, for decoders that have no table (WordPiece, CTC, BPE with suffixes).

The text of a new token is what decoding it after a few tokens of context adds to decoding the context alone.
Context is a handful of tokens, and so is what waits for the rest of a character: every id is decoded a
bounded number of times, and text flows whatever comes, an endless run of U+FFFD included.

Knows the tokenizer's `decode`; must not know rows, stops or frames.
"""

import codecs
import logging
from collections.abc import Callable
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
    """A tokenizer, and which of its ids are text at all. It calls `beat` with every few ids."""

    def __init__(self, tokenizer: "Tokenizer", beat: Callable[[], None] = lambda: None) -> None:
        self._tokenizer = tokenizer
        self._beat = beat
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
        self._runs = bytes_of if "ByteFallback" in names(decoder_of(tokenizer)) else {}
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

    def run(self, ids: list[int]) -> bytes:
        """Return the bytes of the run that ids end in."""
        return bytes(self._runs[token] for token in ids[len(self.before_run(ids)) :])

    def broken(self, ids: list[int]) -> list[int]:
        """Return those few of the run that ids end in which alone break it; none when it is not broken."""
        if not ids or ids[-1] not in self._runs or _unfinished(run := self.run(ids)) is not None:
            return []
        end = next(size for size in range(1, len(run) + 1) if _unfinished(run[:size]) is None)
        return ids[len(ids) - len(run) :][max(0, end - OPEN - 1) : end]

    def decode(self, ids: list[int]) -> str:
        """Return the tokenizer's text for ids that all are text."""
        self.work += len(ids)
        self._beat()
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

    __slots__ = ("_context", "_pending", "_prefix", "_run", "_shorter", "_skip", "_text")

    def __init__(self, text: TokenizerText, skip_special: bool, prompt: list[int], whole: bool) -> None:
        self._text = text
        self._skip = skip_special
        known = [token for token in prompt if text.is_text(token, skip_special)]
        known = text.last(known, len(known), whole)
        self._context = text.broken(known) or text.last(known, MAX_CONTEXT)
        self._prefix = text.decode(self._context) if self._context else ""
        self._run = _undecided(text.run(self._context))
        # What the prompt says if its last ids only began a character.
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
        if self._text.in_run(token):
            return self._add_to_run(token)
        self._run = b""
        added = self._added(waiting)
        if added and (self._text.closes(token) or not added.endswith(REPLACEMENT)):
            self._advance(waiting)
            return added
        return "" if waiting < MAX_PENDING else self._let_go()

    def _add_to_run(self, token: int) -> str:
        """A run's last byte decides what its first becomes. A long one gives out its whole characters."""
        self._run += self._text.run([token])
        unfinished = _unfinished(self._run)
        if unfinished is not None and len(self._run) < MAX_RUN:
            return ""
        added = self._take(len(self._pending) - (unfinished or 0))  # all of a broken one: nothing mends it
        self._run = _undecided(self._text.run(self._context + self._pending))
        return added

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
        head = self._text.broken(past) or self._text.last(past, done)
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
        if self._text.in_run(self._pending[0]) and (run := self._text.run(self._context)):
            return self._added_to_run(text, run, done)
        if text.startswith(prefix):
            return text[len(prefix) :]
        # The context ended inside a character that is whole now: the character is the output's, what stands
        # before it is not.
        same = 0
        while same < min(len(text), len(prefix)) and text[same] == prefix[same]:
            same += 1
        return text[max([same, *(len(told) for told in self._shorter if text.startswith(told))]) :]

    def _added_to_run(self, text: str, run: bytes, done: int) -> str:
        """Return what ids that wait add to `run`, which the context ends in; `text` is all that both say."""
        ids, begun = self._pending[:done], _unfinished(run)
        more = next((size for size, token in enumerate(ids) if not self._text.in_run(token)), len(ids))
        if _unfinished(run + self._text.run(ids[:more])) != 0:
            # It is broken. What the context said stays said: each byte behind it is U+FFFD.
            return text[len(self._text.decode(self._text.before_run(self._context))) + len(run) :]
        if not begun:
            return text[len(self._prefix) :]
        # The character that the context began is whole, and the output's; if it is U+FFFD, it stands there.
        told = self._text.decode(self._context[:-begun])
        return text[len(told) :].removeprefix(REPLACEMENT)


def _unfinished(run: bytes) -> int | None:
    """Return how many bytes at a run's end only begin a character; None when it is broken: no UTF-8."""
    try:
        return len(run) - codecs.utf_8_decode(run, "strict", False)[1]
    except UnicodeDecodeError:
        return None


def _undecided(run: bytes) -> bytes:
    """Return what of a run more bytes may make something else of: its unfinished end, all if it is broken."""
    unfinished = _unfinished(run)
    return run if unfinished is None else run[len(run) - unfinished :]
