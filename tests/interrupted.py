"""A Ctrl-C that comes at a line of one's choice."""

import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any


def interrupted(call: Callable[[], object], at: int, *modules: ModuleType) -> bool:
    """Run `call`, and raise KeyboardInterrupt before the line number `at` of what it executes in `modules`,
    counted from 1; False when it came to its end first.
    """
    files = {module.__file__ for module in modules}
    left, usual = at, sys.gettrace()

    def tracing(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return tracing

    sys.settrace(tracing)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(usual)
    return False
