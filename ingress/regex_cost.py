"""What one search of a pattern can cost, as a function of the length of the text, from above.

Counts, for each position of the graph and each place of the text, the ways in which a search that starts
anywhere can come to be there: what a backtracking engine without memory visits is never more. A count is a
polynomial in the place; see `Poly`. Ways add up where the graph joins, but only those whose last characters
can be the same. In a loop they pile up only if a way that enters now can meet one that entered before
(infinite ambiguity); if two ways inside a loop can part and meet again the pattern is exponential.

A position from which a match can no longer fail is entered once in a whole search, because the search ends
there: it counts as one, whatever leads to it.

docs/ingress.md has the argument why this is sound.
"""

import math

from .regex_classes import Mask
from .regex_components import components
from .regex_entries import entries_apart
from .regex_knots import Knot
from .regex_places import ANYWHERE, ASKS_NOTHING, UNLIMITED, Explosive, Front, Graph, TooComplex, completing
from .regex_poly import Cost, Poly, add, highest, piled, times
from .regex_trails import Trails
from .regex_tree import allowed

MAX_COUNT = 1e12
MULTIPLY_UP_TO = 4096
MAX_CELLS = 24
MAX_STEPS = 700

Cell = tuple[Mask, Poly]
Profile = list[Cell]
"""Ways by the last character: disjoint masks, each with its ways."""


def cost_of(graph: Graph) -> Cost:
    """Return the cost of a search. Raises Explosive, TooComplex."""
    return _Analysis(graph).run()


class _Analysis:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.steps = 0
        size = len(graph.high)
        alphabet = graph.alphabet
        self.all = alphabet.anything
        self.held: list[Poly] = [()] * size
        """Ways to be at a position."""
        self.left: list[Poly] = [()] * size
        """Ways to go on from it."""
        self.profiles: dict[int, Profile] = {}
        self.sure = self._cannot_fail()
        self.again = self._in_hub_loops() if self.sure else set()
        """Positions that one way can come to again and again."""
        self.extra: dict[int, float] = {}
        """What a position bears of the cost of its loops' hubs."""
        self.shared = self._shared_hubs()
        self.trails = Trails(graph, 0 in self.sure, self.step)

    def step(self, count: int = 1) -> None:
        self.steps += count
        self.graph.work += count
        if self.steps > MAX_STEPS:
            raise TooComplex("it takes too much work to analyse")

    # -- where a match can no longer fail

    def _cannot_fail(self) -> set[int]:
        # A count that is not reached yet can still fail, and so can a row of characters.
        graph = self.graph
        return {node for node in completing(graph) if graph.least[node] <= 1 and node not in graph.runs}

    def _shared_hubs(self) -> set[int]:
        """Return the loops' hubs that only the one way of the sure positions comes to."""
        graph = self.graph
        return {
            hub
            for hub in graph.width
            if graph.preds[hub]
            and all(edge[0] in self.sure and graph.high[edge[0]] for edge in graph.preds[hub])
        }

    # -- the whole

    def run(self) -> Cost:
        graph = self.graph
        alphabet = graph.alphabet
        if 0 in self.sure:
            # Matching nothing is a match: the first start succeeds.
            self.profiles[0] = [(alphabet.edge, (1.0,))]
            self.held[0] = self.left[0] = (1.0,)
        else:
            self.profiles[0] = [(alphabet.all, (0.0, 1.0)), (alphabet.edge, (1.0,))]
            self.held[0] = self.left[0] = (0.0, 1.0)
        for component in self._components(self.sure):
            if len(component) == 1 and (component[0] in self.sure or not self._returns(component[0])):
                self._single(component[0])
            else:
                self._knot(component)
        return self._total()

    def _returns(self, node: int) -> bool:
        return any(edge[0] == node for edge in self.graph.preds[node])

    def _in_hub_loops(self) -> set[int]:
        """Return the nodes on a loop through a hub, sure ones too."""
        if not self.graph.cyclic:
            return set()
        loops = self._components(set())
        return {node for nodes in loops if len(nodes) > 1 or self._returns(nodes[0]) for node in nodes}

    def _components(self, sure: set[int]) -> list[list[int]]:
        """Return the strongly connected components, predecessors first, without the loops of `sure` ones: a
        sure position's number does not depend on any."""
        graph = self.graph
        size = len(graph.high)
        if not graph.cyclic:
            return [[node] for node in range(1, size)]

        def before(node: int) -> list[int]:
            if node in sure and graph.high[node]:
                return []
            return [edge[0] for edge in graph.preds[node] if edge[0]]

        return components(size, before)

    # -- ways in

    def _profile(self, node: int) -> Profile:
        profile = self.profiles.get(node)
        if profile is None:
            high = self.graph.high[node]
            if high == ANYWHERE:
                profile = [(self.all, self._most(self._cells(self.graph.preds[node], self.all)))]
            elif high:
                profile = [(high, self.left[node])]
            else:
                profile = self._cells(self.graph.preds[node], self.all)
            self.profiles[node] = profile
        return profile

    def _cells(self, front: Front, after: Mask) -> Profile:
        """Add up the ways of a front by last character, given the class of the next one."""
        cells: Profile = []
        for source, ways, guard, _ in front:
            before = allowed(guard, after)
            if not before:
                continue
            for mask, poly in self._profile(source):
                mask &= before
                if mask and poly:
                    cells = self._split(cells, mask, times(poly, ways))
        return cells

    def _split(self, cells: Profile, mask: Mask, poly: Poly) -> Profile:
        """Add ways to the cells of a mask, cutting cells where it ends."""
        self.step(len(cells) + 1)
        found: Profile = []
        for cell, held in cells:
            common = cell & mask
            if not common:
                found.append((cell, held))
                continue
            found.append((common, add(held, poly)))
            rest = cell & ~mask
            if rest:
                found.append((rest, held))
            mask &= ~cell
        if mask:
            found.append((mask, poly))
        if len(found) > MAX_CELLS:
            found = _fewer(found)
        return found

    def _into(self, front: Front, after: Mask) -> Poly:
        """Return the ways into a place before one of `after`, for the worst last character."""
        if len(front) == 1:
            source, ways, guard, _ = front[0]
            if guard is None and source and self.graph.high[source] > 0:
                return times(self.left[source], ways)
        return self._most(self._cells(front, after))

    def _most(self, cells: Profile) -> Poly:
        if len(cells) == 1:
            return cells[0][1]
        most: Poly = ()
        for _, poly in cells:
            most = highest(most, poly)
        if most:
            # What happens once after one character and once after another can be at two places of a text.
            most = (sum(poly[0] for _, poly in cells if poly), *most[1:])
        if len(most) > 1 and most[0] and max(sum(poly[:2]) for _, poly in cells) <= most[1]:
            # What happens once, at one place, adds nothing where each place is counted for as much.
            most = (0.0, *most[1:])
        if any(x > MAX_COUNT for x in most):
            raise Explosive(f"there are over {MAX_COUNT:.0e} ways to be at one place")
        return most

    # -- one position

    def _single(self, node: int) -> None:
        graph = self.graph
        high = graph.high[node]
        if high == 0 or high == ANYWHERE:
            self._profile(node)
            return
        least, most = graph.least[node], graph.most[node]
        if node in self.sure:
            again = node in self.again
            self.held[node] = (0.0, 1.0) if most == UNLIMITED or again else (float(min(most, 1 << 20)),)
            # It is left for good, once; in a loop through a hub perhaps to come back.
            self.left[node] = (0.0, 1.0) if again else (1.0,)
            return
        run = graph.runs.get(node)
        into = self._into(graph.preds[node], high if run is None else run[0])
        if most == 1 or not into:
            self.held[node] = self.left[node] = into
            return
        # A counted repeat is entered at its required part, and at its optional part just so much later.
        entered = graph.preds[graph.halves.get(node, node)]
        overlap, apart = self._overlap(node, entered), entries_apart(graph, entered, high)
        held = self._held(into, overlap, most, apart)
        self.held[node] = held
        if most != UNLIMITED and most - least + 1 < min(overlap, most):
            # Each way in leaves after least..most characters, so few leave at one place.
            self.left[node] = times(into, float(most - least + 1))
        elif most != UNLIMITED:
            self.left[node] = (min(held[0], into[0] * (most - least + 1)), *held[1:])
        else:
            self.left[node] = held
        if (
            apart == 1
            and most == least
            and any(edge[0] == node and edge[3] & ASKS_NOTHING for edge in graph.final)
        ):
            # Whoever reaches the count ends the search, so all others fall short: by half, on average.
            self.held[node] = times(held, 0.5)

    def _held(self, into: Poly, overlap: float, most: int, apart: int = 1) -> Poly:
        """Return how many ways a loop holds, when those of `overlap` places at most can be in it together and
        it is entered at one of `apart` places at most."""
        places = min(overlap, float(most))
        if places > MULTIPLY_UP_TO and places > apart:
            return piled(into, apart)
        held = (0.0, *times(into, math.ceil(places / apart))[1:])
        if into[0]:
            # What enters once in the whole text stays for as long as the loop lasts.
            held = add(held, (into[0] * most,) if most <= MULTIPLY_UP_TO else (0.0, into[0]))
        return held

    def _overlap(self, node: int, entered: Front) -> float:
        """Bound how many places apart two ways can enter a loop over one class and both still be in it."""
        high, enough = self.graph.high[node], float(self.graph.most[node])
        return 1.0 + self.trails.longest(entered, high, high, {}, node, enough)

    def _knot(self, component: list[int]) -> None:
        """Fill in a loop through hubs: each way in is in at most one way at each of its positions."""
        graph = self.graph
        knot = Knot(graph, component, self.step)
        knot.must_not_explode()
        entering: Profile = []
        for _, targets, outside in knot.doors:
            for target in targets:
                ways = self._most(self._cells(outside, graph.high[target]))
                if ways:
                    entering = self._split(entering, graph.high[target], ways)
        if not entering:
            return
        into = self._most(entering)
        overlap = 1.0
        if knot.entries_may_meet(self._lasts):
            endless = float(UNLIMITED)
            seen = dict.fromkeys(component, endless)
            for _, _, outside in knot.doors:
                longest = self.trails.longest(outside, knot.union, knot.union, seen, -2, endless)
                overlap = max(overlap, 1.0 + longest)
        held = self._held(into, overlap, UNLIMITED)
        for node in knot.places:
            self.held[node] = self.left[node] = held
        if knot.deterministic:
            # Each way in is in one place at a time, and comes to a hub once in `width` characters at most.
            own = knot.inside | self.sure
            hubs = [
                hub
                for hub, width in graph.width.items()
                if width > 1
                and any(edge[0] in knot.inside for edge in graph.preds[hub])
                and all(edge[0] in own for edge in graph.preds[hub])
            ]
            share = sum(graph.spent[hub] / graph.width[hub] for hub in hubs)
            self.shared.update(hubs)
            for node in knot.places:
                self.extra[node] = share
        for hub in knot.hubs:
            cells: Profile = []
            for source, count, _ in knot.sources(hub):
                cells = self._split(cells, graph.high[source], times(held, count))
            outside = [edge for edge in graph.preds[hub] if edge[0] not in knot.inside]
            for mask, more in self._cells(outside, self.all):
                cells = self._split(cells, mask, more)
            self.profiles[hub] = cells

    def _lasts(self, node: int) -> Mask:
        """Return the characters that can be the last before a node's ways go on."""
        mask = 0
        for cell, _ in self._profile(node):
            mask |= cell
        return mask

    # -- the sum

    def _total(self) -> Cost:
        """Add up what every position costs, for the worst character at each place."""
        graph = self.graph
        sums = _Sums()
        # One way, at one position at a time: only the dearest counts.
        alone = max([0.0, *(self._bear(node, sums) for node in range(len(graph.high)))])
        for (node, before), spent in graph.spent_after.items():
            if node in self.sure and node and graph.high[node] > 0:
                alone += spent
                continue
            for mask, poly in self._profile(node):
                if mask & before:
                    sums.bear(mask & before, poly, spent)
        for hub in self.shared:
            if any(edge[0] in self.sure for edge in graph.preds[hub]):
                alone += graph.spent[hub] / graph.width[hub]
        # A search starts nowhere after the place where that one way began.
        starting = graph.spent[0]
        if 0 in self.sure:
            sums.bear(self.all, (starting, alone), 1.0)
        else:
            sums.bear(self.all, (0.0, 1.0), max(alone, starting))
        return Cost((sums.once(), *self._worst_place(sums.by_mask())[1:]))

    def _bear(self, node: int, sums: "_Sums") -> float:
        """Add what a node costs; return what is not added, as the one way of the sure positions bears it."""
        graph = self.graph
        high, spent = graph.high[node], graph.spent[node]
        if not node or (high <= 0 and node in self.shared):
            return 0.0
        if high <= 0:
            for mask, poly in self._profile(node):
                sums.bear(mask, poly, spent)
            return 0.0
        if node in self.sure:
            if node in self.again:
                return graph.scan[node] + spent
            sums.bear(self.all, (1.0,), spent)
            return graph.scan[node]
        run = graph.runs.get(node)
        sums.bear(high if run is None else run[0], self.held[node], graph.scan[node])
        if run is not None:
            for mask, test in zip(run, graph.run_tests[node], strict=False):
                sums.bear(mask, self.held[node], test.test)
        sums.bear(high, self.left[node], spent + self.extra.get(node, 0.0))
        return 0.0

    def _worst_place(self, by_mask: dict[Mask, Poly]) -> Poly:
        """Return what a place costs whose character is the worst there is."""
        wide = [(mask, poly) for mask, poly in by_mask.items() if mask & (mask - 1)]
        cells: Profile = []
        for mask, poly in wide:
            cells = self._split(cells, mask, poly)
        most = self._most(cells) if cells else ()
        for mask, poly in by_mask.items():
            if mask & (mask - 1) == 0:
                beside = next((other for cell, other in cells if cell & mask), ())
                most = highest(most, add(poly, beside))
        return most


class _Sums:
    """Costs by the characters that they are for, in nanoseconds."""

    def __init__(self) -> None:
        self._sums: dict[Mask, list[float]] = {}

    def bear(self, mask: Mask, poly: Poly, nanoseconds: float) -> None:
        """Add so much for each of `poly` ways, wherever a character of `mask` is."""
        held = self._sums.get(mask)
        if held is None:
            self._sums[mask] = [x * nanoseconds for x in poly]
            return
        held += [0.0] * (len(poly) - len(held))
        for k, x in enumerate(poly):
            held[k] += x * nanoseconds

    def once(self) -> float:
        """Return what is spent once in the whole text."""
        return sum(held[0] for held in self._sums.values() if held)

    def by_mask(self) -> dict[Mask, Poly]:
        """Return the rest: what is spent at places."""
        return {mask: (0.0, *held[1:]) for mask, held in self._sums.items()}


def _fewer(cells: Profile) -> Profile:
    """Join cells into half as many, each with the most of its parts: more, never less."""
    cells = sorted(cells, key=lambda cell: (len(cell[1]), cell[1][-1:]))
    joined = []
    for i in range(0, len(cells), 2):
        pair = cells[i : i + 2]
        mask, poly = pair[0]
        if len(pair) == 2:
            mask, poly = mask | pair[1][0], highest(poly, pair[1][1])
        joined.append((mask, poly))
    return joined
