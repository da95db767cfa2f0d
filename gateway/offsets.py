"""Where in a completion's text each of its tokens begins, in characters.

The text that a client gets is what counts, and it is not its tokens' texts one behind the other: a character
may come in the pieces of several tokens, a special token may add nothing, and text that could become a stop
string comes later than its tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

_decoder = codecs.getincrementaldecoder("utf-8")


class Offsets:
    """The places of a request's tokens, as they come. `start`: characters before the first of them."""

    __slots__ = ("_at", "_decode", "_due", "_lost", "_rest")

    def __init__(self, start: int = 0) -> None:
        self._at = start
        self._rest = ""
        """Text that has come and that no token has accounted for."""
        self._due: list[str] = []
        """What tokens have added that has not come."""
        self._lost = 0
        """Tokens since then whose bytes nobody knows."""
        self._decode = _decoder("replace").decode

    def places(self, tokens: Iterable[bytes | None], text: str, last: bool) -> list[int]:
        """Return where each token begins.

        Args:
            tokens: the bytes each of them stands for; None when nobody knows.
            text: what has come with them.
            last: whether that was the end of it, so that no token can begin behind it.
        """
        self._rest += text
        self._account()
        found = [self._place(token) for token in tokens]
        end = self._at + len(self._rest)
        return [min(place, end) for place in found] if last else found

    def _place(self, token: bytes | None) -> int:
        if token is None:
            self._lost += 1
            return self._at + sum(map(len, self._due))
        added = self._decode(token)
        if self._lost and added and not self._due:
            # What the unknown ones were is seen from where this one is; each was a piece of some character.
            skipped = self._rest.find(added, 0, self._lost + len(added))
            self._step(max(0, skipped))
            self._lost = 0
        place = self._at + sum(map(len, self._due))
        if added:
            self._due.append(added)
            self._account()
        return place

    def _account(self) -> None:
        """Step over what is due and has come."""
        while self._due:
            due, rest = self._due[0], self._rest
            if rest.startswith(due):
                self._step(len(due))
            elif due.startswith(rest):
                return  # the rest of it is still to come
            elif rest.startswith(bare := due.lstrip(" ")):
                self._step(len(bare))  # a tokenizer drops the space before a text's first word
            # Else it is not in the text at all, as a special token.
            del self._due[0]

    def _step(self, characters: int) -> None:
        self._at += characters
        self._rest = self._rest[characters:]
