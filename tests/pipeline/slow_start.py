"""A launcher that stands still on its way: run as a script, with a file and a place.

    python slow_start.py GATE PLACE LAUNCH_OPTIONS...

PLACE is `segments`, when they are made, or `tokenizer`, when the process that compiles it has done so. There
the file GATE appears, with the pid of who stands still, and it goes on when that is gone. Beside the launcher
runs a thread that has blocked no signal, as a BLAS starts them on a machine with more than one core.
"""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from outfeed.ring.instance import Instance
from outfeed.shards import launcher
from outfeed.shards.table import TokenTable

GATE, PLACE = Path(sys.argv[1]), sys.argv[2]


def slow(really: Any) -> Any:
    def stands_still(*given: Any) -> Any:
        made = really(*given)
        unseen = GATE.with_suffix(".new")
        unseen.write_text(str(os.getpid()), encoding="ascii")
        unseen.rename(GATE)
        while GATE.exists():
            time.sleep(0.005)
        return made

    return stands_still


if PLACE == "segments":
    Instance.create = slow(Instance.create)  # type: ignore[method-assign]
else:
    TokenTable.compile = slow(TokenTable.compile)  # type: ignore[method-assign]

if __name__ == "__main__":
    threading.Thread(target=time.sleep, args=(600.0,), daemon=True).start()
    sys.exit(launcher.main(sys.argv[3:]))
