"""Texts that are bad for a pattern, made from the automaton the admission itself looks at.

Two kinds. Where the admission found a mean cost it also found the text that has it. And whatever it found,
the cells of the pattern (`regex_worst`) are walked here, character by character, keeping the few texts that
cost the most so far: that finds the runs in which ways pile up.
"""

import warnings
from collections.abc import Iterator
from re import _parser  # type: ignore[attr-defined]

from outfeed.ingress.regex_cells import Beyond, Cells, Edge, Kinds
from outfeed.ingress.regex_classes import KINDS, Alphabet, Mask
from outfeed.ingress.regex_graph import Builder
from outfeed.ingress.regex_places import Explosive, Graph, TooComplex
from outfeed.ingress.regex_worst import MAX_WORK, core_pattern, ffi, lib, worst_of
from outfeed.ingress.stop_regex import codes_of

STEPS, WIDTH, LOOPS, PERIODS, MANY = 40, 4, 4, 6, 1e6
FAILING = "\x00"
RUNS = (12, 99)
DEAREST = "½_!。"
"""Characters that take the engine the most looks to classify."""

State = dict[int, tuple[float, bool]]
"""By cell: the ways to be there, and whether a search surely is."""


def graph_of(pattern: str) -> Graph | None:
    """Return a pattern's graph, if it has one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parsed = _parser.parse(pattern)
    flags = parsed.state.flags
    try:
        codes, folds, _ = codes_of(pattern, parsed, flags)
        return Builder(Alphabet(codes, folds=folds)).build(parsed, flags)
    except (Explosive, TooComplex, RecursionError, ValueError):
        return None


class Adversary:
    """Makes the texts that are worst for a pattern's automaton. What it walks it walks once."""

    def __init__(self, pattern: str) -> None:
        graph = graph_of(pattern)
        self._rounds: list[tuple[str, str]] = []
        """(text, end): the text goes round its end until it is long enough."""
        self._bodies: list[tuple[str, str]] = []
        """(head, body), the body again and again."""
        self._piles: list[tuple[str, str]] = []
        """The same, such that ways pile up in them."""
        if graph is None:
            return
        chars = _Chars(graph.alphabet)
        found = worst_of(graph, 0.0, 32_000)
        if found is not None and found.text:
            for dearest in (True, False):
                self._rounds.append((chars.text(found.text, dearest), ""))
        try:
            walker = _Walker(graph)
        except Beyond:
            return
        for piling in walker.piling():
            text = chars.text(piling, dearest=False)
            # Which part of it comes round is not told.
            self._piles += [(text, text[-period:]) for period in range(1, min(len(text), PERIODS) + 1)]
        for walk in walker.walks():
            self._rounds.append((chars.text(walk, dearest=True), ""))
            text = chars.text(walk, dearest=False)
            self._rounds += [(text, end) for end in ("\x00", "é", "\n!")]
        for way, kind in walker.ways_into_loops():
            head, char = chars.text(way, dearest=False), chars.text([kind], dearest=True)
            self._bodies += [("", head), ("", head + 40 * char), (head, char)]

    def texts(self, length: int, words: list[str]) -> Iterator[str]:
        """Return texts of `length` characters, those that the admission found first. Where ways pile up they
        end with one of `words` as well, texts that match, so that the last of it matches or does not."""
        for text, end in self._rounds:
            if text:
                yield _long(text, length)[: length - len(end)] + end
        for head, body in self._bodies:
            if body:
                yield (head + body * (length // len(body) + 1))[:length]
        for head, body in self._piles:
            full = (head + body * (length // len(body) + 1))[:length]
            for ending in ("", FAILING, *words):
                yield full[: max(0, length - len(ending))] + ending
        # What would match in the end comes to nothing, again and again.
        for head, body in {*self._bodies, *self._piles}:
            for run in RUNS:
                for breaker in ("\n", FAILING):
                    unit = (head + body * run)[:run] + breaker
                    yield (unit * (length // run + 1))[:length]


class _Walker:
    """Follows texts through a pattern's cells."""

    def __init__(self, graph: Graph) -> None:
        self.edge = graph.alphabet.edge
        self.cells = cells = Cells(graph)
        self._told = kinds = Kinds(cells)
        self.kinds = kinds.masks
        self.follow: dict[int, list[Edge]] = {}
        for edge in cells.edges:
            self.follow.setdefault(edge.source, []).append(edge)
        self.asks: dict[int, list[tuple[Mask, float, list[float]]]] = {}
        for trial in cells.trials:
            row = [0.0] * len(self.kinds) if trial.test is None else kinds.prices(trial.test)
            row = [
                price + trial.besides if trial.after & kind else 0.0
                for price, kind in zip(row, self.kinds, strict=True)
            ]
            self.asks.setdefault(trial.cell, []).append((trial.before, trial.ways, row))

    def step(self, state: State, last: Mask, at: int, everywhere: bool) -> tuple[float, State] | None:
        """Return what a character costs and where it leads; None where a search would have matched."""
        cells, kind = self.cells, self.kinds[at]
        cost = 0.0
        after: State = {0: (1.0, True)} if everywhere else {}
        for cell, (ways, surely) in state.items():
            cost += ways * cells.cost[cell]
            for before, more, row in self.asks.get(cell, ()):
                if before & last:
                    cost += ways * more * row[at]
            for edge in self.follow.get(cell, ()):
                target = edge.target
                if not (cells.may[target] & kind and edge.after & kind and edge.before & last):
                    continue
                there = surely and edge.sharp and bool(cells.surely[target] & kind)
                if cells.ends[target] and everywhere:
                    if there:
                        return None
                    continue
                held, known = after.get(target, (0.0, False))
                after[target] = (min(MANY, held + ways * edge.ways), known or there)
        for hub, into in cells.hubs:
            joined = [
                (after[edge.source][0] * edge.ways, edge.sharp and after[edge.source][1])
                for edge in into
                if edge.source in after and edge.before & kind
            ]
            if joined:
                after[hub] = (min(MANY, sum(ways for ways, _ in joined)), any(known for _, known in joined))
        return cost, after

    def piling(self) -> Iterator[list[Mask]]:
        """Return the texts with which ways become too many for the admission, if they do."""
        pattern, _kept = core_pattern(self.cells, self._told)
        found = ffi.new("ofw_worst *")
        pattern.max_work = 16 * MAX_WORK
        for pattern.depth, pattern.digits in ((1 << 16, 0), (1 << 16, 2), (6, 1), (3, 1), (1, 0)):
            if lib.ofw_find(pattern, found) == lib.OFW_TOO_MUCH and found.length:
                yield [self.kinds[found.text[i]] for i in range(found.length)]

    def walks(self) -> Iterator[list[Mask]]:
        """Keep the few texts that cost the most: for all searches, then for the first one only."""
        for everywhere in (True, False):
            best: list[tuple[float, State, Mask, list[Mask]]] = [(0.0, {0: (1.0, True)}, self.edge, [])]
            for _ in range(STEPS):
                grown = []
                for spent, state, last, text in best:
                    for at, kind in enumerate(self.kinds):
                        stepped = self.step(state, last, at, everywhere)
                        if stepped is not None and stepped[1]:
                            grown.append((spent + stepped[0], stepped[1], kind, [*text, kind]))
                if not grown:
                    break
                # What is held now will cost at the next place: it counts as well.
                grown.sort(key=lambda one: -one[0] - 8.0 * sum(ways for ways, _ in one[1].values()))
                best = grown[:WIDTH]
            for _, _, _, text in best[:2]:
                yield text

    def ways_into_loops(self) -> Iterator[tuple[list[Mask], Mask]]:
        """Return, for each cell that is read again and again, a way to it and a character that stays in
        it."""
        cells = self.cells
        ways: dict[int, list[Mask]] = {0: []}
        waiting = [(0, self.edge)]
        while waiting:
            cell, last = waiting.pop(0)
            for hub, into in cells.hubs:
                if hub not in ways and any(edge.source == cell for edge in into):
                    ways[hub] = ways[cell]
                    waiting.append((hub, last))
            for edge in self.follow.get(cell, ()):
                target = edge.target
                if target in ways or not (edge.before & last or cell == 0):
                    continue
                for kind in self.kinds:
                    if cells.may[target] & kind and edge.after & kind:
                        ways[target] = [*ways[cell], kind]
                        waiting.append((target, kind))
                        break
        loops = [edge.source for edge in cells.edges if edge.source == edge.target and edge.source in ways]
        for loop in loops[:LOOPS]:
            inside = [kind for kind in self.kinds if kind & cells.may[loop]]
            for kind in {*inside[:1], *inside[-1:]}:
                yield ways[loop], kind


def _long(text: str, length: int) -> str:
    """Make a text as long as wanted by going round its end."""
    if not text:
        return ""
    tail = text[len(text) // 3 :]
    period = next((n for n in range(1, len(tail) // 2 + 1) if tail[:-n] == tail[n:]), len(tail))
    return (text + tail[len(tail) - period :] * (length // period + 1))[:length]


class _Chars:
    """Chooses characters of kinds."""

    def __init__(self, alphabet: Alphabet) -> None:
        self._alphabet = alphabet
        self._known: dict[tuple[Mask, bool], str] = {}

    def text(self, kinds: list[Mask], dearest: bool) -> str:
        """Return a text of kinds, `dearest` of characters that take the most looks to classify."""
        for kind in kinds:
            if (kind, dearest) not in self._known:
                self._known[kind, dearest] = self._chosen(kind, dearest)
        return "".join(self._known[kind, dearest] for kind in kinds)

    def _chosen(self, kind: Mask, dearest: bool) -> str:
        alphabet = self._alphabet
        if dearest:
            for char in DEAREST:
                if alphabet.atom(ord(char)) & kind:
                    return char
        ascii_bits = [code for code in range(127) if kind >> code & 1]
        if ascii_bits:
            return chr(next((code for code in ascii_bits if code > 32), ascii_bits[-1]))
        for start, end, bit in alphabet.intervals():
            if kind >> bit & (1 << KINDS) - 1:
                for code in range(start, min(end, start + 20_000)):
                    if not 0xD800 <= code < 0xE000 and kind & alphabet.atom(code):
                        return chr(code)
        return "?"
