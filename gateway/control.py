"""Control requests over HTTP: `POST /control/OP` hands an operation to the scheduler, and its answer back.

What an operation means is the scheduler's. Only who has the admin key gets here, since an operation may empty
caches or exchange weights; the key that clients have does not open it.
"""

from __future__ import annotations

import re
from typing import Final

from ..ingress.errors import BadRequest, Refused, show
from .backend import Backend
from .exchange import Request

PREFIX: Final = "/control/"
SHOWN: Final = "/control/OP"
"""What messages and metrics call the endpoint, whatever the operation."""
MAX_BYTES: Final = 1 << 20
WAIT_S: Final = 60.0
"""How long the scheduler has to answer."""

_OP: Final = re.compile(r"[a-z0-9_]{1,64}").fullmatch


class TooLarge(Refused):
    """An operation's body is larger than one may be."""

    status = 413
    type = "too_large"


class NoAnswer(Refused):
    """The scheduler did not answer in time; it may have carried the operation out all the same."""

    status = 504
    type = "timeout"


async def control(request: Request, backend: Backend, wait_s: float = WAIT_S) -> bytes:
    """Have the scheduler carry out the operation that a request names; return its answer.

    Raises:
        Refused: it is none, it could not be handed over, or the scheduler refused it or did not answer.
    """
    op = request.path.rstrip("/").removeprefix(PREFIX)
    if not _OP(op):
        raise BadRequest("", f"an operation is 1 to 64 of a-z, 0-9 and _, got {show(op)}")
    body = bytes(request.body)
    if len(body) > MAX_BYTES:
        raise TooLarge(f"an operation's body has at most {MAX_BYTES} bytes, this one {len(body)}")
    try:
        return await backend.control(op, body, wait_s)
    except TimeoutError:
        raise NoAnswer(
            f"the scheduler has not answered {op} within {wait_s:g} s; it may carry it out all the same"
        ) from None
