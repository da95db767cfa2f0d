"""What each client field of `sampling_params` may hold: its JSON type, before any rule about its value.

A check takes the value and the field's full name and returns the value in the one form the rest of ingress
uses, or raises BadRequest. Python's own traps are closed here: `True` is not an integer, NaN is not a
number, an integer too large for a float or for the scheduler's i64 is refused, a string must be encodable.
"""

import math
from collections.abc import Callable
from typing import Any

from .errors import BadRequest, show

MAX_I64 = (1 << 63) - 1
MIN_I64 = -(1 << 63)
MAX_F32 = 3.4028234663852886e38

MAX_STOP_STRINGS = 32
MAX_STOP_BYTES = 4096
MAX_STOP_REGEXES = 32
MAX_STOP_REGEX_BYTES = 256
# Bounds of our own on what the field leaves open; each is far beyond any real use.
MAX_STOP_TOKEN_IDS = 65_536
MAX_GRAMMAR_BYTES = 1 << 20
MAX_CUSTOM_ENTRIES = 64
MAX_CUSTOM_KEY_CHARACTERS = 256
MAX_CUSTOM_VALUES = 4096
MAX_CUSTOM_CHARACTERS = 65_536

Check = Callable[[Any, str], Any]


def boolean(value: Any, field: str) -> bool:
    """Take true or false, nothing that merely counts as one of them."""
    if value is True or value is False:
        return value
    raise BadRequest(field, f"must be true or false, got {show(value)}")


def integer(value: Any, field: str) -> int:
    """Take an integer that fits i64."""
    if type(value) is not int:
        raise BadRequest(field, f"must be an integer, got {show(value)}")
    if not MIN_I64 <= value <= MAX_I64:
        raise BadRequest(field, f"must fit a signed 64-bit integer, got {show(value)}")
    return value


def number(value: Any, field: str) -> float:
    """Take a finite number; an integer becomes a float."""
    if type(value) is float:
        if math.isfinite(value):
            return value
        raise BadRequest(field, f"must be a finite number, got {show(value)}")
    if type(value) is not int:
        raise BadRequest(field, f"must be a number, got {show(value)}")
    try:
        return float(value)
    except OverflowError:
        raise BadRequest(field, f"must be a finite number, got {show(value)}") from None


def text(value: Any, field: str) -> str:
    """Take a string that can be sent on as UTF-8 (JSON can spell half a surrogate pair)."""
    if type(value) is not str:
        raise BadRequest(field, f"must be a string, got {show(value)}")
    if not value.isascii():
        utf8_bytes(value, field)
    return value


def utf8_bytes(value: str, field: str) -> int:
    """Count the UTF-8 bytes of a string; BadRequest if it holds half a surrogate pair."""
    try:
        return len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError:
        raise BadRequest(
            field, f"must be valid Unicode text, got a lone surrogate in {show(value)}"
        ) from None


def strings(limit: int, max_bytes: int) -> Check:
    """Make the check of a string or a list of at most `limit` strings, each of at most `max_bytes`."""

    def check(value: Any, field: str) -> str | list[str]:
        if type(value) is str:
            _at_most(value, field, max_bytes)
            return value
        if type(value) is not list:
            raise BadRequest(field, f"must be a string or a list of strings, got {show(value)}")
        if len(value) > limit:
            raise BadRequest(field, f"takes at most {limit} strings, got {len(value)}")
        for index, entry in enumerate(value):
            if type(entry) is not str:
                raise BadRequest(f"{field}[{index}]", f"must be a string, got {show(entry)}")
            if len(entry) > max_bytes or not entry.isascii():
                _at_most(entry, f"{field}[{index}]", max_bytes)
        return list(value)

    return check


def _at_most(value: str, field: str, max_bytes: int) -> None:
    """Refuse a string of more UTF-8 bytes than `max_bytes`."""
    # A character is at least one byte: a huge string is refused before it is encoded.
    size = len(value) if len(value) > max_bytes else utf8_bytes(value, field)
    if size > max_bytes:
        raise BadRequest(field, f"takes at most {max_bytes} UTF-8 bytes, got {size} or more")


def grammar(value: Any, field: str) -> str:
    """Take a grammar's source text."""
    if type(value) is str:
        _at_most(value, field, MAX_GRAMMAR_BYTES)
        return value
    return text(value, field)


def token_ids(value: Any, field: str) -> list[int]:
    """Take a list of token ids, nulls and doubles dropped; their range is checked with the vocabulary."""
    if not isinstance(value, list | tuple | set | frozenset):
        raise BadRequest(field, f"must be a list of token ids, got {show(value)}")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise BadRequest(field, f"takes at most {MAX_STOP_TOKEN_IDS} token ids, got {len(value)}")
    found = set()
    for index, entry in enumerate(value):
        if type(entry) is int and MIN_I64 <= entry <= MAX_I64:
            found.add(entry)
        elif entry is not None:
            integer(entry, f"{field}[{index}]")
    return sorted(found)


def logit_bias(value: Any, field: str) -> dict[str, float]:
    """Take an object from token ids, spelled in decimal, to biases that are finite in f32, or -inf."""
    if type(value) is not dict:
        raise BadRequest(field, f"must be an object from token ids to numbers, got {show(value)}")
    checked = {}
    for key, bias in value.items():
        # One spelling per id: "07" beside "7" would be two biases for one token.
        if (
            type(key) is not str
            or not key.isdecimal()
            or not key.isascii()
            or len(key) > 10
            or (key[0] == "0" and key != "0")
        ):
            raise BadRequest(field, f"keys must be token ids in decimal, got {show(key)}")
        # Written so that NaN fails; what is not a plain float in range is looked at again for its message.
        if type(bias) is not float or not (-MAX_F32 <= bias <= MAX_F32 or bias == -math.inf):
            bias = _bias(bias, f"{field}[{key}]")
        checked[key] = bias
    return checked


def _bias(value: Any, field: str) -> float:
    bias = number(value, field)
    if not -MAX_F32 <= bias <= MAX_F32:
        raise BadRequest(field, f"must fit a 32-bit float or be -Infinity, got {show(bias)}")
    return bias


def custom_params(value: Any, field: str) -> dict[str, Any]:
    """Take an object of scalars, lists of scalars and objects of scalars, of bounded size."""
    if type(value) is not dict:
        raise BadRequest(field, f"must be an object, got {show(value)}")
    if len(value) > MAX_CUSTOM_ENTRIES:
        raise BadRequest(field, f"takes at most {MAX_CUSTOM_ENTRIES} keys, got {len(value)}")
    checked: dict[str, Any] = {}
    left = MAX_CUSTOM_VALUES
    for key, entry in value.items():
        name = _named(field, key)
        size = len(entry) if isinstance(entry, list | dict) else 1
        left -= size
        if left < 0:
            raise BadRequest(field, f"takes at most {MAX_CUSTOM_VALUES} values in all")
        if type(entry) is list:
            checked[key] = [_scalar(inner, f"{name}[{index}]") for index, inner in enumerate(entry)]
        elif type(entry) is dict:
            checked[key] = {inner: _scalar(deep, _named(name, inner)) for inner, deep in entry.items()}
        else:
            checked[key] = _scalar(entry, name)
    return checked


def _named(field: str, key: Any) -> str:
    """Return the full name of an object's entry, once the key is known to be a short string."""
    if type(key) is not str or len(key) > MAX_CUSTOM_KEY_CHARACTERS:
        raise BadRequest(
            field, f"keys must be strings of at most {MAX_CUSTOM_KEY_CHARACTERS} characters, got {show(key)}"
        )
    text(key, field)
    return f"{field}.{key}"


def _scalar(value: Any, field: str) -> Any:
    if value is None or type(value) is bool:
        return value
    if type(value) is int:
        return integer(value, field)
    if type(value) is float:
        return number(value, field)
    if type(value) is str:
        if len(value) > MAX_CUSTOM_CHARACTERS:
            raise BadRequest(field, f"takes at most {MAX_CUSTOM_CHARACTERS} characters, got {len(value)}")
        return text(value, field)
    raise BadRequest(field, f"must be null, true, false, a number or a string here, got {show(value)}")


CHECKS: dict[str, Check] = {
    "max_new_tokens": integer,
    "stop": strings(MAX_STOP_STRINGS, MAX_STOP_BYTES),
    "stop_token_ids": token_ids,
    "stop_regex": strings(MAX_STOP_REGEXES, MAX_STOP_REGEX_BYTES),
    "temperature": number,
    "top_p": number,
    "top_k": integer,
    "min_p": number,
    "frequency_penalty": number,
    "presence_penalty": number,
    "repetition_penalty": number,
    "min_new_tokens": integer,
    "n": integer,
    "beam_width": integer,
    "json_schema": grammar,
    "regex": grammar,
    "ebnf": grammar,
    "structural_tag": grammar,
    "ignore_eos": boolean,
    "no_stop_trim": boolean,
    "skip_special_tokens": boolean,
    "spaces_between_special_tokens": boolean,
    "stream_interval": integer,
    "logit_bias": logit_bias,
    "sampling_seed": integer,
    "custom_params": custom_params,
}
"""Every field a client may set, with the check of its type (reference: the sampling parameter table)."""
