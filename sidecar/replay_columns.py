"""The replay scheduler's log probabilities: made up, but the same for whoever works them out again.

A value depends on where in the replayed text its token stands, so a checker that knows the rid knows every
number that must arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..ring.columns import F32, I32
from ..ring.families import FAMILIES, Family, Kind
from ..ring.family_makers import flat_family, ragged_family
from ..ring.frames import LogprobOptions


def replay_logprobs(position: int, ids: I32) -> F32:
    """Return the log probability of each of `ids`, the first of which stands at `position` of its replay."""
    places = np.arange(position, position + len(ids), dtype=np.int64)
    return (-((places * 31 + ids) % 997) / 100).astype(np.float32)


def replay_top_logprobs(values: F32, ids: I32, top: int) -> tuple[F32, I32]:
    """Return what stands beside each token: f32[n, top] and i32[n, top], the token itself first."""
    ranks = np.arange(top, dtype=np.int32)
    return (values[:, None] - ranks * np.float32(0.125)).astype(np.float32), ids[:, None] + ranks


def logprob_families(rows: Sequence[tuple[int, LogprobOptions, int, I32]]) -> list[Family | None]:
    """Return the families of a step: `rows` are (row, what it wants, its position, its ids), ascending."""
    flat = [(row, replay_logprobs(position, ids), ids) for row, _, position, ids in rows]
    ragged = []
    for (row, options, _, ids), (_, values, _) in zip(rows, flat, strict=True):
        if options.top_logprobs_num:
            top_values, top_ids = replay_top_logprobs(values, ids, options.top_logprobs_num)
            ragged.append((row, list(zip(top_values, top_ids, strict=True))))
    families: list[Family | None] = [None] * FAMILIES
    families[Kind.OUTPUT_LOGPROBS] = flat_family(flat)
    families[Kind.OUTPUT_TOP_LOGPROBS] = ragged_family(ragged)
    return families
