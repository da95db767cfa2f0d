"""A parsed pattern becomes a graph: what each construct of the dialect adds to it (see `regex_places`).

What a construct cannot be modelled as is bounded: more ways, never fewer, and a note that says so.
Must not know how much text there will be.
"""

from re import _constants as sre  # type: ignore[attr-defined]
from typing import Any

from .regex_checks import Check, derived, word_costs
from .regex_places import (
    ANYWHERE,
    ASKS_NOTHING,
    EXACT,
    MAX_ROUNDS,
    MAX_WAYS,
    NOTHING,
    PLAIN,
    UNLIMITED,
    WRITTEN_OUT,
    Explosive,
    Front,
    Graph,
    Places,
    TooComplex,
    doubted,
    where,
)
from .regex_tree import REPEATS, UNITS, Guard, Unit, both_of, combined, loses_captures, size, unwrapped
from .regex_units import (
    ALTERNATIVE_NS,
    ANCHOR_NS,
    BRANCH_NS,
    EXIT_NS,
    KEPT_EXIT_NS,
    LAZY_NS,
    LITERAL_TAIL_NS,
    LOOK_NS,
    MARK_NS,
    MORE_NS,
    REFERENCE_NS,
    REPEAT_NS,
    REPEAT_ONE_NS,
    ROUND_NS,
    SCAN_FOLDED_NS,
    SCAN_LITERAL_NS,
    SKIP_NS,
    START_NS,
    UNTIL_NS,
)


class Builder(Places):
    """Makes the graph of one parsed pattern."""

    def build(self, parsed: Any, flags: int) -> Graph:
        """Return the graph. Raises TooComplex, Explosive."""
        if loses_captures(parsed):
            raise TooComplex(
                "a capturing group that is repeated inside an atomic group or possessive repeat can make the "
                "engine fail; write (?:...) there"
            )
        graph = self.graph
        self._begin(parsed, flags)
        graph.final = self._sequence(parsed.data, [(0, 1.0, None, PLAIN)], flags)
        self._inline_short_hubs()
        return graph

    def _begin(self, parsed: Any, flags: int) -> None:
        """Spend what it costs to begin at a place: the engine first looks for what a match must begin
        with."""
        start: Front = [(0, 1.0, None, PLAIN)]
        first = parsed
        while len(first.data) and first.data[0][0] is sre.SUBPATTERN:
            flags = combined(flags, first.data[0][1][1], first.data[0][1][2])
            first = first.data[0][1][3]
        op, av = first.data[0] if len(first.data) else (None, None)
        if parsed.getwidth()[0] == 0 or flags & sre.SRE_FLAG_IGNORECASE:
            self._spend(start, START_NS)
        elif op is sre.LITERAL:
            hits = self._class((op, av), flags).high
            self._ask(start, derived(self._alphabet.all, hits, START_NS, SKIP_NS))
        elif op is sre.IN:
            test = self._class((op, av), flags)
            self._ask(start, Check((test.low, test.high), test.pieces, SKIP_NS))
            self._ask(start, derived(self._alphabet.all, test.high, START_NS, 0.0))
        else:
            self._spend(start, START_NS)

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
            for source, ways, guard, trust in graph.preds[node]:
                if source not in short:
                    into.append((source, ways, guard, trust))
                    continue
                self._charge(len(graph.preds[source]))
                for before, more, inner, also in graph.preds[source]:
                    both = both_of(inner, guard)
                    if both != ():
                        dropped = guard is not None and both is inner
                        into.append((before, ways * more, both, 0 if dropped else trust & also))
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
            self.graph.work += 1
            self._tail = ()
            if op is sre.BRANCH:
                front = self._branch(av[1], front, flags)
            elif op in REPEATS:
                front = self._repeat(op, av, front, flags)
            elif op is sre.SUBPATTERN:
                front = self._group(av, front, flags)
            elif op is sre.AT:
                if av in (sre.AT_BOUNDARY, sre.AT_NON_BOUNDARY):
                    self._ask_words(front, flags)
                front = self._guarded(front, self._anchor(av, flags))
            elif op is sre.ASSERT or op is sre.ASSERT_NOT:
                front = self._look(op is sre.ASSERT_NOT, av, front, flags)
            elif op is sre.ATOMIC_GROUP:
                self._spend(front, LOOK_NS)
                front = doubted(self._sequence(av.data, front, flags), ASKS_NOTHING)
                if any(item[0] in REPEATS or item[0] is sre.BRANCH for item in av.data):
                    self.graph.notes.add("an atomic group is taken for a plain one")
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
        test = self._class(unit, flags)
        others = front
        if self._tail and unit[0] is sre.LITERAL and not _folds(unit[1], flags):
            # The engine looks for a literal before it tries what follows a repeat of one class: that saves
            # the try wherever the next character is another.
            others = [edge for edge in front if edge[0] not in self._tail]
            look = derived(self._alphabet.all, test.high, EXIT_NS + test.test, LITERAL_TAIL_NS)
            for edge in front:
                if edge[0] in self._tail:
                    self._spend([edge], -EXIT_NS)
                    inside = self.graph.high[edge[0]] & test.high
                    self._ask([edge], look, -1.0 if inside else LITERAL_TAIL_NS)
        self._ask(others, test)
        self._tail = ()
        if not test.high:
            return []
        return [(self._new((test.low, test.high), front, 1, 1, 0.0), 1.0, None, PLAIN)]

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
        lows, masks, tests = [graph.low[node]], [graph.high[node]], []
        for unit in units[1:]:
            self.graph.work += 1
            test = self._class(unit, flags)
            if not test.high:
                return []
            lows.append(test.low)
            masks.append(test.high)
            tests.append(test)
        graph.low_runs[node] = lows
        graph.runs[node] = masks
        graph.run_tests[node] = tests
        graph.low[node], graph.high[node] = lows[-1], masks[-1]
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

    def _branch(self, alternatives: Any, front: Front, flags: int) -> Front:
        self._spend(front, BRANCH_NS + self._mark_cost())
        ends: Front = []
        for body in alternatives:
            first = body.data[0] if body.data else (None, 0)
            if first[0] is sre.IN or (first[0] is sre.LITERAL and not _folds(first[1], flags)):
                # A look comes before the try.
                test = self._class(first, flags)
                self._ask(front, derived(self._alphabet.all, test.high, ALTERNATIVE_NS + test.scan, 0.0))
            else:
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
            self._spend(front, REPEAT_NS + UNTIL_NS)  # The engine begins it all the same.
            return front
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
            return doubted(self._group_repeat(least, most, body, front, flags), ASKS_NOTHING)
        return self._group_repeat(least, most, body, front, flags)

    def _group_repeat(self, least: int, most: int, body: Any, front: Front, flags: int) -> Front:
        if least == most == 1:
            return self._sequence(body.data, front, flags)
        if least == 0 and most == 1:
            self._spend(front, REPEAT_NS + MORE_NS + UNTIL_NS + self._mark_cost())
            end = self._sequence(body.data, front, flags)
            self._spend(end, UNTIL_NS)
            self._tail = ()
            return self._merged([*front, *end])
        if most <= MAX_ROUNDS and most * size(body) <= WRITTEN_OUT:
            return self._written_out(least, most, body, front, flags)
        if most == sre.MAXREPEAT and 1 < least <= MAX_ROUNDS and least * size(body) <= WRITTEN_OUT:
            # So that its first rounds are told from the others.
            front = self._written_out(least - 1, least - 1, body, front, flags)
            least = 1
        return self._loop(least, most, body, front, flags)

    def _class_repeat(
        self, op: Any, least: int, most: int, unit: Unit, front: Front, flags: int, extra: float = 0.0
    ) -> Front:
        test = self._class(unit, flags)
        low, high = of = (test.low, test.high)
        trust = PLAIN
        if least == most == 1:
            return self._unit(unit, front, flags)
        if not high:
            return front if least == 0 else []
        alphabet = self._alphabet
        possessive = op is sre.POSSESSIVE_REPEAT
        # In a loop a count tells apart what a loop of the class would not.
        small = 24 if possessive else 12 if self._in_loop else 2 if least == most else 0
        if most <= small:
            return self._class_written_out(possessive, least, most, unit, front, flags)
        if most != UNLIMITED and self._in_loop:
            self.graph.notes.add("a long counted repeat inside a repeat is taken for an unlimited one")
            most = UNLIMITED
            least = min(least, 2)
            trust = ASKS_NOTHING
        lazy = op is sre.MIN_REPEAT
        lazy = lazy and least != most
        # A lazy repeat counts what must be there as any other does, and then looks at one character a time.
        besides = extra + (LAZY_NS + test.step if lazy else 0.0)
        cost = besides + (test.test - test.step if lazy else test.scan)
        self._spend(front, REPEAT_ONE_NS)
        self._ask(front, test)
        first = 0
        if least > 1 and not self._in_loop and most > least:
            # First what must be there, then what may: after the first part the second cannot fail.
            first = self._new(of, front, least, least, extra + test.scan)
            self.graph.scanned[first] = (test, extra)
            self.graph.spent[first] += EXIT_NS
            front = [(first, 1.0, None, PLAIN)]
            least, most = 0, most - least if most != UNLIMITED else UNLIMITED
        node = self._new(of, front, least, most, cost)
        self.graph.scanned[node] = (test, besides)
        if first:
            self.graph.halves[node] = first
        guard: Guard = None
        if not possessive or most != UNLIMITED:
            self.graph.spent[node] += KEPT_EXIT_NS if least == most else EXIT_NS
        if possessive:
            trust &= ASKS_NOTHING
            if most == UNLIMITED:
                self._ask([(node, 1.0, None, PLAIN)], derived(alphabet.all, low, 0.0, KEPT_EXIT_NS))
                # It gives nothing back: whatever comes next does so where the run has ended.
                guard = ((alphabet.anything, alphabet.anything & ~low),)
                trust |= EXACT if low == high and not self._in_loop else 0
        end = [(node, 1.0, guard, trust)]
        if op is sre.MAX_REPEAT and not extra:
            self._tail = (node, *[edge[0] for edge in front if self.graph.least[edge[0]] > 1])
        if possessive:
            trust = ASKS_NOTHING
        return self._joined(doubted(front, trust), end) if least == 0 else end

    def _class_written_out(
        self, possessive: bool, least: int, most: int, unit: Unit, front: Front, flags: int
    ) -> Front:
        test, every = self._class(unit, flags), self._alphabet.anything
        exact = EXACT if test.low == test.high else 0
        end: Front = []
        self._spend(front, REPEAT_ONE_NS)
        for step in range(most):
            if step >= least:
                left = front
                if possessive:
                    # It is left before its last round only where the run ends.
                    left = where(front, ((every, every & ~test.low),), exact | ASKS_NOTHING)
                self._spend(left, KEPT_EXIT_NS if possessive else EXIT_NS)
                end += left
            front = self._unit(unit, front, flags)
        self._spend(front, KEPT_EXIT_NS if possessive or least == most else EXIT_NS)
        return self._merged(end + front)

    def _written_out(self, least: int, most: int, body: Any, front: Front, flags: int) -> Front:
        end: Front = []
        self._spend(front, REPEAT_NS)
        must = ROUND_NS if body.getwidth()[0] else MORE_NS
        for step in range(most):
            if step >= least:
                end += front
            self._spend(front, self._mark_cost() + (must if step < least else MORE_NS + UNTIL_NS))
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
            self._spend(front, least * ROUND_NS * (1 + empty) ** least)
        factor = (1 + empty) ** least if empty else 1.0
        hub = self._new(NOTHING, [], 1, 1, 0.0)
        floor, self._floor = self._floor, hub + 1
        self._in_loop += 1
        more = (ROUND_NS if least else MORE_NS + UNTIL_NS) + self._mark_cost()
        self._spend(front, factor * (REPEAT_NS + more))
        entry = [(source, ways * factor, guard, trust) for source, ways, guard, trust in front]
        end = self._sequence(body.data, [*entry, (hub, 1.0, None, PLAIN)], flags)
        end = [edge for edge in end if edge[0] > hub]
        around = MORE_NS + UNTIL_NS + self._mark_cost()
        self._in_loop -= 1
        self._floor = floor
        self._tail = ()
        if least > 1:
            # The count may not be reached yet: the match can still fail here.
            end = doubted(end)
        if empty or most != sre.MAXREPEAT:
            end = doubted(end, ASKS_NOTHING)
        graph = self.graph
        graph.preds[hub] = end
        graph.spent[hub] += around
        graph.width[hub] = max(1, body.getwidth()[0])
        graph.cyclic = graph.cyclic or bool(end)
        after: Front = [(hub, 1.0 + empty, None, PLAIN)]
        if len(end) <= 4:
            after = [(source, ways * (1 + empty), guard, trust) for source, ways, guard, trust in end]
        skipped = 1.0 + empty if least == 0 else factor * (1 + empty) if empty else 0.0
        if skipped:
            # Rounds that match nothing may still ask something: only leaving them all out asks nothing.
            passed = front if least == 0 else doubted(front)
            after = [(source, ways * skipped, guard, trust) for source, ways, guard, trust in passed] + after
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

    def _ask_words(self, front: Front, flags: int) -> None:
        """Spend what a boundary costs: it looks at the characters before and after."""
        alphabet = self._alphabet
        every, costs = alphabet.all, word_costs(alphabet, flags)
        self._ask(front, Check((every, every), costs, 0.0))
        for mask, cost in costs:
            self._spend(where(front, ((mask, alphabet.anything),)), cost)

    def _look(self, negative: bool, av: Any, front: Front, flags: int) -> Front:
        direction, body = av
        alphabet = self._alphabet
        anything = alphabet.anything
        if len(body.data) == 1 and body.data[0][0] in UNITS:
            test = self._class(body.data[0], flags)
            low, high = test.low, test.high
            self._spend(front, LOOK_NS)
            if direction > 0:
                self._ask(front, test)
            else:
                self._spend(front, test.test)
            side = anything & ~low if negative else high
            trust = EXACT if low == high else 0
            return self._guarded(front, ((anything, side),) if direction > 0 else ((side, anything),), trust)
        self._spend(front, LOOK_NS)
        inside = front
        if direction < 0:
            inside = [(self._new((0, ANYWHERE), front, 1, 1, 0.0), 1.0, None, PLAIN)]
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
            self._spend(front, REFERENCE_NS)
            return doubted(self._sequence(body.data, front, group_flags))
        self.graph.notes.add("a back-reference is taken for any text of its group's length")
        self._spend(front, REPEAT_ONE_NS)
        alphabet = self._alphabet
        if most == 0:
            return doubted(front)
        bound = UNLIMITED if most >= sre.MAXREPEAT or self._in_loop else most
        scan = SCAN_FOLDED_NS if folded else SCAN_LITERAL_NS
        node = self._new((0, alphabet.all), front, 2, bound, scan)
        end: Front = [(node, 1.0, None, 0)]
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


def _folds(code: int, flags: int) -> bool:
    """Say whether a literal is compared without its case: the engine has short cuts only for others."""
    return bool(flags & sre.SRE_FLAG_IGNORECASE) and chr(code).lower() != chr(code).upper()
