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

from .regex_checks import Check, check_of
from .regex_classes import Alphabet, Class, Mask
from .regex_tree import Guard, Unit, both_of
from .regex_units import ANCHOR_NS

MAX_NODES = 300
MAX_WORK = 1500
MAX_WIDE = 6
"""More ways into a place than this are joined in a hub."""
MAX_WAYS = 1e9
WRITTEN_OUT = 160
"""A repeat is written out when that takes at most so many positions…"""
MAX_ROUNDS = 32
"""…and it has at most so many rounds."""

ASKS_NOTHING, EXACT = 1, 2
PLAIN = ASKS_NOTHING | EXACT
Edge = tuple[int, float, Guard, int]
"""(from, ways, guard, trust). Of trust, `ASKS_NOTHING`: nothing here can make the match fail; `EXACT`: the
engine surely comes to try what follows, whenever the guard holds (not so after an atomic group, say)."""
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
    """The class of a position, characters that may be in it; 0 for a hub."""
    low: list[Mask] = field(default_factory=list)
    """Those that surely are."""
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
    low_runs: dict[int, list[Mask]] = field(default_factory=dict)
    halves: dict[int, int] = field(default_factory=dict)
    """The optional part of a counted repeat of one class → its required part."""
    run_tests: dict[int, list[Check]] = field(default_factory=dict)
    """What is asked for each of them but the first, where the one before it was read."""
    asked: list[tuple[int, float, Guard, Check, float]] = field(default_factory=list)
    """(position, ways, guard, test, most): the part of what is spent that depends on the next character. As
    `most` it is in `spent`, if there is a guard in `spent_after`."""
    guarded: list[tuple[int, float, Guard]] = field(default_factory=list)
    """(position, nanoseconds, guard): what else is in `spent_after`, and when exactly it is spent."""
    scanned: dict[int, tuple[Check, float]] = field(default_factory=dict)
    """What a repeat of one class asks of each character, and what it costs besides; the most is in `scan`."""
    width: dict[int, int] = field(default_factory=dict)
    """How many characters, at least, are read between two visits of a loop's hub."""
    final: Front = field(default_factory=list)
    """After what the match is complete."""
    cyclic: bool = False
    """There are loops through hubs."""
    notes: set[str] = field(default_factory=set)
    """What was bounded instead of modelled."""
    work: int = 0
    """What the analysis has taken so far, in about microseconds."""


UNLIMITED = 1 << 62
NOTHING: Class = (0, 0)
ANYWHERE = -1
"""`high` of a hub that may come after any character (the body of a look-behind)."""


class Places:
    """The nodes of a graph in the making, and the fronts from which the next ones are reached."""

    def __init__(self, alphabet: Alphabet) -> None:
        self.graph = Graph(alphabet)
        self._alphabet = alphabet
        self._groups: dict[int, tuple[Any, int]] = {}
        self._classes: dict[Any, Check] = {}
        self._tail: dict[int, float] = {}
        """The positions of a repeat of one class, when what comes next follows it directly, with what leaving
        it there was taken to cost."""
        self._marks = 0
        """The highest number of a group that may be set by now."""
        self._in_repeat = 0
        """How many repeats of groups the place is in, rounds written out included."""
        self._kept = 0
        """Bytes that the engine keeps of one round of the outermost loop, so far."""
        self._copies = 0.0
        """Not 0: what stands here is a group's text again, which costs so much for each character and asks
        nothing of the place it stands at."""
        self._floor = 1
        self._in_loop = 0
        self._new((alphabet.all | alphabet.edge,) * 2, [], 1, 1, 0.0)

    def _charge(self, work: int) -> None:
        self.graph.work += work
        if self.graph.work > MAX_WORK:
            raise TooComplex("it takes too much work to analyse")

    def _new(self, of: Class, preds: Front, least: int, most: int, scan: float) -> int:
        graph = self.graph
        if len(graph.high) >= MAX_NODES:
            raise TooComplex(f"it has more than {MAX_NODES} places to be in")
        graph.low.append(of[0])
        graph.high.append(of[1])
        graph.preds.append(preds)
        graph.least.append(least)
        graph.most.append(most)
        graph.scan.append(scan)
        graph.spent.append(0.0)
        return len(graph.high) - 1

    def _spend(self, front: Front, nanoseconds: float) -> None:
        spent = self.graph.spent
        self._charge(len(front))
        if self._copies:
            return
        for source, ways, guard, _ in front:
            if guard is None:
                spent[source] += ways * nanoseconds
                continue
            before = 0
            for mask, _ in guard:
                before |= mask
            self.graph.guarded.append((source, ways * nanoseconds, guard))
            key = (source, before)
            self.graph.spent_after[key] = self.graph.spent_after.get(key, 0.0) + ways * nanoseconds

    def _ask(self, front: Front, test: Check, most: float = -1.0) -> None:
        """Spend what it costs to look at the next character, or `most` where each place is taken alone."""
        if self._copies:
            return
        most = test.test if most < 0.0 else most
        guarded = len(self.graph.guarded)
        self._spend(front, most)
        del self.graph.guarded[guarded:]
        self.graph.asked += [(source, ways, guard, test, most) for source, ways, guard, _ in front]

    def _merged(self, front: Front) -> Front:
        """Add up the ways that are the same, and join what is still too many."""
        self._charge(len(front))
        if len(front) < 2:
            return front
        ways_of: dict[tuple[int, Guard, int], float] = {}
        for source, ways, guard, trust in front:
            key = (source, guard, trust)
            ways_of[key] = ways_of.get(key, 0.0) + ways
        merged = [(source, ways, guard, trust) for (source, guard, trust), ways in ways_of.items()]
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
        hub = self._new(NOTHING, inside, 1, 1, 0.0)
        return [*[edge for edge in front if edge[0] < floor], (hub, 1.0, None, PLAIN)]

    def _guarded(self, front: Front, guard: Guard, trust: int = EXACT) -> Front:
        self._spend(front, ANCHOR_NS)
        result = []
        for source, ways, before, own in front:
            both = both_of(before, guard)
            if both != ():
                result.append((source, ways, both, own & trust if both is not before else 0))
        return result

    def _other_than(self, mask: Mask) -> Mask:
        """Return what else can be beside a place: any other character, or nothing."""
        return self._alphabet.anything & ~mask

    def _anchor(self, code: Any, flags: int) -> Guard:
        alphabet = self._alphabet
        edge, line = alphabet.edge, alphabet.newline
        anything = alphabet.anything
        multiline = flags & sre.SRE_FLAG_MULTILINE
        if code is sre.AT_BEGINNING:
            return (((edge | line) if multiline else edge, anything),)
        if code is sre.AT_BEGINNING_STRING:
            return ((edge, anything),)
        if code is sre.AT_END:
            return ((anything, edge | line | (alphabet.goes_on if multiline else 0)),)
        if code is sre.AT_END_STRING:
            return ((anything, edge),)
        word = alphabet.category("WORD", bool(flags & sre.SRE_FLAG_ASCII))
        other = anything & ~word
        if code is sre.AT_BOUNDARY:
            return ((word, other), (other, word))
        if code is sre.AT_NON_BOUNDARY:
            return ((word, word), (other, other))
        raise TooComplex(f"the anchor {code} is not modelled")

    def _class(self, unit: Unit, flags: int) -> Check:
        """Return a unit's class."""
        op, av = unit
        # A set's items stay where they are for as long as the parsed pattern does.
        key = (op, id(av) if op is sre.IN else av, flags)
        known = self._classes.get(key)
        if known is None:
            known = self._classes[key] = check_of(op, av, flags, self._alphabet)
        return known


def doubted(front: Front, trust: int = 0) -> Front:
    """Say that the match may fail here, or keep no more than this trust."""
    return [(source, ways, guard, own & trust) for source, ways, guard, own in front]


def times_each(front: Front, ways: float) -> Front:
    """Return a front that is come to on so many times as many ways."""
    return [(source, own * ways, guard, trust) for source, own, guard, trust in front]


def where(front: Front, guard: Guard, trust: int = 0) -> Front:
    """Return a front where a guard holds too."""
    met = [(source, ways, both_of(before, guard), own & trust) for source, ways, before, own in front]
    return [edge for edge in met if edge[2] != ()]


def completing(graph: Graph) -> set[int]:
    """Return the nodes that complete a match when they are left: it is found, whatever comes."""
    found: set[int] = set()
    waiting = [edge[0] for edge in graph.final if edge[3] & ASKS_NOTHING]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            if node and graph.high[node] == 0:
                waiting += [edge[0] for edge in graph.preds[node] if edge[3] & ASKS_NOTHING]
    return found
