"""A parsed pattern as a graph of positions: what the backtracking engine can be doing, and after what.

A *position* consumes one character of a class: it is "the last thing consumed". `preds` says after which
positions it can come, on how many ways that consume nothing (`ways`), and under which guard. Node 0 is the
start of a search: it comes after any character, as a search starts everywhere. A *hub* consumes nothing and
joins ways. A repeat of one class is one position that loops; other repeats loop through a hub, or are
written out when they are small.

A guard is what anchors, `\\b` and one-character look-arounds ask of the characters before and after a place:
a tuple of (before, after) masks, any one of which must hold. None asks nothing.

What is spent at a place without consuming anything is added to `spent` of the position it was reached from,
in nanoseconds: the constants below are twice what a quiet machine needs.

Must not know how much text there will be.
"""

from dataclasses import dataclass, field
from re import _constants as sre  # type: ignore[attr-defined]
from typing import Any

from .regex_classes import Alphabet, Class, Mask

# Nanoseconds, from above for a quiet machine (see docs/ingress.md for how they were found).
START_NS = 10.0
LITERAL_NS = 3.0
LITERAL_TAIL_NS = 1.0
CLASS_NS = 4.5
CATEGORY_NS = 11.0
CLASS_ITEM_NS = 5.0
FOLDED_NS = 12.0
FOLDED_WIDE_NS = 24.0
ANCHOR_NS = 6.0
SCAN_LITERAL_NS = 1.6
SCAN_ANY_NS = 1.3
SCAN_CLASS_NS = 3.3
SCAN_CATEGORY_NS = 6.0
REPEAT_ONE_NS = 20.0
EXIT_NS = 9.5
LAZY_NS = 12.0
REPEAT_NS = 22.0
UNTIL_NS = 14.0
MARK_NS = 4.0
BRANCH_NS = 12.0
ALTERNATIVE_NS = 10.0
LOOK_NS = 22.0

MAX_NODES = 300
MAX_WORK = 2000
MAX_WIDE = 6
"""More ways into a place than this are joined in a hub."""
MAX_WAYS = 1e9
WRITTEN_OUT = 48
"""A repeat is written out when that takes at most so many positions."""

Guard = tuple[tuple[Mask, Mask], ...] | None
Edge = tuple[int, float, Guard, bool]
"""(from, ways, guard, sure): `sure` when nothing here can make the match fail."""
Front = list[Edge]
Unit = tuple[Any, Any]
"""A parsed item that consumes one character: its code and argument."""

_TYPE_FLAGS = sre.SRE_FLAG_ASCII | sre.SRE_FLAG_LOCALE | sre.SRE_FLAG_UNICODE
_REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT)
_UNITS = (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN)


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


class Builder:
    """Makes the graph of one parsed pattern."""

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

    def build(self, parsed: Any, flags: int) -> Graph:
        """Return the graph. Raises TooComplex, Explosive."""
        graph = self.graph
        graph.final = self._sequence(parsed.data, [(0, 1.0, None, True)], flags)
        self._inline_short_hubs()
        return graph

    def _inline_short_hubs(self) -> None:
        """Replace a loop's hub by what leads to it where that is little: guards then meet their classes."""
        graph = self.graph
        if not graph.cyclic:
            return
        short = {
            node
            for node in range(1, len(graph.high))
            if graph.high[node] == 0 and 0 < len(graph.preds[node]) <= 4
        }
        for node in range(1, len(graph.high)):
            if node in short or not any(edge[0] in short for edge in graph.preds[node]):
                continue
            into: Front = []
            for source, ways, guard, sure in graph.preds[node]:
                if source not in short:
                    into.append((source, ways, guard, sure))
                    continue
                self._charge(len(graph.preds[source]))
                for before, more, inner, also in graph.preds[source]:
                    both = _both(inner, guard)
                    if both != ():
                        into.append((before, ways * more, both, sure and also))
            graph.preds[node] = into

    # -- nodes, fronts and guards

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
            both = _both(before, guard)
            if both != ():
                result.append((source, ways, both, False))
        return result

    # -- the constructs

    def _sequence(self, items: Any, front: Front, flags: int) -> Front:
        run: list[Unit] = []
        for item in items:
            op, av = item
            if op in _UNITS:
                run.append(item)
                continue
            if run:
                front = self._run(run, front, flags)
                run = []
            if not front:
                return front
            self._work += 1
            self._tail = ()
            if op is sre.BRANCH:
                front = self._branch(av[1], front, flags)
            elif op in _REPEATS:
                front = self._repeat(op, av, front, flags)
            elif op is sre.SUBPATTERN:
                front = self._group(av, front, flags)
            elif op is sre.AT:
                front = self._guarded(front, self._anchor(av, flags))
            elif op is sre.ASSERT or op is sre.ASSERT_NOT:
                front = self._look(op is sre.ASSERT_NOT, av, front, flags)
            elif op is sre.ATOMIC_GROUP:
                self._spend(front, LOOK_NS)
                if any(item[0] in _REPEATS or item[0] is sre.BRANCH for item in av.data):
                    self.graph.notes.add("an atomic group is taken for a plain one")
                front = self._sequence(av.data, front, flags)
            elif op is sre.GROUPREF:
                front = self._reference(av, front, flags)
            elif op is sre.GROUPREF_EXISTS:
                front = self._conditional(av, front, flags)
            elif op is sre.FAILURE:
                front = []
            else:
                raise TooComplex(f"the construct {op} is not modelled")
        return self._run(run, front, flags) if run and front else front

    def _class(self, unit: Unit, flags: int) -> tuple[Class, float, float]:
        """Return a unit's class, the cost of testing it once, and of consuming one of a run."""
        op, av = unit
        if op is sre.IN:
            return self._new_class(op, av, flags)
        known = self._classes.get((op, av, flags))
        if known is None:
            known = self._classes[op, av, flags] = self._new_class(op, av, flags)
        return known

    def _new_class(self, op: Any, av: Any, flags: int) -> tuple[Class, float, float]:
        alphabet = self._alphabet
        if op is sre.ANY:
            low = alphabet.all if flags & sre.SRE_FLAG_DOTALL else alphabet.all & ~alphabet.newline
            return (low, low), LITERAL_NS, SCAN_ANY_NS
        if op is sre.IN:
            slow = sum(_is_slow(part, arg) for part, arg in av)
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

    def _unit(self, unit: Unit, front: Front, flags: int) -> Front:
        (_, high), test, scan = self._class(unit, flags)
        self._spend(front, test)
        if self._tail and unit[0] is sre.LITERAL and not flags & sre.SRE_FLAG_IGNORECASE:
            # The engine looks for a literal before it tries what follows a repeat of one class.
            self._spend([edge for edge in front if edge[0] in self._tail], LITERAL_TAIL_NS - EXIT_NS - test)
        self._tail = ()
        if not high:
            return []
        return [(self._new(high, front, 1, 1, scan), 1.0, None, True)]

    def _run(self, units: list[Unit], front: Front, flags: int) -> Front:
        """Take units in a row: as one node, except in a loop, where each is a place for two ways to meet."""
        front = self._unit(units[0], front, flags)
        if len(units) == 1 or not front:
            return front
        if self._in_loop:
            for unit in units[1:]:
                front = self._unit(unit, front, flags)
                if not front:
                    break
            return front
        graph = self.graph
        node = front[0][0]
        masks, costs = [graph.high[node]], []
        for unit in units[1:]:
            self._work += 1
            (_, high), test, _ = self._class(unit, flags)
            if not high:
                return []
            masks.append(high)
            costs.append(test)
        graph.runs[node] = masks
        graph.run_costs[node] = costs
        graph.high[node] = masks[-1]
        return front

    def _group(self, av: Any, front: Front, flags: int) -> Front:
        group, add, remove, body = av
        flags = _combined(flags, add, remove)
        if group is None:
            return self._sequence(body.data, front, flags)
        self._marks += 1
        self._spend(front, MARK_NS)
        self._groups[group] = (body, flags)
        front = self._sequence(body.data, front, flags)
        self._spend(front, MARK_NS)
        self._tail = ()
        return front

    def _branch(self, alternatives: Any, front: Front, flags: int) -> Front:
        self._spend(front, BRANCH_NS + self._mark_cost())
        ends: Front = []
        for body in alternatives:
            first = body.data[0][0] if body.data else None
            if first is not sre.LITERAL and first is not sre.IN:
                self._spend(front, ALTERNATIVE_NS)
            self._tail = ()
            ends += self._sequence(body.data, front, flags)
        self._tail = ()
        return self._merged(ends)

    def _mark_cost(self) -> float:
        """The engine saves all groups' places at each choice inside a repeat."""
        return 0.5 * self._marks if self._in_loop else 0.0

    def _repeat(self, op: Any, av: Any, front: Front, flags: int) -> Front:
        least, most, body = av
        if most == 0:
            return front
        unlimited = most == sre.MAXREPEAT
        if len(body.data) == 1 and body.data[0][0] in _UNITS:
            return self._class_repeat(op, least, UNLIMITED if unlimited else most, body.data[0], front, flags)
        inner, groups, inner_flags = _unwrapped(body, flags)
        if inner is not None and unlimited and not self._in_loop:
            # `(a)*`: one class under groups; the engine takes the long way, the graph need not.
            for group in groups:
                self._groups[group] = (body, flags)
            self._marks += len(groups)
            cost = REPEAT_NS + 2 * MARK_NS * len(groups)
            return self._class_repeat(op, least, UNLIMITED, inner, front, inner_flags, cost)
        if op is sre.POSSESSIVE_REPEAT:
            self.graph.notes.add("a possessive repeat of a group is taken for a plain one")
        if least == most == 1:
            return self._sequence(body.data, front, flags)
        if least == 0 and most == 1:
            self._spend(front, REPEAT_NS + self._mark_cost())
            end = self._sequence(body.data, front, flags)
            self._spend(end, UNTIL_NS)
            self._tail = ()
            return self._merged([*front, *end])
        if not unlimited and most <= 16 and most * _size(body) <= WRITTEN_OUT:
            return self._written_out(least, most, body, front, flags)
        return self._loop(least, most, body, front, flags)

    def _class_repeat(
        self, op: Any, least: int, most: int, unit: Unit, front: Front, flags: int, extra: float = 0.0
    ) -> Front:
        (low, high), test, scan = self._class(unit, flags)
        if least == most == 1:
            return self._unit(unit, front, flags)
        if not high:
            return front if least == 0 else []
        alphabet = self._alphabet
        # In a loop a count tells apart what a loop of the class would not.
        if most <= (12 if self._in_loop else 2) and (self._in_loop or least == most):
            end: Front = []
            for step in range(most):
                if step >= least:
                    end += front
                front = self._unit(unit, front, flags)
                self._spend(front, EXIT_NS)
            return self._merged(end + front)
        if most != UNLIMITED and self._in_loop:
            self.graph.notes.add("a long counted repeat inside a repeat is taken for an unlimited one")
            most = UNLIMITED
            least = min(least, 2)
        lazy = op is sre.MIN_REPEAT
        cost = extra + (LAZY_NS + test if lazy else scan)
        self._spend(front, REPEAT_ONE_NS + test)
        first = 0
        if least > 1 and not self._in_loop and most > least:
            # First what must be there, then what may: after the first part the second cannot fail.
            first = self._new(high, front, least, least, cost)
            self.graph.spent[first] += EXIT_NS
            front = [(first, 1.0, None, True)]
            least, most = 0, most - least if most != UNLIMITED else UNLIMITED
        node = self._new(high, front, least, most, cost)
        if first:
            self.graph.halves[node] = first
        self.graph.spent[node] += EXIT_NS
        guard: Guard = None
        if op is sre.POSSESSIVE_REPEAT and most == UNLIMITED:
            # It gives nothing back: whatever comes next does so where the run has ended.
            edge = alphabet.edge
            guard = ((alphabet.all | edge, (alphabet.all & ~low) | edge),)
        end = [(node, 1.0, guard, True)]
        if not lazy and not extra:
            self._tail = (node, *[edge[0] for edge in front if self.graph.least[edge[0]] > 1])
        return self._joined(front, end) if least == 0 else end

    def _written_out(self, least: int, most: int, body: Any, front: Front, flags: int) -> Front:
        end: Front = []
        for step in range(most):
            if step >= least:
                end += front
            self._spend(front, REPEAT_NS + self._mark_cost())
            front = self._merged(self._sequence(body.data, front, flags))
            if not front:
                break
        self._spend(front, UNTIL_NS)
        self._tail = ()
        return self._merged(end + front)

    def _loop(self, least: int, most: int, body: Any, front: Front, flags: int) -> Front:
        """A repeat that loops through a hub. Counts above 1 are not kept: more ways, never fewer."""
        if most != sre.MAXREPEAT:
            self.graph.notes.add("a long counted repeat of a group is taken for an unlimited one")
        empty = self._empty_ways(body)
        if empty and least > 1:
            # The engine makes the first `least` iterations whatever they match: each may match nothing.
            if least > 30 or (1 + empty) ** least > MAX_WAYS:
                raise Explosive(f"a repeat of at least {least} times may match nothing each time")
            self._spend(front, least * REPEAT_NS * (1 + empty) ** least)
        factor = (1 + empty) ** least if empty else 1.0
        hub = self._new(0, [], 1, 1, 0.0)
        floor, self._floor = self._floor, hub + 1
        self._in_loop += 1
        self._spend(front, factor * (REPEAT_NS + self._mark_cost()))
        entry = [(source, ways * factor, guard, sure) for source, ways, guard, sure in front]
        end = self._sequence(body.data, [*entry, (hub, 1.0, None, True)], flags)
        end = [edge for edge in end if edge[0] > hub]
        around = REPEAT_NS + UNTIL_NS + self._mark_cost()
        self._in_loop -= 1
        self._floor = floor
        self._tail = ()
        if least > 1:
            # The count may not be reached yet: the match can still fail here.
            end = _doubted(end)
        graph = self.graph
        graph.preds[hub] = end
        graph.spent[hub] += around
        graph.width[hub] = max(1, body.getwidth()[0])
        graph.cyclic = graph.cyclic or bool(end)
        after: Front = [(hub, 1.0 + empty, None, True)]
        if len(end) <= 4:
            after = [(source, ways * (1 + empty), guard, sure) for source, ways, guard, sure in end]
        skipped = 1.0 + empty if least == 0 else factor * (1 + empty) if empty else 0.0
        if skipped:
            after = [(source, ways * skipped, guard, sure) for source, ways, guard, sure in front] + after
        return self._merged(after)

    def _empty_ways(self, body: Any) -> float:
        """Count the ways a body can match nothing, from above."""
        ways = 1.0
        for op, av in body.data:
            self._charge(1)
            if op in _UNITS:
                return 0.0
            if op in _REPEATS:
                inner = self._empty_ways(av[2])
                if av[0] == 0:
                    ways *= 1.0 + (inner if av[1] else 0.0)
                elif av[0] > 40 and inner:
                    return MAX_WAYS
                else:
                    ways *= inner ** av[0] * (1 + inner)
            elif op is sre.SUBPATTERN:
                ways *= self._empty_ways(av[3])
            elif op is sre.ATOMIC_GROUP:
                ways *= self._empty_ways(av)
            elif op is sre.BRANCH:
                ways *= sum(self._empty_ways(one) for one in av[1])
            elif op is sre.GROUPREF_EXISTS:
                ways *= sum(self._empty_ways(one) if one is not None else 1.0 for one in av[1:])
            if ways == 0.0 or ways > MAX_WAYS:
                return min(ways, MAX_WAYS)
        return ways

    def _anchor(self, code: Any, flags: int) -> Guard:
        alphabet = self._alphabet
        edge, line = alphabet.edge, alphabet.newline
        anything = alphabet.all | edge
        multiline = flags & sre.SRE_FLAG_MULTILINE
        if code is sre.AT_BEGINNING:
            return (((edge | line) if multiline else edge, anything),)
        if code is sre.AT_BEGINNING_STRING:
            return ((edge, anything),)
        if code is sre.AT_END:
            return ((anything, edge | line),)
        if code is sre.AT_END_STRING:
            return ((anything, edge),)
        word = alphabet.category("WORD", bool(flags & sre.SRE_FLAG_ASCII))
        other = anything & ~word
        if code is sre.AT_BOUNDARY:
            return ((word, other), (other, word))
        if code is sre.AT_NON_BOUNDARY:
            return ((word, word), (other, other))
        raise TooComplex(f"the anchor {code} is not modelled")

    def _look(self, negative: bool, av: Any, front: Front, flags: int) -> Front:
        direction, body = av
        alphabet = self._alphabet
        anything = alphabet.all | alphabet.edge
        if len(body.data) == 1 and body.data[0][0] in _UNITS:
            (low, high), test, _ = self._class(body.data[0], flags)
            self._spend(front, LOOK_NS + test)
            side = anything & ~low if negative else high
            return self._guarded(front, ((anything, side),) if direction > 0 else ((side, anything),))
        self._spend(front, LOOK_NS)
        inside = front
        if direction < 0:
            inside = [(self._new(ANYWHERE, front, 1, 1, 0.0), 1.0, None, True)]
        # The body is tried and left again: nothing follows it, and the match goes on from before it.
        floor, self._floor = self._floor, len(self.graph.high)
        self._sequence(body.data, inside, flags)
        self._floor = floor
        return _doubted(front)

    def _reference(self, group: int, front: Front, flags: int) -> Front:
        width = self._widths[group]
        body, group_flags = self._groups.get(group, (None, 0))
        if width is None or body is None:
            return []  # A group that cannot be set by now: the engine fails here.
        least, most = width
        folded = flags & sre.SRE_FLAG_IGNORECASE
        if least == most and 0 < most <= 8 and not folded:
            # Text of one known length: whatever can match the group can stand here.
            self._spend(front, REPEAT_ONE_NS)
            return _doubted(self._sequence(body.data, front, group_flags))
        self.graph.notes.add("a back-reference is taken for any text of its group's length")
        self._spend(front, REPEAT_ONE_NS)
        alphabet = self._alphabet
        if most == 0:
            return _doubted(front)
        bound = UNLIMITED if most >= sre.MAXREPEAT or self._in_loop else most
        node = self._new(alphabet.all, front, 2, bound, FOLDED_NS if folded else SCAN_LITERAL_NS)
        end: Front = [(node, 1.0, None, False)]
        if least == 0:
            end += _doubted(front)
        return self._merged(end)

    def _conditional(self, av: Any, front: Front, flags: int) -> Front:
        _, yes, no = av
        self._spend(front, ANCHOR_NS)
        ends = self._sequence(yes.data, front, flags)
        ends = ends + (front if no is None else self._sequence(no.data, front, flags))
        # Which of the two is taken is not known: an empty one is no promise.
        return self._merged(_doubted(ends))


def _doubted(front: Front) -> Front:
    """Say that the match may fail here."""
    return [(source, ways, guard, False) for source, ways, guard, _ in front]


def _both(first: Guard, second: Guard) -> Guard:
    """Return the guard that asks both; the empty tuple when nothing can pass."""
    if first is None or second is None:
        return second if first is None else first
    joined = [
        (before & other_before, after & other_after)
        for before, after in first
        for other_before, other_after in second
        if before & other_before and after & other_after
    ]
    return tuple(joined[:8]) if len(joined) <= 8 else first


def allowed(guard: Guard, after: Mask) -> Mask:
    """Return which characters may come before a place, when one of `after` comes next."""
    if guard is None:
        return -1
    before = 0
    for mask, following in guard:
        if following & after:
            before |= mask
    return before


def _combined(flags: int, add: int, remove: int) -> int:
    if add & _TYPE_FLAGS:
        flags &= ~_TYPE_FLAGS
    return (flags | add) & ~remove


def _is_slow(op: Any, av: Any) -> bool:
    """Say whether the engine tests this part of a class by itself: what is not in its bit map."""
    if op is sre.LITERAL:
        return bool(av > 0xFFFF)
    if op is sre.RANGE:
        return bool(av[1] > 0xFFFF)
    return op is sre.CATEGORY


def _unwrapped(body: Any, flags: int) -> tuple[Any, list[int], int]:
    """Look through groups for a single class: (its item or None, the groups around it, its flags)."""
    groups: list[int] = []
    while len(body.data) == 1:
        op, av = body.data[0]
        if op in _UNITS:
            return (op, av), groups, flags
        if op is not sre.SUBPATTERN:
            break
        if av[0] is not None:
            groups.append(av[0])
        flags = _combined(flags, av[1], av[2])
        body = av[3]
    return None, [], flags


def _size(body: Any) -> int:
    """Count the positions a body takes when it is written out, from above."""
    total = 0
    for op, av in body.data:
        if op in _UNITS:
            total += 1
        elif op in _REPEATS:
            inner = _size(av[2])
            unit = len(av[2].data) == 1 and av[2].data[0][0] in _UNITS
            total += inner if unit or av[1] == sre.MAXREPEAT else inner * min(av[1], 64)
        elif op is sre.SUBPATTERN:
            total += _size(av[3])
        elif op is sre.ATOMIC_GROUP:
            total += _size(av)
        elif op is sre.BRANCH:
            total += sum(_size(one) for one in av[1])
        elif op is sre.ASSERT or op is sre.ASSERT_NOT:
            total += _size(av[1])
        elif op is sre.GROUPREF:
            total += 8
        elif op is sre.GROUPREF_EXISTS:
            total += sum(_size(one) for one in av[1:] if one is not None)
    return min(total, 1000)
