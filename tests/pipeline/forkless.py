"""A launcher that is refused a process now and then: run as a script, with a file of refusals.

    python forkless.py REFUSALS LAUNCH_OPTIONS...

Every byte of the file REFUSALS stands for one fork that the system refuses; each refusal takes one off.
"""

import errno
import os
import sys
from pathlib import Path

from outfeed.shards import launcher

REFUSALS = Path(sys.argv[1])
really = os.fork


def fork() -> int:
    left = REFUSALS.read_bytes()
    if left:
        REFUSALS.write_bytes(left[1:])
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return really()


os.fork = fork

if __name__ == "__main__":
    sys.exit(launcher.main(sys.argv[2:]))
