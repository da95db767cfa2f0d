"""A thread that waits for the interpreter, and gets it only where another lets go of it."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def waiting_thread() -> Iterator[Callable[[], int]]:
    """Run one; yield what tells how many turns it has had so far."""
    turns, over = 0, threading.Event()

    def run() -> None:
        nonlocal turns
        while not over.is_set():
            turns += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # seconds: nobody is made to let go
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: turns
    finally:
        over.set()
        sys.setswitchinterval(interval)
        thread.join()
