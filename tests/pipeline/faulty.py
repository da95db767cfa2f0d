"""A launcher whose shards die at a named point, once: run as a script, with a token file per death.

    python faulty.py POINT NUMBER TOKEN LAUNCH_OPTIONS...

A shard that reaches POINT for the NUMBER-th time and finds TOKEN removes it and is killed (-9) on the spot.
The points are methods of the shard, wrapped before the launcher forks: the product knows nothing of it.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from outfeed.shards import launcher
from outfeed.shards.decoder import Decoder
from outfeed.shards.egress import Egress
from outfeed.shards.loop import Shard

POINTS: dict[str, tuple[Any, str, bool]] = {
    # name: (class, method, die before the call rather than after it)
    "registered": (Decoder, "register", False),
    "decoded, not written": (Egress, "write", True),
    "written, not released": (Egress, "write", False),
    "one restored": (Decoder, "restore", False),
    "all restored": (Shard, "take_over", False),
    "supervisor and shard": (Egress, "write", True),
}


def die_at(point: str, number: int, token: str) -> None:
    """Wrap the point's method."""
    owner, name, before = POINTS[point]
    method: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if before and calls == number:
            die(point, token)
        result = method(*args, **kwargs)
        if not before and calls == number:
            die(point, token)
        return result

    setattr(owner, name, wrapped)


def die(point: str, token: str) -> None:
    """Be killed, if nobody was before."""
    try:
        os.unlink(token)
    except FileNotFoundError:
        return
    if point == "supervisor and shard":
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_at(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    sys.exit(launcher.main(sys.argv[4:]))
