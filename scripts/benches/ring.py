"""Moving frames between processes, from Python: this project's ring beside its peers, in one run.

Method. Writers are processes that send bodies of one size for a set time; the reader is another process,
which looks at every frame in Python (its tag, or its length) and lets it go. A run's figure is frames
received over the time from the first frame to the last. Sizes 64 B, 4 KiB, 64 KiB and 1 MiB, one and
four writers. Every transport is in its best honest configuration (`transports.py` says which):

- outfeed: one `write` per frame, a full lane is waited for, `read` in batches, views released per batch; the
  reader spins up to 200 us before it parks (iceoryx2's polls without end), a lane has 1 MiB or four frames;
- multiprocessing.Queue and multiprocessing.Pipe as they come, bytes in and bytes out;
- pyzmq PUSH/PULL over ipc, without pyzmq's copies from 64 KiB on;
- faster-fifo without pickling and with get_many;
- iceoryx2 publish/subscribe of byte slices, loaned and filled in place, nothing dropped;
- C memcpy (one writer): two C loops that copy the body into shared memory of a lane's size and count, with
  no records, no checks and no sleeping: the floor.

Implementations take turns, for several rounds, so that whatever else the machine does hits all alike; a
figure is the median of its rounds, a ratio the median of the rounds' ratios. Ratios, all of one writer
unless they end in `_4w`: `vs_pyzmq_<size>`, `vs_best_peer_<size>` (the peer with the best median),
`of_memcpy_65536` (our share of the C memcpy). On a machine whose cores are all busy with something else
the figures say who has more threads (pyzmq has four to our two); measure on one that is not.
"""

import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benches.transports import PEERS, Memcpy, Outfeed, Transport, measure

SIZES = (64, 4096, 65536, 1 << 20)
MEMCPY_SIZE = 65536
Rates = dict[tuple[int, int, str], list[float]]


def _rounds(
    sizes: tuple[int, ...], rounds: int, seconds: float, kinds_of: Callable[[int, int], list[type[Transport]]]
) -> Rates:
    """Measure every case, implementations in turns."""
    rates: Rates = {}
    for size in sizes:
        for writers in (1, 4):
            for turn in range(rounds):
                for kind in kinds_of(size, writers):
                    tag = f"{os.getpid()}-{size}-{writers}-{turn}-{kind.__name__}"
                    rate = measure(kind, size, writers, seconds, tag)
                    rates.setdefault((size, writers, kind.name), []).append(rate)
    return rates


def _over(ours: list[float], theirs: list[float]) -> float:
    """Return the median over the rounds of what we reached as a multiple of what they did in that round."""
    return median(mine / other for mine, other in zip(ours, theirs, strict=True))


def _ratios(rates: Rates) -> dict[str, float]:
    """Compare our rates with the peers' of the same case and round."""
    ratios = {}
    for size in SIZES:
        for writers, ending in ((1, ""), (4, "_4w")):
            ours = rates[size, writers, Outfeed.name]
            peers = [rates[size, writers, kind.name] for kind in PEERS]
            best = max(peers, key=median)
            ratios[f"vs_pyzmq_{size}{ending}"] = _over(ours, rates[size, writers, "pyzmq"])
            ratios[f"vs_best_peer_{size}{ending}"] = _over(ours, best)
    floor = rates[MEMCPY_SIZE, 1, Memcpy.name]
    ratios[f"of_memcpy_{MEMCPY_SIZE}"] = _over(rates[MEMCPY_SIZE, 1, Outfeed.name], floor)
    return {name: round(value, 3) for name, value in ratios.items()}


def _kinds(size: int, writers: int) -> list[type[Transport]]:
    """Which implementations a case has. The floor comes right after ours, so that their rounds compare."""
    floor: list[type[Transport]] = [Memcpy] if writers == 1 else []
    return [Outfeed, *floor, *PEERS]


def _iceoryx_files() -> set[Path]:
    """Return what iceoryx2 leaves behind for its next user: this run removes its own."""
    return set(Path("/dev/shm").glob("iox2_*"))


def run(quick: bool) -> dict[str, Any]:
    """Measure everything; see the module's docstring."""
    before = _iceoryx_files()
    rates = _rounds(SIZES, 3 if quick else 7, 0.15 if quick else 0.3, _kinds)
    for path in _iceoryx_files() - before:
        path.unlink(missing_ok=True)
    results = [
        {
            "case": f"{size} B, {writers} writer{'s' if writers > 1 else ''}",
            "impl": impl,
            "value": round(median(found)),
            "unit": "frames/s",
        }
        for (size, writers, impl), found in rates.items()
    ]
    return {"bench": "ring", "results": results, "ratios": _ratios(rates)}
