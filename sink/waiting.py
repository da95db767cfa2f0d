"""How a source sleeps until its sender has something: threads, asyncio tasks, callbacks.

The order that makes a wake-up impossible to lose, with the GIL as the fence: the source stores its waiter,
then looks for items; the sender appends its item, then looks for a waiter. Whoever comes second sees the
other. The sender only marks waiters; `wake` fires them together, for asyncio with one call into each loop.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable


class ThreadWaiter:
    """A thread asleep in `wait`. Used once."""

    __slots__ = ("_gate", "marked")
    loop = None

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        self.marked = False

    def fire(self) -> None:
        """Let the thread go on."""
        with contextlib.suppress(RuntimeError):  # fired before: a sender and who closes may both
            self._gate.release()

    def wait(self, timeout: float) -> bool:
        """Sleep until fired; False when `timeout` seconds passed first."""
        return self._gate.acquire(timeout=timeout)


class TaskWaiter:
    """An asyncio task awaiting `future`. Used once."""

    __slots__ = ("future", "loop", "marked")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.future: asyncio.Future[None] = loop.create_future()
        self.marked = False

    def fire(self) -> None:
        """Let the task go on; called in its loop."""
        if not self.future.done():
            self.future.set_result(None)


class CallbackWaiter:
    """A function called in its loop whenever there is something. Stays until replaced or dropped."""

    __slots__ = ("_callback", "loop", "marked")

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self.loop = loop
        self._callback: Callable[[], None] | None = callback
        self.marked = False

    def fire(self) -> None:
        """Call it; what is sent from here on marks it anew."""
        self.marked = False
        callback = self._callback  # looked at once: its source may be closed in another thread
        if callback is not None:
            callback()

    def drop(self) -> None:
        """Let go of it: it is not called any more, though it may have been fired already."""
        self._callback = None


Waiter = ThreadWaiter | TaskWaiter | CallbackWaiter


def wake(waiters: Iterable[Waiter]) -> None:
    """Fire marked waiters: threads at once, each loop's in one call_soon_threadsafe."""
    by_loop: dict[asyncio.AbstractEventLoop, list[TaskWaiter | CallbackWaiter]] = {}
    for waiter in waiters:
        if isinstance(waiter, ThreadWaiter):
            waiter.fire()
        else:
            by_loop.setdefault(waiter.loop, []).append(waiter)
    for loop, group in by_loop.items():
        try:
            loop.call_soon_threadsafe(_fire_all, group)
        except RuntimeError:
            # The loop is closed: nobody is left to wake, and its sources are collected as gone.
            continue


def _fire_all(waiters: list[TaskWaiter | CallbackWaiter]) -> None:
    for waiter in waiters:
        try:
            waiter.fire()
        except Exception as error:
            # One handler's fault is not the others': they are marked, so nobody would wake them again.
            waiter.loop.call_exception_handler(
                {"message": "a callback for a stream's items failed", "exception": error}
            )
