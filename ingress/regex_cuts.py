"""Ways that cannot have been: what a text says of a loop when it goes on with what completes a match.

Take a loop before the end of a pattern, the `.*?` of "```.*?```", and a text that from some place on surely
reads what comes after it. Whichever way is in the loop at that place first goes on to that, at once or when
staying has failed, and matches: nothing is tried any more. So all ways but one were not in the loop there.
When every search comes to the loop after as many characters, those that are not in it yet, or came to it
later, were begun after the one that matched: not at all.

Must not know how texts are followed.
"""

from typing import NamedTuple

from .regex_places import EXACT, UNLIMITED, Edge, Graph, completing


class Tail(NamedTuple):
    """What completes a match: a node, and how many characters of it must be read."""

    node: int
    length: int


class Cut(NamedTuple):
    """When the cell `end` is surely come to, there are `most` ways at `cell` at most."""

    end: int
    cell: int
    most: float


def sure_tails(graph: Graph) -> dict[int, Tail]:
    """Return, by unlimited loop, the shortest of what completes a match right after it."""
    tails: dict[int, Tail] = {}
    for node in completing(graph):
        if node == 0 or graph.high[node] <= 0 or not _is_sure(graph, node):
            continue
        run = graph.runs.get(node)
        length = max(graph.least[node], 1) if run is None else len(run)
        for edge in graph.preds[node]:
            loop = edge[0]
            if _is_tried_by_all(graph, edge) and (loop not in tails or length < tails[loop].length):
                tails[loop] = Tail(node, length)
    return tails


def _is_sure(graph: Graph, node: int) -> bool:
    """Say whether the characters that a node may read are those that it surely reads."""
    return graph.high[node] == graph.low[node] and graph.runs.get(node) == graph.low_runs.get(node)


def _is_tried_by_all(graph: Graph, edge: Edge) -> bool:
    """Say whether the engine tries an edge out of an unlimited loop wherever it is in the loop."""
    loop, _, guard, trust = edge
    return (
        loop > 0
        and graph.high[loop] > 0
        and graph.most[loop] == UNLIMITED
        and guard is None
        and bool(trust & EXACT)
    )


def distances(into: dict[int, list[tuple[int, int]]], cell: int, without: set[int]) -> dict[int, int] | None:
    """Return the cells that lead to a cell and how many characters before it each is read, leaving out some.

    `into` has by cell from where it is come to, and how many characters that reads. None when a cell leads
    there by ways that are not as long as each other.
    """
    found = {cell: 0}
    waiting = [cell]
    while waiting:
        here = waiting.pop()
        for source, length in into.get(here, ()):
            far = found[here] + length
            if source in without or found.get(source) == far:
                continue
            if source in found:
                return None
            found[source] = far
            waiting.append(source)
    return found
