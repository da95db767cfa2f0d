"""A finalizer that does what it likes, at every place where a call may collect garbage.

Up to Python 3.11 that is wherever an object is made that the collector knows, in C too; later it is only
between two bytecode instructions.
"""

import gc
from collections.abc import Callable


class Known:
    """An object that the collector knows and that is made anew: Python keeps old lists for the next ones."""


def collected(call: Callable[[], object], at: int, other: Callable[[], object]) -> bool:
    """Run `call`, and `other` as a finalizer in its collection `at`; False when there are fewer of them.

    One is due with every second object only: those of odd `at` come with the odd objects, the others' with
    the even ones.
    """
    left = (at + 1) // 2

    def collecting(phase: str, info: dict[str, int]) -> None:
        nonlocal left
        if phase == "start":
            left -= 1
            if left == 0:
                other()

    usual = gc.get_threshold()
    gc.freeze()  # what is there already need not be looked through each time
    gc.callbacks.append(collecting)
    kept = [Known() for _ in range(at % 2)]
    gc.set_threshold(1)
    try:
        call()
    finally:
        gc.set_threshold(*usual)
        gc.callbacks.remove(collecting)
        gc.unfreeze()
        del kept
    return left <= 0
