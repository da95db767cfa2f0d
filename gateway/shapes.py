"""The JSON of errors, in the two shapes clients expect: `/generate`'s and OpenAI's.

A message here was written for a client. What went wrong inside is logged, never sent.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

import msgspec

DONE: Final = b"data: [DONE]\n\n"
FAILED: Final = "the server failed on this request; its log says why"

_TYPES: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
}


_PHRASES: Final = {int(status): status.phrase.encode() for status in HTTPStatus} | {
    499: b"Client Closed Request"
}


def phrase(status: int) -> bytes:
    """Return the reason phrase of an HTTP status; one nobody registered has none."""
    return _PHRASES.get(status, b"")


def wants_openai(path: str) -> bool:
    """Whether who asks for this path expects OpenAI's shape of errors."""
    return path == "/v1" or path.startswith("/v1/")


def error_json(
    status: int, message: str, openai: bool = False, index: int | None = None, param: str | None = None
) -> bytes:
    """Render an error as a response's body. `index`: the prompt of a batch that it is about.

    Never raises: what is no text in a message (half a surrogate pair, quoted by who knows whom) is escaped.
    """
    message = _text(message)
    param = None if param is None else _text(param)
    error: dict[str, Any]
    if openai:
        kind = _TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
        error = {"object": "error", "message": message, "type": kind, "param": param, "code": status}
    else:
        error = {"message": message, "code": status}
    return msgspec.json.encode({"error": error} if index is None else {"error": error, "index": index})


def _text(value: str) -> str:
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()


def sse(data: bytes) -> bytes:
    """Frame one event of a stream."""
    return b"data: %b\n\n" % data


def http_status(status: int) -> int:
    """Return `status` if it can stand as an error's HTTP status, else 500: a scheduler may write anything."""
    return status if 400 <= status <= 599 else 500
