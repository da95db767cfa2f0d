"""Texts followed through a pattern's cells, one at a time: what the C core does for all texts at once."""

from collections.abc import Iterator
from typing import NamedTuple

from outfeed.ingress.regex_cells import Cells, Kinds


class Followed(NamedTuple):
    """What a text has come to: what it cost so far, and whether another search begins after it."""

    cost: float
    ways: dict[int, float]
    surely: set[int]
    before: int
    text: tuple[int, ...]
    begins: bool


class Walk:
    """Follows one text through a pattern's cells, with nothing merged and nothing bounded."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells
        self.kinds = Kinds(cells)

    def costs(self, text: list[int], last_start: int) -> float | None:
        """Return what reading kinds costs when searches begin at every place up to `last_start`; None if one
        of those before it would have matched, so that it cannot be."""
        total, before = 0.0, self.cells.graph.alphabet.edge
        for place, ways in enumerate(self.ways(text, last_start)):
            if ways is None:
                return None
            total += self.price(ways, before, text[place] if place < len(text) else None)
            before = self.kinds.masks[text[place]] if place < len(text) else 0
        return total

    def ways(self, text: list[int], last_start: int) -> Iterator[dict[int, float] | None]:
        """Yield the ways at each place of a text, from before its first character to its end, or None."""
        cells = self.cells
        ways, surely, before = {0: 1.0}, {0}, cells.graph.alphabet.edge
        yield ways
        for place, at in enumerate(text):
            kind = self.kinds.masks[at]
            after, known = self.read(ways, surely, before, kind)
            matched = any(cells.ends[cell] for cell in known)
            begins = place + 1 <= last_start
            if begins and (matched or self.complete(surely, before, kind)):
                yield None
                return
            self.taken(after, known, kind, begins)
            ways, surely, before = after, known, kind
            yield ways

    def begun(self) -> "Followed":
        """Return what the empty text has come to."""
        return Followed(
            0.0, {0: 1.0}, {0}, self.cells.graph.alphabet.edge, (), not self.cells.matches_nothing
        )

    def on(self, one: "Followed", at: int, begins: bool) -> "Followed | None":
        """Follow a text by a kind more, where another search begins or none does; None if it does not, as one
        before has matched."""
        kind, cost = self.kinds.masks[at], one.cost + self.price(one.ways, one.before, at)
        ways, surely = self.read(one.ways, one.surely, one.before, kind)
        if begins and (
            not one.begins
            or any(self.cells.ends[cell] for cell in surely)
            or self.complete(one.surely, one.before, kind)
        ):
            return None
        self.taken(ways, surely, kind, begins)
        return Followed(cost, ways, surely, kind, (*one.text, at), begins)

    def dearest(self, length: int, width: int) -> "list[Followed]":
        """Return texts of up to so many kinds that cost much, at each place the `width` dearest."""
        found, followed = [], [self.begun()]
        for _ in range(length + 1):
            found += followed
            ahead = [
                self.on(one, at, begins)
                for one in followed
                for at in range(len(self.kinds.masks))
                for begins in (False, True)
            ]
            followed = sorted(filter(None, ahead), key=lambda one: -one.cost)[:width]
        return found

    def mean(self, one: "Followed", word: list[int], rounds: int = 12) -> float | None:
        """Return what each kind of a word costs that comes again and again after a text, for ever; None if it
        cannot, or costs more each time."""
        begins = one.begins
        for _ in range(rounds):
            before = one
            for at in word:
                ahead = self.on(one, at, begins)
                if ahead is None:
                    return None
                one = ahead
            if (one.ways, one.surely, one.before) == (before.ways, before.surely, before.before):
                return (one.cost - before.cost) / len(word)
        return None

    def complete(self, surely: set[int], before: int, kind: int) -> bool:
        return any(
            final.source in surely and final.before & before and final.after & kind
            for final in self.cells.finals
        )

    def price(self, ways: dict[int, float], before: int, at: int | None) -> float:
        """Return what a place costs before a kind, or at the end of the text."""
        cells = self.cells
        comes = cells.graph.alphabet.edge if at is None else self.kinds.masks[at]
        costs = {cell: count * cells.cost[cell] for cell, count in ways.items()}
        for trial in cells.trials:
            if trial.cell in ways and trial.before & before and trial.after & comes:
                price = trial.besides
                if trial.test is not None:
                    price += 0.0 if at is None else self.kinds.prices(trial.test)[at]
                costs[trial.cell] += ways[trial.cell] * trial.ways * price
        # The way that matches is at one cell at a time.
        last = [cost for cell, cost in costs.items() if cells.ends[cell] and cells.may[cell]]
        rest = [cost for cell, cost in costs.items() if not (cells.ends[cell] and cells.may[cell])]
        return sum(rest) + max(last, default=0.0)

    def read(
        self, ways: dict[int, float], surely: set[int], before: int, kind: int
    ) -> tuple[dict[int, float], set[int]]:
        cells, known = self.cells, set[int]()
        after: dict[int, float] = {}
        for edge in cells.edges:
            count = ways.get(edge.source, 0.0) * edge.ways
            if count and cells.may[edge.target] & kind and edge.after & kind and edge.before & before:
                after[edge.target] = 1.0 if cells.ends[edge.target] else after.get(edge.target, 0.0) + count
                if edge.sharp and edge.source in surely and cells.surely[edge.target] & kind:
                    known.add(edge.target)
        return after, known

    def taken(self, ways: dict[int, float], surely: set[int], kind: int, begins: bool) -> None:
        """Make of what was read the ways at the next place, where another search begins or none."""
        if begins:
            for cell in [cell for cell in ways if self.cells.ends[cell]]:
                del ways[cell]
            ways[0] = 1.0
            surely.add(0)
        for end, cell, most in self.cells.cuts:
            if end in surely and cell in ways:
                ways[cell] = min(ways[cell], most)
        self.join(ways, surely, kind)

    def join(self, ways: dict[int, float], surely: set[int], kind: int) -> None:
        for hub, edges in self.cells.hubs:
            count = sum(ways.get(edge.source, 0.0) * edge.ways for edge in edges if edge.before & kind)
            if count:
                ways[hub] = count
            if any(edge.sharp and edge.source in surely and edge.before & kind for edge in edges):
                surely.add(hub)
