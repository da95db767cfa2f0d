"""Admission of stop_regex: may a scheduler search this pattern in an output of this length?

A scheduler searches the decoded tail with CPython's `re` at every step, with the GIL held, so a pattern
that backtracks stops the whole server. `admit` analyses a pattern once (`regex_graph`, `regex_cost`);
`Admission.refusal` weighs what was found against the longest text it will be searched in.
"""

import re
import threading
import warnings
from dataclasses import dataclass
from re import _compiler, _parser  # type: ignore[attr-defined]
from re import _constants as sre  # type: ignore[attr-defined]
from typing import Any

from .admission_cache import Cache
from .errors import BadRequest, show
from .regex_classes import Alphabet
from .regex_cost import cost_of
from .regex_graph import Builder
from .regex_places import Explosive, TooComplex
from .regex_poly import Cost
from .regex_tree import inner_pieces
from .regex_worst import Worst, worst_of

UNBOUNDED = 1 << 30
"""A length without an upper bound: search everything so far."""
LIMIT_MS = 4.75
"""What the bound on one search may be. A search may take 5 ms: the rest is for what the prices have wrong."""
SHORTEST_TEXT = 256
"""A pattern is weighed for at least so many characters, however short the output: what is only harmless
because nothing is there to be searched is not harmless."""
LONGEST_LINEAR_TEXT = 32_000
"""A linear pattern is weighed for at most so many characters: beyond, it costs what any search does."""
MAX_ENUMERATED = 100_000
"""The engine's compiler walks through every character of a class's ranges: at most so many per pattern."""

CACHED = 512
"""Patterns that are kept with what is known of them."""
MAX_EFFORT = 20_000
"""What the analysis of all patterns of a request may take, in about microseconds of a quiet machine. The
pattern that comes to it is still analysed, so a request takes that of one pattern more."""
PARSE_US, COMPILE_US = 120, 3
"""What the engine's own parser and compiler take, per pattern and per character."""
SPAN_US, SPAN_FOLDED_US = 0.03, 0.08
"""What the compiler takes for each character that it walks through, and where case is ignored."""
MAP_SPAN = 2500
"""It takes as long to make the map of a class with characters beyond U+00FF as to walk through so many."""


class Effort:
    """What may still be spent on the patterns of one request, so that it cannot hold up the others."""

    __slots__ = ("left",)

    def __init__(self, microseconds: int = MAX_EFFORT) -> None:
        self.left = microseconds


@dataclass(frozen=True, slots=True)
class Admission:
    """What is known of one pattern that compiles. It does not depend on any request.

    `max_len` bounds a match's length in characters; `window` is how much of the end of a text must be
    searched to find what a search of the whole would find (look-arounds and anchors look further than the
    match). `cost` is None when no text is short enough, and `why` says for what reason.
    """

    pattern: str
    max_len: int
    window: int
    cost: Cost | None
    why: str
    longest: int
    """A text of so many characters may be searched (see `_longest`); -1 for none at all."""
    work: int
    """What the analysis took, in about microseconds."""

    def refusal(self, characters: int) -> str | None:
        """Return why a search in a text of `characters` may take too long, or None."""
        if characters <= self.longest:
            return None
        if self.cost is None:
            return f"{show(self.pattern)} may take a search longer than any server can wait: {self.why}"
        characters = _weighed(self.cost, characters)
        took = self.cost.milliseconds(characters)
        power = (
            ""
            if self.cost.degree < 2
            else f"; its cost grows with the length to the power of {self.cost.degree}"
        )
        why = f" ({self.why})" if self.why else ""
        shorter = (
            f", or lower max_new_tokens: it is admitted for up to {self.longest} characters"
            if self.longest >= 0
            else ""
        )
        return (
            f"{show(self.pattern)} may take {took:.3g} ms to search in the {characters} characters this "
            f"request's output can have, at most {LIMIT_MS:g} ms are allowed{power}{why}; shorten its "
            f"repeats or begin it with a literal{shorter}"
        )


def _weighed(cost: Cost, characters: int) -> int:
    """Return for how many characters a cost is taken, when a text may have so many."""
    characters = max(characters, SHORTEST_TEXT)
    return min(characters, LONGEST_LINEAR_TEXT) if cost.degree < 2 else characters


def _longest(cost: Cost | None) -> int:
    """Return the longest text that may be searched at a cost: the cost grows with the length."""
    if cost is None or cost.milliseconds(_weighed(cost, 0)) > LIMIT_MS:
        return -1
    if cost.milliseconds(_weighed(cost, UNBOUNDED)) <= LIMIT_MS:
        return UNBOUNDED
    low, high = 0, UNBOUNDED
    while high - low > 1:
        middle = (low + high) // 2
        if cost.milliseconds(_weighed(cost, middle)) <= LIMIT_MS:
            low = middle
        else:
            high = middle
    return low


def analyse(pattern: str) -> Admission:
    """Analyse one pattern, without the cache. Raises ValueError with the reason when it cannot compile."""
    parsed = _parse(pattern)
    flags = parsed.state.flags
    codes, folds, spanned = codes_of(pattern, parsed, flags)
    work = PARSE_US + COMPILE_US * len(pattern)
    if pattern.count("(?") != pattern.count("(?:"):
        # The compiler refuses look-behinds without a fixed width and little else, nothing of it spelled
        # plainly; whatever is not plain is compiled, to be sure.
        work += int((SPAN_FOLDED_US if folds else SPAN_US) * spanned)
        try:
            _compiler.compile(parsed)
        except (re.error, OverflowError, RecursionError, ValueError, RuntimeError) as error:
            raise ValueError(str(error)) from None
    widest = parsed.getwidth()[1]
    max_len = UNBOUNDED if widest >= UNBOUNDED else widest
    before, after = _context(parsed, flags)
    window = min(UNBOUNDED, max(1, max_len + before + after))
    builder = Builder(Alphabet(codes, folds=folds))
    why, cost = "", None
    try:
        graph = builder.build(parsed, flags)
        try:
            cost = cost_of(graph)
        except (Explosive, TooComplex) as error:
            why = str(error)
        if _longest(cost) < UNBOUNDED:
            better = _better(cost, worst_of(graph, LIMIT_MS * 1e6, LONGEST_LINEAR_TEXT))
            if better is not cost:
                cost, why = better, ""
    except (Explosive, TooComplex) as error:
        why = str(error)
    except RecursionError:
        why = "its groups are nested too deeply"
    if builder.graph.notes:
        why = "; ".join(filter(None, [why, *sorted(builder.graph.notes)]))
    work += builder.graph.work
    return Admission(pattern, max_len, window, cost, why, _longest(cost), work)


def _better(cost: Cost | None, worst: Worst | None) -> Cost | None:
    """Return the cost that lets the longer text be searched."""
    if worst is None or (cost is not None and _longest(cost) >= _longest(worst.cost)):
        return cost
    return worst.cost


_WARNING_SIGNS = ("[[", "[^[", "--", "&&", "~~", "||", "(?(")
_warnings_lock = threading.Lock()


def _parse(pattern: str) -> Any:
    try:
        if any(sign in pattern for sign in _WARNING_SIGNS):
            # The parser warns of some spellings; a client must not be able to write to the server's log.
            with _warnings_lock, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _parser.parse(pattern)
        return _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise ValueError(str(error)) from None


def codes_of(pattern: str, parsed: Any, flags: int) -> tuple[set[int], bool, int]:
    """Return the non-ASCII code points a pattern names, whether it ignores case anywhere, and through how
    many characters the engine's compiler walks for its classes, or as long as it takes.

    Raises ValueError when the engine's compiler would walk through too many.
    """
    folds = bool(flags & sre.SRE_FLAG_IGNORECASE) or ("(?" in pattern and "i" in pattern)
    if pattern.isascii() and "\\" not in pattern:
        return set(), folds, 0
    codes: set[int] = set()
    enumerated = maps = 0
    waiting = [parsed]
    while waiting:
        for op, av in waiting.pop():
            if op is sre.LITERAL or op is sre.NOT_LITERAL:
                if av > 127:
                    codes.add(av)
            elif op is sre.RANGE:
                codes.update(code for code in av if code > 127)
                enumerated += min(av[1], 0xFFFF) - av[0] + 1 if av[0] <= 0xFFFF else 0
            elif op is sre.IN:
                waiting.append(av)
                maps += any(
                    (kind is sre.LITERAL and it > 255) or (kind is sre.RANGE and it[1] > 255)
                    for kind, it in av
                )
            else:
                waiting += inner_pieces(op, av)
    if enumerated > MAX_ENUMERATED:
        raise ValueError(
            f"its classes span {enumerated} characters, which take the engine too long to compile; "
            f"at most {MAX_ENUMERATED} (a complement like [^a-z] spans few)"
        )
    return codes, folds, enumerated + MAP_SPAN * maps


def _context(parsed: Any, flags: int) -> tuple[int, int]:
    """Return how many characters before and after a match the engine may have to see."""
    before = after = 0
    for op, av in parsed:
        inner: list[Any] = []
        if op is sre.AT:
            multiline = flags & sre.SRE_FLAG_MULTILINE
            if av is sre.AT_BEGINNING_STRING or (av is sre.AT_BEGINNING and not multiline):
                before = UNBOUNDED
            else:
                before, after = max(before, 1), max(after, 1)
        elif op is sre.ASSERT or op is sre.ASSERT_NOT:
            more_before, more_after = _context(av[1], flags)
            width = av[1].getwidth()[1]
            before = max(before, more_before + (width if av[0] < 0 else 0))
            after = max(after, more_after + (width if av[0] > 0 else 0))
        elif op is sre.SUBPATTERN:
            flags_inside = (flags | av[1]) & ~av[2]
            more_before, more_after = _context(av[3], flags_inside)
            before, after = max(before, more_before), max(after, more_after)
        else:
            inner = inner_pieces(op, av)
        for one in inner:
            more_before, more_after = _context(one, flags)
            before, after = max(before, more_before), max(after, more_after)
    return before, after


CACHE: Cache[Admission] = Cache(CACHED)


def admit(pattern: str, field: str, effort: Effort) -> Admission:
    """Return what is known of a pattern; BadRequest if the engine cannot compile it or no text is short
    enough.

    What is not admitted for any text is not kept: it would push out what is in use.
    """
    known = CACHE.get(pattern)
    if known is not None:
        return known
    if effort.left <= 0:
        raise BadRequest(
            field,
            "the stop patterns of this request take too much to analyse together; send fewer or simpler ones",
        )
    try:
        found = analyse(pattern)
    except ValueError as error:
        raise BadRequest(field, f"does not compile in Python's re: {error}; got {show(pattern)}") from None
    effort.left -= found.work
    if found.longest < 0:
        raise BadRequest(field, found.refusal(0) or "is refused")
    CACHE.put(pattern, found)
    return found
