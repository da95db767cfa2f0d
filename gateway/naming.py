"""An OpenAI client's own names in what ingress says of its request.

Ingress knows `/generate`'s fields. A client of OpenAI's endpoints sent `max_tokens` and a `prompt`, so that
is what a message, and its `param`, must speak of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from ..ingress.errors import BadRequest

SAMPLING: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "n": "n",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "stop_regex": "stop_regex",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens",
    "logit_bias": "logit_bias",
    "seed": "sampling_seed",
    "regex": "regex",
    "ebnf": "ebnf",
    "json_schema": "json_schema",
    "structural_tag": "structural_tag",
    "ignore_eos": "ignore_eos",
    "no_stop_trim": "no_stop_trim",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
    "custom_params": "custom_params",
}
"""OpenAI's names, and the common extensions, for the sampling parameters."""

_HEAD: Final = re.compile(r"^(?:sampling_params\.)?(\w+)")
# What the client wrote is shown in quotes, and stays as it is.
_PIECE: Final = re.compile(r"""(?<!\w)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|\b[a-z]+_[a-z_]+\b""")


def names_of(body: Mapping[str, Any], chat: bool) -> dict[str, str]:
    """Return the client's name for each field of `/generate`'s, as far as they differ."""
    names = {ours: theirs for theirs, ours in SAMPLING.items() if theirs != ours}
    prompt = "messages" if chat else "prompt"
    names |= {"text": prompt, "input_ids": prompt}
    names["top_logprobs_num"] = "top_logprobs" if chat else "logprobs"
    newer = body.get("max_completion_tokens") is not None
    names["max_new_tokens"] = "max_completion_tokens" if newer else "max_tokens"
    if (wanted := body.get("response_format")) is not None:
        tagged = type(wanted) is dict and wanted.get("type") == "structural_tag"
        names["structural_tag" if tagged else "json_schema"] = "response_format"
    return names


def in_the_clients_words(error: BadRequest, names: Mapping[str, str]) -> BadRequest:
    """Return the complaint with its fields under the client's names."""

    def head(found: re.Match[str]) -> str:
        return names.get(found[1], found[1])

    def piece(found: re.Match[str]) -> str:
        return names.get(found[0], found[0])

    return BadRequest(_HEAD.sub(head, error.field), _PIECE.sub(piece, error.what))
