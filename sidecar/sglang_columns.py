"""SGLang's lists of log probabilities and hidden states as the optional columns of a step.

In a batch of SGLang's each is a list with an entry for each request, empty where it has none; or None, or an
empty list for all. Must not import anything of SGLang: it goes by the names of a batch's fields
(BatchTokenIDOutput).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ..ring.families import Family, Kind
from ..ring.family_makers import flat_family, hidden_family, ragged_family

_FLAT: Final = {
    Kind.OUTPUT_LOGPROBS: "output_token_logprobs",
    Kind.INPUT_LOGPROBS: "input_token_logprobs",
}
_RAGGED: Final = {
    Kind.OUTPUT_TOP_LOGPROBS: "output_top_logprobs",
    Kind.INPUT_TOP_LOGPROBS: "input_top_logprobs",
    Kind.OUTPUT_IDS_LOGPROBS: "output_token_ids_logprobs",
    Kind.INPUT_IDS_LOGPROBS: "input_token_ids_logprobs",
}


def families(batch: Any, rows: Sequence[int]) -> dict[Kind, Family | None] | None:
    """Return the columns of these rows of a batch, numbered from 0; None when it has none at all.

    Raises:
        BadColumns: values and ids are not of the same length, or are no numbers.
    """
    if not (batch.output_token_logprobs_val or batch.input_token_logprobs_val or batch.output_hidden_states):
        return None  # as nearly always: the other columns come with the first two
    found: dict[Kind, Family | None] = {}
    for kind, name in _FLAT.items():
        values, ids = getattr(batch, f"{name}_val"), getattr(batch, f"{name}_idx")
        if values:
            found[kind] = flat_family(
                (at, values[row], ids[row]) for at, row in enumerate(rows) if values[row]
            )
    for kind, name in _RAGGED.items():
        values, ids = getattr(batch, f"{name}_val"), getattr(batch, f"{name}_idx")
        if values:
            found[kind] = ragged_family(
                (at, [pair if pair[0] else None for pair in zip(values[row], ids[row], strict=True)])
                for at, row in enumerate(rows)
                if values[row]
            )
    hidden = batch.output_hidden_states
    if hidden:
        found[Kind.HIDDEN_STATES] = hidden_family(
            (at, _vectors(hidden[row])) for at, row in enumerate(rows) if hidden[row]
        )
    return found


def _vectors(states: Sequence[Any]) -> Any:
    """Return f32[vectors, width] of a request's states.

    Those of its prompt are one entry, each token's another. Who wants the last alone has a single vector.
    """
    if not isinstance(states[0], Sequence):
        return np.asarray([states], np.float32)
    return np.vstack([np.atleast_2d(np.asarray(part, np.float32)) for part in states])
