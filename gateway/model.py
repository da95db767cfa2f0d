"""What every gateway of an instance checks its requests against: as the launcher was told.

Must not know requests.
"""

from __future__ import annotations

from typing import Any

from ..ingress.request import MAX_TOP_LOGPROBS, Model
from ..ring.board import InstanceConfig
from ..shards import table
from ..shards.errors import TokenizerFileError


class NoTokenizer(ValueError):
    """The instance's tokenizer file cannot be loaded in this process."""


def load_tokenizer(path: str) -> Any:
    """Load the file that the launcher was given as the instance's tokenizer. Raises NoTokenizer."""
    try:
        tokenizer, _ = table.load_tokenizer(path)
    except TokenizerFileError as error:
        raise NoTokenizer(
            f"{error}; this process must see the file that the launcher was given, under the same path"
        ) from error
    return tokenizer


def model_of(config: InstanceConfig, tokenizer: Any, max_top_logprobs: int = MAX_TOP_LOGPROBS) -> Model:
    """Return what every gateway of the instance checks requests against.

    Raises:
        BadRequest: the instance's sampling defaults are none for this tokenizer.
    """
    # Not the number of tokens: ids may have gaps, and the largest one counts.
    vocabulary = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return Model(
        vocabulary,
        config.context_length,
        tokenizer,
        config.characters_per_token,
        config.sampling_defaults,
        max_top_logprobs,
    )
