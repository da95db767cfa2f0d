"""Fuzz the BATCH body: drawn batches, one to three damages each, and every promise checked.

Each round encodes a drawn step, damages it, and feeds it twice to a reader with one sink per row: as it is
(then only the exact original may be delivered) and with its check made right again (then the other checks
stand alone: it is rejected, or it is a batch that holds together). A fault is anything else: an exception,
a partial delivery, a named request that was not ended exactly once. Its seed is printed; the seed and the
round make it again.
"""

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import Any

from outfeed.ring.batch import decode_batch
from outfeed.ring.checked import BadBatch
from outfeed.sink import Done, Frame

# Last on the path, and only here: the material is the tests' own.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.sink.front import Front, waiting
from tests.sink.material import DAMAGES, Seeded, Step, check_invariants, draw_step, pick, reseal

ROUND_PRIME = 1_000_003


def damage(choose: Seeded, body: bytes) -> bytes:
    """Apply one to three damages; one that does not apply to what is left is passed over."""
    for _ in range(choose.integer(1, 3)):
        if len(body) < 17:
            break
        try:
            body = pick(choose, DAMAGES)(choose, body)
        except Exception:
            continue
    return body


def judge(step: Step, body: bytes, original: bytes | None) -> tuple[bool, str | None]:
    """Feed one body; return whether it was rejected, and the fault if there is one."""
    rejected = False
    try:
        check_invariants(decode_batch(memoryview(body)))
    except BadBatch:
        rejected = True
    front = Front()
    sources = {row.route: front.open(row.route, first=row.first) for row in step.rows}
    front.arrive(body)
    items = {route: waiting(source) for route, source in sources.items()}
    delivered = [route for route, got in items.items() if any(isinstance(item, Frame | Done) for item in got)]
    if not rejected:
        if original is not None and body != original:
            return False, "a changed body was delivered"
        return False, None
    if delivered:
        return True, f"a rejected body delivered to {delivered}"
    if any(items.values()) or front.ends or front.aborts:
        return True, f"a rejected body ended {front.ends}: whom it names may have lost nothing"
    return True, None


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Fuzz for args.seconds."""
    logging.getLogger("outfeed").setLevel(logging.CRITICAL)
    deadline = time.monotonic() + args.seconds
    rounds = rejected = passed = rejected_resealed = 0
    faults: list[dict[str, Any]] = []
    while time.monotonic() < deadline and len(faults) < 10:
        choose = Seeded(args.seed * ROUND_PRIME + rounds)
        rounds += 1
        step = draw_step(choose, most_rows=8)
        original = step.encode()
        body = damage(choose, original)
        try:
            was, fault = judge(step, body, original)
            rejected, passed = rejected + was, passed + (not was)
            if fault is None and len(body) >= 16:
                was, fault = judge(step, reseal(body), None)
                rejected_resealed += was
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        if fault is not None:
            faults.append({"round": rounds - 1, "fault": fault, "body": body.hex()})
    return {
        "ok": not faults,
        "seed": args.seed,
        "rounds": rounds,
        "rejected": rejected,
        "passed_unchanged": passed,
        "rejected_by_the_other_checks_alone": rejected_resealed,
        "faults": faults,
    }
