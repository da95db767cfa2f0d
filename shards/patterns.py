"""Stop patterns that a shard looks for itself (`detect_stops`), token by token, in a bounded window.

A pattern means what CPython's `re` says it means. Where google-re2 (an optional extra) means the same, it
does the search, in linear time; elsewhere `re` does, on patterns that ingress admitted and on a window that
bounds the cost. Knows text; must not know ids or rows.
"""

import re
from collections import Counter
from itertools import accumulate, pairwise
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

try:
    import re2
except ImportError:  # pragma: no cover - the extra is installed wherever the tests run
    re2 = None

from .budget import Budget
from .errors import BadRegistration

# Characters of a match at most; a longer one may not be found.
LONGEST = 4096
# What a look-behind or an anchor may want to see before a match, and what a look-ahead sees behind it.
BEFORE = 256
BEHIND = 256
# re2 refuses more.
MAX_REPEAT = 1000
# What a compiled pattern may take, the states that re2 keeps included; and a request that has some besides.
PATTERN_BYTES = 1 << 20
WATCH_BYTES = 8 * (LONGEST + BEHIND + BEFORE)


class Found(NamedTuple):
    """A match: the token with which it was complete, and its end in the text that was looked at."""

    token: int
    end: int
    pattern: str


class Compiled:
    """The stop patterns in use, compiled once for all of a gateway's requests, and paid from its budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._users: Counter[tuple[int, str]] = Counter()
        self._compiled: dict[tuple[int, str], Any] = {}

    def take(self, reader: int, pattern: str) -> Any:
        """Return a pattern compiled, for one more user. Raises what `re` raises, and MemoryError."""
        if (reader, pattern) not in self._compiled:
            self._budget.take(reader, pattern, PATTERN_BYTES)
            try:
                self._compiled[reader, pattern] = _compile(pattern)
            except BaseException:
                self._budget.give_back(reader, pattern)
                raise
        self._users[reader, pattern] += 1
        return self._compiled[reader, pattern]

    def give_back(self, reader: int, pattern: str) -> None:
        """Let one user go; without any the pattern goes, too."""
        self._users[reader, pattern] -= 1
        if not self._users[reader, pattern]:
            del self._users[reader, pattern], self._compiled[reader, pattern]
            self._budget.give_back(reader, pattern)


class PatternWatch:
    """One request's stop patterns, and the end of its text.

    The text is all that the tokens have made, sent or held back. A search after a token may find what begins
    within a match's length of the token's own text; what is before that is seen, but was searched before.
    """

    __slots__ = (
        "_came",
        "_compiled",
        "_held",
        "_least",
        "_passed",
        "_patterns",
        "_reach",
        "_reader",
        "_shelf",
        "_tail",
        "keeps_stops",
    )

    def __init__(
        self, patterns: list[str], compiled: Compiled, reader: int, keeps_stops: bool = False, least: int = 0
    ) -> None:
        self.keeps_stops = keeps_stops
        """Whether a stop string that ends this request stays in its text."""
        self._patterns: list[str] = []
        self._compiled: list[Any] = []
        self._shelf = compiled
        self._reader = reader
        longest = 0
        try:
            for pattern in patterns:
                longest = max(longest, min(int(parser.parse(pattern).getwidth()[1]), LONGEST))
                self._compiled.append(compiled.take(reader, pattern))
                self._patterns.append(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            self.close()
            raise BadRegistration(f"stop_regex {pattern!r} cannot be compiled: {error}") from error
        except MemoryError:
            self.close()
            raise
        self._reach = longest + BEHIND
        self._tail = ""
        self._held = 0  # characters at the tail's end that come again with the next text
        self._least = least
        self._came = 0  # tokens
        self._passed = -1  # where in the tail the text ends in which a match does not end the request

    def close(self) -> None:
        """Let the patterns go: this watch searches no more."""
        while self._patterns:
            self._shelf.give_back(self._reader, self._patterns.pop())

    @property
    def ends_nothing(self) -> int:
        """How many tokens, from the first one on, a match may be complete with and end nothing."""
        return max(0, self._least - 1)

    def seen(self, text: str, tokens: int, passed: int) -> None:
        """Remember text that another shard sent, of a request that so many tokens had come of.

        `passed`: the characters that those of them made which end nothing, sent or held back.
        """
        self._came = tokens
        if self.ends_nothing:
            self._passed = passed
        self._remember(text, 0)

    def search(self, text: str, ends: list[int], held: int = 0) -> Found | None:
        """Look at a row's text token by token; `ends` are the tokens' ends in it.

        The text is what the row sends and, behind that, `held` characters which it does not: they come
        again at the beginning of the next row's text.

        Returns the first token after which a pattern matches; None, and the text is remembered, when there
        is none.
        """
        sent = len(self._tail) - self._held
        whole, last = self._tail[:sent] + text, len(self._tail)
        for token, end in enumerate(ends):
            self._came += 1
            if self._came < self._least:
                self._passed = last = max(last, sent + end)
                continue
            found = self._search(whole, last, sent + end)
            if found is not None:
                return Found(token, max(0, found[0] - sent), found[1])
            last = max(last, sent + end)
        self._remember(whole, held)
        return None

    def _search(self, whole: str, last: int, upto: int) -> tuple[int, str] | None:
        """Search whole[:upto], of which the text up to `last` was searched before."""
        begin = max(0, last - self._reach)
        seen_from = max(0, begin - BEFORE)
        seen = whole[seen_from:upto]
        for pattern, compiled in zip(self._patterns, self._compiled, strict=True):
            # Not seen[begin:]: `^`, `\b` and look-behinds are to see what is before.
            for match in compiled.finditer(seen, begin - seen_from):
                if (end := seen_from + match.end()) > self._passed:
                    return end, pattern
        return None

    def _remember(self, whole: str, held: int) -> None:
        most = self._reach + BEFORE + held
        self._tail, self._held = whole[-most:], held
        self._passed -= len(whole) - len(self._tail)


class WatchedRow(NamedTuple):
    """A row of a request with patterns."""

    row: int
    route: int
    watch: PatternWatch
    text: bytes
    """What it sends, and behind that what its tokens made beside: held back, or cut off as a stop string."""
    sent: int
    """Bytes of it that are sent."""
    ends: list[int]
    """The tokens' ends in it; more text may come behind them when the request ends."""
    stop: int
    """Bytes of the stop string that the row was found to end with; it is the text's end."""

    def search(self, ending: bool) -> Found | None:
        """Search this row; `ending`: it is its request's last, and says what the decoder still held."""
        # Piece by piece, and none of them ends inside a character: a long row is not decoded for each token.
        pieces = (self.text[begin:end] for begin, end in pairwise((0, *self.ends)))
        ends = list(accumulate(len(piece.decode(errors="ignore")) for piece in pieces))
        whole = self.text.decode()
        if ending:
            ends = [*ends[:-1], len(whole)]
        found = self.watch.search(whole, ends, len(whole) - len(self.text[: self.sent].decode()))
        # The token that completes a stop string ends the text before it: a pattern has to match there.
        if found and self.stop and found.token == len(ends) - 1 and len(self.upto(found.end)) > self.begin:
            return None
        return found

    @property
    def begin(self) -> int:
        """Where the stop string begins."""
        return len(self.text) - self.stop

    def upto(self, end: int) -> bytes:
        """Return the first `end` characters of the text."""
        return self.text.decode()[:end].encode()


def _compile(pattern: str) -> Any:
    compiled = re.compile(pattern)
    if re2 is None or compiled.flags != re.UNICODE:
        return compiled
    options = re2.Options()
    options.log_errors = False
    options.max_mem = PATTERN_BYTES
    try:
        return re2.compile(_for_re2(parser.parse(pattern)), options)
    except (_NotInRe2, re2.error):
        return compiled


class _NotInRe2(Exception):
    """This pattern means something else in re2, or nothing."""


def _for_re2(parsed: Any) -> str:
    """Write a parsed pattern for re2, which reads some of Python's sources otherwise (`{,3}`, `[[:a:]]`).

    What means the same there: literals, sets of literals, choices, repeats, groups. Not so: \\d, \\w, \\s,
    \\b (ASCII there), $ (before a last newline, here), anchors, look-around, references, and repeats of what
    can be empty (where the two go on looking in different ways).
    """
    return "".join(_part_for_re2(code, value) for code, value in parsed)


def _part_for_re2(code: Any, value: Any) -> str:
    match code:
        case op.LITERAL:
            return _character(value)
        case op.NOT_LITERAL:
            return f"[^{_character(value)}]"
        case op.ANY:
            return r"[^\n]"
        case op.IN:
            return f"[{''.join(_in_set(kind, item) for kind, item in value)}]"
        case op.BRANCH:
            return f"(?:{'|'.join(_for_re2(branch) for branch in value[1])})"
        case op.SUBPATTERN if not value[1] and not value[2]:
            return f"(?:{_for_re2(value[3])})"
        case op.MAX_REPEAT | op.MIN_REPEAT:
            low, high, inner = value
            return _repeat(low, high, inner, lazy=code is op.MIN_REPEAT)
    raise _NotInRe2


def _repeat(low: int, high: Any, inner: Any, lazy: bool) -> str:
    if not inner.getwidth()[0] or low > MAX_REPEAT or (high != op.MAXREPEAT and high > MAX_REPEAT):
        raise _NotInRe2
    most = "" if high == op.MAXREPEAT else high
    return f"(?:{_for_re2(inner)}){{{low},{most}}}{'?' if lazy else ''}"


def _in_set(kind: Any, item: Any) -> str:
    match kind:
        case op.NEGATE:
            return "^"
        case op.LITERAL:
            return _character(item)
        case op.RANGE:
            return f"{_character(item[0])}-{_character(item[1])}"
    raise _NotInRe2


def _character(code: int) -> str:
    return f"\\x{{{code:X}}}"
