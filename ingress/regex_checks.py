"""What it costs the engine to ask whether a character is of a class, by class and by character.

The engine compiles a class to a row of steps that are tried in turn: a range, a bit map, a category. So the
cost depends on the character: `\\w` takes a letter for the price of one look into Unicode's tables and a `!`
for that of four. docs/ingress.md has the method by which the units were measured.

Must not know of graphs.
"""

from _sre import unicode_tolower  # type: ignore[import-not-found]
from re import _constants as sre  # type: ignore[attr-defined]
from re._casefix import _EXTRA_CASES  # type: ignore[import-not-found]
from typing import Any

from .regex_classes import LAST_MAPPED, Alphabet, Class, Mask
from .regex_units import (
    BIG_MAP_NS,
    CATEGORY_ASCII_NS,
    DIGIT_NS,
    FAILURE_NS,
    FOLD_NS,
    MAP_NS,
    NEGATE_NS,
    OP_NS,
    RANGE_NS,
    SCAN_ANY_NS,
    SCAN_FOLDED_NS,
    SCAN_FOLDED_SET_NS,
    SCAN_LITERAL_NS,
    SPACE_FAR_NS,
    SPACE_NS,
    WORD_DIGIT_NS,
    WORD_LETTER_NS,
    WORD_OTHER_NS,
)

Piece = tuple[Mask, float]
_SPANS = (sre.LITERAL, sre.RANGE)


class Check:
    """A class with the cost of asking for it. `low` and `high` are as in `regex_classes`.

    `pieces` are disjoint masks, together all characters, each with the nanoseconds of one look at such a
    character while the engine counts a run; a look that is a step of its own takes OP_NS more.
    """

    __slots__ = ("high", "low", "pieces", "scan", "step", "tells", "test")

    def __init__(self, of: Class, pieces: list[Piece], step: float | None = None) -> None:
        self.low, self.high = of
        self.pieces = pieces
        self.tells = step is not None
        """Its prices tell apart other characters than its class does."""
        self.step = step = OP_NS if step is None else step
        """What a look costs besides when it is a step of its own."""
        self.test = step + (pieces[0][1] if len(pieces) == 1 else max([ns for _, ns in pieces]))
        """The most that one look can cost, as a step of its own."""
        high = self.high
        self.scan = max([ns for mask, ns in pieces if mask & high]) if high else 0.0
        """The most that a look at a character of the class can cost, in a run."""


def check_of(op: Any, av: Any, flags: int, alphabet: Alphabet) -> Check:
    """Return the class of a parsed item that consumes one character."""
    every = alphabet.all
    if op is sre.ANY:
        low = every if flags & sre.SRE_FLAG_DOTALL else every & ~alphabet.newline
        return Check((low, low), [(every, SCAN_ANY_NS)])
    if op is sre.IN:
        return Check(alphabet.charset(av, flags), _pieces(av, flags, alphabet))
    low, high = alphabet.literal(av, flags)
    if op is sre.NOT_LITERAL:
        low, high = every & ~high, every & ~low
    return Check((low, high), [(every, _literal_cost(av, flags))])


def _literal_cost(code: int, flags: int) -> float:
    """Return what comparing with a literal costs."""
    if not folds_case(code, flags):
        return SCAN_LITERAL_NS
    # A letter with more than two forms (`s` and `\u017f`) is compiled to a set of them.
    others = unicode_tolower(code) in _EXTRA_CASES and not flags & sre.SRE_FLAG_ASCII
    return SCAN_FOLDED_SET_NS if others else SCAN_FOLDED_NS


def folds_case(code: int, flags: int) -> bool:
    """Say whether a literal is compared without its case: the engine has short cuts only for others."""
    return bool(flags & sre.SRE_FLAG_IGNORECASE) and chr(code).lower() != chr(code).upper()


def _pieces(items: Any, flags: int, alphabet: Alphabet) -> list[Piece]:
    """Follow the steps a class is compiled to."""
    folds = bool(flags & sre.SRE_FLAG_IGNORECASE) and any(op in (sre.LITERAL, sre.RANGE) for op, _ in items)
    open_pieces: list[Piece] = [(alphabet.all, FOLD_NS if folds else 0.0)]
    done: list[Piece] = []
    for op, av in _steps(items, folds):
        if op is sre.NEGATE:
            open_pieces = [(mask, ns + NEGATE_NS) for mask, ns in open_pieces]
            continue
        hit, costs = _step(op, av, flags, alphabet)
        still: list[Piece] = []
        for mask, ns in open_pieces:
            for part, cost in costs:
                common = mask & part
                if common & hit:
                    done.append((common & hit, ns + cost))
                if common & ~hit:
                    still.append((common & ~hit, ns + cost))
        open_pieces = still
    return done + [(mask, ns + FAILURE_NS) for mask, ns in open_pieces]


def _steps(items: Any, folds: bool) -> list[tuple[Any, Any]]:
    """Return the steps in the order in which the engine tries them."""
    named = [(av, av) if op is sre.LITERAL else av for op, av in items if op in _SPANS]
    if not named:
        return list(items)
    spans = sorted((low, min(high, LAST_MAPPED)) for low, high in named if low <= LAST_MAPPED)
    runs: list[list[int]] = []
    for low, high in spans:
        if runs and low <= runs[-1][1] + 1:
            runs[-1][1] = max(runs[-1][1], high)
        else:
            runs.append([low, high])
    first = [(op, av) for op, av in items if op is sre.NEGATE]
    rest = [item for item in items if item[0] is not sre.NEGATE and (item[0] not in _SPANS or _is_far(*item))]
    if folds:
        # Which runs or map the folded characters make is not followed: two steps are the most.
        mapped = [("map", spans), (sre.RANGE, (0, -1))] if spans else []
        return [*first, *mapped, *_joined(rest)]
    if len(runs) > 2:
        return [*first, ("map", spans), *_joined(rest)]
    if len(first) + len(runs) + len(rest) < len(items):
        return [*first, *((sre.RANGE, (low, high)) for low, high in runs), *_joined(rest)]
    return _joined(items)


def _is_far(op: Any, av: Any) -> bool:
    """Say whether an item names characters beyond the engine's maps: each such item is a step of its own."""
    return op in _SPANS and (av if op is sre.LITERAL else av[1]) > LAST_MAPPED


def _joined(items: Any) -> list[tuple[Any, Any]]:
    """Join far items in a row to one step, which costs what all of them do."""
    steps: list[tuple[Any, Any]] = []
    for op, av in items:
        if not _is_far(op, av):
            steps.append((op, av))
        elif steps and steps[-1][0] == "far":
            steps[-1][1].append((op, av))
        else:
            steps.append(("far", [(op, av)]))
    return steps


def _step(op: Any, av: Any, flags: int, alphabet: Alphabet) -> tuple[Mask, list[Piece]]:
    """Return which characters a step takes, and what it costs for which."""
    every = alphabet.all
    if op == "map":
        hit = 0
        for low, high in av:
            # What only may be hit is taken to go on to the next steps.
            hit |= alphabet.charset([(sre.RANGE, (low, high))], flags)[0]
        return hit, [(every, MAP_NS if av[-1][1] < 256 else BIG_MAP_NS)]
    if op == "far":
        ranges = sum(one is sre.RANGE for one, _ in av) if flags & sre.SRE_FLAG_IGNORECASE else 0
        # A range is looked for in both cases.
        return alphabet.charset(av, flags)[0], [(every, len(av) * RANGE_NS + ranges * FOLD_NS)]
    if op is sre.LITERAL:
        return alphabet.span(av, av), [(every, RANGE_NS)]
    if op is sre.RANGE:
        return alphabet.span(*av), [(every, RANGE_NS)]
    name = str(av)[len("CATEGORY_") :]
    wanted = name.removeprefix("NOT_")
    ascii_only = bool(flags & sre.SRE_FLAG_ASCII)
    hit = alphabet.category(wanted, ascii_only)
    if wanted != name:
        hit = every & ~hit
    if ascii_only:
        return hit, [(every, CATEGORY_ASCII_NS)]
    if wanted == "DIGIT":
        return hit, [(every, DIGIT_NS)]
    if wanted == "SPACE":
        return hit, [(every & alphabet.ascii, SPACE_NS), (every & ~alphabet.ascii, SPACE_FAR_NS)]
    letters, digits = alphabet.letters, alphabet.category("DIGIT", False)
    return hit, [
        (letters, WORD_LETTER_NS),
        (digits, WORD_DIGIT_NS),
        (every & ~letters & ~digits, WORD_OTHER_NS),
    ]


def word_costs(alphabet: Alphabet, flags: int) -> list[Piece]:
    """Return what it costs to ask whether a character is a word character: what `\\b` does on both sides."""
    return _step(sre.CATEGORY, sre.CATEGORY_WORD, flags, alphabet)[1]


def derived(every: Mask, hits: Mask, on_hit: float, on_miss: float) -> Check:
    """Return a row of costs alone: `on_hit` for the characters of a mask and `on_miss` for the others."""
    pieces = [(hits & every, on_hit), (every & ~hits, on_miss)]
    return Check((every, every), [piece for piece in pieces if piece[0]], 0.0)
