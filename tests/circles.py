"""What of ours is left to the garbage collector: objects that hold each other in a circle.

A circle that every request leaves is memory that waits for a collection, and makes collections, which stop
all threads, long and many.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def circles() -> Iterator[list[str]]:
    """Yield a list; on leaving put into it the classes of what was made meanwhile and is left in circles."""
    found: list[str] = []
    gc.disable()
    gc.freeze()  # what earlier tests left, and may let go of now, is theirs
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = [type(one) for one in gc.garbage]
        found += [kind.__qualname__ for kind in kinds if kind.__module__.startswith("outfeed.")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()
