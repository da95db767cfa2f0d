"""What is left of a parsed pattern when the ways are gone that the engine never comes to.

Where a piece is done with once it has matched, nothing is tried that comes after the first success: at the
end of the pattern, of a look-around and of what gives nothing back (an atomic group, a round of a possessive
repeat). So a lazy repeat there stops at its least, and no alternative after one that cannot fail is tried.

Must not know of graphs or costs.
"""

from re import _constants as sre  # type: ignore[attr-defined]
from typing import Any

from .regex_tree import REPEATS, UNITS, captures

OPEN, KEPT, LAST = 0, 1, 2
"""What comes after a piece: more of the pattern, which may make the engine come back to it; more of it, but
it never comes back; nothing, so that it does not matter either where the piece ends."""
AGAIN = "again"
"""An item of our own: a piece that reads nothing is gone through so many times in a row, and what follows is
then tried once or twice."""
PAID = "paid for"
"""An item of our own: a look-ahead begins here whose body stands in the pattern after it."""


def settled(body: Any, after: int) -> Any:
    """Return a parsed piece without the ways that are never tried."""
    done: list[Any] = []
    for item in reversed(body.data):
        here = after
        if not all(map(_empty, done)):
            # Where the rest cannot fail the engine does not come back either.
            here = KEPT if after != OPEN and all(map(_item_cannot_fail, done)) else OPEN
        done = _item(item, here) + done
    return type(body)(body.state, done)


def _item(item: Any, after: int) -> list[Any]:
    op, av = item
    if op in UNITS or op is sre.AT:
        return [(op, av)]
    if op in REPEATS:
        return [_repeat(op, av, after)]
    if op is sre.SUBPATTERN:
        group, add, remove, inner = av
        return [(op, (group, add, remove, settled(inner, after)))]
    if op is sre.BRANCH:
        return [_branch(av[1], after)]
    if op is sre.ATOMIC_GROUP:
        inner = settled(av, max(after, KEPT))
        return [(PAID, None), *inner.data] if after == LAST or not chooses(inner) else [(op, inner)]
    if op is sre.ASSERT or op is sre.ASSERT_NOT:
        # The text of a group in it may be asked for later, so there it matters where the group ends.
        alone = av[0] > 0 and (after == LAST or not captures(av[1]))
        inner = settled(av[1], LAST if alone else KEPT)
        if op is sre.ASSERT and after == LAST and av[0] > 0:
            return [(PAID, None), *inner.data]
        return [(op, (av[0], inner))]
    if op is sre.GROUPREF_EXISTS:
        return [(op, (av[0], *(None if one is None else settled(one, after) for one in av[1:])))]
    return [(op, av)]


def _repeat(op: Any, av: Any, after: int) -> Any:
    least, most, body = av
    if op is sre.MIN_REPEAT and after != OPEN:
        most = least
    if body.getwidth()[1] == 0:
        # After the least number of rounds it tries one more, and none after a round that read nothing.
        most = min(most, least + 1)
        if least and most > 1 and _asks_only(body):
            twice = most > least and op is not sre.POSSESSIVE_REPEAT and after != LAST
            return (AGAIN, (most, 2 if twice else 1, settled(body, after)))
    inside = after if most == 1 else OPEN
    if _one_class(body):
        if op is sre.MAX_REPEAT and after == KEPT:
            op = sre.POSSESSIVE_REPEAT
    elif op is sre.POSSESSIVE_REPEAT:
        inside = max(inside, KEPT)
        if after == LAST and least <= 1:
            # Whichever way the first round matches, the match is found.
            op = sre.MAX_REPEAT
    return (op, (least, most, settled(body, inside)))


def _branch(alternatives: Any, after: int) -> Any:
    kept: list[Any] = []
    for body in alternatives:
        kept.append(settled(body, after))
        if after != OPEN and cannot_fail(kept[-1]):
            break
    return (sre.BRANCH, (None, kept))


def cannot_fail(body: Any) -> bool:
    """Say whether a piece matches whatever the text is, when nothing comes after it."""
    return all(map(_item_cannot_fail, body.data))


def _item_cannot_fail(item: Any) -> bool:
    op, av = item
    if op in REPEATS:
        return bool(av[0] == 0 or cannot_fail(av[2]))
    if op is sre.SUBPATTERN:
        return cannot_fail(av[3])
    if op is sre.BRANCH:
        return any(map(cannot_fail, av[1]))
    return bool(op is PAID)


def _empty(item: Any) -> bool:
    """Say whether an item asks and reads nothing."""
    op, av = item
    if op in REPEATS:
        return bool(av[1] == 0)
    if op is AGAIN:
        return all(map(_empty, av[2].data))
    return op is PAID or (op is sre.SUBPATTERN and all(map(_empty, av[3].data)))


def _asks_only(body: Any) -> bool:
    """Say whether a piece matches nothing, in one way at most: all its rounds then find the same."""
    return all(
        op is sre.AT
        or op is sre.ASSERT_NOT
        or (op is sre.ASSERT and not captures(av[1]))
        or (op is sre.SUBPATTERN and av[0] is None and _asks_only(av[3]))
        for op, av in body.data
    )


def _one_class(body: Any) -> bool:
    return len(body.data) == 1 and body.data[0][0] in UNITS


def chooses(body: Any) -> bool:
    """Say whether there is more than one way through a piece, so that giving nothing back means something."""
    return any(_item_chooses(item) for item in body.data)


def _item_chooses(item: Any) -> bool:
    op, av = item
    if op in UNITS or op is sre.AT or _empty(item):
        return False
    if op in REPEATS:
        return not (_one_class(av[2]) and (av[0] == av[1] or op is sre.POSSESSIVE_REPEAT))
    return not (op is sre.SUBPATTERN and not chooses(av[3]))
