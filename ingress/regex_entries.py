"""How near to each other ways come into a loop: what is read before it may not fit on itself.

Two ways come into the `.*?` of `<tool>.*?</tool>` six places apart at least, for that is how far one `<tool>`
must be from the next; and into the `.*` of `(?m)^- .*` never, as one has to come after a newline that the
other does not read. Must not know what a loop costs.
"""

from .regex_classes import Mask
from .regex_places import UNLIMITED, Edge, Front, Graph
from .regex_tree import allowed

ROWS, LENGTH = 3, 12
"""So many ways in are looked at, so many characters back."""
LOOKS_PER_US = 8

Row = list[Mask]
"""Characters that a way in has just read, the last first."""


def entries_apart(graph: Graph, entered: Front, high: Mask) -> int:
    """Return how many places apart two ways come in by a front at least, when the later one reads characters
    of `high` in between, as the one that is in the loop already does. UNLIMITED when it cannot."""
    if len(entered) > ROWS:
        return 1
    rows = [_row(graph, edge, high) for edge in entered]
    apart = 1
    while not any(_fits(earlier, later, apart, high) for earlier in rows for later in rows):
        apart += 1
        graph.work += 1 + len(rows) ** 2 * LENGTH // LOOKS_PER_US
        if apart > LENGTH:
            return apart if any(all(mask & high for mask in row) for row in rows) else UNLIMITED
    return apart


def _row(graph: Graph, edge: Edge, after: Mask) -> Row:
    """Return what is surely read before one of `after` follows an edge, as far as that is one row."""
    row: Row = []
    while len(row) < LENGTH:
        node, _, guard, _ = edge
        before = allowed(guard, after)
        read = graph.runs.get(node, [graph.high[node]])
        if node == 0 or graph.high[node] <= 0:
            if guard is not None:
                row.append(before)
            break
        row.append(read[-1] & before)
        row += reversed(read[:-1])
        if graph.most[node] != 1 or len(graph.preds[node]) != 1:
            break
        edge, after = graph.preds[node][0], read[0]
    return row[:LENGTH]


def _fits(earlier: Row, later: Row, apart: int, high: Mask) -> bool:
    """Say whether one way can have come in so many places before another."""
    return all(mask & high for mask in later[:apart]) and all(
        one & other for one, other in zip(earlier, later[apart:], strict=False)
    )
