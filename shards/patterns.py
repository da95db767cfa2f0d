"""Stop patterns that a shard looks for itself (`detect_stops`), token by token, in a bounded window.

A pattern means what CPython's `re` says it means. Where google-re2 (an optional extra) means the same, it
does the search, in linear time; elsewhere `re` does, on patterns that ingress admitted and on a window that
bounds the cost. Knows text; must not know ids or rows.
"""

import re
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

try:
    import re2
except ImportError:  # pragma: no cover - the extra is installed wherever the tests run
    re2 = None

from .errors import BadRegistration

# Characters of text that a search sees at most; a longer match is not found.
WINDOW = 4096
# What a look-behind may want to see before a match.
BEFORE = 256
# re2 refuses more.
MAX_REPEAT = 1000


class PatternWatch:
    """One request's stop patterns, and the end of its text."""

    __slots__ = ("_compiled", "_patterns", "_tail", "_window")

    def __init__(self, patterns: list[str]) -> None:
        self._patterns = patterns
        self._compiled = []
        self._window = 0
        for pattern in patterns:
            try:
                width = parser.parse(pattern).getwidth()[1]
                self._compiled.append(_compile(pattern))
            except (re.error, RecursionError, OverflowError) as error:
                raise BadRegistration(f"stop_regex {pattern!r} cannot be compiled: {error}") from error
            self._window = max(self._window, min(int(width), WINDOW) + BEFORE)
        self._tail = ""

    def seen(self, text: str) -> None:
        """Remember text that was searched before, by another shard."""
        self._tail = (self._tail + text)[-self._window :]

    def search(self, text: str, ends: list[int]) -> tuple[int, int, str] | None:
        """Look at new text token by token; `ends` are the tokens' ends in it.

        Returns (token, end of the match in `text`, the pattern) for the first token after which a pattern
        matches; None, and the text is remembered, when none does.
        """
        before = len(self._tail)
        whole = self._tail + text
        for token, end in enumerate(ends):
            seen = whole[max(0, before + end - self._window) : before + end]
            offset = before + end - len(seen)
            for pattern, compiled in zip(self._patterns, self._compiled, strict=True):
                if (match := compiled.search(seen)) is not None:
                    return token, max(0, offset + match.end() - before), pattern
        self._tail = whole[-self._window :]
        return None


def _compile(pattern: str) -> Any:
    compiled = re.compile(pattern)
    if re2 is not None and compiled.flags == re.UNICODE and _same_in_re2(parser.parse(pattern)):
        options = re2.Options()
        options.log_errors = False
        try:
            return re2.compile(pattern, options)
        except re2.error:
            return compiled
    return compiled


def _same_in_re2(parsed: Any) -> bool:
    """Whether a parsed pattern means the same in re2: literals, sets of literals, choices, repeats, groups.

    Not so: \\d, \\w, \\s, \\b (ASCII there), $ (before a last newline, here), anchors,
    look-around, references.
    """
    for code, value in parsed:
        match code:
            case op.LITERAL | op.NOT_LITERAL | op.ANY:
                pass
            case op.IN:
                if any(kind not in (op.LITERAL, op.RANGE, op.NEGATE) for kind, _ in value):
                    return False
            case op.BRANCH:
                if not all(_same_in_re2(branch) for branch in value[1]):
                    return False
            case op.SUBPATTERN:
                if value[1] or value[2] or not _same_in_re2(value[3]):
                    return False
            case op.MAX_REPEAT | op.MIN_REPEAT:
                low, high, inner = value
                if low > MAX_REPEAT or (high != op.MAXREPEAT and high > MAX_REPEAT):
                    return False
                if not _same_in_re2(inner):
                    return False
            case _:
                return False
    return True
