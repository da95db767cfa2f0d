"""Loops through hubs: can two ways part inside one and meet again, and can ways that enter one meet?

A knot is a strongly connected component of the graph with more than a loop on one position. Both questions
are reachability in the graph of pairs: a pair stands for two ways that have read the same text.

Must not know of costs.
"""

from collections.abc import Callable

from .regex_classes import Mask
from .regex_places import UNLIMITED, Explosive, Front, Graph, TooComplex
from .regex_tree import Guard, allowed

MAX_HUBS_IN_A_ROW = 64
TWICE = "inside a repeat, the same text can be taken in two ways, each time around"

Pair = tuple[int, int]
Source = tuple[int, float, Guard]


class Knot:
    """One knot. `step` is called with the work done, and ends what takes too long."""

    def __init__(self, graph: Graph, component: list[int], step: Callable[[int], None]) -> None:
        self._graph = graph
        self._step = step
        self.inside = set(component)
        self.places = [node for node in component if graph.high[node]]
        self.hubs = [node for node in component if not graph.high[node]]
        self.union: Mask = 0
        """The characters that can be read without leaving the knot."""
        for node in self.places:
            self.union |= graph.high[node]
        self.deterministic = False
        """Known after `must_not_explode`: a way never parts inside."""
        self._sources: dict[int, list[Source]] = {}
        self._follow = self._followers()
        self.doors = self._doors()
        """(node, the positions it leads to, the edges from outside into it)"""

    def sources(self, hub: int) -> list[Source]:
        """Return the knot's positions that lead to a hub, through other hubs too, with ways and guard."""
        found = self._sources.get(hub)
        if found is not None:
            return found
        graph = self._graph
        found = []
        waiting: list[tuple[int, float, Guard, int]] = [(hub, 1.0, None, 0)]
        while waiting:
            node, ways, guard, depth = waiting.pop()
            if depth > MAX_HUBS_IN_A_ROW:
                raise TooComplex("its repeats are nested too deeply")
            for source, more, inner, _ in graph.preds[node]:
                self._step(1)
                if source not in self.inside:
                    continue
                # Of two guards one is kept: that lets more pass, never less.
                kept = guard if inner is None else inner
                if graph.high[source]:
                    found.append((source, ways * more, kept))
                else:
                    waiting.append((source, ways * more, kept, depth + 1))
        self._sources[hub] = found
        return found

    def _followers(self) -> dict[int, list[int]]:
        """Return, for each position, those of the knot that can come next; one twice if on two ways."""
        graph = self._graph
        follow: dict[int, list[int]] = {node: [] for node in self.places}
        for target in self.places:
            high = graph.high[target]
            for source, ways, guard, _ in graph.preds[target]:
                if source not in self.inside:
                    continue
                origins: list[Source] = [(source, 1.0, None)] if graph.high[source] else self.sources(source)
                self._step(len(origins))
                for origin, more, inner in origins:
                    if graph.high[origin] & allowed(inner, high) & allowed(guard, high):
                        follow[origin] += [target] if ways * more <= 1.0 else [target, target]
            if graph.most[target] == UNLIMITED:
                follow[target].append(target)
        return follow

    def _doors(self) -> list[tuple[int, list[int], Front]]:
        graph = self._graph
        doors = []
        for node in self.inside:
            outside = [edge for edge in graph.preds[node] if edge[0] not in self.inside]
            if outside:
                doors.append((node, [node] if graph.high[node] else self._reached(node), outside))
        return doors

    def _reached(self, hub: int) -> list[int]:
        """Return the positions a hub leads to, through other hubs too."""
        graph = self._graph
        hubs = {hub}
        more = True
        while more:
            self._step(len(self.hubs))
            grown = {h for h in self.hubs if h not in hubs and any(e[0] in hubs for e in graph.preds[h])}
            hubs |= grown
            more = bool(grown)
        self._step(len(self.places))
        return [node for node in self.places if any(edge[0] in hubs for edge in graph.preds[node])]

    def must_not_explode(self) -> None:
        """Raise Explosive if two ways can part and meet again: each time around doubles them.

        In a strongly connected component, two ways that part at a position and meet at another can be led
        back to where they parted by one and the same text, so the number of ways grows exponentially; and
        without such a meeting there is one way between any two places of the text.
        """
        high = self._graph.high
        parted: set[Pair] = set()
        for after in {tuple(nodes) for nodes in self._follow.values()}:
            self._step(len(after))
            if len(set(after)) != len(after):
                raise Explosive(TWICE)
            for i, one in enumerate(after):
                mask = high[one]
                for other in after[i + 1 :]:
                    if mask & high[other]:
                        parted.add((one, other) if one < other else (other, one))
                self._step((len(after) - i) // 4)
        self.deterministic = not parted
        if self._meet(parted):
            raise Explosive(TWICE)

    def entries_may_meet(self, lasts: Callable[[int], Mask]) -> bool:
        """Say whether a way that enters can ever be where a way that entered before it is.

        `lasts` gives the characters that can be the last before a node outside. Whether the two can really
        be about at the same time is not asked: yes is the safe answer.
        """
        high = self._graph.high
        pairs: set[Pair] = set()
        for _, targets, outside in self.doors:
            for source, _, guard, _ in outside:
                before = lasts(source)
                for target in targets:
                    last = before & allowed(guard, high[target])
                    if not last:
                        continue
                    for place in self.places:
                        if not high[place] & last:
                            continue
                        self._step(len(self._follow[place]))
                        for after in self._follow[place]:
                            if not high[after] & high[target]:
                                continue
                            if after == target:
                                return True
                            pairs.add((after, target) if after < target else (target, after))
        return self._meet(pairs)

    def _meet(self, pairs: set[Pair]) -> bool:
        """Say whether from one of the pairs both can come to the same position by the same text."""
        high = self._graph.high
        follow = self._follow
        seen = set(pairs)
        waiting = list(pairs)
        while waiting:
            one, other = waiting.pop()
            theirs = follow[other]
            for a in follow[one]:
                mask = high[a]
                self._step(1 + len(theirs) // 4)
                for b in theirs:
                    if not mask & high[b]:
                        continue
                    if a == b:
                        return True
                    pair = (a, b) if a < b else (b, a)
                    if pair not in seen:
                        seen.add(pair)
                        waiting.append(pair)
        return False
