"""A launcher that stands still when its segments are there: run as a script, with a file.

    python slow_start.py GATE LAUNCH_OPTIONS...

The file GATE appears when the segments are made; the launcher goes on when it is gone. Beside it runs a
thread that has blocked no signal, as a BLAS starts them on a machine with more than one core.
"""

import sys
import threading
import time
from pathlib import Path

from outfeed.ring.board import InstanceConfig
from outfeed.ring.instance import Instance
from outfeed.shards import launcher

GATE = Path(sys.argv[1])
really = Instance.create


def create(config: InstanceConfig) -> Instance:
    made = really(config)
    GATE.touch()
    while GATE.exists():
        time.sleep(0.005)
    return made


Instance.create = create  # type: ignore[method-assign]

if __name__ == "__main__":
    threading.Thread(target=time.sleep, args=(600.0,), daemon=True).start()
    sys.exit(launcher.main(sys.argv[2:]))
