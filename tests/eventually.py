"""Waiting in tests: for a condition, by looking, with one bound and one message."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

LIMIT_S = 60.0
"""Far beyond what any of it takes, on a machine that does much else too."""
PAUSE_S = 0.005

Value = TypeVar("Value")


def until(what: str, condition: Callable[[], Value], limit: float = LIMIT_S) -> Value:
    """Wait until `condition()` holds and return its value; fail, naming `what`, if it never does."""
    deadline = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {limit:.0f} s in vain for: {what}"
        time.sleep(PAUSE_S)
    return value


async def until_async(what: str, condition: Callable[[], Value], limit: float = LIMIT_S) -> Value:
    """Do the same while the event loop goes on."""
    deadline = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {limit:.0f} s in vain for: {what}"
        await asyncio.sleep(PAUSE_S)
    return value
