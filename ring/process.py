"""What a process of an instance does about its own life: die when its parent dies.

Must not know what the process is for.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process (SIGKILL) when its parent dies; exit if it is dead already.

    Call it early in the new process; `parent` is the pid that started it. The kernel watches the thread
    that did the fork, so start processes from a thread that lives as long as the parent does.

    Raises:
        OSError: the kernel refused.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)
