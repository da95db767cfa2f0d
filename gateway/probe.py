"""`/health_generate`: a token asked for as a client would, and then an answer through every shard."""

from __future__ import annotations

import time
from typing import Final

from ..sink import Done, Error
from .backend import Backend

PROBE_S: Final = 20.0
"""How long the one token may take."""
CHECK_S: Final = 5.0
"""How long each shard has to bring the scheduler's answer after that."""

# Whatever the instance's own defaults are.
_BODY: Final = {
    "input_ids": [0],
    "sampling_params": {"max_new_tokens": 1, "min_new_tokens": 0, "temperature": 0.0},
}


async def probe(backend: Backend, wait_s: float = PROBE_S) -> str | None:
    """Generate a token and ask every shard; say what is sick, or None.

    Raises:
        Refused: the request for the token was not taken.
    """
    (stream,) = await backend.submit(_BODY)
    deadline = time.monotonic() + wait_s
    try:
        while True:
            match await stream.source.receive(deadline - time.monotonic()):
                case Done(event):
                    if event.finish is not None and event.finish.type == "abort":
                        why = event.finish.message or "the scheduler aborted the request"
                        return f"a token could not be generated: {why}"
                    break
                case Error(_, kind, message):
                    return f"a token could not be generated: {kind}: {message}"
    except TimeoutError:
        return f"no token was generated within {wait_s:g} s"
    finally:
        stream.close()
    # That token came through one shard; the others are asked for an answer too.
    sick = await backend.check(CHECK_S)
    return None if sick is None else f"not healthy: {sick}"
