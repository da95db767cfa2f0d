"""Admission of stop_regex: may a scheduler search this pattern in an output of this length?

A scheduler searches the decoded tail with CPython's `re` at every step, with the GIL held, so a pattern
that backtracks stops the whole server. `admit` analyses a pattern once; `Admission.refusal` weighs what was
found against the longest text it will be searched in.
"""

import re
import warnings
from dataclasses import dataclass

from .errors import BadRequest, show

UNBOUNDED = 1 << 30
"""`max_len` of a pattern whose match has no upper bound: search everything so far."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What is known of one pattern that compiles. It does not depend on any request."""

    pattern: str
    max_len: int

    def refusal(self, characters: int) -> str | None:
        """Return why a search in a text of `characters` may be too slow, or None."""
        return None


def admit(pattern: str, field: str) -> Admission:
    """Analyse one pattern; BadRequest if the engine cannot compile it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError, ValueError, RuntimeError) as error:
        raise BadRequest(field, f"does not compile in Python's re: {error}; got {show(pattern)}") from None
    return Admission(compiled.pattern, UNBOUNDED)
