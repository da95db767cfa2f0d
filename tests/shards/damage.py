"""A wild write into a ring, as a process that maps it can do."""

import mmap
from pathlib import Path

from outfeed.ring import Ring

PAGE, LANE, CONSUMER = 4096, 512, 384


def scribble(ring: Ring, word: str) -> None:
    """Spoil one word of a one-lane ring: its `tail`, its `quarantine`, or its consumer's `head`."""
    at, value = {
        "tail": (PAGE, b"\x77" * 8),
        "quarantine": (PAGE + 136, (33).to_bytes(8, "little")),
        "head": (PAGE + LANE + CONSUMER, b"\x77" * 8),
    }[word]
    with open(Path("/dev/shm") / ring.name, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[at : at + len(value)] = value
