"""What ends a replayed request before its limit: stop tokens, stop strings and stop patterns.

It stands for an engine's own search, over the decoded tail of what it generated. Must not know batches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from ..ring.finish import FinishReason
from ..ring.frames import PROMPT_TAIL

NO_LIMIT: Final = 1 << 30
# Ids more than a stop can have: some have no text (special ones that are skipped).
SLACK: Final = 32
LONGEST_RUN: Final = 256
"""Ids of a prompt that are searched, before its tail, for one where no character is open."""


class Detokenize(Protocol):
    """What the replay scheduler needs of a tokenizer, to look for stop strings as an engine does."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`."""
        ...


@dataclass(slots=True)
class Stops:
    """What may end one request before its limit."""

    token_ids: frozenset[int]
    strings: list[str]
    patterns: list[re.Pattern[str]]
    window: int
    skip_special: bool
    prompt: list[int] = field(default_factory=list)
    """Its last ids: what the first text follows on."""
    ids: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, params: dict[str, object]) -> Stops | None:
        """Return the stops of a request's sampling parameters; None when it has none."""
        tokens = frozenset(params.get("stop_token_ids") or ())  # type: ignore[call-overload]
        strings = list(params.get("stop_strs") or ())  # type: ignore[call-overload]
        patterns = [re.compile(pattern) for pattern in params.get("stop_regex_strs") or ()]  # type: ignore[attr-defined]
        if not (tokens or strings or patterns):
            return None
        # In ids: a string's length is in bytes, a pattern's in characters of at most 4 bytes each.
        longest = max(
            int(params.get("stop_str_max_len") or 0),  # type: ignore[call-overload]
            4 * int(params.get("stop_regex_max_len") or 0),  # type: ignore[call-overload]
        )
        return cls(
            tokens,
            strings,
            patterns,
            min(longest, NO_LIMIT) + SLACK,
            bool(params.get("skip_special_tokens", True)),
        )

    def check(self, new: list[int], tokenizer: Detokenize | None) -> tuple[int, FinishReason | None]:
        """Return how many of `new` count, and why the request ends there, if it does."""
        kept, reason = len(new), None
        for at, token in enumerate(new):
            if token in self.token_ids:
                kept, reason = at + 1, FinishReason.stop(token)
                break
        before = len(self.ids)
        self.ids += new[:kept]
        if tokenizer is None or not (self.strings or self.patterns):
            return kept, reason
        spoken = self.ids[:-1] if reason else self.ids
        for late, tail, begin in self._tails(spoken, before, kept, tokenizer):
            found = next((text for text in self.strings if text in tail), None) or next(
                (pattern.pattern for pattern in self.patterns if pattern.search(tail, begin)), None
            )
            if found is not None:
                return kept - late, FinishReason.stop(found)
        return kept, reason

    def _tails(
        self, spoken: list[int], before: int, kept: int, tokenizer: Detokenize
    ) -> Iterator[tuple[int, str, int]]:
        """Yield texts to search: how many of the last ids one lacks, itself, where in it a pattern may begin.

        Where bytes are tokens, a run of them that begins or ends inside a character is U+FFFD throughout. So
        a tail begins where no character is open, and is tried without the ids that may have opened one at its
        end, as an engine saw it then. At the output's beginning it follows on the prompt.

        As much text again stands before what is searched: there `^`, `\\b` and look-behinds must not take the
        tail's beginning for the text's.
        """

        def decode(ids: list[int]) -> str:
            return tokenizer.decode(ids, skip_special_tokens=self.skip_special)

        searched = max(0, before - self.window)
        start = max(0, searched - self.window)
        while start > 0 and "\ufffd" in tokenizer.decode(spoken[start : start + 1]):
            start -= 1
        context = [] if start else self.prompt
        told = decode(context) if context else ""
        known = told
        for open_ids in range(min(4, searched - start)):
            known = decode(context + spoken[start : searched - open_ids])
            if not known.endswith("\ufffd"):
                break
        for late in range(kept):
            tail = decode(context + spoken[start : len(spoken) - late])
            begin = _same(told, tail)
            yield late, tail[begin:], max(_same(known, tail) - begin, 0)
            if not tail.endswith("\ufffd"):
                break


def prompt_tail(input_ids: bytes, tokenizer: Detokenize | None) -> list[int]:
    """Return a prompt's last ids, what output follows on, from where no character is open.

    Where bytes are tokens a run of them that begins inside a character is U+FFFD throughout, and so would be
    the output that goes on with it.
    """
    ids = np.frombuffer(input_ids, "<i4")
    begin = max(0, len(ids) - PROMPT_TAIL)
    least = max(0, begin - LONGEST_RUN)
    while tokenizer and begin > least and "\ufffd" in tokenizer.decode([int(ids[begin])]):
        begin -= 1
    return [int(token) for token in ids[begin:]]


def _same(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    return next(
        (k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
