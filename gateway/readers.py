"""Which reader a gateway process becomes: the one it was told to, or the first that nobody is.

An instance is started with room for so many (`--readers`), each with rings of its own; a gateway process is
one of them for as long as it lives.
"""

from __future__ import annotations

from ..ingress.request import MAX_TOP_LOGPROBS
from ..ring.board import MAX_EACH, Role
from ..ring.errors import LaneOwned, RingError
from ..ring.instance import Instance
from .front import Front


class NoReader(RingError):
    """The instance has no such reader, or none that is free; the message says which are taken by whom."""


def attach_reader(
    instance: str, reader: int | None = None, max_top_logprobs: int = MAX_TOP_LOGPROBS
) -> Front:
    """Attach to a running instance as reader number `reader`, or as the first that is free.

    max_top_logprobs: see `Front.attach`.

    Raises:
        NoReader: that one is taken or does not exist, or all are taken.
        InstanceGone: there is no such instance.
        BadRequest: the instance's sampling defaults are none for its tokenizer.
    """
    count, taken = _look(instance)
    if reader is not None and not 0 <= reader < count:
        raise NoReader(
            f"instance {instance!r} has {count} reader(s), numbers 0 to {count - 1}, and no reader {reader}: "
            f"give one of these, or start the instance with --readers for more"
        )
    for number in range(count) if reader is None else (reader,):
        if number in taken:
            continue
        try:
            return Front.attach(instance, number, max_top_logprobs=max_top_logprobs)
        except LaneOwned:
            # Another gateway was faster, or one on its way out still holds on.
            continue
    raise NoReader(_taken(instance, reader))


def _look(instance: str) -> tuple[int, dict[int, int]]:
    """Return how many readers the instance has room for, and the pids of those that serve, by number."""
    here = Instance.attach(instance)
    try:
        rows = here.board.rows(Role.READER)
        owners = {row.index: row.owner for row in rows if row.serving}
        return len(rows), {number: owner.pid for number, owner in owners.items() if owner is not None}
    finally:
        here.close()


def _taken(instance: str, reader: int | None) -> str:
    count, taken = _look(instance)
    pids = {number: f"by pid {pid}" for number, pid in taken.items()}
    more = f"start the instance with --readers {count + 1} for more"
    if count == MAX_EACH:
        more = "an instance has room for no more: start another one"
    if reader is None:
        owners = ", ".join(f"{number} {pids.get(number, 'just now')}" for number in range(count))
        return f"every reader of instance {instance!r} is taken ({owners}): {more}"
    free = ", ".join(str(number) for number in range(count) if number != reader and number not in taken)
    return f"reader {reader} is taken {pids.get(reader, 'just now')}; free: {free or 'none'}; {more}"
