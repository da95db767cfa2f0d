"""A parsed pattern becomes a graph: what each construct of the dialect adds to it (see `regex_places`).

What a construct cannot be modelled as is bounded: more ways, never fewer, and a note that says so.
Must not know how much text there will be.
"""

from re import _compiler  # type: ignore[attr-defined]
from re import _constants as sre  # type: ignore[attr-defined]
from typing import Any

from .regex_checks import Check, check_of, derived, folds_case, word_costs
from .regex_classes import Mask
from .regex_places import (
    ANYWHERE,
    ASKS_NOTHING,
    EXACT,
    PLAIN,
    Front,
    Graph,
    TooComplex,
    doubted,
    times_each,
    where,
)
from .regex_repeats import Repeats
from .regex_settled import AGAIN, LAST, PAID, settled
from .regex_tree import REPEATS, UNITS, Guard, Unit, both_of, combined, goes_back, loses_captures
from .regex_units import (
    ALTERNATIVE_NS,
    ANCHOR_NS,
    BRANCH_NS,
    COPY_FOLDED_NS,
    LITERAL_TAIL_NS,
    LOOK_NS,
    MARK_NS,
    MORE_NS,
    PREFIX_NS,
    REFERENCE_NS,
    REPEAT_NS,
    ROUND_NS,
    SCAN_LITERAL_NS,
    SKIP_NS,
    START_NS,
    UNTIL_NS,
)


class Builder(Repeats):
    """Makes the graph of one parsed pattern."""

    def build(self, parsed: Any, flags: int) -> Graph:
        """Return the graph. Raises TooComplex, Explosive."""
        if loses_captures(parsed):
            raise TooComplex(
                "a capturing group that is repeated inside an atomic group or possessive repeat can make the "
                "engine fail; write (?:...) there"
            )
        if goes_back(parsed):
            raise TooComplex(
                "a look-behind inside a possessive repeat can make the engine search for ever (CPython "
                "before 3.11.5); write (?>(?:...)*) for (?:...)*+"
            )
        items = settled(parsed, LAST).data
        read, start = self._begin(parsed, items, flags)
        self.graph.final = self._sequence(items[read:], start, flags)
        self._inline_short_hubs()
        return self.graph

    def _begin(self, parsed: Any, items: Any, flags: int) -> tuple[int, Front]:
        """Begin at every place. The engine first looks for the characters or the class that a match must
        begin with, and tries a match only where it finds them: returns how many items are read then, and
        what follows them."""
        start: Front = [(0, 1.0, None, PLAIN)]
        every = self._alphabet.all
        prefix = charset = None
        if parsed.getwidth()[0]:
            prefix = _compiler._get_literal_prefix(parsed, flags)[0]
            charset = None if prefix else _compiler._get_charset_prefix(parsed, flags)
        if prefix and len(prefix) > 1 and len(items) > 1 and items[0][0] is items[1][0] is sre.LITERAL:
            return self._prefix(prefix, items, start, flags)
        if not prefix and not charset:
            self._spend(start, START_NS)
            return 0, start
        first = [(sre.LITERAL, prefix[0])] if prefix else charset
        test = check_of(sre.IN, first, flags & ~sre.SRE_FLAG_IGNORECASE, self._alphabet)
        if not prefix:
            self._ask(start, Check((test.low, test.high), test.pieces, SKIP_NS))
        self._ask(start, derived(every, test.high, START_NS, SKIP_NS if prefix else 0.0))
        return 0, where(start, self._guard_of(1, test.high), PLAIN)

    def _prefix(self, prefix: list[int], items: Any, start: Front, flags: int) -> tuple[int, Front]:
        """Read the literals that the engine looks for at once: it goes on from a part of them to the next
        without trying a match."""
        every = self._alphabet.all
        count = 0
        while count < min(len(prefix), len(items)) and items[count][0] is sre.LITERAL:
            count += 1
        classes = [self._class(item, flags) for item in items[:count]]
        self._ask(start, derived(every, classes[0].high, PREFIX_NS, SKIP_NS))
        node = self._new((classes[-1].low, classes[-1].high), start, 1, 1, 0.0)
        graph = self.graph
        graph.low_runs[node] = [one.low for one in classes]
        graph.runs[node] = [one.high for one in classes]
        graph.run_tests[node] = [Check((one.low, one.high), [(every, PREFIX_NS)], 0.0) for one in classes[1:]]
        after: Front = [(node, 1.0, None, PLAIN)]
        self._spend(after, START_NS)
        return count, after

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
            self._tail = {}
            if op is sre.BRANCH:
                front = self._branch(av[1], front, flags)
            elif op in REPEATS:
                # A copied text may go on with what a possessive repeat would have taken.
                op = sre.MAX_REPEAT if self._copies else op
                front = self._repeat(op, av, front, flags)
            elif op is sre.SUBPATTERN:
                front = self._group(av, front, flags)
            elif self._copies and op in (sre.AT, sre.ASSERT, sre.ASSERT_NOT):
                pass
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
            elif op is AGAIN:
                front = self._again(av, front, flags)
            elif op is PAID:
                self._spend(front, LOOK_NS)
            elif op is sre.FAILURE:
                front = []
            else:
                raise TooComplex(f"the construct {op} is not modelled")
        return self._run(run, front, flags) if run and front else front

    def _unit(self, unit: Unit, front: Front, flags: int) -> Front:
        test = self._class(unit, flags)
        others = front
        if self._tail and unit[0] is sre.LITERAL and not folds_case(unit[1], flags):
            # The engine looks for a literal before it tries what follows a repeat of one class: that saves
            # the try wherever the next character is another.
            others = [edge for edge in front if edge[0] not in self._tail]
            for edge in front:
                left = self._tail.get(edge[0])
                if left is not None:
                    self._spend([edge], -left)
                    look = derived(self._alphabet.all, test.high, left + test.test, LITERAL_TAIL_NS)
                    inside = self.graph.high[edge[0]] & test.high
                    self._ask([edge], look, -1.0 if inside else LITERAL_TAIL_NS)
        self._ask(others, test)
        self._tail = {}
        if not test.high:
            return []
        return [(self._new((test.low, test.high), front, 1, 1, self._copies), 1.0, None, PLAIN)]

    def _run(self, units: list[Unit], front: Front, flags: int) -> Front:
        """Take units in a row: as one node, except in a loop, where each is a place for two ways to meet."""
        front = self._unit(units[0], front, flags)
        if len(units) == 1 or not front:
            return front
        if self._in_loop or self._copies:
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
        if group is None or self._copies:
            return self._sequence(body.data, front, flags)
        self._marks = max(self._marks, group)
        self._spend(front, MARK_NS)
        self._groups[group] = (body, flags)
        front = self._sequence(body.data, front, flags)
        self._spend(front, MARK_NS)
        self._tail = {}
        return front

    def _branch(self, alternatives: Any, front: Front, flags: int) -> Front:
        self._spend(front, BRANCH_NS + self._saved())
        ends: Front = []
        begun, kept, tried = self._kept, self._kept, ALTERNATIVE_NS + self._copied()
        for body in alternatives:
            kept, self._kept = max(kept, self._kept), begun
            first = body.data[0] if body.data else (None, 0)
            if first[0] is sre.IN or (first[0] is sre.LITERAL and not folds_case(first[1], flags)):
                # A look comes before the try.
                test = self._class(first, flags)
                self._ask(front, derived(self._alphabet.all, test.high, tried + test.scan, 0.0))
            else:
                self._spend(front, tried)
            self._tail = {}
            ends += self._sequence(body.data, front, flags)
        self._kept = max(kept, self._kept)
        self._tail = {}
        return self._merged(ends)

    def _ask_words(self, front: Front, flags: int) -> None:
        """Spend what a boundary costs: it looks at the characters before and after."""
        alphabet = self._alphabet
        every, costs = alphabet.all, word_costs(alphabet, flags)
        self._ask(front, Check((every, every), costs, 0.0))
        for mask, cost in costs:
            self._spend(where(front, ((mask, alphabet.anything),)), cost)

    def _look(self, negative: bool, av: Any, front: Front, flags: int) -> Front:
        direction, body = av
        if len(body.data) == 1 and body.data[0][0] in UNITS:
            test = self._class(body.data[0], flags)
            low, high = test.low, test.high
            self._spend(front, LOOK_NS)
            if direction > 0:
                self._ask(front, test)
            else:
                self._spend(front, test.test)
            side = self._other_than(low) if negative else high
            trust = EXACT if low == high else 0
            return self._guarded(front, self._guard_of(direction, side), trust)
        self._spend(front, LOOK_NS)
        inside = front
        if direction < 0:
            inside = [(self._new((0, ANYWHERE), front, 1, 1, 0.0), 1.0, None, PLAIN)]
        # The body is tried and left again: nothing follows it, and the match goes on from before it.
        floor, self._floor = self._floor, len(self.graph.high)
        self._sequence(body.data, inside, flags)
        self._floor = floor
        # It cannot match beside a character that it neither begins nor ends with.
        side = self._side(body, flags, 0 if direction > 0 else -1)
        if side == self._alphabet.anything:
            return doubted(front)
        beside, others = self._guard_of(direction, side), self._guard_of(direction, self._other_than(side))
        if negative:
            return self._merged(where(front, others, EXACT) + where(front, beside))
        return where(front, beside)

    def _again(self, av: Any, front: Front, flags: int) -> Front:
        """Go through a piece that reads nothing, and if it matches through it again for the other rounds."""
        rounds, tries, body = av
        self._spend(front, REPEAT_NS + ROUND_NS)
        if body.getwidth()[1]:
            # A look-ahead at the end, whose text is read in its place: all rounds are paid for at once.
            end = times_each(self._sequence(body.data, times_each(front, rounds), flags), 1 / rounds)
        else:
            end = self._sequence(body.data, front, flags)
            self._sequence(body.data, times_each(end, rounds - 1), flags)
        self._spend(times_each(end, rounds), MORE_NS + UNTIL_NS)
        return times_each(end, tries)

    def _guard_of(self, direction: int, side: Mask) -> Guard:
        anything = self._alphabet.anything
        return ((anything, side | self._alphabet.goes_on),) if direction > 0 else ((side, anything),)

    def _side(self, body: Any, flags: int, at: int) -> Mask:
        """Return what a piece can read first (`at` 0) or last (-1), everything where that is not plain."""
        if not body.data:
            return self._alphabet.anything
        op, av = body.data[at]
        if op in UNITS:
            return self._class(body.data[at], flags).high
        if op is sre.SUBPATTERN and not av[1] and not av[2]:
            return self._side(av[3], flags, at)
        if op in REPEATS and av[0] > 0:
            return self._side(av[2], flags, at)
        if op is sre.BRANCH:
            found = 0
            for one in av[1]:
                found |= self._side(one, flags, at)
            return found
        return self._alphabet.anything

    def _reference(self, group: int, front: Front, flags: int) -> Front:
        body, group_flags = self._groups.get(group, (None, 0))
        if body is None:
            return []  # A group that cannot be set by now: the engine fails here.
        # Whatever text can match the group can stand here, and nothing of it is tried in another way.
        folded = flags & sre.SRE_FLAG_IGNORECASE
        copying = COPY_FOLDED_NS if folded else SCAN_LITERAL_NS
        self._spend(front, REFERENCE_NS)
        least, most = body.getwidth()
        trust = 0
        if least == most:
            # All its texts are as long as each other, so where the last character is read the group is. Where
            # that character is another one, it was looked at all the same.
            trust = ASKS_NOTHING
            self._spend(front, copying)
        outside, self._copies = self._copies, copying
        self._tail = {}
        end = self._sequence(body.data, doubted(front), group_flags | folded)
        self._copies = outside
        self._tail = {}
        return doubted(end, trust)

    def _conditional(self, av: Any, front: Front, flags: int) -> Front:
        _, yes, no = av
        self._spend(front, ANCHOR_NS)
        ends = self._sequence(yes.data, front, flags)
        ends = ends + (front if no is None else self._sequence(no.data, front, flags))
        # Which of the two is taken is not known: an empty one is no promise.
        return self._merged(doubted(ends))
