"""Small questions about a parsed pattern, and guards: what a place asks of the characters beside it.

A guard is what anchors, `\\b` and one-character look-arounds ask: a tuple of (before, after) masks, any one
of which must hold; None asks nothing. Must not know of graphs or costs.
"""

from re import _constants as sre  # type: ignore[attr-defined]
from typing import Any

from .regex_classes import Mask

Guard = tuple[tuple[Mask, Mask], ...] | None
Unit = tuple[Any, Any]
"""A parsed item that consumes one character: its code and argument."""

UNITS = (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN)
REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT)
_TYPE_FLAGS = sre.SRE_FLAG_ASCII | sre.SRE_FLAG_LOCALE | sre.SRE_FLAG_UNICODE


def both_of(first: Guard, second: Guard) -> Guard:
    """Return the guard that asks both; the empty tuple when nothing can pass."""
    if first is None or second is None:
        return second if first is None else first
    joined = [
        (before & other_before, after & other_after)
        for before, after in first
        for other_before, other_after in second
        if before & other_before and after & other_after
    ]
    return tuple(joined[:8]) if len(joined) <= 8 else first


def allowed(guard: Guard, after: Mask) -> Mask:
    """Return which characters may come before a place, when one of `after` comes next."""
    if guard is None:
        return -1
    before = 0
    for mask, following in guard:
        if following & after:
            before |= mask
    return before


def combined(flags: int, add: int, remove: int) -> int:
    """Return the flags inside a group that adds some and removes some."""
    if add & _TYPE_FLAGS:
        flags &= ~_TYPE_FLAGS
    return (flags | add) & ~remove


def unwrapped(body: Any, flags: int) -> tuple[Any, list[int], int]:
    """Look through groups for a single class: (its item or None, the groups around it, its flags)."""
    groups: list[int] = []
    while len(body.data) == 1:
        op, av = body.data[0]
        if op in UNITS:
            return (op, av), groups, flags
        if op is not sre.SUBPATTERN:
            break
        if av[0] is not None:
            groups.append(av[0])
        flags = combined(flags, av[1], av[2])
        body = av[3]
    return None, [], flags


def size(body: Any) -> int:
    """Count the positions a body takes when it is written out, from above."""
    total = 0
    for op, av in body.data:
        if op in UNITS:
            total += 1
        elif op in REPEATS:
            inner = size(av[2])
            unit = len(av[2].data) == 1 and av[2].data[0][0] in UNITS
            total += inner if unit or av[1] == sre.MAXREPEAT else inner * min(av[1], 64)
        elif op is sre.SUBPATTERN:
            total += size(av[3])
        elif op is sre.ATOMIC_GROUP:
            total += size(av)
        elif op is sre.BRANCH:
            total += sum(size(one) for one in av[1])
        elif op is sre.ASSERT or op is sre.ASSERT_NOT:
            total += size(av[1])
        elif op is sre.GROUPREF:
            total += 8
        elif op is sre.GROUPREF_EXISTS:
            total += sum(size(one) for one in av[1:] if one is not None)
    return min(total, 1000)


def inner_pieces(op: Any, av: Any) -> list[Any]:
    """Return the parsed pieces that an item is made of."""
    if op is sre.SUBPATTERN:
        return [av[3]]
    if op in REPEATS:
        return [av[2]]
    if op is sre.ATOMIC_GROUP:
        return [av]
    if op is sre.BRANCH:
        return list(av[1])
    if op is sre.ASSERT or op is sre.ASSERT_NOT:
        return [av[1]]
    if op is sre.GROUPREF_EXISTS:
        return [one for one in av[1:] if one is not None]
    return []


def captures(body: Any) -> int:
    """Return the highest number of a capturing group in a parsed piece; 0 if it has none."""
    highest = 0
    for op, av in body.data:
        own = av[0] or 0 if op is sre.SUBPATTERN else 0
        highest = max(highest, own, *(captures(one) for one in inner_pieces(op, av)))
    return highest


def loses_captures(body: Any, kept: bool = False, again: bool = False) -> bool:
    """Say whether the engine may lose the span of a group, which ends a search in a SystemError (in 3.11).

    It does where it gives nothing back (`kept`: an atomic group, a possessive repeat) and goes through a
    group again (`again`): a round that fails leaves the group's new start beside the end of the round
    before. In a possessive repeat of nothing but one group the new start is that very end, so nothing is
    lost.
    """
    for op, av in body.data:
        if op is sre.SUBPATTERN and av[0] is not None and kept and again:
            return True
        here, more = kept, again
        if op in REPEATS:
            inner = av[2]
            here = kept or op is sre.POSSESSIVE_REPEAT
            more = again or av[1] > 1
            alone = len(inner.data) == 1 and inner.data[0][0] is sre.SUBPATTERN
            if here and not kept and not again and alone and not captures(inner.data[0][1][3]):
                continue
        elif op is sre.ATOMIC_GROUP:
            here = True
        if any(loses_captures(one, here, more) for one in inner_pieces(op, av)):
            return True
    return False


def goes_back(body: Any, possessive: bool = False) -> bool:
    """Say whether the engine may go back in the text and read it again, for ever (CPython before 3.11.5,
    gh-106052).

    A possessive repeat of more than one class goes on from wherever its last round came to before it failed,
    and a look-behind that fails in it came to a place before that round.
    """
    for op, av in body.data:
        if possessive and op in (sre.ASSERT, sre.ASSERT_NOT) and av[0] < 0:
            return True
        inside = possessive or op is sre.POSSESSIVE_REPEAT
        if any(goes_back(one, inside) for one in inner_pieces(op, av)):
            return True
    return False
