"""The route: one u64 that names one live request to every process.

    63            36 35      28 27     20 19              0
    ┌───────────────┬──────────┬─────────┬────────────────┐
    │ generation 28 │ reader 8 │ shard 8 │    slot 20     │
    └───────────────┴──────────┴─────────┴────────────────┘

A slot is one place in its reader's table, whatever the shard, so `(reader, slot)` is a key and the whole
route is an identity: when the slot is used again its generation is another, and a late row of the request
before cannot be taken for a row of the one after. A generation is never 0, so 0 is never a route.

The functions take a Python int, or a numpy u64 array for a whole column at once (numpy's stubs do not know
that `u64 & int` stays u64, hence the ignores).
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

SLOT_BITS = 20
SHARD_BITS = 8
READER_BITS = 8
GENERATION_BITS = 28

MAX_SLOTS = 1 << SLOT_BITS
MAX_SHARDS = 1 << SHARD_BITS
MAX_READERS = 1 << READER_BITS
MAX_GENERATION = (1 << GENERATION_BITS) - 1

SHARD_SHIFT = SLOT_BITS
READER_SHIFT = SHARD_SHIFT + SHARD_BITS
GENERATION_SHIFT = READER_SHIFT + READER_BITS

IntOrColumn = TypeVar("IntOrColumn", int, NDArray[np.uint64])


def make_route(reader: int, shard: int, slot: int, generation: int) -> int:
    """Join the four parts; ValueError names the part that is out of its range."""
    _in_range("reader", reader, 0, MAX_READERS - 1)
    _in_range("shard", shard, 0, MAX_SHARDS - 1)
    _in_range("slot", slot, 0, MAX_SLOTS - 1)
    _in_range("generation", generation, 1, MAX_GENERATION)
    return generation << GENERATION_SHIFT | reader << READER_SHIFT | shard << SHARD_SHIFT | slot


def next_generation(generation: int) -> int:
    """Return the generation for the slot's next use: one more, past the last one 1 again, never 0."""
    return generation % MAX_GENERATION + 1


def slot_of(route: IntOrColumn) -> IntOrColumn:
    """Return the place in the reader's table."""
    return route & (MAX_SLOTS - 1)  # type: ignore[return-value]


def shard_of(route: IntOrColumn) -> IntOrColumn:
    """Return the shard that decodes this request; also its lane on the egress ring."""
    return (route >> SHARD_SHIFT) & (MAX_SHARDS - 1)  # type: ignore[return-value]


def reader_of(route: IntOrColumn) -> IntOrColumn:
    """Return the reader that delivers this request; also the number of its egress ring."""
    return (route >> READER_SHIFT) & (MAX_READERS - 1)  # type: ignore[return-value]


def generation_of(route: IntOrColumn) -> IntOrColumn:
    """Return which use of its slot this is."""
    return (route >> GENERATION_SHIFT) & MAX_GENERATION  # type: ignore[return-value]


def format_route(route: int) -> str:
    """Return the route for a log line: `r0/s1/42#7` is reader 0, shard 1, slot 42, generation 7."""
    return f"r{reader_of(route)}/s{shard_of(route)}/{slot_of(route)}#{generation_of(route)}"


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} {value} of a route is not in {low}..{high}")
