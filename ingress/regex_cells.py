"""A pattern's graph as cells that each read one character, for texts to be followed through it
(`regex_worst`).

A counted repeat has a cell for each count, a row of characters one for each of them. A *hub* reads nothing:
it joins ways, those of the graph's hubs and those that leave a counted repeat. What is asked of the next
character is kept apart from what being at a cell costs, because it depends on the character.

Characters become *kinds*: those that no class, guard or price of the pattern tells apart.

Must not know how texts are followed.
"""

from collections.abc import Mapping
from typing import NamedTuple

from .regex_checks import Check
from .regex_classes import Mask
from .regex_cuts import Cut, Tail, distances
from .regex_places import ANYWHERE, EXACT, UNLIMITED, Front, Graph, completing
from .regex_tree import Guard

MAX_CELLS = 320
MAX_EDGES = 800
MAX_TRIALS = 1200
MAX_KINDS = 40
NOWHERE = -1
"""The target of edges that lead to no cell."""
NO_TAILS: Mapping[int, Tail] = {}
MAX_WAYS_ON = 6
"""A hub is laid out as so many cells at most."""


class Beyond(Exception):
    """The pattern is larger than what texts are followed through."""


class Edge(NamedTuple):
    """Ways from a cell to another, after and before some characters; `sharp` when the engine surely takes
    them."""

    source: int
    target: int
    ways: float
    before: Mask
    after: Mask
    sharp: bool


class Trial(NamedTuple):
    """What is asked of the next character from a cell, after and before some: `test`, and `besides` (ns)."""

    cell: int
    ways: float
    before: Mask
    after: Mask
    test: Check | None
    besides: float


class Cells:
    """The cells of a graph. Raises Beyond.

    After the loops in `tails`, what is read may tell that ways were none (see `regex_cuts`).
    """

    def __init__(self, graph: Graph, tails: Mapping[int, Tail] = NO_TAILS) -> None:
        self.graph = graph
        self._tails = tails
        self.matches_nothing = False
        """Matching nothing is a match, so the first search that begins is the only one."""
        self.may: list[Mask] = []
        """By cell: the characters it may read; 0 for a hub."""
        self.surely: list[Mask] = []
        self.cost: list[float] = []
        """By cell: nanoseconds of being there once, whatever comes next."""
        self.ends: list[bool] = []
        """By cell: a search that comes there has matched."""
        self.edges: list[Edge] = []
        self.hubs: list[tuple[int, list[Edge]]] = []
        """Each hub with the edges into it, in an order in which what is needed comes first."""
        self.trials: list[Trial] = []
        self.finals: list[Edge] = []
        """From where a match is surely complete if the next character allows it; they lead nowhere."""
        self.cuts: list[Cut] = []
        self.every = graph.alphabet.all
        self.anything = graph.alphabet.anything
        self._enter: list[int] = []
        """The cell with which a node begins; -1 for one that is not followed."""
        self._leave: list[list[tuple[int, Mask]]] = []
        """The cells from which it is left, each with the characters that may come next: a hub has one for
        each condition on what comes after it."""
        self._loops: dict[int, set[int]] = {}
        """The cells of the loops in `tails`, the hub they are left by included; the last one loops."""
        self._aside = self._look_behinds()
        self._lay_out()
        self._connect()
        self._cut()
        self._price()
        if len(self.edges) > MAX_EDGES or len(self.trials) > MAX_TRIALS:
            raise Beyond

    # -- nodes

    def _look_behinds(self) -> dict[int, float]:
        """Return the nodes of look-behinds' bodies, each with its ways for one way to its start.

        They read what was read before, so they are not followed but paid for where they are tried. One that
        is tried at every place is: its body is then read from every place.
        """
        graph = self.graph
        aside: dict[int, float] = {}
        for node, high in enumerate(graph.high):
            preds = graph.preds[node]
            if high == ANYWHERE:
                if [edge[:3] for edge in preds] != [(0, 1.0, None)]:
                    aside[node] = 1.0
            elif aside and any(edge[0] in aside for edge in preds):
                if graph.most[node] == UNLIMITED or graph.cyclic:
                    raise Beyond
                aside[node] = sum(aside[edge[0]] * edge[1] for edge in preds if edge[0] in aside)
        return aside

    def _lay_out(self) -> None:
        """Give each node its cells."""
        graph = self.graph
        ends = completing(graph)
        self.matches_nothing = 0 in ends
        for node, high in enumerate(graph.high):
            if node in self._aside or high <= 0:
                self._enter.append(-1)
                self._leave.append([])
            elif node in graph.runs:
                self._row(node, node in ends)
            elif graph.most[node] == 1:
                cell = self._cell(high, graph.low[node], graph.scan[node], node in ends)
                self._enter.append(cell)
                self._leave.append([(cell, self.anything)])
            else:
                self._counted(node, node in ends)

    def _cell(self, may: Mask, surely: Mask, cost: float, ends: bool) -> int:
        if len(self.may) >= MAX_CELLS:
            raise Beyond
        self.may.append(may)
        self.surely.append(surely)
        self.cost.append(cost)
        self.ends.append(ends)
        return len(self.may) - 1

    def _row(self, node: int, ends: bool) -> None:
        """Lay out characters that follow one another."""
        graph = self.graph
        tests = graph.run_tests[node]
        begin = len(self.may)
        for i, (may, surely) in enumerate(zip(graph.runs[node], graph.low_runs[node], strict=True)):
            cell = self._cell(may, surely, 0.0, ends and i == len(tests))
            if i:
                self._next(cell - 1, cell)
                self._ask(cell - 1, tests[i - 1], tests[i - 1].step)
        self._enter.append(begin)
        self._leave.append([(begin + len(tests), self.anything)])

    def _counted(self, node: int, ends: bool) -> None:
        """Lay out a repeat of one class."""
        graph = self.graph
        least, most = graph.least[node], graph.most[node]
        count = max(least, 1) if most == UNLIMITED else most
        if node in self._tails:
            # As many more as are read until it is known who was in the loop.
            count += self._tails[node].length
        if len(self.may) + count > MAX_CELLS:
            raise Beyond
        test, besides = graph.scanned.get(node, (None, graph.scan[node]))
        begin = len(self.may)
        self._enter.append(begin)
        for i in range(1, count + 1):
            cell = self._cell(graph.high[node], graph.low[node], besides, ends and i >= least)
            if i > 1:
                self._next(cell - 1, cell)
            if test is not None and (i < count or most == UNLIMITED):
                self._ask(cell, test, 0.0)
        if most == UNLIMITED:
            self._next(cell, cell)
        first = begin + max(least, 1) - 1
        if first == cell:
            self._leave.append([(cell, self.anything)])
            return
        hub = self._cell(0, 0, 0.0, False)
        into = [Edge(one, hub, 1.0, self.anything, self.anything, True) for one in range(first, cell + 1)]
        self.hubs.append((hub, into))
        self._leave.append([(hub, self.anything)])
        if node in self._tails:
            self._loops[node] = set(range(begin, hub + 1))

    def _next(self, source: int, target: int) -> None:
        self.edges.append(Edge(source, target, 1.0, self.anything, self.anything, True))

    def _ask(self, cell: int, test: Check, besides: float) -> None:
        self.trials.append(Trial(cell, 1.0, self.anything, self.anything, test, besides))

    # -- edges

    def _conditions(self, guard: Guard) -> tuple[tuple[Mask, Mask], ...]:
        return ((self.anything, self.anything),) if guard is None else guard

    def _before_last(self, after: Mask) -> bool:
        """Say whether a place is only before the last newline or at the end: they are not among the places
        that are counted, and either is taken for the end."""
        alphabet = self.graph.alphabet
        return bool(after & alphabet.newline and not after & alphabet.goes_on)

    def _asked(self, after: Mask) -> Mask:
        """Return what may come next where something is asked."""
        return self.graph.alphabet.edge if self._before_last(after) else after

    def _read(self, edge: Edge) -> Edge:
        """Return an edge with what may come next where its cell is come to. One that reads the last newline
        is taken for one that may read any."""
        if self._before_last(edge.after):
            return edge._replace(after=self.may[edge.target] & self.graph.alphabet.newline, sharp=False)
        return edge

    def _connect(self) -> None:
        graph = self.graph
        ordered: list[int] = []
        seen: set[int] = set()
        for node, high in enumerate(graph.high):
            if high <= 0 and node not in self._aside:
                self._order(node, ordered, seen, 0)
        for hub in ordered:
            self._join(hub)
        for node, high in enumerate(graph.high):
            if high > 0 and node not in self._aside:
                self.edges += map(self._read, self._edges(self._enter[node], graph.preds[node]))
        finals = [edge for edge in self._edges(NOWHERE, graph.final) if edge.sharp]
        self.finals = [edge._replace(after=self._asked(edge.after)) for edge in finals]

    def _join(self, hub: int) -> None:
        """Lay out a hub: ways that may go on with the same characters are joined in one cell."""
        found: dict[Mask, list[Edge]] = {}
        for edge in self._edges(NOWHERE, self.graph.preds[hub]):
            found.setdefault(edge.after, []).append(edge)
        if len(found) > MAX_WAYS_ON:
            raise Beyond
        for after, edges in found.items():
            cell = self._cell(0, 0, 0.0, False)
            self.hubs.append((cell, [edge._replace(target=cell) for edge in edges]))
            self._leave[hub].append((cell, after))

    def _edges(self, target: int, preds: Front) -> list[Edge]:
        return [
            Edge(cell, target, ways, before, after & onward, bool(trust & EXACT))
            for source, ways, guard, trust in preds
            if source not in self._aside
            for cell, onward in self._leave[source]
            for before, after in self._conditions(guard)
            if after & onward
        ]

    def _cut(self) -> None:
        """Lay out what is known when a match is complete after a loop."""
        into: dict[int, list[tuple[int, int]]] = {}
        for edge in self.edges:
            into.setdefault(edge.target, []).append((edge.source, 1))
        for hub, edges in self.hubs:
            into[hub] = [(edge.source, 0) for edge in edges]
        for loop, own in self._loops.items():
            tail, length = self._tails[loop]
            first, last = self._enter[loop], max(own) - 1
            end = self._enter[tail] + length - 1
            self.cuts.append(Cut(end, last, 1.0))
            before = distances(into, first, set())
            past = distances(into, self._enter[tail], own)
            if before is None or past is None:
                continue
            del past[self._enter[tail]]
            if all(before.get(cell) == far for cell, far in past.items()):
                later = [cell for cell in before if cell not in (0, first)]
                self.cuts += [Cut(end, cell, 0.0) for cell in (*later, *range(first, first + length - 1))]

    def _order(self, hub: int, ordered: list[int], seen: set[int], depth: int) -> None:
        """Put a hub after the hubs that lead to it."""
        if hub in seen:
            return
        if depth > 40:
            raise Beyond
        seen.add(hub)
        graph = self.graph
        for source, _, _, _ in graph.preds[hub]:
            if graph.high[source] <= 0 and source not in self._aside:
                self._order(source, ordered, seen, depth + 1)
        ordered.append(hub)

    # -- prices

    def _price(self) -> None:
        """Let the cells pay for what is spent and asked where they are left, and for look-behinds."""
        graph = self.graph
        own = list(graph.spent)
        for node, ways, guard, test, most in graph.asked:
            if node in self._aside:
                own[node] += ways * most if guard is not None else 0.0
                continue
            if guard is None:
                own[node] -= ways * most
            self._try(node, ways, guard, test, test.step)
        for node, cost, guard in graph.guarded:
            if node in self._aside:
                own[node] += cost
            else:
                self._try(node, 1.0, guard, None, cost)
        for node, cost in enumerate(own):
            if node not in self._aside:
                self._try(node, 1.0, None, None, cost)
        self._pay_look_behinds(own)

    def rest(self) -> list[float] | None:
        """Return by cell what everything it leads to costs at most; None where ways come round."""
        leads: list[list[tuple[int, float]]] = [[] for _ in self.may]
        own = list(self.cost)
        for edge in (*self.edges, *(edge for _, into in self.hubs for edge in into)):
            leads[edge.source].append((edge.target, edge.ways))
        for trial in self.trials:
            price = trial.besides + (0.0 if trial.test is None else max(ns for _, ns in trial.test.pieces))
            own[trial.cell] += trial.ways * price
        known = [-1.0] * len(own)
        for begin in range(len(own)):
            waiting = [begin] if known[begin] < 0.0 else []
            while waiting:
                cell = waiting[-1]
                ahead = [target for target, _ in leads[cell] if known[target] < 0.0]
                if known[cell] >= 0.0 or not ahead:
                    waiting.pop()
                    known[cell] = own[cell] + sum(ways * known[target] for target, ways in leads[cell])
                elif len(waiting) > len(own):
                    return None
                else:
                    waiting.append(ahead[0])
        return known

    def _try(self, node: int, ways: float, guard: Guard, test: Check | None, besides: float) -> None:
        """Let the ways from a node pay, wherever a guard holds."""
        for cell, onward in self._leave[node]:
            if test is None and guard is None and onward == self.anything:
                self.cost[cell] += ways * besides
                continue
            for before, after in self._conditions(guard):
                asked = self._asked(after & onward)
                if asked:
                    self.trials.append(Trial(cell, ways, before, asked, test, besides))

    def _pay_look_behinds(self, own: list[float]) -> None:
        """Let those who try a look-behind pay for all of its body."""
        graph = self.graph
        bodies: dict[int, float] = {}
        start = -1
        for node, ways in self._aside.items():
            if graph.high[node] == ANYWHERE:
                start = node
                bodies[start] = ways * own[node]
                continue
            asked = sum(test.test for test in graph.run_tests.get(node, ()))
            read = graph.scan[node] * graph.most[node] if graph.high[node] > 0 else 0.0
            left = max(1, graph.most[node] - max(graph.least[node], 1) + 1)
            bodies[start] += ways * (asked + read + left * own[node])
        for node, cost in bodies.items():
            for source, ways, guard, _ in graph.preds[node]:
                if source in self._aside:
                    raise Beyond
                self._try(source, ways, guard, None, cost)


class Kinds:
    """The kinds of characters of some cells.

    `masks` are the kinds; `set_of` gives the kinds that a mask of the pattern meets, a bit each, the bit
    after the last for the place before the text; `alike` numbers the kinds (that place included) so that
    those with the same number are alike to everything that looks back at them.
    """

    def __init__(self, cells: Cells) -> None:
        alphabet = cells.graph.alphabet
        into = [edge for _, edges in cells.hubs for edge in edges]
        behind = {edge.before for edge in cells.edges} | {edge.before for edge in into}
        behind |= {trial.before for trial in cells.trials} | {edge.before for edge in cells.finals}
        masks = {*cells.may, *cells.surely, *behind}
        masks |= {edge.after for edge in (*cells.edges, *cells.finals)}
        masks |= {trial.after for trial in cells.trials}
        tests = {id(trial.test): trial.test for trial in cells.trials if trial.test is not None}
        for test in tests.values():
            if test.tells:
                masks.update(mask for mask, _ in test.pieces)
        self.masks = _parted(alphabet.all, masks)
        parts = [*self.masks, alphabet.edge]
        known: dict[Mask, int] = {}
        for mask in masks:
            bits = 0
            for i, part in enumerate(parts):
                if part & mask:
                    bits |= 1 << i
            known[mask] = bits
        self.set_of = known
        telling = {known[mask] for mask in behind}
        numbers: dict[tuple[int, ...], int] = {}
        self.alike = [
            numbers.setdefault(tuple(bits >> i & 1 for bits in telling), len(numbers))
            for i in range(len(parts))
        ]

    def prices(self, test: Check) -> list[float]:
        """Return what a test costs by kind, the dearest character of each."""
        prices = [0.0] * len(self.masks)
        for mask, ns in test.pieces:
            for i, kind in enumerate(self.masks):
                if kind & mask and ns > prices[i]:
                    prices[i] = ns
        return prices


def _parted(every: Mask, masks: set[Mask]) -> list[Mask]:
    """Cut all characters into parts that no mask cuts."""
    parts = [every]
    for mask in masks:
        cut = []
        for part in parts:
            common = part & mask
            if common and common != part:
                cut.append(common)
                cut.append(part & ~mask)
            else:
                cut.append(part)
        parts = cut
        if len(parts) > MAX_KINDS:
            raise Beyond
    return parts
