"""What ingress answers a request it does not take. One class per thing the client can do about it.

Also `show`: a value of any size or depth as a short, safe piece of a message.
"""

from typing import Any

SHOWN_CHARACTERS = 60
SHOWN_BITS = 128


class Refused(Exception):
    """A request that is not taken. `status` is the HTTP status, `type` a short identifier for machines."""

    status = 500
    type = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class BadRequest(Refused):
    """The client must change the request. `field` names what is wrong, `params[2].top_p` in a list."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.what = message

    def under(self, where: str) -> "BadRequest":
        """Return the same complaint about a field of `where`."""
        return BadRequest(f"{where}.{self.field}" if self.field else where, self.what)


class RidInUse(Refused):
    """A live request has this rid already: choose another, or wait until that one ends."""

    status = 409
    type = "conflict"


class Unavailable(Refused):
    """The server is full just now: the same request may be sent again later."""

    status = 503
    type = "unavailable"


class TicketClosed(ValueError):
    """A ticket was used whose request has ended, or was never opened here."""


def show(value: Any) -> str:
    """Describe a client's value in a message: short, printable ASCII or text, never a crash or a flood."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        # repr of a huge integer is slow, and past 4,300 digits an error.
        return repr(value) if value.bit_length() <= SHOWN_BITS else f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        cut = value[:SHOWN_CHARACTERS]
        text = cut.encode("utf-8", "backslashreplace").decode("utf-8")
        return repr(text) if len(cut) == len(value) else f"{text!r}… ({len(value)} characters)"
    if isinstance(value, list | tuple | set | frozenset):
        return f"a list of {len(value)} entries"
    if isinstance(value, dict):
        return f"an object of {len(value)} keys"
    return f"a value of type {type(value).__name__}"
