"""What a search costs for each character of the worst text, when that does not grow with the text.

`regex_cost` bounds every place of a text by the worst that any text has there. But no text is at its worst
everywhere: after a character that many searches can go on from comes one that few can. Here texts are
followed from character to character (in C, `core/`), which gives the mean over the worst text
there is. It is asked only about patterns that would be refused otherwise.
"""

from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

from . import _worst
from .regex_cells import NO_TAILS, Beyond, Cells, Kinds, Trial
from .regex_classes import Mask
from .regex_cuts import Tail, sure_tails
from .regex_places import Graph
from .regex_poly import Cost

ffi, lib = _worst.ffi, _worst.lib

MAX_WORK = 400_000
"""Steps of the C core for one pattern: about 170 of them take a microsecond."""
STEPS_PER_US = 170
BEYOND_US = 2000
SMALL_NS, LARGE_NS = 20_000.0, 1_000_000.0
"""Where all that one search does costs no more than the first at most, the last is not followed but paid for;
up to the second, it is followed when that is too much."""
CELL_US = 5
"""What it takes to lay out one cell, edge or trial and to add up what it leads to, about."""
_WHOLE = 1 << 16
_FINER = ((_WHOLE, 1), (_WHOLE, 2), (_WHOLE, 3))
_COARSER = ((8, 1), (4, 1), (2, 0))
"""(depth, digits): see `ofw_pattern`."""


class Worst(NamedTuple):
    """What was found: the cost, and a text about as bad as can be, as masks to choose characters from."""

    cost: Cost
    text: list[Mask]
    total: float
    """Nanoseconds for a text of the length that was asked for."""
    work: int


def worst_of(graph: Graph, enough: float, length: int, max_work: int = MAX_WORK) -> Worst | None:
    """Return what a search costs at most, when it is so much for each character; None when it is not known.

    States of the texts are told apart the finer the longer a search of `length` characters costs more than
    `enough` (nanoseconds), and coarser where there are too many, until `max_work` is done.
    """
    tails = sure_tails(graph)
    best, work = _followed(graph, NO_TAILS, enough, length, max_work // 2 if tails else max_work)
    if tails and (best is None or best.total > enough):
        other, more = _followed(graph, tails, enough, length, max_work - work)
        work += more
        if other is not None and (best is None or other.total < best.total):
            best = other
    graph.work += work // STEPS_PER_US
    return best


def _followed(
    graph: Graph, tails: Mapping[int, Tail], enough: float, length: int, max_work: int
) -> tuple[Worst | None, int]:
    """Return the least that was found with so much work at most, and the work."""
    try:
        cells = Cells(graph, tails)
        kinds = Kinds(cells)
    except Beyond:
        graph.work += BEYOND_US
        return None, 0
    graph.work += CELL_US * (len(cells.may) + len(cells.edges) + len(cells.trials))
    pattern, kept = core_pattern(cells, kinds)
    found = ffi.new("ofw_worst *")
    best: Worst | None = None
    work = 0
    for rest in _rests(cells):
        pattern.rest = rest
        kept.append(rest)
        waiting = [(_WHOLE, 0)]
        first = True
        while waiting and work < max_work:
            pattern.depth, pattern.digits = waiting.pop(0)
            pattern.max_work = max_work - work
            result = lib.ofw_find(pattern, found)
            work += found.work
            if result == lib.OFW_OK:
                if first and pattern.depth == _WHOLE:
                    waiting = list(_FINER)
                total = found.first + found.each * length
                if best is None or total < best.total:
                    text = [kinds.masks[found.text[i]] for i in range(found.length)]
                    best = Worst(Cost((found.first, found.each)), text, total, work)
                if total <= enough or (rest != ffi.NULL and found.each * length <= enough):
                    break
            elif result == lib.OFW_NO_MEMORY:
                raise MemoryError("there is no memory to follow the worst text for a stop pattern")
            elif result != lib.OFW_TOO_MUCH:
                break
            elif first and pattern.depth == _WHOLE:
                waiting = list(_COARSER)
            first = False
        if best is None or best.total <= enough:
            break
    return best, work


def _rests(cells: Cells) -> list[Any]:
    """Return what the C core is given as `rest`, in the order in which it is tried."""
    rest = cells.rest()
    if rest is None or max(rest) > LARGE_NS:
        return [ffi.NULL]
    given = ffi.new("float[]", rest)
    return [given] if max(rest) < SMALL_NS else [given, ffi.NULL]


def core_pattern(cells: Cells, kinds: Kinds) -> tuple[Any, list[Any]]:
    """Return the pattern as the C core takes it, and what must be kept as long as it."""
    pattern = ffi.new("ofw_pattern *")
    kept: list[Any] = []

    def give(name: str, code: str, values: list[int] | list[float] | list[bool]) -> None:
        buffer = ffi.from_buffer(_TYPES[code], array(code, values))
        kept.append(buffer)
        setattr(pattern, name, buffer)

    set_of = kinds.set_of
    pattern.matches_nothing = cells.matches_nothing
    pattern.cells, pattern.kinds = len(cells.may), len(kinds.masks)
    give("may", "Q", [set_of[mask] for mask in cells.may])
    give("surely", "Q", [set_of[mask] for mask in cells.surely])
    give("cost", "f", cells.cost)
    give("ends", "B", cells.ends)
    edges = sorted(cells.edges)
    into = [edge for _, found in cells.hubs for edge in found]
    pattern.edges, pattern.joins = len(edges), len(into)
    for prefix, those in (("edge", edges), ("join", into)):
        give(f"{prefix}_source", "H", [edge.source for edge in those])
        give(f"{prefix}_target", "H", [edge.target for edge in those])
        give(f"{prefix}_ways", "f", [edge.ways for edge in those])
        give(f"{prefix}_before", "Q", [set_of[edge.before] for edge in those])
        give(f"{prefix}_sharp", "B", [edge.sharp for edge in those])
    give("edge_after", "Q", [set_of[edge.after] for edge in edges])
    pattern.finals = len(cells.finals)
    give("final_source", "H", [edge.source for edge in cells.finals])
    give("final_before", "Q", [set_of[edge.before] for edge in cells.finals])
    give("final_after", "Q", [set_of[edge.after] for edge in cells.finals])
    pattern.cuts = len(cells.cuts)
    give("cut_end", "H", [one.end for one in cells.cuts])
    give("cut_cell", "H", [one.cell for one in cells.cuts])
    give("cut_most", "f", [one.most for one in cells.cuts])
    trials = sorted(cells.trials, key=lambda trial: trial.cell)
    tests, prices = _numbered(trials, kinds)
    pattern.trials = len(trials)
    give("trial_cell", "H", [trial.cell for trial in trials])
    give("trial_ways", "f", [trial.ways for trial in trials])
    give("trial_before", "Q", [set_of[trial.before] for trial in trials])
    give("trial_after", "Q", [set_of[trial.after] for trial in trials])
    give("trial_besides", "f", [trial.besides for trial in trials])
    give("trial_test", "H", tests)
    give("prices", "f", prices)
    pattern.tests = len(prices) // len(kinds.masks)
    give("alike", "B", kinds.alike)
    return pattern, kept


def _numbered(trials: list[Trial], kinds: Kinds) -> tuple[list[int], list[float]]:
    """Return the number of each trial's test, 0 for none, and what the tests cost, by number and kind."""
    numbers: dict[int, int] = {}
    prices = [0.0] * len(kinds.masks)
    tests = []
    for trial in trials:
        number = 0
        if trial.test is not None:
            number = numbers.setdefault(id(trial.test), len(numbers) + 1)
            if number * len(kinds.masks) == len(prices):
                prices += kinds.prices(trial.test)
        tests.append(number)
    return tests, prices


_TYPES = {"Q": "uint64_t[]", "f": "float[]", "B": "uint8_t[]", "H": "uint16_t[]"}
