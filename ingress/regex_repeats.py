"""What a repeat adds to the graph: a position that loops, rounds written out, or a loop through a hub.

What is too long to be kept apart is bounded: more ways, never fewer, and a note that says so.
Must not know how a pattern's other constructs are laid out.
"""

from re import _constants as sre  # type: ignore[attr-defined]
from typing import Any

from .regex_checks import Check, derived
from .regex_classes import Class
from .regex_places import (
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
    Places,
    doubted,
    where,
)
from .regex_settled import AGAIN, cannot_fail, chooses
from .regex_tree import REPEATS, UNITS, Guard, Unit, captures, size, unwrapped
from .regex_units import (
    CACHED_BYTES,
    COPIED_BYTE_NS,
    EXIT_NS,
    FAR_BYTE_NS,
    FRESH_BYTE_NS,
    KEPT_CONTEXT,
    KEPT_EXIT_NS,
    KEPT_GROUP,
    LAZY_NS,
    MARK_NS,
    MORE_NS,
    REPEAT_NS,
    REPEAT_ONE_NS,
    ROUND_NS,
    STACK_BYTES,
    UNTIL_NS,
)


class Repeats(Places):
    """Lays out repeats; what is in them is laid out by the class that knows the other constructs."""

    def _sequence(self, items: Any, front: Front, flags: int) -> Front:
        raise NotImplementedError

    def _unit(self, unit: Unit, front: Front, flags: int) -> Front:
        raise NotImplementedError

    def _copied(self) -> float:
        """Return what copying all groups' places costs, as the engine does at each choice inside a repeat."""
        return COPIED_BYTE_NS * KEPT_GROUP * self._marks if self._in_repeat else 0.0

    def _saved(self, contexts: int = 1) -> float:
        """Return what it costs to begin a choice that takes so many of the engine's contexts. In a loop they
        are kept, with the groups' places, round after round."""
        cost = self._copied()
        if self._in_loop:
            cost -= _keeping(self._kept)
            self._kept += KEPT_CONTEXT * contexts + KEPT_GROUP * self._marks
            cost += _keeping(self._kept)
        return cost

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
            self._spend(front, REPEAT_NS + MORE_NS + UNTIL_NS)  # Even where no round is found.
            cost = ROUND_NS + MORE_NS + UNTIL_NS + 2 * MARK_NS * len(groups)
            if not self._copies:
                self._marks = max(self._marks, *groups, 0)
                bytes_kept = 2 * KEPT_CONTEXT + KEPT_GROUP * self._marks
                cost += COPIED_BYTE_NS * KEPT_GROUP * self._marks + _keeping(bytes_kept)
            return self._class_repeat(op, least, UNLIMITED, inner, front, inner_flags, cost)
        if not self._copies and not self._in_repeat:
            # What is in it is known for the repeats in it, too.
            self._marks = max(self._marks, captures(body))
        # A round that gives nothing back may end elsewhere than where the next could go on from.
        trust = ASKS_NOTHING if op is sre.POSSESSIVE_REPEAT and chooses(body) else PLAIN
        self._in_repeat += 1
        end = self._group_repeat(least, most, body, front, flags, trust)
        self._in_repeat -= 1
        if op is sre.POSSESSIVE_REPEAT:
            self.graph.notes.add("a possessive repeat of a group is taken for a plain one")
            return doubted(end, ASKS_NOTHING)
        return end

    def _group_repeat(self, least: int, most: int, body: Any, front: Front, flags: int, trust: int) -> Front:
        if least == most == 1:
            self._spend(front, REPEAT_NS + ROUND_NS + self._saved(2))
            front = self._sequence(body.data, front, flags)
            self._spend(front, UNTIL_NS)
            self._tail = {}
            return front
        if least == 0 and most == 1:
            self._spend(front, REPEAT_NS + MORE_NS + UNTIL_NS + self._saved(2))
            end = self._sequence(body.data, front, flags)
            self._spend(end, UNTIL_NS)
            self._tail = {}
            return self._merged([*front, *end])
        if most <= MAX_ROUNDS and most * size(body) <= WRITTEN_OUT:
            return self._written_out(least, most, body, front, flags, trust)
        if most == sre.MAXREPEAT and 1 < least <= MAX_ROUNDS and least * size(body) <= WRITTEN_OUT:
            # So that its first rounds are told from the others.
            front = self._written_out(least - 1, least - 1, body, front, flags, trust)
            least = 1
        return self._loop(least, most, body, front, flags, trust)

    def _class_repeat(
        self, op: Any, least: int, most: int, unit: Unit, front: Front, flags: int, extra: float = 0.0
    ) -> Front:
        trust = PLAIN
        if least == most == 1:
            self._spend(front, REPEAT_ONE_NS)
            front = self._unit(unit, front, flags)
            self._spend(front, KEPT_EXIT_NS)
            return front
        test = self._class(unit, flags)
        if not test.high:
            return front if least == 0 else []
        # In a loop a count tells apart what a loop of the class would not.
        small = 24 if op is sre.POSSESSIVE_REPEAT else 12 if self._in_loop else 2 if least == most else 0
        if most <= small:
            return self._class_written_out(op, least, most, unit, front, flags)
        if most != UNLIMITED and self._in_loop:
            self.graph.notes.add("a long counted repeat inside a repeat is taken for an unlimited one")
            most = UNLIMITED
            # Where more than two must be there it is not known whether they are: the match can still fail.
            trust = ASKS_NOTHING if least <= 2 else 0
            least = min(least, 2)
        return self._class_loop(op, least, most, test, front, extra, trust)

    def _class_loop(
        self, op: Any, least: int, most: int, test: Check, front: Front, extra: float, trust: int
    ) -> Front:
        """Lay out a repeat of one class as a position that loops, after one for what must be there."""
        alphabet = self._alphabet
        low, high = of = (test.low, test.high)
        possessive = op is sre.POSSESSIVE_REPEAT
        lazy = op is sre.MIN_REPEAT and least != most
        # A lazy repeat counts what must be there as any other does, and then looks at one character a time.
        besides = extra + (LAZY_NS + test.step if lazy else 0.0)
        cost = besides + (test.test - test.step if lazy else test.scan)
        exit_ns, kept_exit_ns = EXIT_NS + self._copied(), KEPT_EXIT_NS + self._copied()
        self._spend(front, REPEAT_ONE_NS + (0.0 if possessive else self._saved()))
        self._ask(front, test)
        first = 0
        if least > 1 and not self._in_loop and most > least:
            # First what must be there, then what may: after the first part the second cannot fail.
            first = self._repeated(of, front, least, least, (test, extra), extra + test.scan, exit_ns)
            front = [(first, 1.0, None, PLAIN)]
            least, most = 0, most - least if most != UNLIMITED else UNLIMITED
        left = 0.0
        if op is sre.MIN_REPEAT and not lazy:
            left = exit_ns + REPEAT_ONE_NS
        elif not possessive or most != UNLIMITED:
            left = kept_exit_ns if least == most else exit_ns
        node = self._repeated(of, front, least, most, (test, besides), cost, left)
        if first:
            self.graph.halves[node] = first
        guard: Guard = None
        if possessive:
            trust &= ASKS_NOTHING
            if most == UNLIMITED:
                self._ask([(node, 1.0, None, PLAIN)], derived(alphabet.all, low, 0.0, KEPT_EXIT_NS))
                # It gives nothing back: whatever comes next does so where the run has ended.
                guard = ((alphabet.anything, self._other_than(low)),)
                trust |= EXACT if low == high and not self._in_loop else 0
        end = [(node, 1.0, guard, trust)]
        if op is sre.MAX_REPEAT and not extra:
            self._tail = {node: left} | {edge[0]: exit_ns for edge in front if self.graph.least[edge[0]] > 1}
        if possessive:
            trust = ASKS_NOTHING
        return self._joined(doubted(front, trust), end) if least == 0 else end

    def _repeated(
        self,
        of: Class,
        front: Front,
        least: int,
        most: int,
        asks: tuple[Check, float],
        scan: float,
        left: float,
    ) -> int:
        """Make the node of a repeat of one class. What it `asks` for each character; leaving costs `left`."""
        if self._copies:
            return self._new(of, front, least, most, self._copies)
        node = self._new(of, front, least, most, scan)
        self.graph.scanned[node] = asks
        self.graph.spent[node] += left
        return node

    def _class_written_out(
        self, op: Any, least: int, most: int, unit: Unit, front: Front, flags: int
    ) -> Front:
        possessive, lazy = op is sre.POSSESSIVE_REPEAT, op is sre.MIN_REPEAT
        test = self._class(unit, flags)
        other = ((self._alphabet.anything, self._other_than(test.low)),)
        exact = EXACT if test.low == test.high else 0
        end: Front = []
        exit_ns = EXIT_NS + self._copied()
        self._spend(front, REPEAT_ONE_NS + (0.0 if possessive else self._saved()))
        for step in range(most):
            if step >= least:
                left = front
                if possessive:
                    # It is left before its last round only where the run ends.
                    left = where(front, other, exact | ASKS_NOTHING)
                self._spend(left, KEPT_EXIT_NS if possessive else exit_ns)
                end += left
            front = self._unit(unit, front, flags)
        self._spend(front, KEPT_EXIT_NS if possessive or (least == most and not lazy) else exit_ns)
        if lazy:
            # It looks for one more when what follows has failed, even at the most.
            self._spend(front, REPEAT_ONE_NS)
        elif not possessive and front:
            # Those that are left before came from further back: only the last is told apart.
            self._tail = {front[0][0]: KEPT_EXIT_NS if least == most else exit_ns}
        return self._merged(end + front)

    def _written_out(self, least: int, most: int, body: Any, front: Front, flags: int, trust: int) -> Front:
        end: Front = []
        self._spend(front, REPEAT_NS)
        must = ROUND_NS if body.getwidth()[0] else MORE_NS
        for step in range(most):
            if step >= least:
                end += front
            self._spend(front, self._saved(2) + (must if step < least else MORE_NS + UNTIL_NS))
            front = self._merged(doubted(self._sequence(body.data, front, flags), trust))
            if not front:
                break
        self._spend(front, UNTIL_NS)
        self._tail = {}
        return self._merged(end + front)

    def _loop(self, least: int, most: int, body: Any, front: Front, flags: int, trust: int) -> Front:
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
        self._kept = self._kept if self._in_loop else 0
        self._in_loop += 1
        more = (ROUND_NS if least else MORE_NS + UNTIL_NS) + self._saved()
        self._spend(front, factor * (REPEAT_NS + more))
        entry = [(source, ways * factor, guard, trust) for source, ways, guard, trust in front]
        end = doubted(self._sequence(body.data, [*entry, (hub, 1.0, None, PLAIN)], flags), trust)
        end = [edge for edge in end if edge[0] > hub]
        around = MORE_NS + UNTIL_NS + self._saved()
        self._in_loop -= 1
        self._floor = floor
        self._tail = {}
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
            # Rounds that match nothing may still ask something: only leaving them all out asks nothing. And a
            # round that must be may never match nothing though it could: `b*+` gives back no `b`.
            passed = front if least == 0 else doubted(front, ASKS_NOTHING if cannot_fail(body) else 0)
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
            elif op is AGAIN:
                ways *= av[1]
            elif op is sre.ATOMIC_GROUP:
                ways *= self._empty_ways(av)
            elif op is sre.BRANCH:
                ways *= sum(self._empty_ways(one) for one in av[1])
            elif op is sre.GROUPREF_EXISTS:
                ways *= sum(self._empty_ways(one) if one is not None else 1.0 for one in av[1:])
            if ways == 0.0 or ways > MAX_WAYS:
                return min(ways, MAX_WAYS)
        return ways


def _keeping(kept: int) -> float:
    """Return what it costs a round of a loop when so many bytes are kept of each."""
    if kept <= STACK_BYTES:
        return FAR_BYTE_NS * max(0, kept - CACHED_BYTES)
    return FRESH_BYTE_NS * kept
