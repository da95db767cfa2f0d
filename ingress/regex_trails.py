"""How far apart two ways can come into a loop over one class and both still be in it.

That is the longest *trail*: characters of the class with which one can come to the loop, since whoever is in
it reads them as well. How near to each other they can come is another question (`regex_entries`).

Must not know what a loop costs.
"""

from collections.abc import Callable

from .regex_classes import Mask
from .regex_places import ANYWHERE, UNLIMITED, Front, Graph
from .regex_tree import allowed


class Trails:
    """The trails of one graph. `step` is called for each edge looked at, and ends what takes too long.

    once: a search begins at one place of the text only, for its first match cannot fail.
    """

    def __init__(self, graph: Graph, once: bool, step: Callable[[], None]) -> None:
        self._graph = graph
        self._once = once
        self._step = step
        self._enough = float(UNLIMITED)

    def longest(
        self, front: Front, next_high: Mask, high: Mask, seen: dict[int, float], loop: int, enough: float
    ) -> float:
        """Return the longest run of characters of `high` with which one can come to a front, before one of
        `next_high`; a run of `enough` is not followed further.

        `seen` has what is known by node, and takes what is found; `loop` is the node that is not followed.
        """
        self._enough = enough
        return self._to(front, next_high, high, seen, loop)

    def _to(self, front: Front, next_high: Mask, high: Mask, seen: dict[int, float], loop: int) -> float:
        longest = 0.0
        for source, _, guard, _ in front:
            self._step()
            before = allowed(guard, next_high & high)
            if source == loop or not before:
                continue
            kind = self._graph.high[source]
            if source == 0:
                if self._once or not high & before & self._graph.alphabet.all:
                    continue  # It comes from the start of the text, once.
                return float(UNLIMITED)
            if kind == ANYWHERE:
                return float(UNLIMITED)
            if source in seen:
                length = seen[source]
            elif kind == 0:
                seen[source] = float(UNLIMITED) if self._graph.cyclic else 0.0
                length = self._to(self._graph.preds[source], next_high, high, seen, loop)
                seen[source] = length
            elif not kind & high & before:
                length = 0.0
            else:
                length = self._through(source, high, seen, loop)
                if length >= UNLIMITED:
                    return length
            longest = max(longest, length)
            if longest >= self._enough:
                break
        return longest

    def _through(self, source: int, high: Mask, seen: dict[int, float], loop: int) -> float:
        """Return the trail that ends with a position whose last character can be one of `high`."""
        graph = self._graph
        most = graph.most[source]
        if most == UNLIMITED:
            return float(UNLIMITED)
        seen[source] = float(UNLIMITED)
        kind, length = graph.high[source], float(most)
        run = graph.runs.get(source)
        if run is not None:
            kind, length = run[0], 0.0
            for mask in reversed(run):
                if not mask & high:
                    seen[source] = length
                    return length
                length += 1.0
        if length < self._enough:
            length += self._to(graph.preds[source], kind, high, seen, loop)
        seen[source] = length
        return length
