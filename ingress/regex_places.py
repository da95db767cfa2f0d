"""A parsed pattern as a graph of positions: what the backtracking engine can be doing, and after what.

A *position* consumes one character of a class: it is "the last thing consumed". `preds` says after which
positions it can come, on how many ways that consume nothing (`ways`), and under which guard. Node 0 is the
start of a search: it comes after any character, as a search starts everywhere. A *hub* consumes nothing and
joins ways. A repeat of one class is one position that loops; other repeats loop through a hub, or are
written out when they are small.

A guard is what anchors, `\\b` and one-character look-arounds ask of the characters before and after a place:
a tuple of (before, after) masks, any one of which must hold. None asks nothing.

What is spent at a place without consuming anything is added to `spent` of the position it was reached from,
in nanoseconds (see `regex_units`).

Must not know how much text there will be.
"""

from dataclasses import dataclass, field
from re import _constants as sre  # type: ignore[attr-defined]
from typing import Any

from .regex_classes import Alphabet, Class, Mask
from .regex_tree import Guard, Unit, both_of, is_slow
from .regex_units import (
    ANCHOR_NS,
    CATEGORY_NS,
    CLASS_ITEM_NS,
    CLASS_NS,
    FOLDED_NS,
    FOLDED_WIDE_NS,
    LITERAL_NS,
    SCAN_ANY_NS,
    SCAN_CATEGORY_NS,
    SCAN_CLASS_NS,
    SCAN_LITERAL_NS,
)

MAX_NODES = 300
MAX_WORK = 1500
MAX_WIDE = 6
"""More ways into a place than this are joined in a hub."""
MAX_WAYS = 1e9
WRITTEN_OUT = 48
"""A repeat is written out when that takes at most so many positions."""

Edge = tuple[int, float, Guard, bool]
"""(from, ways, guard, sure): `sure` when nothing here can make the match fail."""
Front = list[Edge]


class TooComplex(Exception):
    """The graph, or the work to make it, is larger than the analysis allows itself."""


class Explosive(Exception):
    """The pattern can take exponentially many ways through the same text; says where that was seen."""


@dataclass(slots=True)
class Graph:
    """See the module. All lists are by node."""

    alphabet: Alphabet
    high: list[Mask] = field(default_factory=list)
    """The class of a position; 0 for a hub."""
    preds: list[Front] = field(default_factory=list)
    least: list[int] = field(default_factory=list)
    """How often a position's class is repeated at least…"""
    most: list[int] = field(default_factory=list)
    """…and at most: 1, a bound, or UNLIMITED."""
    scan: list[float] = field(default_factory=list)
    """Nanoseconds for consuming one character here."""
    spent: list[float] = field(default_factory=list)
    spent_after: dict[tuple[int, Mask], float] = field(default_factory=dict)
    """The same, but only where the last character was one of a mask."""
    runs: dict[int, list[Mask]] = field(default_factory=dict)
    """The classes of a node that stands for several characters in a row; `high` is the last of them."""
    halves: dict[int, int] = field(default_factory=dict)
    """The optional part of a counted repeat of one class → its required part."""
    run_costs: dict[int, list[float]] = field(default_factory=dict)
    """What testing each of them but the first costs, spent where the one before it was read."""
    width: dict[int, int] = field(default_factory=dict)
    """How many characters, at least, are read between two visits of a loop's hub."""
    final: Front = field(default_factory=list)
    """After what the match is complete."""
    cyclic: bool = False
    """There are loops through hubs."""
    notes: set[str] = field(default_factory=set)
    """What was bounded instead of modelled."""


UNLIMITED = 1 << 62
ANYWHERE = -1
"""`high` of a hub that may come after any character (the body of a look-behind)."""


class Places:
    """The nodes of a graph in the making, and the fronts from which the next ones are reached."""

    def __init__(self, alphabet: Alphabet, group_widths: list[tuple[int, int] | None]) -> None:
        self.graph = Graph(alphabet)
        self._alphabet = alphabet
        self._widths = group_widths
        self._groups: dict[int, tuple[Any, int]] = {}
        self._work = 0
        self._classes: dict[Any, tuple[Class, float, float]] = {}
        self._tail: tuple[int, ...] = ()
        """The positions of a repeat of one class, when what comes next follows it directly."""
        self._marks = 0
        self._floor = 1
        self._in_loop = 0
        self._new(alphabet.all | alphabet.edge, [], 1, 1, 0.0)

    def _charge(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise TooComplex("it takes too much work to analyse")

    def _new(self, high: Mask, preds: Front, least: int, most: int, scan: float) -> int:
        graph = self.graph
        if len(graph.high) >= MAX_NODES:
            raise TooComplex(f"it has more than {MAX_NODES} places to be in")
        graph.high.append(high)
        graph.preds.append(preds)
        graph.least.append(least)
        graph.most.append(most)
        graph.scan.append(scan)
        graph.spent.append(0.0)
        return len(graph.high) - 1

    def _spend(self, front: Front, nanoseconds: float) -> None:
        spent = self.graph.spent
        self._charge(len(front))
        for source, ways, guard, _ in front:
            if guard is None:
                spent[source] += ways * nanoseconds
                continue
            before = 0
            for mask, _ in guard:
                before |= mask
            key = (source, before)
            self.graph.spent_after[key] = self.graph.spent_after.get(key, 0.0) + ways * nanoseconds

    def _merged(self, front: Front) -> Front:
        """Add up the ways that are the same, and join what is still too many."""
        self._charge(len(front))
        if len(front) < 2:
            return front
        ways_of: dict[tuple[int, Guard, bool], float] = {}
        for source, ways, guard, sure in front:
            key = (source, guard, sure)
            ways_of[key] = ways_of.get(key, 0.0) + ways
        merged = [(source, ways, guard, sure) for (source, guard, sure), ways in ways_of.items()]
        if any(edge[1] > MAX_WAYS for edge in merged):
            raise Explosive("there are over 10^9 ways to match nothing")
        return self._joined(merged, [])

    def _joined(self, front: Front, more: Front) -> Front:
        """Put two fronts that share nothing together, and join in a hub what is too many."""
        front = front + more
        if len(front) <= MAX_WIDE:
            return front
        floor = self._floor
        inside = [edge for edge in front if edge[0] >= floor]
        if len(inside) <= MAX_WIDE:
            return front
        hub = self._new(0, inside, 1, 1, 0.0)
        return [*[edge for edge in front if edge[0] < floor], (hub, 1.0, None, True)]

    def _guarded(self, front: Front, guard: Guard) -> Front:
        self._spend(front, ANCHOR_NS)
        result = []
        for source, ways, before, _ in front:
            both = both_of(before, guard)
            if both != ():
                result.append((source, ways, both, False))
        return result

    def _class(self, unit: Unit, flags: int) -> tuple[Class, float, float]:
        """Return a unit's class, the cost of testing it once, and of consuming one of a run."""
        op, av = unit
        # A set's items stay where they are for as long as the parsed pattern does.
        key = (op, id(av) if op is sre.IN else av, flags)
        known = self._classes.get(key)
        if known is None:
            known = self._classes[key] = self._new_class(op, av, flags)
        return known

    def _new_class(self, op: Any, av: Any, flags: int) -> tuple[Class, float, float]:
        alphabet = self._alphabet
        if op is sre.ANY:
            low = alphabet.all if flags & sre.SRE_FLAG_DOTALL else alphabet.all & ~alphabet.newline
            return (low, low), LITERAL_NS, SCAN_ANY_NS
        if op is sre.IN:
            slow = sum(is_slow(part, arg) for part, arg in av)
            test, scan = (CATEGORY_NS, SCAN_CATEGORY_NS) if slow else (CLASS_NS, SCAN_CLASS_NS)
            if slow > 1:
                test, scan = test + CLASS_ITEM_NS * slow, scan + CLASS_ITEM_NS * slow
            found = alphabet.charset(av, flags)
            if flags & sre.SRE_FLAG_IGNORECASE and not all(item[0] is sre.CATEGORY for item in av):
                more = FOLDED_WIDE_NS if found[1] & alphabet.beyond else FOLDED_NS
                test, scan = test + more, scan + more
            return found, test, scan
        found = alphabet.literal(av, flags)
        if op is sre.NOT_LITERAL:
            found = (alphabet.all & ~found[1], alphabet.all & ~found[0])
        if flags & sre.SRE_FLAG_IGNORECASE:
            return found, FOLDED_NS, FOLDED_NS
        return found, LITERAL_NS, SCAN_LITERAL_NS


def doubted(front: Front) -> Front:
    """Say that the match may fail here."""
    return [(source, ways, guard, False) for source, ways, guard, _ in front]
