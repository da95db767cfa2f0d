"""Why a request ended: the field's finish reasons, kept key for key.

A finish reason is a JSON object. What a scheduler wrote is what the client reads, nulls, order and unknown
keys included; this class only looks at the few keys that our processes act on. A type nobody here has
heard of is a finish reason like any other: it must never fail a frame.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeGuard

# Deeper than any finish reason in the field; what is deeper is not one.
MAX_DEPTH = 16


class FinishReason:
    """One finish reason, verbatim.

    `FinishReason(mapping)` keeps the mapping as it came. The field's own three have makers:
    `stop(matched)`, `length(tokens)` and `abort(message, status_code, err_type)`.
    """

    __slots__ = ("_raw",)

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw: Final = dict(raw)

    @classmethod
    def stop(cls, matched: int | str | list[int] | None = None) -> "FinishReason":
        """A stop matched: a token id, a stop string or pattern, or several token ids."""
        return cls({"type": "stop", "matched": matched})

    @classmethod
    def length(cls, length: int) -> "FinishReason":
        """The limit on tokens was reached; `length` is that number of tokens."""
        return cls({"type": "length", "length": length})

    @classmethod
    def abort(
        cls, message: str | None = None, status_code: int | None = None, err_type: str | None = None
    ) -> "FinishReason":
        """It was aborted; with a status code the client sees an HTTP error, without one a normal end."""
        return cls({"type": "abort", "message": message, "status_code": status_code, "err_type": err_type})

    @property
    def type(self) -> str:
        """The `type` key: "stop", "length", "abort", any other string, or "unknown" when it is none."""
        kind = self._raw.get("type")
        return kind if isinstance(kind, str) else "unknown"

    @property
    def matched(self) -> int | str | list[int] | None:
        """What a stop matched: a token id, a string, a list of token ids; else None."""
        if self._raw.get("type") != "stop":
            return None
        matched = self._raw.get("matched")
        if isinstance(matched, str) or _is_int(matched):
            return matched
        if isinstance(matched, list) and all(_is_int(item) for item in matched):
            return list(matched)
        return None

    @property
    def abort_status(self) -> int | None:
        """The HTTP status an abort carries (a request error, 400 to 599), or None for any normal end."""
        if self._raw.get("type") != "abort":
            return None
        status = self._raw.get("status_code")
        return status if _is_int(status) and 400 <= status <= 599 else None

    @property
    def message(self) -> str | None:
        """The message of an abort, if it has one."""
        message = self._raw.get("message")
        return message if isinstance(message, str) else None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object, as it came. It is the object itself: do not change it."""
        return self._raw

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FinishReason) and self._raw == other._raw

    def __hash__(self) -> int:
        return hash(self.type)

    def __repr__(self) -> str:
        return f"FinishReason({self._raw!r})"


def is_json(value: object, depth: int = MAX_DEPTH) -> bool:
    """Say whether a value has a JSON form: no bytes, no other types, text keys, at most `depth` deep."""
    if value is None or isinstance(value, str | int | float):
        return True
    if depth == 0:
        return False
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_json(item, depth - 1) for key, item in value.items())
    return isinstance(value, list) and all(is_json(item, depth - 1) for item in value)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
