"""Where in a completion's text each of its tokens begins, in characters.

The text that a client gets is what counts, and it is not its tokens' texts one behind the other: a character
may come in the pieces of several tokens, a special token may add nothing, and text that could become a stop
string comes later than its tokens.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable

MAX_LOST = 256
"""How far the text is searched for where tokens and text agree again."""

_decoder = codecs.getincrementaldecoder("utf-8")


class Offsets:
    """The places of a request's tokens, as they come. `start`: characters before the first of them.

    A token costs the same however many came before it, and however much text: whole answers come at once.
    """

    __slots__ = ("_at", "_decode", "_due", "_due_length", "_lost", "_start", "_text")

    def __init__(self, start: int = 0) -> None:
        self._start = start
        self._text = ""
        """Text from `_start` on."""
        self._at = 0
        """How far in it tokens account for."""
        self._due: deque[str] = deque()
        """What tokens have added that has not come."""
        self._due_length = 0
        self._lost = 0
        """Characters that tokens since then may have made which are not known, or not found in the text."""
        self._decode = _decoder("replace").decode

    def places(self, tokens: Iterable[bytes | None], text: str, last: bool) -> list[int]:
        """Return where each token begins.

        Args:
            tokens: the bytes each of them stands for; None when nobody knows.
            text: what has come with them.
            last: whether that was the end of it, so that no token can begin behind it.
        """
        self._start += self._at
        self._text = self._text[self._at :] + text
        self._at = 0
        self._account()
        found = [self._place(token) for token in tokens]
        # Text comes with its tokens or after them: what none of them accounts for is not to come again.
        self._at = max(self._at, len(self._text) - self._due_length - self._lost)
        end = self._start + len(self._text)
        return [min(place, end) for place in found] if last else found

    def _place(self, token: bytes | None) -> int:
        added = ""
        if token is None:
            self._lost = min(self._lost + 1, MAX_LOST)  # a piece of some character
        else:
            if token and token[0] & 0xC0 != 0x80:
                self._add(self._decode(b"", True))  # a character that was begun before will never be whole
            added = self._decode(token)
        if added and not self._due:
            self._seek(added)
        place = self._start + self._at + self._due_length
        self._add(added)
        return place

    def _add(self, added: str) -> None:
        """Note what a token adds to the text."""
        if added:
            self._due.append(added)
            self._due_length += len(added)
            self._account()

    def _account(self) -> None:
        """Step over what is due and has come."""
        text = self._text
        while self._due:
            due = self._due[0]
            self._seek(due)
            at = self._at
            if text.startswith(due, at):
                self._at += len(due)
                self._lost = 0
            elif len(text) - at < len(due) and due.startswith(text[at:]):
                return  # the rest of it is still to come
            elif text.startswith(bare := due.lstrip(" "), at):
                self._at += len(bare)  # a tokenizer drops the space before a text's first word
            else:
                # A special token, or one that says it otherwise: with a space before it, perhaps.
                self._lost = min(self._lost + len(due) + 1, MAX_LOST)
            self._due.popleft()
            self._due_length -= len(due)

    def _seek(self, added: str) -> None:
        """Step over what tokens that were not found in the text have made, if this one is behind it."""
        if self._lost:
            found = self._text.find(added, self._at, self._at + self._lost + len(added))
            if found >= 0:
                self._at, self._lost = found, 0
