"""Small instances for the tests of this room."""

import itertools
import os

from outfeed.ring.board import InstanceConfig

NUMBERS = itertools.count()


def config(**more: object) -> InstanceConfig:
    """Describe an instance that no other test has, with rings of 64 KiB."""
    small = {f"{ring}_bytes": 1 << 16 for ring in ("request", "control", "step", "egress")}
    values = {"instance": f"t-ring-{os.getpid()}-{next(NUMBERS)}", "tokenizer": "none", **small, **more}
    return InstanceConfig(**values)  # type: ignore[arg-type]
