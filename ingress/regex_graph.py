"""A parsed pattern becomes a graph: what each construct of the dialect adds to it (see `regex_places`).

What a construct cannot be modelled as is bounded: more ways, never fewer, and a note that says so.
Must not know how much text there will be.
"""

from re import _constants as sre  # type: ignore[attr-defined]
from typing import Any

from .regex_places import (
    ANYWHERE,
    MAX_WAYS,
    UNLIMITED,
    WRITTEN_OUT,
    Explosive,
    Front,
    Graph,
    Places,
    TooComplex,
    doubted,
)
from .regex_tree import REPEATS, UNITS, Guard, Unit, both_of, captures, combined, size, unwrapped
from .regex_units import (
    ALTERNATIVE_NS,
    ANCHOR_NS,
    BRANCH_NS,
    EXIT_NS,
    FOLDED_NS,
    LAZY_NS,
    LITERAL_TAIL_NS,
    LOOK_NS,
    MARK_NS,
    REPEAT_NS,
    REPEAT_ONE_NS,
    SCAN_LITERAL_NS,
    UNTIL_NS,
)


class Builder(Places):
    """Makes the graph of one parsed pattern."""

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
                    both = both_of(inner, guard)
                    if both != ():
                        into.append((before, ways * more, both, sure and also))
            graph.preds[node] = into

    # -- the constructs

    def _sequence(self, items: Any, front: Front, flags: int) -> Front:
        run: list[Unit] = []
        for item in items:
            op, av = item
            if op in UNITS:
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
            elif op in REPEATS:
                front = self._repeat(op, av, front, flags)
            elif op is sre.SUBPATTERN:
                front = self._group(av, front, flags)
            elif op is sre.AT:
                front = self._guarded(front, self._anchor(av, flags))
            elif op is sre.ASSERT or op is sre.ASSERT_NOT:
                front = self._look(op is sre.ASSERT_NOT, av, front, flags)
            elif op is sre.ATOMIC_GROUP:
                self._spend(front, LOOK_NS)
                self._no_captures(av)
                if any(item[0] in REPEATS or item[0] is sre.BRANCH for item in av.data):
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

    def _unit(self, unit: Unit, front: Front, flags: int) -> Front:
        (_, high), test, scan = self._class(unit, flags)
        self._spend(front, test)
        if self._tail and unit[0] is sre.LITERAL and not flags & sre.SRE_FLAG_IGNORECASE:
            # The engine looks for a literal before it tries what follows a repeat of one class: that saves
            # the try where the run has no such character in it.
            spared = [edge for edge in front if edge[0] in self._tail and not self.graph.high[edge[0]] & high]
            self._spend(spared, LITERAL_TAIL_NS - EXIT_NS - test)
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
        flags = combined(flags, add, remove)
        if group is None:
            return self._sequence(body.data, front, flags)
        self._marks += 1
        self._spend(front, MARK_NS)
        self._groups[group] = (body, flags)
        front = self._sequence(body.data, front, flags)
        self._spend(front, MARK_NS)
        self._tail = ()
        return front

    def _no_captures(self, body: Any) -> None:
        """Refuse groups that capture where the engine gives nothing back.

        CPython's engine loses their spans there and fails the search with a SystemError (3.11.7).
        """
        if captures(body):
            raise TooComplex(
                "a capturing group inside an atomic group or possessive repeat can make the engine fail; "
                "write (?:...) there"
            )

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
        if op is sre.POSSESSIVE_REPEAT:
            self._no_captures(body)
        unlimited = most == sre.MAXREPEAT
        if len(body.data) == 1 and body.data[0][0] in UNITS:
            return self._class_repeat(op, least, UNLIMITED if unlimited else most, body.data[0], front, flags)
        inner, groups, inner_flags = unwrapped(body, flags)
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
        if not unlimited and most <= 16 and most * size(body) <= WRITTEN_OUT:
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
            end = doubted(end)
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
            # Rounds that match nothing may still ask something: only leaving them all out asks nothing.
            passed = front if least == 0 else doubted(front)
            after = [(source, ways * skipped, guard, sure) for source, ways, guard, sure in passed] + after
        return self._merged(after)

    def _empty_ways(self, body: Any) -> float:
        """Count the ways a body can match nothing, from above."""
        ways = 1.0
        for op, av in body.data:
            self._charge(1)
            if op in UNITS:
                return 0.0
            if op in REPEATS:
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
        if len(body.data) == 1 and body.data[0][0] in UNITS:
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
        return doubted(front)

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
            return doubted(self._sequence(body.data, front, group_flags))
        self.graph.notes.add("a back-reference is taken for any text of its group's length")
        self._spend(front, REPEAT_ONE_NS)
        alphabet = self._alphabet
        if most == 0:
            return doubted(front)
        bound = UNLIMITED if most >= sre.MAXREPEAT or self._in_loop else most
        node = self._new(alphabet.all, front, 2, bound, FOLDED_NS if folded else SCAN_LITERAL_NS)
        end: Front = [(node, 1.0, None, False)]
        if least == 0:
            end += doubted(front)
        return self._merged(end)

    def _conditional(self, av: Any, front: Front, flags: int) -> Front:
        _, yes, no = av
        self._spend(front, ANCHOR_NS)
        ends = self._sequence(yes.data, front, flags)
        ends = ends + (front if no is None else self._sequence(no.data, front, flags))
        # Which of the two is taken is not known: an empty one is no promise.
        return self._merged(doubted(ends))
