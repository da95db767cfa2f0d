"""Instances of the tests' own: names that nothing else has, and rings that take next to no memory."""

import itertools
import os

from outfeed.ring.board import InstanceConfig

NUMBERS = itertools.count()
LANE_BYTES = 1 << 16


def unique(what: str) -> str:
    """Name an instance that no other test has."""
    return f"t-{what}-{os.getpid()}-{next(NUMBERS)}"


def small_config(what: str, *, lane_bytes: int = LANE_BYTES, **more: object) -> InstanceConfig:
    """Describe an instance that no other test has, its rings' lanes as small as that."""
    sizes = {f"{ring}_bytes": lane_bytes for ring in ("request", "control", "step", "egress")}
    values = {"instance": unique(what), "tokenizer": "none", **sizes, **more}
    return InstanceConfig(**values)  # type: ignore[arg-type]
